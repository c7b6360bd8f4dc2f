"""Maps as [batch, devices * channels, height, width], channels last in memory: batch norm and grouped convolution keep
devices apart by themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from strata.graph.rewrite import CutCall
from strata.ops.channels import argument
from strata.training.stepwise import take
from strata.training.vectorised.common import add_common_rules
from strata.training.vectorised.joint_forward import Compute, Form, JointForward, NotVectorisable, batch_norm


def arranged(tensor: Tensor) -> Tensor:
    """Convolutions run up to twice as fast on CPUs with channels last in memory."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor.contiguous()


def _channels(value: Tensor, devices: int, positions: Any) -> Tensor:
    return arranged(take(value.unflatten(1, (devices, -1)), 2, positions).flatten(1, 2))


def _concatenate(values: list[Tensor], devices: int) -> Tensor:
    """As [batch, height, width, devices, channels], which they are in memory."""
    joined = torch.cat([value.permute(0, 2, 3, 1).unflatten(3, (devices, -1)) for value in values], 4)
    return joined.flatten(3).permute(0, 3, 1, 2)


def _features(value: Tensor, devices: int) -> Tensor:
    return value.unflatten(1, (devices, -1)).flatten(2).transpose(0, 1)


FORM = Form(lambda values: arranged(torch.cat(values, 1)), _channels, _concatenate, _features, batch_norm)
add_common_rules(FORM)


@FORM.rule("convolution")
def _convolution(joint: JointForward, step: CutCall, maps: dict[Any, bool]) -> Compute:
    node, call = step.node, step.call
    get = joint.input(step, node.args[0])
    if not maps[node.args[0]]:
        raise NotVectorisable("a convolution of something else than maps")
    weight, bias = joint.parameter(node.args[1]), argument(node, 2, "bias")
    bias_name = None if bias is None else joint.parameter(bias)
    stride = argument(node, 3, "stride", 1)
    padding = argument(node, 4, "padding", 0)
    dilation = argument(node, 5, "dilation", 1)
    groups = call.args[6] if len(call.args) > 6 else call.kwargs.get("groups", 1)
    if isinstance(padding, str):
        raise NotVectorisable("padding given by name")
    maps[node] = True
    return lambda v: functional.conv2d(
        get(v),
        v[weight],
        None if bias_name is None else v[bias_name],
        stride,
        padding,
        dilation,
        groups * joint.devices,
    )


@FORM.rule("group_norm")
def _group_norm(joint: JointForward, step: CutCall, maps: dict[Any, bool]) -> Compute:
    node = step.node
    get = joint.input(step, node.args[0])
    if not maps[node.args[0]]:
        raise NotVectorisable("group norm of features")
    groups: Any = step.call.args[1]
    affine = (argument(node, 2, "weight"), argument(node, 3, "bias"))
    scale, shift = (None if p is None else joint.parameter(p) for p in affine)
    eps = argument(node, 4, "eps", 1e-5)
    maps[node] = True
    return lambda v: functional.group_norm(
        get(v), groups * joint.devices, None if scale is None else v[scale], None if shift is None else v[shift], eps
    )


@FORM.rule("average_pooling", "max_pooling", "adaptive_average_pooling", "adaptive_max_pooling")
def _pooling(joint: JointForward, step: CutCall, maps: dict[Any, bool]) -> Compute:
    node = step.node
    if not maps[node.args[0]]:
        raise NotVectorisable("pooling of something else than maps")
    get, target, rest, kwargs = joint.input(step, node.args[0]), node.target, node.args[1:], dict(node.kwargs)
    maps[node] = True
    return lambda v: target(get(v), *rest, **kwargs)  # type: ignore[operator]
