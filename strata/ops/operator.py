"""Operator: all that Strata knows of a family of operators, in one record; and the register of them.

Nothing has to be known. What a record does not say falls back to something that is safe and slower or wider:
what meets in an operator without a channel rule stays at full width (and is reported), its bytes and FLOPs are found
out by running it on fake tensors, and samples are taken to meet in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from strata.core.errors import BadInput
from strata.ops.channels import FxNode, name_of, named

if TYPE_CHECKING:
    from strata.ops import bytes as byte_rules
    from strata.ops import channels as channel_rules
    from strata.ops import flops as flop_rules
    from strata.ops.resize import Resize


class SamplesApart(Enum):
    """Whether the samples of a batch, which is dim 0, have nothing to do with each other in an operator."""

    ALWAYS = "always"
    UNLESS_ALONG_BATCH = "unless its dims include the batch's"
    NEVER = "never, or nobody knows"


@dataclass(frozen=True)
class Operator:
    """What Strata knows of operators that behave alike. Only `names` is needed."""

    names: tuple[str, ...]
    """As in torch's schemas: 'relu' or 'add.Tensor' of aten (one overload goes before its family), 'mylib::scale' of
    another library."""
    channels: channel_rules.Rule | None = None
    """How channels pass (ops/channels.py). None: what meets here stays at full width, and is reported."""
    resize: Resize | None = None
    """How sizes in its arguments change in a cut graph (ops/resize.py). None: there are none."""
    bytes: byte_rules.Rule | None = None
    """What it allocates, keeps for backward and hands back (ops/bytes.py). None: learned on fake tensors."""
    bytes_for: tuple[str, ...] = ()
    """The overloads that `bytes` covers ('Tensor', 'default'); empty: all."""
    learned_by_running: bool = False
    """Learn its bytes from a real run: the kernel keeps what fake tensors do not show."""
    flops: flop_rules.Rule | None = None
    """Multiply-adds, times two (ops/flops.py). None: torch's counter watches it on fake tensors."""
    samples_apart: SamplesApart = SamplesApart.NEVER
    """Given that the batch is dim 0 before and after: may a batch be computed in parts?"""
    differentiable: bool = True
    """False: no gradient passes, though the output is of floating point."""
    vectorised: str | None = None
    """Which form of strata.training.vectorised runs it for several devices at once."""

    def byte_rule(self, target: Any) -> byte_rules.Rule | None:
        """For this overload, if there is one."""
        if self.bytes_for and getattr(target, "_overloadname", None) not in self.bytes_for:
            return None
        return self.bytes


UNKNOWN = Operator(names=())
_RECORDS: dict[str, Operator] = {}


def register(operator: Operator) -> Operator:
    """Make the operator known, in place of what was known under its names. Returns it."""
    if not isinstance(operator, Operator):
        raise BadInput(f"strata.ops.register takes an Operator, not {operator!r}")
    if not operator.names or isinstance(operator.names, str):
        raise BadInput(f"an Operator has a tuple of names, such as ('mylib::scale',), not {operator.names!r}")
    for name in operator.names:
        _RECORDS[name.removeprefix("aten::")] = operator
    operator_of.cache_clear()
    return operator


@contextmanager
def registered(*operators: Operator) -> Iterator[None]:
    """Known within a `with` block only."""
    before = dict(_RECORDS)
    try:
        for operator in operators:
            register(operator)
        yield
    finally:
        _RECORDS.clear()
        _RECORDS.update(before)
        operator_of.cache_clear()


def operators() -> tuple[Operator, ...]:
    """All that are known, each once."""
    return tuple({id(operator): operator for operator in _RECORDS.values()}.values())


@cache
def operator_of(target: Any) -> Operator:
    """Of a node's target; `UNKNOWN`, which says nothing, if it is not registered."""
    name = name_of(target)
    if isinstance(target, torch._ops.OpOverload):
        exact = _RECORDS.get(f"{name}.{target._overloadname}")
        if exact is not None:
            return exact
    return _RECORDS.get(name, UNKNOWN)


def keeps_samples_apart(node: FxNode) -> bool:
    """Whether a batch that is dim 0 before and after this node may go through it in parts."""
    apart = operator_of(node.target).samples_apart
    if apart is SamplesApart.UNLESS_ALONG_BATCH:
        dims = named(node, "dim")
        inner = [dims] if isinstance(dims, int) else dims
        rank = node.all_input_nodes[0].meta["val"].dim()
        return bool(inner) and all(dim % rank != 0 for dim in inner)
    return apart is SamplesApart.ALWAYS
