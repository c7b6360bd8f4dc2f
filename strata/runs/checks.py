"""What a run is refused for before anything is written: parts of it that do not belong together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from strata.core.errors import BadInput
from strata.core.sizes import show_bytes
from strata.data import FederatedData
from strata.data.objectives import Classification, Regression
from strata.execution import memory
from strata.federation import privacy_accounting as accounting
from strata.federation.norm_statistics import MOST_DEVICES
from strata.federation.privacy import Reach
from strata.graph.inputs import same_inputs
from strata.graph.tied import own_state
from strata.methods import SLT, Method
from strata.methods.base import Phase
from strata.models.loading import check_float32
from strata.runs.config import RunOptions
from strata.training import LocalTraining, Workspace
from strata.training.phases import settings_of


def check_fit(method: Method, model: nn.Module, data: FederatedData) -> None:
    graph = method.graph
    if getattr(method, "variant", None) == "original" and not isinstance(data.objective, Classification):
        raise BadInput(f"the variant original of {method.name} is for classes, and {data.name} has none: leave it out")
    if graph.classes != data.classes and isinstance(data.objective, Classification):
        raise BadInput(
            f"the model has {graph.classes} outputs and {data.name} has {data.classes} classes: "
            f"make the model for {data.classes} classes"
        )
    if graph.classes != data.classes and isinstance(data.objective, Regression):
        raise BadInput(
            f"the model has {graph.classes} outputs and {data.name} has {data.classes} numbers to predict: make the "
            f"model for {data.classes} outputs"
        )
    if not data.objective.suits(graph.output_shape, data.classes, tuple(data.train.targets.shape[1:])):
        ours, theirs = (
            ", ".join(map(str, ("N", *shape))) for shape in (graph.output_shape, data.train.targets.shape[1:])
        )
        raise BadInput(
            f"the model returns [{ours}] and {data.name} has targets [{theirs}] of {data.classes} classes, to learn by "
            f"{data.objective.name}: make the model for them"
        )
    if not same_inputs(graph.inputs, data.inputs):
        kind = " images" if data.train.has_images else ""
        raise BadInput(
            f"the model takes {graph.inputs} and {data.name} has {data.inputs}{kind}: make the model for {data.inputs}"
        )
    check_ids(method, data)
    shapes = {name: tuple(tensor.shape) for name, tensor in own_state(model).items()}
    if shapes != dict(graph.state_shapes):
        raise BadInput("the method was made for another model than the one given: make both from the same model")
    check_float32(model)


def check_augmented(training: LocalTraining, data: FederatedData) -> None:
    if training.transform is not None or training.augmentation == "none":
        return
    if not data.train.has_images:
        raise BadInput(
            f"the augmentation {training.augmentation} is for images, and {data.name} has none: leave it out"
        )
    why = data.parted_by_augmentation
    if why is not None:
        raise BadInput(
            f"the augmentation {training.augmentation} does not suit {data.name}: {why}; give the augmentation none, "
            "or in Python a transform of your own that keeps them together"
        )


def unaugmented(training: LocalTraining, data: FederatedData) -> list[str]:
    """The note where the data's own augmentation is not used."""
    why = data.parted_by_augmentation
    if why is None or data.augmentation == "none" or training.transform is not None:
        return []
    return [f"the augmentation of {data.name}, {data.augmentation}, is left out: {why}"]


def check_ids(method: Method, data: FederatedData) -> None:
    """All ids have a row in the table that they are looked up in: every device would fail by itself."""
    given = zip(method.graph.inputs.names, data.inputs.names, strict=True)  # of one input the name may be another
    for own, name in given:
        if own not in method.graph.ids:
            continue
        table, rows = method.graph.ids[own]
        largest = max(int(samples.inputs[name].max()) for samples in (data.train, data.test))
        if largest >= rows:
            raise BadInput(
                f"{data.name} has {name} up to {largest} and the model's table of embeddings, {table}, has {rows} "
                "rows: read the text by the model's own tokenizer (--tokenizer FOLDER), or make the model for "
                f"{max(largest + 1, data.vocabulary or 0)} ids"
            )


def check_last(method: Method, rounds: int) -> None:
    """What is evaluated at the end becomes the plain model."""
    graph = method.graph
    output = method.evaluation_cut(rounds - 1).output
    if graph.output_named(output) != graph.output_named(None):
        raise BadInput(
            f"{method.name} evaluates {output} after the last round: the final model is evaluated by its own output, "
            f"{graph.output_named(None)}"
        )


def narrowing(method: Method, pretrained: bool) -> list[str]:
    """The warning where trained weights would be cut to a part of their width: what they know is not in the part."""
    if not pretrained:
        return []
    tasks = method.assign(0, range(method.period or 1))
    full = method.graph.state_shapes
    if all(shape == full[name] for task in tasks for name, shape in task.cut.shapes.items()):
        return []
    return [
        f"WARNING: {method.name} trains narrow parts of these pretrained weights, which loses most of what they know; "
        "--method window, top, cycle or lora keeps them (docs/pretrained.md)"
    ]


def check_hooks(method: Method, options: RunOptions) -> None:
    if method.aggregates and (options.robust or options.private or options.updates.weighted):
        raise BadInput(
            f"{method.name} aggregates in its own way: leave out the aggregation, the weights and differential privacy"
        )


def check_phases(method: Method, training: LocalTraining) -> None:
    """What devices would refuse, each by itself and in every round."""
    for task in method.assign(0, range(min(method.period or 1, MOST_DEVICES))):
        for phase in task.phases:
            settings_of(phase, training, task.round)


def check_planned(method: Method | str | type[Method], training: LocalTraining) -> None:
    """What an optimizer of the user's own keeps is part of a step's bytes; a plan may not have heard of it."""
    if not isinstance(method, SLT) or method.plan.accounting != "peak":
        return
    plan = method.plan
    if plan.execution.update_rule != training.update_rule:
        raise BadInput(
            f"the plan counts what {plan.execution.update_rule} keeps and training is by {training.update_rule}: make "
            f"the plan for it, strata.plan(..., execution=strata.Execution(update_rule={training.update_rule!r}))"
        )
    if training.optimizer is None:
        return

    def need_of(step: int, level: int | None) -> int:
        executed = replace(training, **vars(plan.execution_at(step, level)))
        return memory(plan.graph, plan.cut(step, level), executed).total

    levels = range(len(plan.levels)) if plan.levels else (None,)
    for level in levels:
        size = plan.budget_bytes if level is None else plan.levels[level].budget_bytes
        need = max(need_of(step.step, level) for step in plan.steps)
        if need > size:
            raise BadInput(
                f"the plan is for {show_bytes(size)} and with this optimizer, which keeps {training.slots} tensors for "
                f"each trained one, a step takes {show_bytes(need)}: make the plan with it, "
                "strata.plan(..., execution=LocalTraining(optimizer=...))"
            )


def kept_phases(method: Method, training: LocalTraining, rounds: int, workspace: Workspace) -> list[tuple[Phase, int]]:
    """Phases whose frozen part runs again on the same weights, with the bytes that are kept of a sample. None: the run
    is refused. Where a step of the method has no second round, nothing of it comes again."""
    found: list[tuple[Phase, int]] = []
    plan = getattr(method, "plan", None)
    if plan is not None and plan.schedule == "early-stopping":  # when a step begins is not known yet
        first = [(training, Phase(plan.cut(step.step), plan.execution_at(step.step))) for step in plan.steps]
    else:
        steps = [method.step(round) for round in range(rounds)]
        again = {step: round for round, step in enumerate(steps[:-1]) if steps[round + 1] == step}
        if training.epochs > 1:
            again |= {step: round for round, step in enumerate(steps)}
        devices = range(min(method.period or 1, MOST_DEVICES))
        tasks = [(round, task) for round in again.values() for task in method.assign(round, devices)]
        first = [(training.in_round(round), phase) for round, task in tasks for phase in task.phases]
    for settings, phase in first:
        if not settings.caches:
            continue
        placement = workspace.placement(phase.cut, phase.execution or settings)
        if placement is not None and placement.cached_flops:
            found.append((phase, placement.cached_bytes or 0))
    if not found:
        raise BadInput(
            f"{method.name} runs no frozen layers twice on the same weights in this run, so there is nothing to keep: "
            "leave out --cache-prefix"
        )
    return found


def check_renumbering(partition: Any) -> None:
    """A validation split gives the training samples other numbers; a fleet's own samples have none here."""
    by_name = isinstance(partition, str) and not partition.startswith("file:")
    if not by_name and not getattr(partition, "elsewhere", False):
        raise BadInput(
            "a validation split renumbers the training samples, and your own partition names them by the old numbers: "
            "leave out one of them, or give the partition as the data's users, with partition='user'"
        )


def check_privacy(method: Method, options: RunOptions) -> None:
    accounting.check_installed()
    if method.graph.buffer_names and not options.evaluation.validation:
        raise BadInput(
            "this model has batch norm, whose statistics must not come from the devices' images under differential "
            "privacy: give --validation SHARE (in Python, validation=0.05), images that the server keeps for itself"
        )
    Reach.of(method, 0, options.fleet.devices)
