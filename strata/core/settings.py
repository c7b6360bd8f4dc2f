"""Settings that describe themselves: a frozen dataclass whose fields carry their help text, bounds and spelling.

Command-line flags and their help (core/flags.py), JSON, the comparison on resume and the fleet's messages are all
derived from the fields, so a new setting is one new line where it belongs. Components stand together in a `Tree`
(runs/config.py). Without torch: `strata --help` reads all of this.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, get_type_hints

from strata.core.errors import BadInput

KEY = "setting"  # in a field's metadata
RUN = "run"  # in config.json: see digest_of
TITLE, KEPT = "title", "kept"  # in the metadata of a tree's field


@dataclass(frozen=True)
class Needs:
    """Another setting, without which this one would not be looked at."""

    key: str
    values: tuple[str, ...] = ()  # one of them; none named: any
    instead: str | None = None  # what is said where it is missing; None: a sentence made of the above


@dataclass(frozen=True)
class Setting:
    """What is known of a field beside its name, type and default."""

    help: str
    metavar: str | None = None
    flag: str | None = None  # without the dashes, where it is not the field's name; "" : no flag
    parse: Callable[[str], Any] | None = None  # from the command line's text; None: by the field's type
    choices: Sequence[str] | None = None
    least: float | None = None
    above: float | None = None
    below: float | None = None
    most: float | None = None
    whole: bool = False  # a whole number
    key: str | None = None  # in JSON, where it is not the flag's name
    several: bool = False  # a tuple; on the command line repeated or a comma list, and `parse` is for each
    refusal: str | None = None  # the sentence for a value out of bounds, with {} for it
    simulated: str | None = None  # only for simulated fleets; what a real one has in its place
    needs: Needs | None = None
    since: int = 1  # the format of config.json that it came with; a later one is left out where it has its default

    def key_of(self, name: str) -> str:
        return self.key or (self.flag or name).replace("-", "_")

    def option_of(self, name: str) -> str:
        return "--" + (self.flag or name).replace("_", "-")


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
        if value is not None or defaults[name] is not None:
            check_value(value, known, name)


def check_value(value: Any, known: Setting, name: str) -> None:
    problem = problem_of(value, known)
    if problem is not None:
        raise BadInput(
            known.refusal.format(shown(value)) if known.refusal else f"{name} must be {problem}, not {value!r}"
        )


def problem_of(value: Any, known: Setting) -> str | None:
    """What the value should be, where it is not."""
    if known.choices is not None:
        return None if value in known.choices else f"one of {', '.join(known.choices)}"
    if known.whole:
        least = f" of at least {known.least:g}" if known.least is not None else ""
        right = isinstance(value, int) and not isinstance(value, bool)
        return None if right and (known.least is None or value >= known.least) else f"a whole number{least}"
    numeric = any(bound is not None for bound in (known.least, known.above, known.below, known.most))
    if numeric and (not isinstance(value, int | float) or value != value or value == float("inf")):
        return "a finite number"
    bounds = [
        (known.least is None or value >= known.least, f"{known.least} or more"),
        (known.above is None or value > known.above, f"above {known.above}"),
        (known.below is None or value < known.below, f"below {known.below}"),
        (known.most is None or value <= known.most, f"at most {known.most}"),
    ]
    return next((text for holds, text in bounds if not holds), None)


def shown(value: Any) -> str:
    if isinstance(value, str):
        return repr(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def differences(saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Of two JSON objects, each in a sentence."""
    found = []
    for key in sorted({*saved, *now}):
        before, after = saved.get(key), now.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            found.append(f"{prefix}{key} was {json.dumps(before)} and is now {json.dumps(after)}")
    return found


def digest_of(config: Mapping[str, Any]) -> str:
    """Of what makes a run the one it is: its settings, and what it was asked for. In config.json and in checkpoints."""
    content = json.dumps([config.get("settings"), config.get("request")], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def check_digest(config: Mapping[str, Any], path: Path) -> None:
    """Folders of older versions have none."""
    if RUN in config and config[RUN] != digest_of(config):
        raise BadInput(f"{path} was changed after the run began: put back what it was, or start another run")


# --- components together -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Described:
    """A setting where it stands in a tree."""

    part: str  # the tree's field that holds its component
    name: str  # the component's field
    key: str  # flat: in JSON, and as the flag's destination
    hint: Any  # the field's type
    default: Any
    known: Setting

    @property
    def option(self) -> str:
        """The flag, with its dashes."""
        return self.known.option_of(self.name)


def part(component: type, title: str, kept: bool = True) -> Any:
    """A field of a tree. `title`: of its flags in `--help`. `kept` False: it is no part of what a run is, and is
    neither written to JSON nor compared."""
    return field(default_factory=component, metadata={TITLE: title, KEPT: kept})


class Tree:
    """Base of a frozen dataclass whose fields are components, each made by `part`.

    Every setting has one flat key: `tree.lr` is `tree.course.lr`, `Tree.of(lr=0.1)` makes a tree, `changed(lr=0.2)`
    another. JSON is the flat object of all keys that are kept.
    """

    @classmethod
    def described(cls) -> dict[str, Described]:
        """By flat key, in order."""
        return _described(cls)  # type: ignore[arg-type]

    @classmethod
    def parts(cls) -> dict[str, str]:
        """The components by name, each with its title."""
        return {one.name: one.metadata[TITLE] for one in fields(cls)}  # type: ignore[arg-type]

    @classmethod
    def kept(cls) -> frozenset[str]:
        """The keys of all that makes a run what it is."""
        return frozenset(cls.keys_of(*(one.name for one in fields(cls) if one.metadata[KEPT])))  # type: ignore[arg-type]

    @classmethod
    def keys_of(cls, *parts: str) -> list[str]:
        """The keys of these components' settings, in their order."""
        return [key for key, one in cls.described().items() if one.part in parts]

    @classmethod
    def of(cls, **values: Any) -> Self:
        return cls().changed(**values)

    def changed(self, **values: Any) -> Self:
        known = self.described()
        given: dict[str, dict[str, Any]] = {name: {} for name in self.parts()}
        for key, value in values.items():
            if key not in known:
                raise TypeError(f"{type(self).__name__} has no setting {key!r}")
            given[known[key].part][known[key].name] = value
        made = {name: _replaced(getattr(self, name), new) for name, new in given.items()}
        return type(self)(**made)

    # Hidden from mypy, which would take any name for a setting: Strata's own code names the component too, and only
    # what goes over all settings asks by the flat key.
    if not TYPE_CHECKING:

        def __getattr__(self, key: str) -> Any:
            one = self.described().get(key)
            if one is None:
                raise AttributeError(f"{type(self).__name__} has no setting {key!r}")
            return getattr(getattr(self, one.part), one.name)

    def values(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in self.described()}

    def to_json(self) -> dict[str, Any]:
        """What came later and has its default is left out, so that folders of older versions compare equal."""
        kept, known = self.kept(), self.described()
        later = {key for key, one in known.items() if one.known.since > 1}
        values = {key: value for key, value in self.values().items() if key in kept}
        return as_json({key: value for key, value in values.items() if key not in later or value != known[key].default})

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        unknown = sorted(set(values) - cls.kept())
        if unknown:
            raise BadInput(f"the run was started by another version of Strata, with {', '.join(unknown)}")
        return cls.of(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


@cache
def _described(tree: type) -> dict[str, Described]:
    found: dict[str, Described] = {}
    components = get_type_hints(tree)
    for one in fields(tree):
        component = components[one.name]
        hints = get_type_hints(component)
        defaults = {each.name: each.default for each in fields(component)}
        for name, known in settings_of(component).items():
            key = known.key_of(name)
            assert key not in found and key not in components, f"two settings are called {key}"
            found[key] = Described(one.name, name, key, hints[name], defaults[name], known)
    return found


def _replaced(component: Any, new: Mapping[str, Any]) -> Any:
    """dataclasses.replace, which a component that is not changed passes unchecked a second time."""
    if not new:
        return component
    return type(component)(**{one.name: new.get(one.name, getattr(component, one.name)) for one in fields(component)})
