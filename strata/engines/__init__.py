"""Where device work runs."""

from strata.engines.base import Engine, EngineFailed, Outcome, Program
from strata.engines.local import InlineEngine, LocalEngine, default_workers

__all__ = ["Engine", "EngineFailed", "InlineEngine", "LocalEngine", "Outcome", "Program", "default_workers"]
