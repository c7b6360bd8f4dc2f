"""Which values of a network are each sample's own, found by trial: three samples together, and each of them alone.

Rules (ops/, `samples_apart`) know this of single operators. A transformer makes its masks and positions of the batch's
size by operators of which no rule can say it (an index by row numbers), so here the values themselves are compared. The
trial runs at full width on random weights and inputs; batch norms go by fixed statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, fx

from strata.graph.batch_norms import with_fixed_statistics

if TYPE_CHECKING:
    from strata.graph import ChannelGraph
    from strata.graph.inputs import Input

SAMPLES = 3
OWN, CONSTANT = "own", "constant"  # dim 0 is the batch, and each row is its sample's; the same for whatever batch
CLOSE, NEAR_ZERO = 1e-3, 1e-5  # the same numbers, rounded otherwise


@lru_cache(maxsize=8)
def kinds_of(graph: ChannelGraph) -> Mapping[str, str]:
    """OWN or CONSTANT by the name of the operation, of those that are either. The number of samples is its own."""
    full = graph.full()
    generator = torch.Generator().manual_seed(0)
    state = {name: _weight(shape, graph.state_dtypes[name], generator) for name, shape in full.shapes.items()}
    module = graph.submodel(full, state)
    training = with_fixed_statistics(module.train_graph, {norm.mean for norm in graph.batch_norms})
    inputs = [_input(one, generator) for one in graph.inputs.inputs]
    try:
        whole = _values(training, module, inputs)
        alone = [_values(training, module, [one[i : i + 1] for one in inputs]) for i in range(SAMPLES)]
    except Exception:  # of an operator that takes other numbers only: nothing is known
        return {}
    names = [op.name for op in graph.sized(full, SAMPLES) if op.kind == "op" or op.kind == "cut"]
    found = ((name, _kind(one, each)) for name, one, *each in zip(names, whole, *alone, strict=True))
    return {name: kind for name, kind in found if kind is not None}


def _values(graph: fx.Graph, module: Any, inputs: list[Tensor]) -> list[Any]:
    """Of each operation, as copies: some are written in place later."""
    values: dict[fx.Node, Any] = {}
    given = iter(inputs)
    made = []
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for node in graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given).clone()
            elif node.op == "get_attr":
                values[node] = attrgetter(str(node.target))(module)
            elif node.op == "call_function":
                args, kwargs = cast(Any, fx.node.map_arg((node.args, node.kwargs), lambda n: values[n]))
                values[node] = node.target(*args, **kwargs)
                made.append(values[node].clone() if isinstance(values[node], Tensor) else values[node])
    return made


def _kind(whole: Any, alone: list[Any]) -> str | None:
    if not isinstance(whole, Tensor):
        number = isinstance(whole, int) and whole == SAMPLES and all(one == 1 for one in alone)
        return OWN if number else None
    if all(_alike(whole, one) for one in alone):
        return CONSTANT
    if not whole.dim() or len(whole) != SAMPLES or any(len(one) != 1 for one in alone):
        return None
    return OWN if all(_alike(whole[i], one[0]) for i, one in enumerate(alone)) else None


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.allclose(one, other, CLOSE, NEAR_ZERO) if one.is_floating_point() else torch.equal(one, other)


def _weight(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    if len(shape) < 2:  # of norms: not near zero
        return (0.5 + torch.rand(shape, generator=generator)).to(dtype)
    return (torch.randn(shape, generator=generator) / shape[1] ** 0.5).to(dtype)


def _input(one: Input, generator: torch.Generator) -> Tensor:
    """Valid as numbers, as ids and as masks, and no two samples alike."""
    shape = (SAMPLES, *one.shape)
    if one.dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=one.dtype)
    made = torch.randint(0, 2, shape, generator=generator)
    made.view(SAMPLES, -1)[:, 0] = 1  # a mask hides not all
    return made.to(one.dtype)
