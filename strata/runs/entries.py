"""What `--methods` of a comparison lists: methods, each perhaps with settings of its own for how a step is taken.

slt,small,fedavg:recompute,fedavg:recompute+micro-batch=8,mypkg.methods:Mine:micro-batch=4
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strata.core.errors import BadInput
from strata.core.flags import parsed
from strata.core.settings import Described, settings_of
from strata.execution.execution import Execution
from strata.runs.config import RunConfig

RECOMPUTE = "recompute"
RECOMPUTED = ("activation_checkpointing", "auto")  # what it is short for


@dataclass(frozen=True)
class Entry:
    method: str  # as --method takes it
    settings: tuple[tuple[str, Any], ...] = ()  # of Execution, by their keys in a RunConfig; in the fields' order

    @classmethod
    def of(cls, text: str) -> Entry:
        from strata.methods import METHODS

        first, *rest = text.split(":")
        method, asked = (first, rest) if first in METHODS or not rest else (f"{first}:{rest[0]}", rest[1:])
        if len(asked) > 1:
            raise BadInput(f"an entry is METHOD:SETTING+SETTING, such as fedavg:recompute+micro-batch=8, not {text!r}")
        given = dict(_setting(one, text) for one in asked[0].split("+")) if asked else {}
        return cls(method, tuple((key, given[key]) for key in _known() if key in given))

    def of_config(self, config: RunConfig, **more: Any) -> RunConfig:
        return config.changed(**{"method": self.method, **dict(self.settings), **more})

    @property
    def name(self) -> str:
        """In tables and pictures; `of` reads it."""
        return f"{self.method}:{self.execution}" if self.settings else self.method

    @property
    def execution(self) -> str:
        return "+".join(_short(key, value) for key, value in self.settings)

    @property
    def folder(self) -> str:
        return "-".join((self.method, *self.execution.replace("=", "-").split("+"))) if self.settings else self.method


def execution_text(training: Mapping[str, Any]) -> str:
    """How steps are taken where that is not the usual way, as an entry says it. `training`: by Execution's fields."""
    usual, names = Execution(), settings_of(Execution)
    keys = {one.name: key for key, one in _known().items()}
    given = {name: training[name] for name in names if name in training and training[name] is not None}
    return "+".join(
        _short(keys[name], value) for name, value in given.items() if value != getattr(usual, name) and name in keys
    )


def _known() -> dict[str, Described]:
    return {key: one for key, one in RunConfig.described().items() if one.part == "execution"}


def _setting(text: str, entry: str) -> tuple[str, Any]:
    if text == RECOMPUTE:
        return RECOMPUTED
    flags = {one.option.removeprefix("--"): one for one in _known().values()}
    flag, equals, value = text.partition("=")
    one = flags.get(flag)
    if one is None:
        raise BadInput(
            f"{entry!r} asks for {flag!r}, and a step is taken by {RECOMPUTE} or {', '.join(flags)} (such as "
            "fedavg:recompute+micro-batch=8)"
        )
    if one.hint is not bool and not equals:
        raise BadInput(f"{entry!r} gives {flag} no value: write {flag}=...")
    return one.key, parsed(one, value if equals else True)


def _short(key: str, value: Any) -> str:
    if (key, value) == RECOMPUTED:
        return RECOMPUTE
    flag = _known()[key].option.removeprefix("--")
    return flag if value is True else f"{flag}={value}"
