"""Exported graphs as bytes, in a form of our own: JSON for the operations, safetensors for constants.

No pickle: reading makes nothing but fx nodes whose operations are in torch's own namespaces (or arithmetic on sizes),
so the worst that a wrong file can do is a wrong graph. Reading does not import torch's compiler, which takes a second.
What has no place in this form (an operator of the user's own, an argument of an odd type) is not stored.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, fx

from strata.graph.export import Exported, Exports
from strata.graph.values import BatchSize, DescribedValue, Size, describe

FORMAT = 1
_NAMESPACES = ("aten", "prims")
_ARITHMETIC = (
    "getitem", "add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "pow", "eq", "ne", "lt", "le", "gt", "ge",
)  # fmt: skip
_ON_SIZES = {f"operator.{name}": getattr(operator, name) for name in _ARITHMETIC}
_NAME_ON_SIZES = {function: name for name, function in _ON_SIZES.items()}
_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d, torch.preserve_format)
_MEMORY_FORMATS = {str(one): one for one in _FORMATS}
_LAYOUTS = {str(torch.strided): torch.strided}


class NotStorable(Exception):
    """Something in a graph has no place in this form."""


def to_bytes(exports: Exports, buffers: Collection[str]) -> bytes:
    """`buffers`: names of the constants that are the model's own, to be found there again."""
    data = {
        "format": FORMAT,
        "constants": list(exports.constants),
        "modes": {name: _mode_to_json(mode) for name, mode in exports.modes.items()},
        "leaf_outputs": {node.name: count for node, count in exports.leaf_outputs.items()},
    }
    tensors = {name: value.contiguous() for name, value in exports.constants.items() if name not in buffers}
    if any(tensor.device.type != "cpu" or name.rstrip("_") in buffers for name, tensor in tensors.items()):
        raise NotStorable("a constant that is on a device, or the model's own and of two values")
    return save(tensors, {"graphs": json.dumps(data, separators=(",", ":"))})


def from_bytes(content: bytes, buffers: Mapping[str, Tensor]) -> Exports:
    """Raises whatever (KeyError, ValueError, TypeError, ...) if this is not what to_bytes wrote."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    data = json.loads(header["__metadata__"]["graphs"])
    if data["format"] != FORMAT:
        raise ValueError(f"format {data['format']}")
    modes = {name: _mode_from_json(mode) for name, mode in data["modes"].items()}
    nodes = {node.name: node for node in modes["train"].graph.nodes}
    leaf_outputs = {nodes[name]: int(count) for name, count in data["leaf_outputs"].items()}
    tensors = load(content)
    for name in data["constants"]:
        if name not in tensors:
            tensors[name] = buffers[name].detach().clone()
    return Exports(modes, leaf_outputs, {name: tensors[name] for name in data["constants"]})


def _mode_to_json(mode: Exported) -> dict[str, Any]:
    return {
        "nodes": [_node_to_json(node) for node in mode.graph.nodes],
        "inputs": {name: node.name for name, node in mode.inputs.items()},
        "outputs": {name: node.name for name, node in mode.outputs.items()},
    }


def _mode_from_json(data: Any) -> Exported:
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for one in data["nodes"]:
        args = tuple(_value_from_json(value, nodes) for value in one["args"])
        kwargs = {name: _value_from_json(value, nodes) for name, value in one["kwargs"].items()}
        target = _function(one["target"]) if one["op"] == "call_function" else one["target"]
        node = graph.create_node(one["op"], target, args, kwargs, one["name"])
        if node.name != one["name"] or one["op"] not in ("placeholder", "get_attr", "call_function", "output"):
            raise ValueError(f"{one['op']} {one['name']}")
        nodes[node.name] = node
        node.meta = _meta_from_json(one)
    return Exported(
        graph,
        {name: nodes[node] for name, node in data["inputs"].items()},
        {name: nodes[node] for name, node in data["outputs"].items()},
    )


def _node_to_json(node: fx.Node) -> dict[str, Any]:
    if node.op == "call_function":
        target = _function_name(node.target)
    elif isinstance(node.target, str):
        target = node.target
    else:
        raise NotStorable(str(node.target))
    found: dict[str, Any] = {
        "op": node.op,
        "name": node.name,
        "target": target,
        "args": [_value_to_json(value) for value in node.args],
        "kwargs": {name: _value_to_json(value) for name, value in node.kwargs.items()},
    }
    if node.meta.get("val") is not None:
        found["value"] = _description_to_json(node.meta["val"])
    if node.meta.get("nn_module_stack"):
        found["modules"] = [[key, *module] for key, module in node.meta["nn_module_stack"].items()]
    if node.meta.get("stack_trace"):
        found["line"] = node.meta["stack_trace"]
    return found


def _meta_from_json(data: Any) -> dict[str, Any]:
    meta: dict[str, Any] = {}
    if "value" in data:
        meta["val"] = _description_from_json(data["value"])
    if "modules" in data:
        meta["nn_module_stack"] = {key: tuple(module) for key, *module in data["modules"]}
    if "line" in data:
        meta["stack_trace"] = data["line"]
    return meta


# --- operations ------------------------------------------------------------------------------------------------------


def _function_name(function: Any) -> str:
    if function in _NAME_ON_SIZES:
        return _NAME_ON_SIZES[function]
    name = str(function)
    if (
        isinstance(function, torch._ops.OpOverload)
        and function.namespace in _NAMESPACES
        and _overload(name) is function
    ):
        return name
    raise NotStorable(name)


def _function(name: str) -> Any:
    return _ON_SIZES[name] if name in _ON_SIZES else _overload(name)


def _overload(name: str) -> torch._ops.OpOverload:
    """Of "aten.conv2d.default"."""
    namespace, packet, overload = name.split(".")
    if namespace not in _NAMESPACES:
        raise ValueError(f"{name} is not torch's own")
    found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    if not isinstance(found, torch._ops.OpOverload):
        raise ValueError(f"{name} is not an operator")
    return found


# --- arguments -------------------------------------------------------------------------------------------------------


def _value_to_json(value: Any) -> Any:
    """Plain values as they are, all others as a list that begins with what they are."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, fx.Node):
        return ["node", value.name]
    if isinstance(value, tuple):
        return ["tuple", *map(_value_to_json, value)]
    if isinstance(value, list):
        return ["list", *map(_value_to_json, value)]
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return ["dict", {key: _value_to_json(one) for key, one in value.items()}]
    if isinstance(value, slice):
        return ["slice", *(_value_to_json(one) for one in (value.start, value.stop, value.step))]
    if isinstance(value, torch.dtype):
        return ["dtype", _dtype_name(value)]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    if str(value) in _MEMORY_FORMATS:
        return ["memory format", str(value)]
    if str(value) in _LAYOUTS:
        return ["layout", str(value)]
    raise NotStorable(f"{type(value)}")


def _value_from_json(data: Any, nodes: dict[str, fx.Node]) -> Any:
    if not isinstance(data, list):
        return data
    kind, *parts = data
    if kind in ("tuple", "list", "slice"):
        found = [_value_from_json(part, nodes) for part in parts]
        return found if kind == "list" else tuple(found) if kind == "tuple" else slice(*found)
    (part,) = parts
    if kind == "dict":
        return {key: _value_from_json(one, nodes) for key, one in part.items()}
    if kind == "node":
        return nodes[part]
    if kind == "dtype":
        return _dtype(part)
    if kind == "device":
        return torch.device(part)
    return _MEMORY_FORMATS[part] if kind == "memory format" else _LAYOUTS[part]


# --- what is known of values -----------------------------------------------------------------------------------------


def _description_to_json(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, list):
        return [_description_to_json(one) for one in value]
    if not isinstance(value, DescribedValue):
        raise NotStorable(f"{type(value)}")
    sizes = [[size.constant, size.per_sample] if isinstance(size, BatchSize) else size for size in value.sizes]
    return {"sizes": sizes, "dtype": _dtype_name(value.dtype)}


def _description_from_json(data: Any) -> Any:
    if data is None:
        return None
    if isinstance(data, list):
        return [_description_from_json(one) for one in data]
    return describe(tuple(map(_size, data["sizes"])), _dtype(data["dtype"]))


def _size(data: Any) -> Size:
    return BatchSize(*map(int, data)) if isinstance(data, list) else int(data)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is not a dtype")
    return found
