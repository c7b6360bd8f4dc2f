"""A run on a fleet: waits for its devices, makes levels of their budgets, then plays the rounds of every other run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from strata.core.errors import BadInput, Infeasible
from strata.core.files import read_object, write_json
from strata.data import FederatedData, ImageSet
from strata.federation.robust import parse_aggregation, updates_needed
from strata.fleet.device.own_data import label_digest
from strata.fleet.protocol.settings import RunSettings, Terms
from strata.fleet.server.engine import FlowerEngine
from strata.fleet.server.levels import Assignment, group, level_for, most_bytes, per_device
from strata.fleet.server.members import Device, Kind, Roster, in_order
from strata.fleet.server.messages import Post, names
from strata.fleet.server.resuming import fitted, request_of
from strata.graph import ChannelGraph
from strata.methods import method_class
from strata.methods.heads import is_prepared
from strata.runs.folder import has_checkpoint, is_finished, refuse_used
from strata.runs.request import Request, jsonable
from strata.runs.running import make_engine, run
from strata.training import Workspace

if TYPE_CHECKING:
    from flwr.serverapp import Grid

    from strata.methods import Method
    from strata.runs.session import Result

FILE = "fleet.json"
KEPT = ("names", "samples", "evaluation", "classes", "input", "mean", "std", "augmentation", "levels", "start", "moves")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Reported:
    """How many samples each device says it has, as a partition: which ones they are is the device's own business."""

    samples: tuple[int, ...]
    elsewhere = True  # no sample of the server's data is meant

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, device: int) -> np.ndarray:
        return np.broadcast_to(np.int64(0), (self.samples[device],))


def conduct(grid: Grid, settings: RunSettings) -> Result | None:
    """The finished run, or None where it was finished before."""
    out = Path(settings.out)
    say = partial(print, flush=True)
    if settings.resume and is_finished(out):
        say(f"{out} is finished: nothing to do")
        return None
    if not settings.resume:
        refuse_used(out, "--resume")
    saved = _saved(out / FILE) if settings.resume and (out / FILE).exists() else None
    asked = request_of(out, settings.request) if settings.resume else Request.from_json(settings.request)
    request = replace(asked, exact=True)
    if is_prepared(method_class(request.method)):
        raise BadInput(
            f"{request.method} adds to the model, and real devices make the model by its name alone: simulate it"
        )
    terms = settings.terms(saved or {})
    if saved is not None and saved["evaluation"] != terms.evaluation:
        raise BadInput(f"this run is evaluated by the {saved['evaluation']}: resume it with the same --evaluation")
    if terms.evaluation == "devices" and request.validation:
        raise BadInput("devices hold out data for evaluation themselves: give no --validation with it")
    private = request.dp_noise is not None
    if private:
        _check_privacy(request, terms)

    post = Post(grid)
    roster = Roster(post, request.model, say)
    wanted = None if saved is None else list(saved["names"])
    minimum = terms.minimum if wanted is None else min(terms.minimum, len(wanted))
    roster.gather(minimum, terms.wait, wanted)

    data = request.load_data() if terms.evaluation == "server" else _unseen_data(roster, saved)
    model = request.make_model(data, with_weights=not has_checkpoint(out))
    graph = ChannelGraph(model, data.inputs)
    roster.structure = graph.hash
    roster.labels = label_digest(data.class_names) or _labels(roster, saved)
    members = _members(roster, wanted, say)
    request, assignment = _levels(request, settings, graph, members, saved, say)
    if private:  # a level that depends on who was asked before is not covered by epsilon
        assignment.moves.clear()
    if saved is None:
        fitting = [device for device in members if level_for(device.budget, assignment.levels) is not None]
        fleet = [device.name for device in fitting]
        samples = [device.samples for device in fitting]
    else:
        fleet, samples = wanted or [], list(saved["samples"])
    request = fitted(request, len(fleet))
    roster.allowed = frozenset(fleet)
    roster.devices = {name: device for name, device in roster.devices.items() if name in roster.allowed}
    say(f"{len(fleet)} devices: {names(fleet)}; levels of {', '.join(map(str, assignment.levels)) or 'one size'} bytes")

    base = request.make_method(graph)
    training = request.make_training(data)
    rest, held = request.split(data)
    at_home = terms.evaluation == "server"
    workspace = Workspace(graph)
    home = make_engine(model, rest, training, settings.workers, held=held, workspace=workspace) if at_home else None
    facts = {
        "names": fleet, "samples": samples, **asdict(terms), "classes": data.classes,
        "input": list(data.input_shape), "mean": list(data.train.mean), "std": list(data.train.std),
        "augmentation": data.augmentation, "labels": roster.labels,
    }  # fmt: skip

    def save() -> None:
        write_json(out / FILE, {**facts, **assignment.to_json()})

    robust = parse_aggregation(request.aggregation)
    engine = FlowerEngine(
        post, roster, fleet, assignment, training, request.model, home=home, deadline=terms.deadline,
        wait=terms.wait, say=say, save=save, graph=graph, moving=not private,
        needed=updates_needed(request.quorum, robust), robust=robust is not None,
    )  # fmt: skip

    def adjusted(method: Method, round: int) -> Method:
        return per_device(method, base, assignment.at(round))

    try:
        return run(
            model, data, per_device(base, base, assignment.start), out=out, rounds=request.rounds,
            devices=len(fleet), partition=Reported(tuple(samples)), training=training, engine=engine,
            resume=settings.resume, progress=True, request=jsonable(request),
            adjusted=None if private else adjusted, **request.run_options(),
        )  # fmt: skip
    except KeyboardInterrupt:
        say(f"on this fleet that is: strata fleet run --out {out} --resume")
        raise
    finally:
        engine.close()


def _saved(file: Path) -> dict[str, Any]:
    values = read_object(file)
    lacking = [name for name in KEPT if name not in values]
    if lacking:
        raise BadInput(f"{file} is not as the run left it: it has no {', '.join(lacking)}; bring it back from a copy")
    return values


def _check_privacy(request: Request, terms: Terms) -> None:
    if terms.evaluation == "devices":
        raise BadInput("with differential privacy the server evaluates on data of its own: what devices count on "
                       "theirs is not covered by epsilon; give --evaluation server")  # fmt: skip
    if request.dp_seed is not None:  # a round run again may get other answers; equal noise would cancel out
        raise BadInput("on a real fleet the noise comes from the operating system: leave out --dp-seed")


def _unseen_data(roster: Roster, saved: Mapping[str, Any] | None) -> FederatedData:
    """A stand-in for data that stays on the devices: classes and shape of most of them, no real image.

    Devices whose data is of another kind are left out when members are chosen. Of mean and standard deviation the
    medians, so that no single device can set them.
    """
    if saved is not None:
        kind = Kind(saved["classes"], tuple(saved["input"]), saved["augmentation"])
        mean, std = saved["mean"], saved["std"]
    else:
        devices = in_order(roster.devices.values())
        kind = _most([device.kind for device in devices], "the devices' data differ in classes, shape or augmentation")
        alike = [device for device in devices if device.kind == kind]
        if not any(device.held for device in alike):
            raise BadInput("no device holds out data to evaluate on: start devices with --hold-out, such as 0.2")
        mean, std = (
            [round(median(values), 6) for values in zip(*(getattr(device, key) for device in alike), strict=True)]
            for key in ("mean", "std")
        )
    roster.kind = kind
    blank = ImageSet(
        torch.zeros(1, *kind.input, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64), tuple(mean), tuple(std)
    )
    return FederatedData(blank, blank, "fleet", kind.classes, augmentation=kind.augmentation)


def _labels(roster: Roster, saved: Mapping[str, Any] | None) -> str:
    """How most devices number their classes, where the server does not know their names."""
    if saved is not None and "labels" in saved:
        return str(saved["labels"])
    found = [device.labels for device in roster.devices.values() if device.labels and roster.misfit(device) is None]
    return _most(found, "the devices' classes have different names") if found else ""


def _most(values: Sequence[Value], differ: str) -> Value:
    """The value that most have."""
    counted = Counter(values).most_common(2)
    if len(counted) == 2 and counted[0][1] == counted[1][1]:
        raise BadInput(
            f"{differ}, and no kind is that of most: {counted[0][0]} or {counted[1][0]}? All need the same class "
            "folders, none empty, and pictures of one size"
        )
    return counted[0][0]


def _members(roster: Roster, wanted: list[str] | None, say: Any) -> list[Device]:
    found = in_order(roster.devices.values())
    asked = [device for device in found if wanted is None or device.name in wanted]
    reasons = {device.name: reason for device in asked if (reason := roster.misfit(device)) is not None}
    if len(reasons) == len(asked):
        raise BadInput(f"no device can take part: {'; '.join(list(reasons.values())[:3]) or 'none is there'}")
    for reason in reasons.values():
        say(f"not used: {reason}")
    return [device for device in asked if device.name not in reasons]


def _levels(
    request: Request, settings: RunSettings, graph: ChannelGraph, members: list[Device],
    saved: Mapping[str, Any] | None, say: Any,
) -> tuple[Request, Assignment]:  # fmt: skip
    """The request with its levels in ascending order, and which device has which."""
    if request.constraints:
        constraints = tuple(sorted(set(request.constraints)))
        request = replace(request, constraints=constraints)
        sizes = most_bytes(request.make_method(graph), request.batch, request.micro_batch, request.proximal > 0)
    elif saved is not None:
        sizes = list(saved["levels"])
        request = replace(request, budgets=tuple(sizes))
    else:
        sizes = list(request.budgets)
        sizes = group(sizes, len(sizes)) if sizes else _own_levels(request, settings.levels, graph, members)
        request = replace(request, budgets=tuple(sizes))
    if saved is not None:
        return request, Assignment.from_json(saved)
    start = []
    for device in members:
        level = level_for(device.budget, sizes)
        if level is None:
            say(f"{device.name} has {device.budget} bytes and the smallest level needs {sizes[0]}: it is not used")
        else:
            start.append(level)
    if not start:
        raise BadInput(f"no device has the {sizes[0]} bytes of the smallest level: lower the budget or constraint")
    return request, Assignment(tuple(sizes), tuple(start))


def _own_levels(request: Request, most: int, graph: ChannelGraph, members: list[Device]) -> list[int]:
    """Of the devices' own budgets. Those that are too small for the method are left out, not the run given up."""
    budgets = sorted({device.budget for device in members})
    while True:
        sizes = group(budgets, most)
        try:
            replace(request, budgets=tuple(sizes)).make_method(graph)
        except Infeasible:
            if len(budgets) == 1:
                raise
            del budgets[0]
        else:
            return sizes
