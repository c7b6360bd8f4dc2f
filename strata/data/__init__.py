"""Data sets, partitions over devices, batched augmentation.

Loaded on first use: what describes a run's settings (`Reading`) must not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strata.data.augmentation import AUGMENTATIONS, augment, check_augmentation
    from strata.data.catalogue import CATALOGUE, get, load
    from strata.data.distribution import holdings, picture, table
    from strata.data.files import default_root
    from strata.data.images import ImageSet, normalise
    from strata.data.multi_label import MultiLabel
    from strata.data.objective_names import OBJECTIVES, objective_named
    from strata.data.objectives import IGNORED, Classification, Objective, Regression
    from strata.data.own import wrap
    from strata.data.partitions import (
        Indexed,
        LazyIid,
        Partition,
        by_user,
        check_range,
        dirichlet,
        from_indices,
        iid,
        parse_partition,
        shards,
    )
    from strata.data.positions import NextToken, PerPosition
    from strata.data.reading import Reading
    from strata.data.samples import Batch, FederatedData, Samples, hold_out

_FILES = {
    "AUGMENTATIONS": "augmentation",
    "CATALOGUE": "catalogue",
    "IGNORED": "objectives",
    "OBJECTIVES": "objective_names",
    "Batch": "samples",
    "Classification": "objectives",
    "FederatedData": "samples",
    "ImageSet": "images",
    "Indexed": "partitions",
    "LazyIid": "partitions",
    "MultiLabel": "multi_label",
    "NextToken": "positions",
    "Objective": "objectives",
    "Partition": "partitions",
    "PerPosition": "positions",
    "Reading": "reading",
    "Regression": "objectives",
    "Samples": "samples",
    "augment": "augmentation",
    "by_user": "partitions",
    "check_augmentation": "augmentation",
    "check_range": "partitions",
    "default_root": "files",
    "dirichlet": "partitions",
    "from_indices": "partitions",
    "get": "catalogue",
    "hold_out": "samples",
    "holdings": "distribution",
    "iid": "partitions",
    "load": "catalogue",
    "normalise": "images",
    "objective_named": "objective_names",
    "parse_partition": "partitions",
    "picture": "distribution",
    "shards": "partitions",
    "table": "distribution",
    "wrap": "own",
}

__all__ = [
    "AUGMENTATIONS",
    "CATALOGUE",
    "IGNORED",
    "OBJECTIVES",
    "Batch",
    "Classification",
    "FederatedData",
    "ImageSet",
    "Indexed",
    "LazyIid",
    "MultiLabel",
    "NextToken",
    "Objective",
    "Partition",
    "PerPosition",
    "Reading",
    "Regression",
    "Samples",
    "augment",
    "by_user",
    "check_augmentation",
    "check_range",
    "default_root",
    "dirichlet",
    "from_indices",
    "get",
    "hold_out",
    "holdings",
    "iid",
    "load",
    "normalise",
    "objective_named",
    "parse_partition",
    "picture",
    "shards",
    "table",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module 'strata.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"strata.data.{_FILES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
