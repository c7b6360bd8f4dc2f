"""The progress of all runs together, on stderr: live bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from strata.experiments.base import PlannedRun
from strata.runs.progress import duration

LINE_EVERY = 30.0  # seconds between plain lines without news


@dataclass
class Active:
    run: PlannedRun
    folder: Path
    begun_at: int  # rounds that it had done before
    bar: TaskID | None = None

    def rounds(self) -> int:
        try:
            return (self.folder / "metrics.jsonl").read_bytes().count(b"\n")
        except OSError:  # it is still loading
            return 0


@dataclass
class Overview:
    """`weights`: estimated work of each run to do, in any unit; what is left is judged by the speed so far."""

    weights: Mapping[str, float]
    skipped: int = 0  # finished before
    quiet: bool = False
    file: IO[str] | None = None
    _active: dict[str, Active] = field(default_factory=dict)
    _work: float = 0.0  # of runs that are over, without what they had done before
    _before: float = 0.0  # work that resumed runs had done before
    _over: int = 0
    _began: float = field(default_factory=time.monotonic)
    _shown: float = 0.0
    _bars: Progress | None = None

    def __post_init__(self) -> None:
        self.file = self.file or sys.stderr
        if not self.quiet and self.file.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"))
            self._bars = Progress(*columns, console=Console(file=self.file))
            self._total = self._bars.add_task(f"{len(self.weights)} runs", total=1.0, text="")
            self._bars.start()

    def begin(self, run: PlannedRun, folder: Path) -> None:
        active = Active(run, folder, 0)
        active.begun_at = active.rounds()
        self._before += self._share(active, active.begun_at)
        if self._bars is not None:
            active.bar = self._bars.add_task(run.name, total=run.request.course.rounds, text="")
        self._active[run.name] = active
        done = f" from round {active.begun_at + 1}" if active.begun_at else ""
        self.say(f"{run.name}: {run.request.course.rounds} rounds{done}")

    def end(self, run: PlannedRun, problem: str | None) -> None:
        active = self._active.pop(run.name)
        self._over += 1
        self._work += self._share(active, run.request.course.rounds - active.begun_at)
        if self._bars is not None and active.bar is not None:
            self._bars.remove_task(active.bar)
        self.say(f"{run.name}: {'finished' if problem is None else f'failed: {problem}'}  ({self.summary()})")

    def refresh(self) -> None:
        if self._bars is not None:
            for active in self._active.values():
                if active.bar is not None:
                    rounds = active.rounds()
                    text = f"round {rounds}/{active.run.request.course.rounds}"
                    self._bars.update(active.bar, completed=rounds, text=text)
            self._bars.update(self._total, completed=self.share(), text=self.summary())
        elif time.monotonic() - self._shown > LINE_EVERY:
            at = "; ".join(
                f"{name}: round {one.rounds()}/{one.run.request.course.rounds}" for name, one in self._active.items()
            )
            self.say(f"{self.summary()}  {at}")

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def say(self, text: str) -> None:
        self._shown = time.monotonic()
        if self.quiet:
            return
        if self._bars is not None:
            self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self.file, flush=True)

    def share(self) -> float:
        """Of the work of all runs to do, from 0 to 1."""
        return min(1.0, (self._before + self._done()) / (sum(self.weights.values()) or 1.0))

    def left(self) -> float | None:
        """Seconds, None as long as nothing is known."""
        done, elapsed = self._done(), time.monotonic() - self._began
        if done <= 0:
            return None
        return max(0.0, sum(self.weights.values()) - self._before - done) * elapsed / done

    def summary(self) -> str:
        left = self.left()
        kept = f", {self.skipped} finished before" if self.skipped else ""
        time_left = "" if left is None else f", {duration(left)} left"
        return f"{self._over}/{len(self.weights)} runs{kept}, {self.share():.0%} of the work{time_left}"

    def _done(self) -> float:
        """Since the start."""
        return self._work + sum(self._share(one, one.rounds() - one.begun_at) for one in self._active.values())

    def _share(self, active: Active, rounds: int) -> float:
        return self.weights[active.run.name] * max(0, rounds) / active.run.request.course.rounds
