"""A thing of the user's by its name, `package.module:thing`: a model, a method."""

from __future__ import annotations

import importlib
import os
import sys

from strata.core.errors import BadInput, one_line


def find(name: str, what: str, form: str, purpose: str) -> object:
    """`what` is looked for ("model"), the `form` of its name with an example, and its `purpose`: for the sentences."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        raise BadInput(f"a {what} is named {form}, not {name!r}")
    if os.getcwd() not in sys.path:  # a console script has its own folder there instead of the current one
        sys.path.insert(0, os.getcwd())
    try:
        found: object = importlib.import_module(module_name)
    except Exception as error:
        raise BadInput(
            f"cannot import {module_name!r} for the {what} {name!r} ({one_line(error, kind=True)}); "
            "modules are looked for in the current folder and on PYTHONPATH"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise BadInput(f"module {module_name!r} has no {attribute!r} {purpose}")
        found = getattr(found, part)
    return found
