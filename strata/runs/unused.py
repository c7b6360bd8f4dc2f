"""Settings that nothing would look at: given on a command line, they are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from strata.core.errors import BadInput
from strata.core.settings import Described
from strata.runs.config import RunConfig

if TYPE_CHECKING:
    from strata.methods import Method


def users_of(key: str) -> list[str]:
    """The methods whose card names this setting of MethodOptions."""
    from strata.methods import METHODS

    return [name for name, method in METHODS.items() if key in method.card.options]


def of_some_methods() -> list[str]:
    """The keys of MethodOptions."""
    return RunConfig.keys_of("method_options")


def narrows(method: type[Method]) -> bool:
    """Whether a smaller budget makes the parts that its devices train narrower."""
    return not method.card.for_pretrained and method.card.name != "fedavg"


def refuse_unused(given: Mapping[str, Any], methods: Sequence[str], budgets_follow: bool = False) -> None:
    """Says which of the settings that were `given` on the command line nothing would look at.

    For new runs only: what a folder's run was started with is not given anew. `budgets_follow`: from real devices.
    """
    from strata.methods import method_class

    classes = [method_class(name) for name in methods]
    known = RunConfig.described()
    these = " or ".join(methods)
    for key in of_some_methods():
        users = users_of(key)
        if key in given and not any(key in method.card.options for method in classes):
            raise BadInput(f"{known[key].option} is for the method {' or '.join(users)}, not for {these}: leave it out")
    if "width" in given and not any(narrows(method) for method in classes):
        raise BadInput(f"--width is for methods that narrow the model, and {these} does not: leave it out")
    counted = "constraints" not in given and (budgets_follow or "budgets" in given)
    if "accounting" in given and not counted and not any(method.card.needs_plan for method in classes):
        raise BadInput(
            f"--accounting says how the bytes of a budget are counted, and {these} has none here: leave it out, or "
            "give a --budget, such as 24MiB"
        )
    refuse_without_needed(given, known)


def refuse_without_needed(given: Mapping[str, Any], known: Mapping[str, Described]) -> None:
    """Says which of them need another one that was not given."""
    for key in given:
        needs = known[key].known.needs
        if needs is None:
            continue
        value = given.get(needs.key, known[needs.key].default)
        if value in needs.values if needs.values else value is not None:
            continue
        give = "that" if len(needs.values) == 1 else "one of them"
        raise BadInput(
            needs.instead
            or f"{known[key].option} is for {known[needs.key].option} {' or '.join(needs.values)}: "
            f"give {give}{' too' if give == 'that' else ''}, or leave it out"
        )
