"""Command-line flags of settings that describe themselves: their help, and what was given of them."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from types import UnionType
from typing import Any, NoReturn, Union, get_args, get_origin

from strata.core.errors import BadInput
from strata.core.settings import Described, Tree, check_value, problem_of
from strata.core.sizes import parse_bytes, written_bytes


def add_flags(
    parser: argparse.ArgumentParser,
    tree: type[Tree],
    *,
    only: Collection[str] | None = None,
    without: Collection[str] = (),
    title: str | None = None,
    fleet: bool = False,
) -> None:
    """A flag for every setting of the tree (`only` and `without`: keys), in a group for each component, or all in
    one of this title.

    What is not given is None. `fleet`: what belongs to simulated fleets is refused, with what stands in its place.
    """
    groups: dict[str, Any] = {}
    for key, one in tree.described().items():
        if one.known.flag == "" or key in without or (only is not None and key not in only):
            continue
        group = title or tree.parts()[one.part]
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        if fleet and one.known.simulated is not None:
            parser.add_argument(one.option, action=_Refused, const=one.known.simulated, help=argparse.SUPPRESS)
        else:
            text = help_text(one).replace("%", "%%")
            groups[group].add_argument(one.option, dest=key, help=text, **_form(one))


def help_text(one: Described) -> str:
    """With the default, where there is one that the text does not name."""
    text, default = one.known.help, one.default
    if default is None or default is False or default == () or "default" in text:
        return text
    shown = f"{default:g}" if isinstance(default, float) else str(default)
    return f"{text} (default {shown})"


def _form(one: Described) -> dict[str, Any]:
    known = one.known
    if one.hint is bool:
        return {"action": "store_true", "default": None}
    if known.choices is not None:
        return {"choices": tuple(known.choices)}
    return {"metavar": known.metavar or "X"} | ({"action": "append"} if known.several else {})


def given(args: argparse.Namespace, tree: type[Tree], only: Collection[str] | None = None) -> dict[str, Any]:
    """The settings, by key, that were given on the command line: parsed, and within their bounds."""
    values = {}
    for key, one in tree.described().items():
        text = getattr(args, key, None) if only is None or key in only else None
        if text is not None:
            values[key] = parsed(one, text)
    return values


def parsed(one: Described, text: Any) -> Any:
    known = one.known
    if one.hint is bool:
        return bool(text)
    if known.several:
        parse = known.parse or str
        return tuple(parse(part) for part in split_list(text))
    value = known.parse(text) if known.parse is not None else _by_type(text, one)
    check_value(value, known, one.option)
    return value


def _by_type(text: str, one: Described) -> Any:
    """The first of the field's types that can read it."""
    kinds = get_args(one.hint) if get_origin(one.hint) in (Union, UnionType) else (one.hint,)
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                continue
    if str in kinds:
        return text
    problem = problem_of(text, one.known) or ("a whole number" if int in kinds else "a number")
    raise BadInput(f"{one.option} must be {problem}, not {text}")


def split_list(values: str | Sequence[str] | None) -> list[str]:
    """Repeated options and comma lists: ["0.125,0.25", "0.5"] -> ["0.125", "0.25", "0.5"]."""
    if values is None:
        return []
    texts = [values] if isinstance(values, str) else values
    parts = [part.strip() for text in texts for part in text.split(",")]
    if any(not part for part in parts):
        raise BadInput(f"a list is written a,b,c with no empty places, not {','.join(texts)!r}")
    return parts


def flags_of(tree: Tree) -> list[str]:
    """The flags that ask for this tree: those of all settings that have not their default, or another than follows
    from these."""
    known, values = tree.described(), tree.values()
    other = {key: value for key, value in values.items() if value != known[key].default}
    meant = type(tree).of(**other)
    other |= {key: value for key, value in values.items() if value != getattr(meant, key)}
    flags: list[str] = []
    for key, one in known.items():
        if key not in other or one.known.flag == "":
            continue
        value = other[key]
        flags += [one.option] if one.hint is bool else [one.option, _text(value, one)]
    return flags


def _text(value: Any, one: Described) -> str:
    if isinstance(value, tuple):
        return ("," if one.known.several else "x").join(_text(part, one) for part in value)
    if one.known.parse is parse_bytes:
        return written_bytes(value)
    return str(value)


class _Refused(argparse.Action):
    """A flag that means nothing here says so."""

    def __init__(self, option_strings: Sequence[str], dest: str, const: str, **rest: Any) -> None:
        super().__init__(option_strings, dest, nargs="?", const=const, default=None, help=rest.get("help"))

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None
    ) -> NoReturn:
        parser.exit(2, f"{parser.prog}: {option} is not for real fleets: {self.const}\n")
