"""A run on a fleet: waits for its devices, makes levels of their budgets, then plays the rounds of every other run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from strata.core.errors import BadInput, Infeasible
from strata.core.files import read_object, write_json
from strata.data import FederatedData, ImageSet
from strata.federation.membership import MembershipLog
from strata.federation.robust import updates_needed
from strata.fleet.device.own_data import label_digest
from strata.fleet.protocol.model_text import model_text
from strata.fleet.protocol.settings import NOBODY_JOINS, RunSettings, Terms
from strata.fleet.server.engine import FlowerEngine
from strata.fleet.server.levels import Assignment, group, level_for, most_bytes, per_device
from strata.fleet.server.members import ConnectedDevices, DataKind, Device, in_order
from strata.fleet.server.members_record import Told
from strata.fleet.server.messages import Messenger, names
from strata.fleet.server.native_devices import StepPrograms, exporter
from strata.fleet.server.resuming import config_of, fitted
from strata.fleet.server.roster import LevelAllowance, Roster, takes_part
from strata.fleet.server.secure_checks import check_asked, check_fleet, secure_terms
from strata.graph import ChannelGraph
from strata.graph.inputs import taken_by
from strata.methods import METHODS, method_class
from strata.methods.heads import is_prepared, prepared_model
from strata.runs.config import RunConfig
from strata.runs.folder import has_checkpoint, is_finished, refuse_used
from strata.runs.launch import (
    launch,
    load_data,
    make_method,
    make_model,
    make_training,
    own_options,
    refuse_going_back,
    split_data,
)
from strata.runs.running import Prepared
from strata.runs.workers import make_engine
from strata.training import Workspace
from strata.training.statistics import CALIBRATION_IMAGES

if TYPE_CHECKING:
    from flwr.serverapp import Grid

    from strata.methods import Method
    from strata.runs.session import Result

FILE = "fleet.json"
NORM_FACTOR = 5.0  # usual changes: honest devices differ by 2 or 3
WEIGHT_CAP = 4.0  # median devices: an honest one with more data loses a little, one that lies gains no more
KEPT = ("names", "samples", "evaluation", "classes", "input", "mean", "std", "augmentation", "levels", "start", "moves")
Value = TypeVar("Value")


@dataclass(frozen=True)
class ReportedSamples:
    """How many samples each device says it has, as a partition: which ones they are is the device's own business.

    It is as long as the fleet was when the run began, which is the run's setting; there may be devices beyond."""

    samples: Sequence[int]
    first: int | None = None  # None: all
    elsewhere = True  # no sample of the server's data is meant

    def __len__(self) -> int:
        return len(self.samples) if self.first is None else self.first

    def __getitem__(self, device: int) -> np.ndarray:
        return np.broadcast_to(np.int64(0), (self.samples[device],))


def run_on_fleet(grid: Grid, settings: RunSettings, told: Told | None = None) -> Result | None:
    """The finished run, or None where it was finished before. `told`: hears who joined and who left."""
    out = Path(settings.out)
    say = partial(print, flush=True)
    if settings.resume and is_finished(out):
        refuse_going_back(out, settings.from_round)
        say(f"{out} is finished: nothing to do")
        return None
    if not settings.resume:
        refuse_used(out, "--resume")
    saved = _saved(out / FILE) if settings.resume and (out / FILE).exists() else None
    asked = config_of(out, settings.request) if settings.resume else RunConfig.from_json(settings.request)
    config = asked.changed(exact=True)
    if not settings.resume:
        config = guarded(config)
    name = config.approach.method
    adds = is_prepared(method_class(name))
    if adds and name not in METHODS:
        raise BadInput(f"{name} adds to the model, and real devices know Strata's own methods only: simulate it")
    text = model_text(config.problem.model, name, own_options(config)) if adds else config.problem.model
    private = config.options.private is not None
    # runs of older versions were fixed, too
    usual = {"members": "fixed"} if private or saved is not None else {}
    terms = settings.terms({**usual, **(saved or {})})
    if saved is not None and bool(saved.get("secure_aggregation")) != terms.secure_aggregation:
        raise BadInput(
            "a run with secure aggregation goes on with it, and one without it without: resume it as it began"
        )
    if saved is not None and saved["evaluation"] != terms.evaluation:
        raise BadInput(f"this run is evaluated by the {saved['evaluation']}: resume it with the same --evaluation")
    if terms.evaluation == "devices" and config.evaluation.validation:
        raise BadInput("devices hold out data for evaluation themselves: give no --validation with it")
    if terms.evaluation == "devices" and config.evaluation.bn_images != CALIBRATION_IMAGES:
        raise BadInput(
            f"devices measure batch norm's statistics on {CALIBRATION_IMAGES} of their own images each: give no "
            "--bn-images with it"
        )
    if private:
        _check_privacy(config, terms)
    if terms.secure_aggregation:
        check_asked(config, terms)

    messenger = Messenger(grid)
    connected = ConnectedDevices(messenger, text, say)
    connected.masked = terms.secure_aggregation
    is_open = terms.members == "open"
    known = None if saved is None else [name for name, stays in takes_part(saved).items() if stays]
    minimum = terms.minimum if known is None else min(terms.minimum, max(1, len(known)))
    wanted = None if is_open else known
    connected.gather(minimum, terms.wait, wanted)

    data = load_data(config) if terms.evaluation == "server" else _unseen_data(connected, saved)
    plain = make_model(config, data, with_weights=not has_checkpoint(out))
    data = data.only(taken_by(plain, data.inputs.names))
    model = prepared_model(method_class(name), plain, data.inputs, config.course.seed, own_options(config))
    graph = ChannelGraph(model, data.inputs, width=config.approach.width)
    connected.structure = graph.hash
    connected.labels = label_digest(data.class_names) or _labels(connected, saved)
    members = _members(connected, wanted, say)
    config, assignment = _levels(config, settings, graph, members, saved, say)
    if private:  # a level that depends on who was asked before is not covered by epsilon
        assignment.moves.clear()
    per_round = config.fleet.per_round
    robust = config.options.robust
    needed = terms.summed(updates_needed(config.fleet.quorum, robust))
    more: dict[str, Any] = {"open": is_open, "wait": terms.wait, "say": say, "needed": needed}
    if saved is None:
        fitting = [device for device in members if level_for(device.budget, assignment.levels) is not None]
        fleet, samples = [device.name for device in fitting], [device.samples for device in fitting]
        roster = Roster(fleet, samples, assignment, MembershipLog(len(fleet)), per_round, **more)
    else:
        roster = Roster.of_file(saved, assignment, per_round, **more)
        fleet = roster.names
        connected.runtimes = {**saved.get("runtimes", {}), **connected.runtimes}
    first = roster.log.first
    config = fitted(config, first)
    if not is_open:
        connected.allowed = frozenset(fleet)
    if saved is None or not is_open:  # else the roster takes in who has come since, when the next round begins
        connected.devices = {name: device for name, device in connected.devices.items() if name in fleet}
    say(f"{len(fleet)} devices: {names(fleet)}; levels of {', '.join(map(str, assignment.levels)) or 'one size'} bytes")

    base = make_method(config, graph)
    starting = per_device(base, base, assignment.start)
    if terms.secure_aggregation and saved is None:
        check_fleet(starting, len(fleet), config, terms, model.state_dict())
    training = make_training(config, data)
    rest, held = split_data(config, data)
    at_home = terms.evaluation == "server"
    workspace = Workspace(graph)
    home = make_engine(model, rest, training, settings.workers, held=held, workspace=workspace) if at_home else None
    facts = {
        **asdict(terms),
        "classes": data.classes,
        "input": list(data.inputs.inputs[0].shape),
        "mean": list(data.train.mean),
        "std": list(data.train.std),
        "augmentation": data.augmentation,
        "labels": connected.labels,
    }

    def save() -> None:
        write_json(out / FILE, {**roster.to_json(), **facts, "runtimes": connected.runtimes})

    roster.save = save
    roster.told = told or roster.told
    engine = FlowerEngine(
        messenger,
        connected,
        fleet,
        assignment,
        training,
        text,
        home=home,
        deadline=terms.deadline,
        wait=terms.wait,
        say=say,
        save=save,
        graph=graph,
        moving=not private,
        needed=roster.needed,
        robust=robust is not None,
        secure=secure_terms(config, terms),
        programs=StepPrograms(exporter(graph, model, config.problem.model), out / "programs"),
    )

    def adjusted(method: Method, round: int) -> Method:
        return per_device(method, base, assignment.at(round))

    try:
        prepared = Prepared(
            model=model,
            plain=plain,
            data=data,
            method=starting,
            options=config.options,
            training=training,
            server=config.server.optimizer(),
            partition=ReportedSamples(roster.samples, first),
            engine=engine,
            adjusted=None if private else adjusted,
            present=None if private else lambda round, attempt: roster.at(round, attempt, engine),
            pretrained=config.pretrained,
            allowance=LevelAllowance(tuple(assignment.levels[level] for level in assignment.start), "peak", assignment),
        )
        return launch(config, out, resume=settings.resume, from_round=settings.from_round, prepared=prepared)
    except KeyboardInterrupt:
        say(f"on this fleet that is: strata fleet run --out {out} --resume")
        raise
    finally:
        engine.close()


def guarded(config: RunConfig) -> RunConfig:
    """With what a new run takes against devices that lie, where nothing else was asked for. It is in config.json."""
    asked = config.updates
    cap = WEIGHT_CAP if asked.weight_cap is None else asked.weight_cap
    if (
        config.options.private is not None
    ):  # there clipping bounds a change, and who is refused must not depend on others
        return config.changed(weight_cap=cap)
    return config.changed(weight_cap=cap, norm_factor=NORM_FACTOR if asked.norm_factor is None else asked.norm_factor)


def _saved(file: Path) -> dict[str, Any]:
    values = read_object(file)
    lacking = [name for name in KEPT if name not in values]
    if lacking:
        raise BadInput(f"{file} is not as the run left it: it has no {', '.join(lacking)}; bring it back from a copy")
    return values


def _check_privacy(config: RunConfig, terms: Terms) -> None:
    if terms.members == "open":
        raise BadInput(NOBODY_JOINS)
    if terms.evaluation == "devices":
        raise BadInput(
            "with differential privacy the server evaluates on data of its own: what devices count on theirs is not "
            "covered by epsilon; give --evaluation server"
        )
    if config.privacy.dp_seed is not None:  # a round run again may get other answers; equal noise would cancel out
        raise BadInput("on a real fleet the noise comes from the operating system: leave out --dp-seed")


def _unseen_data(connected: ConnectedDevices, saved: Mapping[str, Any] | None) -> FederatedData:
    """A stand-in for data that stays on the devices: classes and shape of most of them, no real image.

    Devices whose data is of another kind are left out when members are chosen. Of mean and standard deviation the
    medians, so that no single device can set them.
    """
    if saved is not None:
        kind = DataKind(saved["classes"], tuple(saved["input"]), saved["augmentation"])
        mean, std = saved["mean"], saved["std"]
    else:
        devices = in_order(connected.devices.values())
        kind = _most([device.kind for device in devices], "the devices' data differ in classes, shape or augmentation")
        alike = [device for device in devices if device.kind == kind]
        if not any(device.held for device in alike):
            raise BadInput("no device holds out data to evaluate on: start devices with --hold-out, such as 0.2")
        mean, std = (
            [round(median(values), 6) for values in zip(*(getattr(device, key) for device in alike), strict=True)]
            for key in ("mean", "std")
        )
    if not mean:
        raise BadInput(
            "what is not images is evaluated on data of the server's own: give --evaluation server and --data"
        )
    connected.kind = kind
    blank = ImageSet(
        torch.zeros(1, *kind.input, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64), tuple(mean), tuple(std)
    )
    return FederatedData(blank, blank, "fleet", kind.classes, augmentation=kind.augmentation)


def _labels(connected: ConnectedDevices, saved: Mapping[str, Any] | None) -> str:
    """How most devices number their classes, where the server does not know their names."""
    if saved is not None and "labels" in saved:
        return str(saved["labels"])
    found = [
        device.labels for device in connected.devices.values() if device.labels and connected.misfit(device) is None
    ]
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


def _members(connected: ConnectedDevices, wanted: list[str] | None, say: Any) -> list[Device]:
    found = in_order(connected.devices.values())
    asked = [device for device in found if wanted is None or device.name in wanted]
    reasons = {device.name: reason for device in asked if (reason := connected.misfit(device)) is not None}
    if len(reasons) == len(asked):
        raise BadInput(f"no device can take part: {'; '.join(list(reasons.values())[:3]) or 'none is there'}")
    for reason in reasons.values():
        say(f"not used: {reason}")
    return [device for device in asked if device.name not in reasons]


def _levels(
    config: RunConfig,
    settings: RunSettings,
    graph: ChannelGraph,
    members: list[Device],
    saved: Mapping[str, Any] | None,
    say: Any,
) -> tuple[RunConfig, Assignment]:
    """The config with its levels in ascending order, and which device has which."""
    approach = config.approach
    if approach.constraints:
        config = config.changed(constraints=tuple(sorted(set(approach.constraints))))
        method = make_method(config, graph)
        sizes = most_bytes(method, config.counted)
    elif saved is not None:
        sizes = list(saved["levels"])
        config = config.changed(budgets=tuple(sizes))
    else:
        sizes = list(approach.budgets)
        sizes = group(sizes, len(sizes)) if sizes else _own_levels(config, settings.levels, graph, members)
        config = config.changed(budgets=tuple(sizes))
    if saved is not None:
        return config, Assignment.from_json(saved)
    start = []
    for device in members:
        level = level_for(device.budget, sizes)
        if level is None:
            say(f"{device.name} has {device.budget} bytes and the smallest level needs {sizes[0]}: it is not used")
        else:
            start.append(level)
    if not start:
        raise BadInput(f"no device has the {sizes[0]} bytes of the smallest level: lower the budget or constraint")
    return config, Assignment(tuple(sizes), tuple(start))


def _own_levels(config: RunConfig, most: int, graph: ChannelGraph, members: list[Device]) -> list[int]:
    """Of the devices' own budgets. Those that are too small for the method are left out, not the run given up."""
    budgets = sorted({device.budget for device in members})
    while True:
        sizes = group(budgets, most)
        try:
            make_method(config.changed(budgets=tuple(sizes)), graph)
        except Infeasible:
            if len(budgets) == 1:
                raise
            del budgets[0]
        else:
            return sizes
