"""A thing of the user's by its name, `package.module:thing`: a model, a method. And where modules are looked for: the
current folder is not among the places, but where such a name is given, and then as the last of them. A file there that
is called like a package (safetensors.py) must not take its place. No torch here."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from strata.core.errors import BadInput, one_line


def find(name: str, what: str, form: str, purpose: str) -> object:
    """`what` is looked for ("model"), the `form` of its name with an example, and its `purpose`: for the sentences."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        raise BadInput(f"a {what} is named {form}, not {name!r}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found: object = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a script that ends is no module, whatever its exit code
        raise BadInput(
            f"cannot import {module_name!r} for the {what} {name!r} ({one_line(error, kind=True)}); "
            "modules are looked for in the current folder and on PYTHONPATH"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise BadInput(f"module {module_name!r} has no {attribute!r} {purpose}")
        found = getattr(found, part)
    return found


def leave_current_folder() -> None:
    """For `python -m strata`, which puts it first; unless that is where Strata itself is, in its repository."""
    first = sys.path[0] if sys.path and not sys.flags.safe_path else None
    if first == os.getcwd() and Path(first) != Path(__file__).parents[2]:
        del sys.path[0]


def child_command(module: str, *arguments: str) -> list[str]:
    """Python without the current folder, which it would put first."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_path() -> str:
    """A child's PYTHONPATH: it finds what this process finds, in the same places, and the current folder of an
    interactive session last."""
    places = [entry for entry in sys.path if entry]
    if "" in sys.path:
        places.append(os.getcwd())
    return os.pathsep.join(dict.fromkeys(places))
