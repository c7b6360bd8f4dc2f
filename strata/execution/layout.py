"""How images lie in memory while a cut trains: with channels last where that works, else in the usual order.

Convolutions run up to twice as fast on CPUs with channels last. Bytes depend on it, as some operators copy what does
not lie as they like it; so whoever trains and whoever counts asks here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from strata.execution.simulated import Pass, each
from strata.graph.inputs import images_last
from strata.ops.channels import argument
from strata.ops.tape import Simulation, same_layout

if TYPE_CHECKING:
    from strata.graph import ChannelGraph, Cut, SizedOp

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default)  # they refuse where `reshape` and `flatten` would copy
_LANES = 16  # floats in the widest register, AVX-512's


def channels_last(graph: ChannelGraph, cut: Cut, sized: Sequence[SizedOp] = ()) -> bool:
    """Whether the cut's submodel is trained, and evaluated, with images channels last.

    `sized`: its operations for some number of samples, where the caller has them."""
    has_images = any(len(one.shape) == 3 for one in graph.inputs.inputs)
    has_volumes = any(len(shape) == 5 for shape in cut.shapes.values())  # torch has another order for these
    if not has_images or has_volumes:
        return False
    nodes = graph.mode("train").graph.nodes
    if any(_overruns(node, cut) for node in nodes):
        return False
    if not any(node.target in _VIEWS for node in nodes):
        return True
    # not of a single sample, where more than one order may be the usual one
    return _views_hold(sized if _samples(sized) > 1 else graph.sized(cut, 2))


def _samples(sized: Sequence[SizedOp]) -> int:
    return next((op.shape[0] for op in sized if op.kind == "input"), 0)


def _overruns(node: Any, cut: Cut) -> bool:
    """A convolution for which torch 2.13 writes past the end of a buffer in backward, so that the process dies, or goes
    on with a damaged heap: oneDNN gathers the pixels that a strided 1x1 kernel meets a full register at a time, and of
    channels that are last and fewer than its floats the last pixel's stick out. Seen with 2 to 7 channels on AVX2, for
    the gradient of the weight, in images whose size is a multiple of the stride; in the usual order it does not happen.
    """
    if node.target is not aten.conv2d.default:
        return False
    name = str(node.args[1].target)
    shape = cut.shapes[name] if name in cut.shapes else tuple(node.args[1].meta["val"].shape)
    strided = set(_both(argument(node, 3, "stride", 1))) != {1}
    return strided and shape[2:] == (1, 1) and 1 < shape[1] < _LANES and name not in cut.frozen


def _both(value: Any) -> Sequence[int]:
    return (value,) if isinstance(value, int) else value


def _views_hold(sized: Sequence[SizedOp]) -> bool:
    """Both orders side by side, for as long as a value is used that does not lie the same in both."""
    usual, last = (Pass(Simulation(0), sized, channels_last=one) for one in (False, True))
    as_usual, values = dict(usual.standing), dict(last.standing)
    last_use = {name: index for index, op in enumerate(last.calls) for name in op.inputs}

    def differs_until(name: str) -> int:
        both = zip(each(as_usual[name]), each(values[name]), strict=True)
        return -1 if all(same_layout(a.shape, a.strides, b.strides) for a, b in both) else last_use.get(name, -1)

    until = max(map(differs_until, values), default=-1)
    for index, op in enumerate(last.calls):
        if index > until:
            return True
        as_usual[op.name] = usual.apply_or_guess(op, as_usual)
        values[op.name] = last.apply_or_guess(op, values)
        if op.target in _VIEWS and values[op.name].storage != values[op.inputs[0]].storage:
            return False
        until = max(until, differs_until(op.name))
    return True


def submodel_as_trained(graph: ChannelGraph, cut: Cut) -> tuple[nn.Module, bool]:
    """The cut's submodel with its weights as they lie in training, and whether that is channels last."""
    module = graph.submodel(cut, zeros=True)
    return module, channels_last(graph, cut) and _runs(module, graph.inputs.example(2))


def _runs(module: nn.Module, example: Sequence[Tensor]) -> bool:
    """Puts its weights in that order and tries. Should the simulation be mistaken, as of an operator with a rule of a
    user's own, that must cost bytes and not the run."""
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks this form
    try:
        with torch.inference_mode():
            module.eval()(*images_last(example))
    except RuntimeError:
        module.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        return False
    finally:
        module.train()
    return True
