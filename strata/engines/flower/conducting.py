"""A run on a fleet: waits for its devices, makes levels of their budgets, then plays the rounds of every other run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from strata.cutting import ChannelGraph
from strata.data import FederatedData, ImageSet
from strata.engines.flower.engine import FlowerEngine
from strata.engines.flower.holding import label_digest
from strata.engines.flower.levels import Assignment, group, level_for, most_bytes, per_device
from strata.engines.flower.post import Post, names
from strata.engines.flower.roster import Device, Roster
from strata.engines.flower.settings import RunSettings
from strata.errors import BadInput
from strata.federation.files import read_json, write_json
from strata.federation.request import Request, jsonable
from strata.federation.running import make_engine, run

if TYPE_CHECKING:
    from flwr.serverapp import Grid

    from strata.federation.session import Result
    from strata.methods import Method

FILE = "fleet.json"


@dataclass(frozen=True)
class Reported:
    """How many samples each device says it has, as a partition: which ones they are is the device's own business."""

    samples: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, device: int) -> np.ndarray:
        return np.broadcast_to(np.int64(0), (self.samples[device],))


def conduct(grid: Grid, settings: RunSettings) -> Result | None:
    """The finished run, or None where it was finished before."""
    out = Path(settings.out)
    say = partial(print, flush=True)
    if settings.resume and all((out / name).exists() for name in ("summary.json", "model.safetensors")):
        say(f"{out} is finished: nothing to do")
        return None
    if not settings.resume and (out / "config.json").exists():
        raise BadInput(f"{out} already holds a run: resume it with --resume, or choose another folder")
    saved = read_json(out / FILE) if settings.resume and (out / FILE).exists() else None
    before = read_json(out / "config.json")["request"] if settings.resume and (out / "config.json").exists() else {}
    request = Request.from_json({**before, **settings.request, "exact": True})
    if saved is not None and saved["evaluation"] != settings.evaluation:
        raise BadInput(f"this run is evaluated by the {saved['evaluation']}: resume it with the same --evaluation")
    if settings.evaluation == "devices" and request.validation:
        raise BadInput("devices hold out data for evaluation themselves: give no --validation with it")
    if request.dp_noise is not None:
        _check_privacy(request, settings)

    post = Post(grid)
    roster = Roster(post, request.model, say)
    wanted = None if saved is None else list(saved["names"])
    minimum = settings.minimum if wanted is None else min(settings.minimum, len(wanted))
    roster.gather(minimum, settings.wait, wanted)

    data = _server_data(request, settings, roster, saved)
    model = request.make_model(data, with_weights=not settings.resume)
    graph = ChannelGraph(model, data.input_shape)
    roster.structure = graph.hash
    roster.labels = label_digest(data.class_names) or max((d.labels for d in roster.devices.values()), default="")
    members = _members(roster, wanted, say)
    request, assignment = _levels(request, settings, graph, members, saved, say)
    if saved is None:
        fitting = [device for device in members if level_for(device.budget, assignment.levels) is not None]
        fleet = [device.name for device in fitting]
        samples = [device.samples for device in fitting]
    else:
        fleet, samples = wanted or [], list(saved["samples"])
    request = replace(request, devices=len(fleet), per_round=min(request.per_round, len(fleet)))
    roster.allowed = frozenset(fleet)
    roster.devices = {name: device for name, device in roster.devices.items() if name in roster.allowed}
    say(f"{len(fleet)} devices: {names(fleet)}; levels of {', '.join(map(str, assignment.levels)) or 'one size'} bytes")

    base = request.make_method(graph)
    training = request.make_training(data)
    rest, held = request.split(data)
    at_home = settings.evaluation == "server"
    home = make_engine(model, rest, training, settings.workers, held=held, graph=graph) if at_home else None
    facts = {
        "names": fleet, "samples": samples, "evaluation": settings.evaluation, "classes": data.classes,
        "input": list(data.input_shape), "mean": list(data.train.mean), "std": list(data.train.std),
        "augmentation": data.augmentation,
    }  # fmt: skip

    def save() -> None:
        write_json(out / FILE, {**facts, **assignment.to_json()})

    engine = FlowerEngine(
        post, roster, fleet, assignment, training, request.model, home=home, deadline=settings.deadline,
        wait=settings.wait, say=say, save=save, graph=graph,
    )  # fmt: skip

    def adjusted(method: Method, round: int) -> Method:
        return per_device(method, base, assignment.at(round))

    try:
        return run(
            model, data, per_device(base, base, assignment.start), out=out, rounds=request.rounds,
            devices=len(fleet), partition=Reported(tuple(samples)), training=training, engine=engine,
            resume=settings.resume, progress=True, request=jsonable(request), adjusted=adjusted,
            **request.run_options(),
        )  # fmt: skip
    except KeyboardInterrupt:
        say(f"on this fleet that is: strata fleet run --out {out} --resume")
        raise
    finally:
        engine.close()


def _check_privacy(request: Request, settings: RunSettings) -> None:
    if settings.evaluation == "devices":
        raise BadInput("with differential privacy the server evaluates on data of its own: what devices count on "
                       "theirs is not covered by epsilon; give --evaluation server")  # fmt: skip
    if request.dp_seed is not None:  # a round run again may get other answers; equal noise would cancel out
        raise BadInput("on a real fleet the noise comes from the operating system: leave out --dp-seed")


def _server_data(
    request: Request, settings: RunSettings, roster: Roster, saved: Mapping[str, Any] | None
) -> FederatedData:
    """The server's own, or a stand-in for data that stays on the devices: their classes and shape, no real image."""
    if settings.evaluation == "server":
        return request.load_data()
    if saved is not None:
        said = {key: saved[key] for key in ("classes", "input", "mean", "std", "augmentation")}
    else:
        devices = sorted(roster.devices.values(), key=lambda device: device.name)
        if len({device.labels for device in devices} - {""}) > 1:
            raise BadInput("the devices' classes have different names: all need the same class folders, none empty")
        kinds = {(device.classes, device.input) for device in devices}
        if len(kinds) > 1:
            raise BadInput(f"the devices' data differ in classes or shape of images: {sorted(kinds)}")
        total = sum(device.samples for device in devices)
        channels = range(len(devices[0].mean))
        said = {"classes": devices[0].classes, "input": devices[0].input, "augmentation": devices[0].augmentation}
        for key in ("mean", "std"):
            said[key] = [
                round(sum(getattr(device, key)[c] * device.samples for device in devices) / total, 6) for c in channels
            ]
        if not any(device.held for device in devices):
            raise BadInput("no device holds out data to evaluate on: start devices with --hold-out, such as 0.2")
    blank = ImageSet(
        torch.zeros(1, *said["input"], dtype=torch.uint8), torch.zeros(1, dtype=torch.int64),
        tuple(said["mean"]), tuple(said["std"]),
    )  # fmt: skip
    return FederatedData(blank, blank, "fleet", said["classes"], augmentation=said["augmentation"])


def _members(roster: Roster, wanted: list[str] | None, say: Any) -> list[Device]:
    found = sorted(roster.devices.values(), key=lambda device: device.name)
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
        sizes = most_bytes(request.make_method(graph), request.batch, request.micro_batch)
    elif saved is not None:
        sizes = list(saved["levels"])
        request = replace(request, budgets=tuple(sizes))
    else:
        given = request.budgets or [device.budget for device in members]
        sizes = group(given, len(given) if request.budgets else settings.levels)
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
