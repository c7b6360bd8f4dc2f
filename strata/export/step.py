"""One step of a plan as a program for the native device."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from strata import __version__
from strata.core.errors import BadInput, one_line
from strata.core.settings import settings_of
from strata.execution import Execution, memory
from strata.execution.norm_statistics import fixed_norms
from strata.export.joint import LABELS, Traced, traced_evaluation, traced_training
from strata.export.lowering import VERSION, lower, require_executorch
from strata.export.manifest import FORMAT, StepProgram, entries
from strata.export.networks import (
    EvaluationPass,
    TrainingPass,
    measuring_network,
    plain_network,
    statistics_of,
)
from strata.graph.batch_norms import with_fixed_statistics
from strata.graph.submodel import graph_of

if TYPE_CHECKING:
    from strata.graph import ChannelGraph, Cut, SubModel

LABEL_BYTES = 8
METHODS = ("train", "evaluate", "statistics")
# what of an Execution a program does not have, by the setting's name, and what to do instead
UNKNOWN = {
    "activation_checkpointing": "computes nothing anew",
    "frozen_chunk": "takes frozen layers as the others",
    "cache_prefix": "runs frozen layers in every step",
    "release_gradients": "keeps gradients to the end of a step",
}


def check_exportable(graph: ChannelGraph, execution: Execution) -> None:
    for name, does in UNKNOWN.items():
        if getattr(execution, name):
            raise BadInput(f"an exported step {does}: leave out --{name.replace('_', '-')}")
    if execution.update_rule != "sgd":
        raise BadInput(f"an exported step is one of SGD, not of {execution.update_rule}: leave out --optimizer")
    if execution.momentum_dtype != "float32":
        raise BadInput("an exported step keeps momentum in float32: leave out --momentum-dtype")
    if not graph.inputs.single:
        raise BadInput(f"an exported step has one input, and this model takes {graph.inputs}")
    (given,) = graph.inputs.inputs
    if given.dtype not in (torch.float32, torch.int64):
        raise BadInput(f"an exported step takes float32 or int64 inputs, not {given.dtype}")
    if len(graph.output_shape) != 1:
        raise BadInput("an exported step learns classes: scores [batch, classes], and this model gives others")


def export_step(
    graph: ChannelGraph,
    cut: Cut,
    state: Mapping[str, Tensor],
    execution: Execution,
    about: Mapping[str, Any] | None = None,
    evaluates: bool = True,
) -> StepProgram:
    """`state`: the whole model's, of which the cut is taken. `about`: further entries of the manifest. `evaluates`:
    with the methods that evaluation needs; they take as long to export as training does."""
    check_exportable(graph, execution)
    require_executorch()
    tensors = cut.extract(state)
    wrong = next(
        (name for name, one in tensors.items() if one.is_floating_point() and one.dtype != torch.float32), None
    )
    if wrong is not None:
        raise BadInput(f"an exported step has float32 weights, and {wrong} is {tensors[wrong].dtype}")
    sub = graph.submodel(cut, {name: one.clone() for name, one in tensors.items()})
    methods = _traced(graph, cut, execution, sub, evaluates)
    lowered = lower(methods)
    used = {name for one in methods.values() for name in one.inputs}
    trained = [name for name in cut.trained if name in methods["train"].inputs]
    parameters = set(graph.parameter_names)
    frozen = [name for name in tensors if name in used and name in parameters and name not in trained]
    buffers = [name for name in tensors if name not in parameters and tensors[name].is_floating_point()]
    (given,) = graph.inputs.inputs
    manifest = {
        "format": FORMAT,
        "what": "strata step",
        **(about or {}),
        "classes": graph.classes,
        "graph": graph.hash,
        "cut": cut.hash,
        "input": {
            "name": given.name,
            "shape": list(given.shape),
            "dtype": _dtype(given.dtype),
            "stored": _dtype(given.stored),
        },
        "batch": execution.batch_size,
        "micro_batch": execution.at_once,
        "gradients": "summed" if execution.in_parts else "outputs",
        "execution": {name: getattr(execution, name) for name in settings_of(Execution)},
        "trained": entries(trained, cut.shapes),
        "frozen": entries(frozen, cut.shapes),
        "buffers": entries(buffers, cut.shapes),
        "methods": {
            name: {"arena": lowered.arenas[name], "inputs": list(one.inputs), "outputs": list(one.outputs)}
            for name, one in methods.items()
        },
        "operators": list(lowered.operators),
        "bytes": _bytes(graph, cut, execution, lowered.arenas["train"], trained, frozen, buffers),
        "versions": {"strata": __version__, "torch": torch.__version__.split("+")[0], "executorch": VERSION},
    }
    return StepProgram(lowered.program, manifest, {name: tensors[name] for name in (*trained, *frozen, *buffers)})


def _traced(graph: ChannelGraph, cut: Cut, execution: Execution, sub: SubModel, evaluates: bool) -> dict[str, Traced]:
    most = execution.at_once
    # not fewer than two: torch.export takes one for a constant
    x = graph.inputs.example(max(2, most))[0][:most]
    labels = torch.zeros(most, dtype=torch.int64)
    fixed = fixed_norms(graph, cut, execution)
    training = with_fixed_statistics(graph_of(sub, graph, "train"), fixed)
    evaluation = graph_of(sub, graph, "eval")
    statistics = statistics_of(evaluation)
    slots = {name: slot for slot, name in enumerate(cut.trained)} if execution.in_parts else None
    networks = {
        "train": lambda: traced_training(TrainingPass(plain_network(sub, training)), x, labels, most, slots),
        "evaluate": lambda: traced_evaluation(EvaluationPass(plain_network(sub, evaluation)), x, most),
        "statistics": lambda: traced_evaluation(
            EvaluationPass(measuring_network(sub, evaluation, statistics)), x, most, statistics
        ),
    }
    made = {}
    for name in METHODS if evaluates else METHODS[:1]:
        sub.train(name == "train")
        try:
            made[name] = networks[name]()
        except (RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError) as error:
            raise BadInput(f"the {name} pass of this network cannot be exported: {one_line(error, 300)}") from error
    assert LABELS in made["train"].inputs
    return made


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(
    graph: ChannelGraph,
    cut: Cut,
    execution: Execution,
    arena: int,
    trained: list[str],
    frozen: list[str],
    buffers: list[str],
) -> dict[str, int]:
    """What a training step takes on the native device, and what the plan counts for it."""

    def size(names: list[str]) -> int:
        return sum(4 * prod(cut.shapes[name]) for name in names)

    (given,) = graph.inputs.inputs
    found = {
        "arena": arena,
        "weights": size([*trained, *buffers, *([] if execution.maps else frozen)]),  # mapped: pages of a file
        "gradients": size(trained) if execution.in_parts else 0,
        "momentum": execution.slot_bytes(size(trained)),
        "start": size(trained) if execution.proximal else 0,  # the proximal term's
        "batch": execution.at_once * (prod(given.shape) * given.dtype.itemsize + LABEL_BYTES),
    }
    return {**found, "total": sum(found.values()), "peak": memory(graph, cut, execution).total}
