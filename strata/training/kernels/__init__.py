"""Convolutions of our own in C: for narrow networks side by side (narrow.c) and for wide ones (winograd.c).

Without a C compiler there are none, and torch's do the work: slower, and other float32 rounding. So whether a run uses
them is decided once, where it begins, and recorded in config.json.
"""

from __future__ import annotations

from strata.training.kernels.library import LANES, available, require
from strata.training.kernels.narrow import convolution
from strata.training.kernels.winograd import conv2d, in_use, own_convolutions

__all__ = ["LANES", "available", "conv2d", "convolution", "in_use", "own_convolutions", "require"]
