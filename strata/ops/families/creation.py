"""Tensors out of nothing: they have no channels, and no gradient."""

from __future__ import annotations

from strata.ops.bytes import made
from strata.ops.channels import always_there, like_first
from strata.ops.flops import nothing
from strata.ops.operator import Operator, SamplesApart, register

# A byte rule for each, because their sizes may depend on the batch, which learning does not see
register(
    Operator(
        ("zeros", "ones", "full", "arange", "rand"),
        channels=always_there,
        bytes=made,
        flops=nothing,
    )
)
register(
    Operator(
        (
            "empty",
            "randn",
            "eye",
            "linspace",
            "scalar_tensor",
            "new_zeros",
            "new_ones",
            "new_full",
            "new_empty",
        ),
        channels=always_there,
        flops=nothing,
    )
)
register(
    Operator(
        ("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"),
        channels=like_first,
        bytes=made,
        flops=nothing,
        samples_apart=SamplesApart.ALWAYS,
        differentiable=False,
    )
)
