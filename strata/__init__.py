"""Strata: train, over a fleet of devices, a network that none of them has the memory to train."""

__version__ = "0.1.0"
