"""Who is in the fleet. A device is its name; the node id under which Flower knows it changes when it restarts."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from strata.core.errors import BadInput, one_line
from strata.data import AUGMENTATIONS
from strata.federation.checking import is_count
from strata.fleet.protocol import codec
from strata.fleet.protocol.failures import sentence
from strata.fleet.protocol.settings import NAME
from strata.fleet.server.messages import Answer, Messenger, names, plain
from strata.fleet.server.native_devices import objection

Say = Callable[[str], None]

MOST_SAMPLES, MOST_CLASSES, LARGEST_IMAGE = 1 << 40, 1 << 20, 1 << 28  # more is a lie
SMALLEST_STD = 1e-6  # images are divided by it
MOST_PROGRAMS = 1000  # that a device says it has
LONGEST = 500  # characters of what is said about a device


@dataclass(frozen=True)
class DataKind:
    """What devices must have in common to train one network on data that the server has never seen."""

    classes: int
    input: tuple[int, ...]
    augmentation: str

    def __str__(self) -> str:
        return f"{self.classes} classes, images of {'x'.join(map(str, self.input))}, augmentation {self.augmentation}"


@dataclass(frozen=True)
class Device:
    """What a device says of itself."""

    name: str
    node: int
    budget: int
    baseline: int
    samples: int
    held: int
    classes: int
    input: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augmentation: str
    structure: str
    labels: str  # digest of its classes' names in order; empty where they have none
    versions: dict[str, str]
    holds: frozenset[str]
    native: int | None = None  # the format of step programs that it runs; None: it has torch
    programs: frozenset[str] = frozenset()  # step programs that it has, by id

    @classmethod
    def of(cls, node: int, meta: dict[str, Any]) -> Device:
        """Malformed where it makes no sense."""
        try:
            device = cls(
                name=meta["name"],
                node=node,
                **{key: _count(meta[key]) for key in ("budget", "baseline", "samples", "held", "classes")},
                input=tuple(map(_count, meta["input"])),
                mean=tuple(map(_number, meta["mean"])),
                std=tuple(map(_number, meta["std"])),
                augmentation=plain(meta["augmentation"], 64),
                structure=plain(meta["structure"], 64),
                versions={plain(k, 32): plain(v, 64) for k, v in meta["versions"].items()},
                labels=plain(meta["labels"], 64),
                holds=digests(meta["holds"]),
                native=_count(meta["native"]["format"]) if "native" in meta else None,
                programs=program_ids(meta.get("programs", [])),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise codec.Malformed(plain(f"it does not say what it has ({one_line(error, kind=True)})")) from None
        if not isinstance(device.name, str) or not NAME.fullmatch(device.name):
            raise codec.Malformed("it has no proper name")
        if device.samples < 1 or device.budget < 1 or device.classes < 1 or not device.input or 0 in device.input:
            raise codec.Malformed("it has no samples, no memory or no classes")
        large = len(device.input) > codec.MOST_DIMS or math.prod(device.input) > LARGEST_IMAGE
        if large or max(device.samples, device.held) > MOST_SAMPLES or device.classes > MOST_CLASSES:
            raise codec.Malformed("it says that it has more data than there can be")
        images = bool(device.mean or device.std)  # else ids, or other numbers, which are not normalised
        if images and (not len(device.mean) == len(device.std) == device.input[0] or min(device.std) < SMALLEST_STD):
            raise codec.Malformed("it has no mean and standard deviation for each channel of its images")
        if device.augmentation not in AUGMENTATIONS:
            raise codec.Malformed(f"it has an augmentation that is not known here, {device.augmentation}")
        return device

    @property
    def runtime(self) -> str:
        """What it trains with."""
        if self.native is not None:
            return f"no torch (strata-device {self.versions.get('strata-device', '?')})"
        return f"torch {self.versions.get('torch', '?')}"

    @property
    def kind(self) -> DataKind:
        return DataKind(self.classes, self.input, self.augmentation)


def in_order(devices: Iterable[Device]) -> list[Device]:
    """By name, and numbers in names as numbers: pi-2 before pi-10."""
    return sorted(devices, key=lambda device: (_natural(device.name), device.name))


def _natural(name: str) -> list[tuple[str, int]]:
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", name)]


def digests(values: Any) -> frozenset[str]:
    if not isinstance(values, list) or len(values) > codec.MOST_TENSORS:
        raise codec.Malformed("it does not say which layers it holds")
    return frozenset(value for value in values if isinstance(value, str) and len(value) == 32)


def program_ids(values: Any) -> frozenset[str]:
    if not isinstance(values, list) or len(values) > MOST_PROGRAMS:
        raise codec.Malformed("it does not say which step programs it has")
    return frozenset(value for value in values if isinstance(value, str) and len(value) == 64)


def _count(value: Any) -> int:
    if not is_count(value):
        raise ValueError(f"{plain(value, 40)} is not a count")
    return value


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("not finite")
    return number


class ConnectedDevices:
    """Asks every node that connects what it has, once; admits it under its name."""

    def __init__(self, messenger: Messenger, model: str, say: Say) -> None:
        self._messenger, self._model, self._say = messenger, model, say
        self.devices: dict[str, Device] = {}
        self._known: dict[int, str] = {}  # node -> name, or why it is not used
        self._waiting: dict[str, Device] = {}  # came under a name that another node still has: perhaps a restart
        self.structure: str | None = None  # the model's, once it is known
        self.labels = ""  # digest of the class names, once they are known
        self.kind: DataKind | None = None  # of the data, once it is known; None where the server has data of its own
        self.allowed: Collection[str] | None = None  # names, where nobody else may join
        self.masked = False  # updates come masked (secure aggregation)
        self.runtimes: dict[str, str] = {}  # by name, of all who were ever there: what they train with

    def refresh(self) -> None:
        """Greets newcomers and forgets who left. `take` hears their answers."""
        nodes = self._messenger.nodes()
        for node in [node for node in self._known if node not in nodes]:
            del self._known[node]
            self._messenger.forget(node)
        for name, device in list(self.devices.items()):
            if device.node not in nodes:
                del self.devices[name]
                self._say(f"{name} is gone")
        for name, device in list(self._waiting.items()):
            if name not in self.devices:
                del self._waiting[name]
                if device.node in nodes:
                    self._admit(device)
        for node in sorted(nodes - set(self._known)):
            if self._messenger.send(node, "hello", codec.encode({"what": "hello", "model": self._model})) is not None:
                self._known[node] = ""

    def take(self, answer: Answer) -> None:
        """The answer to a greeting. What one device writes never ends the run."""
        node = answer.sent.node
        try:
            if answer.packet is None:
                raise codec.Malformed(answer.error)
            meta = answer.packet.meta
            if meta.get("what") == "failure":
                raise codec.Malformed(sentence(meta.get("kind")))
            device = Device.of(node, meta)
        except Exception as error:
            told = isinstance(error, codec.Malformed)
            self._refuse(node, str(error) if told else f"its greeting cannot be read ({error!r})")
        else:
            self._admit(device)

    def note_program(self, name: str, program: str) -> None:
        """The device has it now."""
        if (device := self.devices.get(name)) is not None:
            self.devices[name] = replace(device, programs=device.programs | {program})

    def _refuse(self, node: int, reason: str) -> None:
        self._known[node] = plain(reason, LONGEST)
        self._say(f"a device (node {node}) is not used: {self._known[node]}")

    def turn_away(self, device: Device, reason: str) -> None:
        """It is here, and of no use to the run."""
        self.devices.pop(device.name, None)
        self._refuse(device.node, reason)

    def _admit(self, device: Device) -> None:
        """Under its name; or says why not."""
        reason = self._objection(device)
        if reason is not None:
            self._refuse(device.node, reason)
            return
        self._known[device.node] = device.name
        self.devices[device.name] = device
        self.runtimes[device.name] = device.runtime
        self._say(
            f"{device.name} is here: {device.samples} samples, {device.budget} bytes for training, runtime "
            f"{device.baseline} bytes, {device.runtime}"
        )

    def _objection(self, device: Device) -> str | None:
        name = device.name
        registered = self._messenger.registered_name(device.node)
        if registered and registered != name:
            return f"it calls itself {name}, and its key is that of {registered}: start it with --name {registered}"
        if self.allowed is not None and name not in self.allowed:
            return f"{name} was not there when the run began, and nobody may join it (--members fixed, or privacy)"
        if (reason := self.misfit(device)) is not None:
            return reason
        other = self.devices.get(name)
        if other is not None and other.node != device.node:
            self._waiting[name] = device  # Flower takes a minute to notice that a node is gone
            return f"there is another device named {name}: if it has not restarted, names must differ"
        return None

    def misfit(self, device: Device) -> str | None:
        """Why this device cannot take part in the run."""
        if self.kind is not None and device.kind != self.kind:
            return f"{device.name} has other data ({device.kind}) than the run is for ({self.kind})"
        if self.labels and device.labels and device.labels != self.labels:
            return (
                f"{device.name} numbers its classes otherwise than the server: the same class folders, by name, are "
                "needed everywhere"
            )
        if (reason := objection(device, self.masked)) is not None:
            return reason
        if self.structure is not None and device.native is None and device.structure != self.structure:
            return (
                f"{device.name} has a model of structure {device.structure} and the server {self.structure}: install "
                "the same version of the model's package there, and have as many classes and images of the same size"
            )
        return None

    def gather(self, minimum: int, wait: float, wanted: Collection[str] | None = None) -> None:
        """Until `minimum` devices (of those `wanted`, if given) have said what they have, and nobody still speaks."""
        until = time.monotonic() + wait
        while True:
            self._messenger.nodes(now=True)
            self.refresh()
            for answer in self._messenger.answers():
                self.take(answer)
            there = [name for name in self.devices if wanted is None or name in wanted]
            if len(there) >= minimum and not self._messenger.open:
                return
            if time.monotonic() >= until:
                if len(there) >= minimum:
                    return
                raise BadInput(
                    f"{len(there)} of {minimum} devices were there after {wait:g} s ({names(sorted(there)) or 'none'})"
                    f"{self._complaints()}: start the others, or ask for fewer"
                )
            self._messenger.pause()

    def _complaints(self) -> str:
        found = [text for text in self._known.values() if text and text not in self.devices]
        return f"; not used: {'; '.join(found[:3])}" if found else ""
