"""From an unmodified nn.Module to two flat graphs of aten operations: one for training, one for evaluation.

torch.export(strict=False) with a dynamic batch; anything that cannot be exported becomes one sentence.
"""

from __future__ import annotations

import inspect
import logging
import operator
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from strata.core.errors import BadInput
from strata.graph.evaluation import evaluation_graph, watch_training_flags
from strata.graph.inputs import InputSpec, arguments_of
from strata.graph.leaves import count_leaf_outputs, watch_leaf_modules
from strata.graph.misfits import misfit
from strata.graph.outputs import named_outputs
from strata.graph.tied import aliases
from strata.graph.values import described

EXAMPLE_BATCH = 4  # not 1: torch.export would specialise on it


@dataclass(frozen=True)
class Exported:
    """One mode of the model as an fx graph whose get_attr targets are state-dict names, or names of constants.

    Of each node is known: `val` (a Described), `nn_module_stack` (the innermost module) and `stack_trace` (the last
    line of the user's own code that led to it)."""

    graph: fx.Graph
    inputs: dict[str, fx.Node]  # by their names in the InputSpec, in its order
    outputs: dict[str, fx.Node]  # by their names in what the model returns; the first is the one to learn from

    @property
    def output(self) -> fx.Node:
        return next(iter(self.outputs.values()))


@dataclass(frozen=True)
class Exports:
    modes: dict[str, Exported]  # train, eval
    leaf_outputs: dict[fx.Node, int]  # of the training graph: see leaves.py
    constants: dict[str, Tensor]  # not in the state dict: non-persistent buffers, literals


def export_modes(model: nn.Module, inputs: InputSpec) -> Exports:
    """Both modes, from torch.export: once where that will do (evaluation.py)."""
    with watch_leaf_modules(model) as calls, watch_training_flags(model) as readers:
        modes = {"train": export_model(model, inputs, training=True)}
    if not readers.are_known:
        modes["eval"] = export_model(model, inputs, training=False)
    constants = _constants(modes.values(), set(model.state_dict()))
    leaf_outputs = count_leaf_outputs(modes["train"].graph, calls)
    for mode in modes.values():
        for node in mode.graph.nodes:
            node.meta = _essential(node.meta)
        mode.graph.owning_module = None  # which holds all weights
    if readers.are_known:
        modes["eval"] = _for_evaluation(modes["train"])
    return Exports(modes, leaf_outputs, constants)


def _for_evaluation(training: Exported) -> Exported:
    graph, copies = evaluation_graph(training.graph)
    inputs = {name: copies[node] for name, node in training.inputs.items()}
    return Exported(graph, inputs, {name: copies[node] for name, node in training.outputs.items()})


def export_model(model: nn.Module, inputs: InputSpec, training: bool) -> Exported:
    arguments = arguments_of(model, inputs)
    example = dict(zip(inputs.names, inputs.example(EXAMPLE_BATCH, _device(model)), strict=True))
    args, kwargs = arguments.of(example)
    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    dynamic = pytree.tree_map(lambda _: {0: torch.export.Dim.DYNAMIC}, dict(bound))
    with _mode(model, training):
        try:
            with _without_dumps():
                program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic, strict=False)
            module = program.module(check_guards=False)
        except Exception as error:
            raise BadInput(_explain(model, error)) from error
    graph = module.graph
    _inline_regions(module)
    _merge_tied(graph, aliases(model))
    _drop_assertions(graph)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    if len(placeholders) != len(arguments.order):
        raise BadInput(f"{_name(model)} was given {len(arguments.order)} inputs and takes {len(placeholders)}.")
    of_input = dict(zip(arguments.order, placeholders, strict=True))
    outputs = named_outputs(graph, program.call_spec.out_spec)
    if not outputs:
        raise BadInput(f"{_name(model)} returns no tensor of scores with a row for each sample.")
    return Exported(graph, {name: of_input[name] for name in inputs.names}, outputs)


def _inline_regions(module: fx.GraphModule) -> None:
    """A region without gradients or automatic casting (rotary positions are computed in one) is a graph of its own: its
    operations come into the model's, where that makes no difference."""
    graph = module.graph
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for node in list(graph.nodes):
        kind = getattr(node.target, "__name__", "")
        if node.op != "call_function" or kind not in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            continue
        body, *given = node.args[1:] if kind == "wrap_with_set_grad_enabled" else node.args[4:]
        if kind == "wrap_with_autocast" and node.args[2]:
            raise BadInput("the model casts by itself (torch.autocast), and runs train in float32: leave that out.")
        if kind == "wrap_with_set_grad_enabled" and not node.args[0] and _depends(given, parameters):
            raise BadInput("the model computes with its weights under torch.no_grad: freeze them instead.")
        inner = getattr(module, str(body.target)).graph
        taken = [one for one in inner.nodes if one.op == "placeholder"]
        with graph.inserting_before(node):
            returned: Any = graph.graph_copy(inner, dict(zip(taken, given, strict=True)))
        for user in list(node.users):  # each takes one of what the region returns
            user.replace_all_uses_with(returned[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
        if not body.users:
            graph.erase_node(body)


def _merge_tied(graph: fx.Graph, further: Mapping[str, str]) -> None:
    """A parameter of several names is one node, by its first."""
    tied = {**further, **{name: name for name in further.values()}}
    seen: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "get_attr" or str(node.target) not in tied:
            continue
        name = tied[str(node.target)]
        if name in seen:
            node.replace_all_uses_with(seen[name])
            graph.erase_node(node)
        else:
            node.target = name
            seen[name] = node


def _depends(values: Iterable[fx.Node], parameters: set[str]) -> bool:
    """Whether a parameter goes into one of these values."""
    waiting, seen = list(values), set()
    while waiting:
        one = waiting.pop()
        if one.op == "get_attr" and str(one.target) in parameters:
            return True
        if one not in seen:
            seen.add(one)
            waiting += one.all_input_nodes
    return False


def _constants(exported: Iterable[Exported], state: set[str]) -> dict[str, Tensor]:
    """Tensors that a graph refers to but that are not in the state dict: non-persistent buffers, literals.

    Export numbers literals anew in each mode: where the same name means something else, the later one is renamed."""
    found: dict[str, Tensor] = {}
    for one in exported:
        module = one.graph.owning_module
        for node in one.graph.nodes:
            if node.op != "get_attr" or node.target in state:
                continue
            value: Any = module
            for part in str(node.target).split("."):
                value = getattr(value, part)
            if not isinstance(value, Tensor):
                raise BadInput(f"the model holds {node.target}, which is not a tensor Strata can read.")
            name = str(node.target)
            while name in found and not torch.equal(found[name], value):
                name += "_"
            node.target = name
            found[name] = value.detach()
    return found


def _essential(meta: dict[str, Any]) -> dict[str, Any]:
    """Of what torch.export knows of a node, what is read later."""
    found: dict[str, Any] = {}
    value = described(meta.get("val"))
    if value is not None:
        found["val"] = value
    if meta.get("nn_module_stack"):
        key, (path, kind) = list(meta["nn_module_stack"].items())[-1]
        found["nn_module_stack"] = {key: (path, str(kind))}
    lines = [line.strip() for line in (meta.get("stack_trace") or "").splitlines() if "File " in line]
    own = [line for line in lines if "/torch/nn/" not in line] or lines
    if own:
        found["stack_trace"] = own[-1]
    return found


def check_weights(model: nn.Module) -> None:
    """Refuse early, with a sentence, what cannot work: nothing to train."""
    if not any(True for _ in model.parameters()):
        raise BadInput(f"{_name(model)} has no parameters, so there is nothing to train.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise BadInput(f"all parameters of {_name(model)} have requires_grad=False, so there is nothing to train.")


def check_inputs(model: nn.Module, inputs: InputSpec) -> None:
    """The model as it is takes them."""
    error = _failure(model, inputs)
    if error is not None:
        raise BadInput(misfit(model, inputs, _first_line(error), partial(_works, model))) from error


def _failure(model: nn.Module, inputs: InputSpec) -> Exception | None:
    """What it raises on them."""
    example = dict(zip(inputs.names, inputs.example(2, _device(model)), strict=True))
    args, kwargs = arguments_of(model, inputs).of(example)
    with _mode(model, training=False), torch.no_grad():
        try:
            model(*args, **kwargs)
        except Exception as error:
            return error
    return None


def _works(model: nn.Module, inputs: InputSpec) -> bool:
    return _failure(model, inputs) is None


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    """The model in the wanted mode, and afterwards every submodule in the mode it had."""
    before = [(module, vars(module)["training"]) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, flag in before:
            module.training = flag


@contextmanager
def _without_dumps() -> Iterator[None]:
    """Where torch.export fails it writes the graph so far, for its developers: a sentence of ours says it. Neither does
    it warn of its own inner workings. What else is written where it does not fail comes out afterwards."""
    out, err = StringIO(), StringIO()
    quiet = _torch_handlers()
    levels = [handler.level for handler in quiet]
    for handler in quiet:
        handler.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(out), redirect_stderr(err):
            warnings.filterwarnings("ignore", "The tensor attributes? .* assigned during export", UserWarning)
            yield
    finally:
        for handler, level in zip(quiet, levels, strict=True):
            handler.setLevel(level)
    sys.stdout.write(out.getvalue())
    sys.stderr.write(err.getvalue())


def _torch_handlers() -> list[logging.Handler]:
    """Of torch's loggers: many of them have one of their own."""
    named = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.split(".")[0] == "torch"]
    found = [handler for logger in named for handler in logger.handlers]
    return found if logging.lastResort is None else [*found, logging.lastResort]


def _drop_assertions(graph: fx.Graph) -> None:
    """Guards and assertions check what export assumed of the full model; a submodel has other sizes."""
    for node in reversed(list(graph.nodes)):
        is_assertion = node.op == "call_module" or "assert" in str(node.target) or "sym_constrain" in str(node.target)
        is_pure_size = node.op == "call_function" and (
            getattr(node.target, "__module__", "") == operator.__name__ or "sym_size" in str(node.target)
        )
        unused_state = node.op == "get_attr"
        if not node.users and (is_assertion or is_pure_size or unused_state):
            graph.erase_node(node)
    left = [node for node in graph.nodes if node.op == "call_module"]
    if left:
        raise BadInput(f"the exported graph calls {left[0].target}, which Strata cannot read.")


def _explain(model: nn.Module, error: Exception) -> str:
    text = str(error)
    kind = type(error).__name__
    data_dependent = "DataDependent" in kind or "data-dependent" in text or "Could not guard" in text
    place = _user_line(text)
    if data_dependent:
        return (
            f"{_name(model)} decides by the values of a tensor which way to go (data-dependent control flow){place}; "
            "Strata needs a network whose operations do not depend on the data."
        )
    return f"{_name(model)} cannot be exported by torch.export ({kind}: {_first_line(error)}){place}."


def _user_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("File ")]
    outside = [line for line in lines if "/torch/" not in line]
    return f" at {outside[-1].removesuffix(', in forward')}" if outside else ""


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")


def _name(model: nn.Module) -> str:
    return type(model).__name__


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))
