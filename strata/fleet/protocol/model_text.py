"""A run's model in a message, as one text: its name, or with what a method of Strata's adds to it (LoRA's pairs).

This file must not import torch: the device's client app reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from strata.core.errors import BadInput

UNKNOWN = "the server names its model in a way that this version of Strata does not know"


def model_text(name: str, method: str | None = None, options: Mapping[str, Any] | None = None) -> str:
    if method is None:
        return name
    return json.dumps({"model": name, "method": method, "options": dict(options or {})}, sort_keys=True)


def read_model(text: str) -> tuple[str, str | None, dict[str, Any]]:
    """The name, the method and its options."""
    if not text.startswith("{"):
        return text, None, {}
    try:
        values = json.loads(text)
        name, method, options = values["model"], values["method"], values["options"]
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{UNKNOWN}: {error!r}") from None
    plain = isinstance(options, dict) and all(isinstance(one, str | int | float) for one in options.values())
    if not isinstance(name, str) or not isinstance(method, str) or not plain:
        raise BadInput(UNKNOWN)
    return name, method, options
