"""Settings that describe themselves: a frozen dataclass whose fields carry their help text, bounds and spelling.

Command-line flags and their help, JSON, the comparison on resume and the fleet's messages are all derived from the
fields (runs/config.py), so a new setting is one new line where it belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from strata.core.errors import BadInput

KEY = "setting"  # in a field's metadata


@dataclass(frozen=True)
class Setting:
    """What is known of a field beside its name, type and default."""

    help: str
    metavar: str | None = None
    flag: str | None = None  # without the dashes, where it is not the field's name; "" : no flag
    parse: Callable[[str], Any] | None = None  # from the command line's text; None: by the type of the default
    choices: Sequence[str] | None = None
    least: float | None = None
    above: float | None = None
    below: float | None = None
    whole: bool = False  # a whole number


def setting(default: Any, help: str, **known: Any) -> Any:
    """A dataclass field: `lr: float = setting(0.1, "learning rate of the first round", above=0)`."""
    return field(default=default, metadata={KEY: Setting(help, **known)})


def settings_of(component: Any) -> dict[str, Setting]:
    """The described fields of a component (a dataclass or an instance of one), in order."""
    return {one.name: one.metadata[KEY] for one in fields(component) if KEY in one.metadata}


def check(component: Any) -> None:
    """Says of the first value out of bounds what it is and what it should be. None is always allowed where it is the
    default: nothing was asked for."""
    defaults = {one.name: one.default for one in fields(component)}
    for name, known in settings_of(component).items():
        value = getattr(component, name)
        if value is None and defaults[name] is None:
            continue
        problem = _problem(value, known)
        if problem is not None:
            raise BadInput(f"{name} must be {problem}, not {value!r}")


def _problem(value: Any, known: Setting) -> str | None:
    """What the value should be, where it is not."""
    if known.choices is not None:
        return None if value in known.choices else f"one of {', '.join(known.choices)}"
    if known.whole:
        least = f" of at least {known.least:g}" if known.least is not None else ""
        right = isinstance(value, int) and not isinstance(value, bool)
        return None if right and (known.least is None or value >= known.least) else f"a whole number{least}"
    bounds = [
        (known.least is None or value >= known.least, f"{known.least} or more"),
        (known.above is None or value > known.above, f"above {known.above}"),
        (known.below is None or value < known.below, f"below {known.below}"),
    ]
    numeric = any(bound is not None for bound in (known.least, known.above, known.below))
    if numeric and (not isinstance(value, int | float) or value != value or value == float("inf")):
        return "a finite number"
    return next((text for holds, text in bounds if not holds), None)
