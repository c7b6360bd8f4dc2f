"""Maps as [devices, channels, height, width, batch]: what our own convolutions take (kernels/narrow.c)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strata.graph.rewrite import CutCall
from strata.ops.channels import argument
from strata.training.kernels import convolution
from strata.training.stepwise import take
from strata.training.vectorised.common import add_common_rules
from strata.training.vectorised.joint_forward import Compute, Form, JointForward, NotVectorisable, batch_norm


def _side_by_side(values: list[Tensor]) -> Tensor:
    return torch.stack([value.permute(1, 2, 3, 0).contiguous() for value in values])


def _channels(value: Tensor, devices: int, positions: Any) -> Tensor:
    return take(value, 1, positions)


def _concatenate(values: list[Tensor], devices: int) -> Tensor:
    return torch.cat(values, 1)


def _features(value: Tensor, devices: int) -> Tensor:
    return value.flatten(1, 3).transpose(1, 2)


def _batch_norm(value: Tensor, scale: Tensor | None, shift: Tensor | None, eps: float) -> Tensor:
    """Over all of a channel, which lies in one piece."""
    return batch_norm(value.reshape(1, value.shape[0] * value.shape[1], -1), scale, shift, eps).view(value.shape)


FORM = Form(_side_by_side, _channels, _concatenate, _features, _batch_norm)
add_common_rules(FORM)


def _one(value: Any) -> int:
    """A size that is the same in both directions."""
    first, *others = (value,) if isinstance(value, int) else value
    if any(other != first for other in others):
        raise NotVectorisable("different sizes along height and width")
    return int(first)


@FORM.rule("convolution")
def _convolution(joint: JointForward, step: CutCall, maps: dict[Any, bool]) -> Compute:
    node, call = step.node, step.call
    groups = call.args[6] if len(call.args) > 6 else call.kwargs.get("groups", 1)
    padding = argument(node, 4, "padding", 0)
    if not maps[node.args[0]] or isinstance(padding, str) or groups != 1 or _one(argument(node, 5, "dilation", 1)) != 1:
        raise NotVectorisable("a convolution that is grouped, dilated or padded by name, or not of maps")
    get, stride, padding = joint.input(step, node.args[0]), _one(argument(node, 3, "stride", 1)), _one(padding)
    weight, bias = joint.parameter(node.args[1]), argument(node, 2, "bias")
    maps[node] = True
    if bias is None:
        return lambda v: convolution(get(v), v[weight].unflatten(0, (joint.devices, -1)), stride, padding)
    added = joint.parameter(bias)
    return lambda v: (
        convolution(get(v), v[weight].unflatten(0, (joint.devices, -1)), stride, padding)
        + v[added].view(joint.devices, -1, 1, 1, 1)
    )


@FORM.rule("average_pooling")
def _average(joint: JointForward, step: CutCall, maps: dict[Any, bool]) -> Compute:
    """Windows that tile the map."""
    node = step.node
    size = _one(node.args[1])
    stride = argument(node, 2, "stride") or size
    height, width = node.meta["val"].shape[2:]
    before = node.args[0].meta["val"].shape[2:]  # type: ignore[union-attr]
    if not maps[node.args[0]] or len(node.args) > 3 or node.kwargs or _one(stride) != size:
        raise NotVectorisable("pooling over windows that overlap or are padded")
    if tuple(before) != (height * size, width * size):
        raise NotVectorisable("pooling that leaves positions over")
    get = joint.input(step, node.args[0])
    maps[node] = True
    return lambda v: get(v).unflatten(3, (-1, size)).unflatten(2, (-1, size)).mean((3, 5))


@FORM.rule("adaptive_average_pooling")
def _global_average(joint: JointForward, step: CutCall, maps: dict[Any, bool]) -> Compute:
    node = step.node
    if not maps[node.args[0]] or _one(node.args[1]) != 1:
        raise NotVectorisable("adaptive pooling to more than one position")
    get = joint.input(step, node.args[0])
    maps[node] = True
    return lambda v: get(v).mean((2, 3), keepdim=True)
