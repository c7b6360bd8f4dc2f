"""How long a target is fuzzed: in the suite a fixed number of fixed examples; `make fuzz` gives all targets together
STRATA_FUZZ_SECONDS, with examples that differ each time."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

TARGETS: list[str] = []  # all of them are imported before the first is run: what each gets is its share


def fuzzed(strategy: SearchStrategy[Any], examples: int) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """A test of a function that has to take whatever the strategy makes. `examples`: in the suite."""

    def made(target: Callable[[Any], None]) -> Callable[[], None]:
        TARGETS.append(target.__name__)

        @functools.wraps(target)
        def test() -> None:
            seconds = float(os.environ.get("STRATA_FUZZ_SECONDS", "0")) / len(TARGETS)
            chosen = settings(
                max_examples=max(examples, 200) if seconds else examples,
                deadline=None,
                derandomize=not seconds,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            run = chosen(given(strategy)(target))
            end = time.monotonic() + seconds
            run()
            while time.monotonic() < end:
                run()

        del test.__wrapped__  # type: ignore[attr-defined]  pytest would ask for the target's argument
        return test

    return made
