"""A device of a Strata fleet in little more memory than its training takes: neither torch nor Flower is needed."""

__version__ = "0.1.0"
