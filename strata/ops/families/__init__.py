"""One file per family of operators: all that Strata knows of it. Importing them registers them."""

from strata.ops.families import (
    attention,
    convolution,
    creation,
    elementwise,
    embedding,
    joins,
    norms,
    pooling,
    products,
    recurrent,
    reductions,
    shapes,
)

__all__ = [
    "attention",
    "convolution",
    "creation",
    "elementwise",
    "embedding",
    "joins",
    "norms",
    "pooling",
    "products",
    "recurrent",
    "reductions",
    "shapes",
]
