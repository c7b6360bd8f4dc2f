"""What a device (Flower's node config) and a run (Flower's run config) are told.

Both travel as one key, `strata`, whose value is JSON: `to_argument` writes what `flower-supernode --node-config` and
`flwr run --run-config` take, `from_config` reads what the apps are given. The FAB therefore declares exactly one key:

    [tool.flwr.app.components]
    serverapp = "strata.fleet.server.server_app:app"
    clientapp = "strata.fleet.device.client_app:app"
    [tool.flwr.app.config]
    strata = ""

This file must not import torch: the device's client app reads its settings from it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from strata.core.errors import BadInput

KEY = "strata"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
EVALUATIONS = ("server", "devices")
MEMBERS = ("open", "fixed")
NOBODY_JOINS = (
    "with differential privacy who takes part is fixed when the run begins, because epsilon is counted for so many "
    "devices: leave out --members open"
)
FEWEST_SUMMED, MOST_SUMMED = 3, 1000  # devices of a secure sum: of two, either knows the other's part
DEFAULT_CLIP, LARGEST_CLIP = 1.0, 1e6  # of a secure sum

_Settings = TypeVar("_Settings", "DeviceSettings", "RunSettings")


@dataclass(frozen=True)
class DeviceSettings:
    """`strata fleet device`. The name is the device: it stays when the device restarts and gets another node id."""

    name: str
    budget: int | None = None  # bytes for tensors; None: what the system allows, less what the runtime holds
    data: str = "digits"  # a data set's name, or folder[:SIZE] for pictures in data_dir
    data_dir: str | None = None
    partition: str | None = None  # None: all training data is its own; else its part of a simulated split, e.g. iid
    index: int = 0  # which part
    devices: int = 1  # of how many
    seed: int = 0  # of the split
    hold_out: float = 0.0  # share of its own data kept for evaluation
    deadline: float | None = None  # seconds; it stops its own work then. The run's deadline holds where shorter
    cache: str | None = None  # folder for frozen layers; None: the user's cache folder
    models: tuple[str, ...] = ()  # package.module:callable it is willing to build, besides Strata's own networks
    hard_limit: bool = True  # train under RLIMIT_DATA (Linux)
    only_sums: int | None = None  # train only in secure sums over at least so many devices; None: as the server asks
    reading: tuple[tuple[str, Any], ...] = ()  # how text, tables and pictures are read: settings of data.Reading

    def __post_init__(self) -> None:
        object.__setattr__(self, "models", tuple(self.models))
        pairs = ((key, tuple(value) if isinstance(value, list) else value) for key, value in self.reading)
        object.__setattr__(self, "reading", tuple(pairs))
        if not isinstance(self.name, str) or not NAME.fullmatch(self.name):
            raise BadInput(
                f"a device's name is 1 to 64 letters, digits, dots, dashes or underscores, not {self.name!r}"
            )
        if self.budget is not None and (not _whole(self.budget) or self.budget < 1):
            raise BadInput(f"a device's budget is a number of bytes, not {self.budget!r}")
        if not _whole(self.devices) or not _whole(self.index) or not 0 <= self.index < self.devices:
            raise BadInput(f"a device holds part 0 to {self.devices!r} - 1 of a split, not {self.index!r}")
        if not 0 <= self.hold_out < 1:
            raise BadInput(f"hold-out is the share of data kept for evaluation, from 0 to below 1, not {self.hold_out}")
        if self.only_sums is not None and (
            not _whole(self.only_sums) or not FEWEST_SUMMED <= self.only_sums <= MOST_SUMMED
        ):
            raise BadInput(f"a secure sum is over {FEWEST_SUMMED} to {MOST_SUMMED} devices, not {self.only_sums!r}")
        _check_seconds(self.deadline, "the device's deadline")

    @property
    def folder(self) -> Path:
        """Where this device keeps frozen layers, its socket and its log."""
        return Path(self.cache).expanduser() if self.cache else Path("~/.cache/strata/fleet").expanduser() / self.name

    def to_argument(self) -> str:
        """For --node-config."""
        return _argument(asdict(self))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DeviceSettings:
        return _settings(cls, config, "device")


@dataclass(frozen=True)
class Terms:
    """How a run treats its devices. They are in its folder: a run that is resumed goes on as it began."""

    minimum: int = 1  # devices to wait for before the first round
    wait: float = 600.0  # seconds to wait for them
    deadline: float | None = 3600.0  # seconds a device has for its answer; None in folders of older versions only
    evaluation: str = "server"  # server: on its test data; devices: on what they hold out, the counts summed
    members: str = "open"  # open: devices may join the run and leave it; fixed: those that are there when it begins
    secure_aggregation: bool = False  # the server sees sums of updates only
    secure_fewest: int = FEWEST_SUMMED  # over at least so many devices
    secure_clip: float = DEFAULT_CLIP  # no value changes by more in a round

    def __post_init__(self) -> None:
        if not _whole(self.secure_fewest) or not FEWEST_SUMMED <= self.secure_fewest <= MOST_SUMMED:
            raise BadInput(f"a secure sum is over {FEWEST_SUMMED} to {MOST_SUMMED} devices, not {self.secure_fewest!r}")
        if not _number(self.secure_clip) or not 0 < self.secure_clip <= LARGEST_CLIP:
            raise BadInput(
                f"--secure-clip is the largest change of a value in a round, above 0 and at most {LARGEST_CLIP:g}, "
                f"not {self.secure_clip!r}"
            )
        if not _whole(self.minimum) or self.minimum < 1:
            raise BadInput(f"a run waits for at least 1 device, not {self.minimum!r}")
        if self.evaluation not in EVALUATIONS:
            raise BadInput(f"evaluation is done by the {' or the '.join(EVALUATIONS)}, not {self.evaluation!r}")
        if self.members not in MEMBERS:
            raise BadInput(f"who takes part is {' or '.join(MEMBERS)}, not {self.members!r}")
        _check_seconds(self.wait, "the time to wait for devices")
        _check_seconds(self.deadline, "the deadline of a round")

    def summed(self, needed: int) -> int:
        """Updates that a round needs; with secure aggregation a sum's, so that a round with one is never redone."""
        return max(needed, self.secure_fewest) if self.secure_aggregation else needed


@dataclass(frozen=True)
class RunSettings:
    """`strata fleet run`. Rounds, devices per round, quorum, norm bound and the like are the request's own."""

    request: Mapping[str, Any]  # strata.runs.config.RunConfig as JSON; without budgets the devices' own count
    out: str  # the run's folder: an absolute path on the server
    resume: bool = False
    from_round: int | None = None  # where it is resumed; None: after the newest checkpoint
    minimum: int | None = None  # this and the next seven: None where not given, see `terms`
    wait: float | None = None
    deadline: float | None = None
    evaluation: str | None = None
    members: str | None = None
    secure_aggregation: bool | None = None
    secure_fewest: int | None = None
    secure_clip: float | None = None
    workers: int = 0  # processes for the server's own evaluation; 0: the server app itself
    levels: int = 4  # at most this many budget levels are made of the devices' budgets

    def __post_init__(self) -> None:
        if not isinstance(self.request, Mapping):
            raise BadInput("a run's settings hold the request as an object")
        if not isinstance(self.out, str) or not Path(self.out).is_absolute():
            raise BadInput(f"the run's folder is an absolute path on the server, not {self.out!r}")
        if self.from_round is not None and not (self.resume and _whole(self.from_round) and self.from_round >= 0):
            raise BadInput("--from-round says after how many rounds a run is resumed: give --resume and a whole number")
        if not _whole(self.workers) or self.workers < 0:
            raise BadInput(f"workers are 0 or more, not {self.workers!r}")
        if not _whole(self.levels) or self.levels < 1:
            raise BadInput(f"a fleet has at least 1 level, not {self.levels!r}")
        self.terms({})

    def terms(self, saved: Mapping[str, Any]) -> Terms:
        """As given; else as in the run's fleet.json, where it is resumed (older ones lack some); else the defaults."""
        names = [field.name for field in fields(Terms)]
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return Terms(**({name: saved[name] for name in names if name in saved} | given))

    def to_argument(self) -> str:
        """For --run-config."""
        return _argument({**asdict(self), "request": dict(self.request)})

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RunSettings:
        return _settings(cls, config, "run")


def _argument(values: Mapping[str, Any]) -> str:
    """A TOML literal string, which Flower's own pattern for key=value finds whole: it may hold no quote mark."""
    text = json.dumps(values, allow_nan=False).replace("'", "\\u0027")
    return f"{KEY}='{text}'"


def _settings(cls: type[_Settings], config: Mapping[str, Any], what: str) -> _Settings:
    text = config.get(KEY)
    if not isinstance(text, str) or not text:
        raise BadInput(f"there are no Strata settings in this {what}'s Flower config: start it with `strata fleet`")
    try:
        values = json.loads(text)
    except ValueError as error:
        raise BadInput(f"this {what}'s Strata settings are not JSON: {error}") from None
    names = {field.name for field in fields(cls)}
    if not isinstance(values, dict) or set(values) - names:
        unknown = ", ".join(sorted(set(values) - names)) if isinstance(values, dict) else type(values).__name__
        raise BadInput(f"this {what} was started by another version of Strata, with {unknown}")
    try:
        return cls(**values)
    except TypeError as error:
        raise BadInput(f"this {what}'s Strata settings do not fit: {error}") from None


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_seconds(value: object, what: str) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise BadInput(f"{what} is a number of seconds above 0, not {value!r}")


def asked_of(config: Any) -> tuple[Mapping[str, Any], str | None]:
    """The request and the folder of a run that the server has; nothing for one that `strata fleet` did not start."""
    try:
        values = json.loads(config[KEY].string) if KEY in config else {}
        return values.get("request", {}), values.get("out")
    except (ValueError, AttributeError):
        return {}, None
