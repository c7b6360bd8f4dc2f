"""The frozen part of a network, some samples at a time: of its own maps none is whole longer than it has to be.

Between two batch norms the samples of a batch have nothing to do with each other. So every stretch up to the next batch
norm runs chunk by chunk; the statistics of a chunk are taken at its end, and only their sum over all chunks has to be
there before the next stretch begins. What the trained part takes is put together as it is made.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, fx, nn

from strata.execution.kept_outputs import KeptOutputs, put
from strata.ops import keeps_samples_apart
from strata.ops.channels import family

if TYPE_CHECKING:
    from strata.execution.segments import Boundary, Code, Surroundings

Statistics = tuple[Tensor, Tensor]  # mean and (biased) variance per channel


def may_be_chunked(node: fx.Node, batch: str) -> bool:
    """Whether samples meet in it nowhere, or in a batch norm; `batch` is the size of the batch's dim, as text."""
    name = family(node)
    if name == "sym_size":
        return True
    if name == "instance_norm" and node.args[3] is not None:
        return False  # it would move its running statistics with each chunk
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() == 0 or str(value.shape[0]) != batch:
        return False
    return keeps_samples_apart(node)


def is_barrier(target: Any, args: Sequence[Any]) -> bool:
    """A batch norm by the batch's own statistics."""
    return target is torch.ops.aten.batch_norm.default and bool(args[5])


def stretches(barriers: Sequence[bool]) -> list[range]:
    """Positions of operations between barriers; each stretch but the first begins with one."""
    starts = [0, *(index for index, barrier in enumerate(barriers) if barrier and index > 0), len(barriers)]
    return [range(a, b) for a, b in zip(starts[:-1], starts[1:], strict=True) if b > a]


def statistics_of(x: Tensor) -> tuple[int, Statistics]:
    """How many values there are of a channel, and their statistics."""
    mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
    return x.numel() // x.shape[1], (mean, variance)


def together(found: Sequence[tuple[int, Statistics]]) -> Statistics:
    """Of all chunks, from each one's count, mean and variance; in float64, where the order of chunks hardly matters."""
    counts = torch.tensor([count for count, _ in found], dtype=torch.float64)
    means, variances = (torch.stack([pair[i].double().cpu() for _, pair in found]) for i in (0, 1))
    shares = (counts / counts.sum()).unsqueeze(1)
    mean = (shares * means).sum(0)
    variance = (shares * (variances + (means - mean).square())).sum(0)
    like = found[0][1][0]
    return mean.to(like), variance.to(like)


class ChunkedSegment:
    """As a RunnableSegment. `code` runs it as a whole, where there is only one chunk."""

    def __init__(self, nodes: Sequence[fx.Node], boundary: Boundary, code: Code, size: int) -> None:
        self.nodes, self.boundary, self.code, self.size = nodes, boundary, code, size
        self.stretches = stretches([is_barrier(node.target, node.args) for node in nodes])
        last = {source.name: index for index, node in enumerate(nodes) for source in (node, *node.all_input_nodes)}
        self.gone: list[list[str]] = [[] for _ in nodes]
        for name, index in last.items():
            self.gone[index].append(name)

    @property
    def weights(self) -> list[str]:
        """And buffers that it reads."""
        sources = (source for node in self.nodes for source in node.all_input_nodes if source.op == "get_attr")
        return sorted({str(source.target) for source in sources})

    def run_by_one(
        self, module: nn.Module, inputs: Sequence[Tensor], constants: Collection[str], kept: KeptOutputs | None
    ) -> tuple[Any, ...]:
        """Each sample by itself; what is kept of one is read. `constants` are the same for all."""
        samples = len(inputs[0])
        whole: dict[str, Any] = {}
        keys = [kept.key([one[index] for one in inputs]) for index in range(samples)] if kept else []
        for index in range(samples):
            if kept and kept.read(keys[index], whole, index, samples):
                continue
            with torch.no_grad():
                made = list(self.code(module, *(one[index : index + 1] for one in inputs)))
            for name in self.boundary.outputs:
                one = made.pop(0)
                if name in constants:
                    whole[name] = one
                else:
                    put(whole, name, one, index, samples)
                del one
            if kept:
                kept.write(keys[index], whole, index, constants)
        return tuple(whole[name] for name in self.boundary.outputs)

    def run(self, module: nn.Module, inputs: Sequence[Any], surroundings: Surroundings) -> tuple[Any, ...]:
        samples = len(inputs[0])
        if samples <= self.size:
            return self.code(module, *inputs)
        sources = {source for node in self.nodes for source in node.all_input_nodes if source.op == "get_attr"}
        weights = {source.name: attrgetter(str(source.target))(module) for source in sources}
        parts = zip(*(one.split(self.size) for one in inputs), strict=True)
        chunks: list[dict[str, Any]] = [dict(zip(self.boundary.inputs, part, strict=True)) for part in parts]
        whole: dict[str, Any] = {}
        with torch.no_grad():
            for stretch in self.stretches:
                statistics = self._barrier(self.nodes[stretch.start], chunks, weights)
                for number, values in enumerate(chunks):
                    self._run(stretch, values, weights, statistics, whole, number * self.size, samples)
        return tuple(whole[name] for name in self.boundary.outputs)

    def _barrier(self, node: fx.Node, chunks: list[dict[str, Any]], weights: dict[str, Any]) -> Statistics | None:
        """Of what a batch norm is given, over all chunks; its running statistics move as they do for a whole batch."""
        if not is_barrier(node.target, node.args):
            return None
        arguments: Any = node.args
        x, _, _, mean, variance, _, momentum, *_ = arguments
        seen = [statistics_of(values[x.name]) for values in chunks]
        found = together(seen)
        if mean is not None and variance is not None:
            count = sum(number for number, _ in seen)
            unbiased = found[1] * (count / max(count - 1, 1))
            for running, now in ((mean, found[0]), (variance, unbiased)):
                weights[running.name].mul_(1 - momentum).add_(now, alpha=momentum)
        return found

    def _run(
        self,
        stretch: range,
        values: dict[str, Any],
        weights: dict[str, Any],
        statistics: Statistics | None,
        whole: dict[str, Any],
        start: int,
        samples: int,
    ) -> None:
        """One chunk, which begins at the sample `start`, through one stretch."""
        for index in stretch:
            node = self.nodes[index]
            given = (node.args, node.kwargs)
            args, kwargs = cast(Any, fx.node.map_arg(given, lambda n: weights.get(n.name, values.get(n.name))))
            if index == stretch.start and statistics is not None:
                mean, variance = statistics
                made = torch.batch_norm(args[0], args[1], args[2], mean, variance, False, 0.0, args[7], args[8])
            else:
                made = node.target(*args, **kwargs)  # type: ignore[operator]
            del args, kwargs
            if node.name in self.boundary.outputs:
                made = put(whole, node.name, made, start, samples)
            values[node.name] = made
            del made
            for name in self.gone[index]:
                values.pop(name, None)
