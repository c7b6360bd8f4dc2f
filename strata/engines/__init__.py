"""Where device work runs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strata.engines.base import Engine, EngineFailed, Outcome, Program
    from strata.engines.local import InlineEngine, LocalEngine, default_workers

__all__ = ["Engine", "EngineFailed", "InlineEngine", "LocalEngine", "Outcome", "Program", "default_workers"]


def __getattr__(name: str) -> Any:
    """On first use: what talks to Flower on a small device must not load torch along the way."""
    if name not in __all__:
        raise AttributeError(f"module 'strata.engines' has no attribute {name!r}")
    room = "local" if name in ("InlineEngine", "LocalEngine", "default_workers") else "base"
    return getattr(importlib.import_module(f"strata.engines.{room}"), name)
