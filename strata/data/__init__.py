"""Data sets, partitions over devices, batched augmentation."""

from __future__ import annotations

from strata.data.augmentation import AUGMENTATIONS, augment, check_augmentation
from strata.data.catalogue import CATALOGUE, get, load
from strata.data.distribution import holdings, picture, table
from strata.data.files import default_root
from strata.data.images import FederatedData, ImageSet, hold_out, normalise, wrap
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

__all__ = [
    "AUGMENTATIONS", "CATALOGUE", "FederatedData", "ImageSet", "Indexed", "LazyIid", "Partition", "augment", "by_user",
    "check_augmentation", "check_range", "default_root", "dirichlet", "from_indices", "get", "hold_out", "holdings",
    "iid", "load", "normalise", "parse_partition", "picture", "shards", "table", "wrap",
]  # fmt: skip
