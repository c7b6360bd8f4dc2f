"""Data sets, partitions over devices, batched augmentation."""

from __future__ import annotations

from strata.data.augmentation import AUGMENTATIONS, augment, check_augmentation
from strata.data.catalogue import CATALOGUE, get, load
from strata.data.distribution import holdings, picture, table
from strata.data.files import default_root
from strata.data.images import ImageSet, normalise
from strata.data.objectives import Classification, Objective, Regression
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
from strata.data.samples import Batch, FederatedData, Samples, hold_out

__all__ = [
    "AUGMENTATIONS",
    "CATALOGUE",
    "Batch",
    "Classification",
    "FederatedData",
    "ImageSet",
    "Indexed",
    "LazyIid",
    "Objective",
    "Partition",
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
    "parse_partition",
    "picture",
    "shards",
    "table",
    "wrap",
]
