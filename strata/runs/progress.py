"""What a run shows: a live bar on a terminal, plain lines elsewhere, all of it on stderr; at the end a table.

The display is a callback like any other, which also shows single lines (`say`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from strata.core.sizes import show_bytes
from strata.runs.allowance import verdict
from strata.runs.callbacks import Callback, RunInfo

if TYPE_CHECKING:
    from strata.runs.session import Result

QUIET_SECONDS = 10.0  # plain lines: rounds without news are shown at most this often


class Silent(Callback):
    def say(self, text: str) -> None:
        """A line for the user."""


class Plain(Silent):
    def __init__(self, file: IO[str] | None = None) -> None:
        self._file = file or sys.stderr

    def run_begins(self, run: RunInfo) -> None:
        self._rounds, self._done, self._began, self._shown = run.rounds, run.done, time.monotonic(), 0.0
        if run.done < run.rounds:
            self.say(f"{run.method}: rounds {run.done + 1} to {run.rounds}")

    def round_ends(self, record: Mapping[str, Any]) -> None:
        now = time.monotonic()
        finished = record["round"] + 1
        if record["accuracy"] is None and not record["dropped"] and now - self._shown < QUIET_SECONDS:
            return
        self._shown = now
        per_round = (now - self._began) / max(1, finished - self._done)
        parts = [
            f"round {finished}/{self._rounds}",
            f"step {record['step']}",
            *([] if record["train_loss"] is None else [f"loss {record['train_loss']:.4f}"]),
            *([] if record["accuracy"] is None else [f"accuracy {record['accuracy']:.2%}"]),
            *([f"{len(record['dropped'])} dropped"] if record["dropped"] else []),
            f"{per_round:.2f} s/round",
            f"{duration((self._rounds - finished) * per_round)} left",
        ]
        self.say("  ".join(parts))

    def say(self, text: str) -> None:
        print(text, file=self._file, flush=True)


class _Throughput(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if not task.speed else f"{60 * task.speed:.1f} rounds/min")


class Live(Silent):
    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar: Progress | None = None

    def run_begins(self, run: RunInfo) -> None:
        self.close()
        self._bar = Progress(
            TextColumn("[bold]{task.fields[name]}"),
            TextColumn("round {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("step {task.fields[step]}  accuracy {task.fields[accuracy]}"),
            _Throughput(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=self._console,
        )
        self._task = self._bar.add_task(
            "", total=run.rounds, completed=run.done, name=run.method, step="-", accuracy="-"
        )
        self._bar.start()

    def round_ends(self, record: Mapping[str, Any]) -> None:
        assert self._bar is not None
        news: dict[str, Any] = {} if record["accuracy"] is None else {"accuracy": f"{record['accuracy']:.2%}"}
        self._bar.update(self._task, completed=record["round"] + 1, step=record["step"], **news)

    def say(self, text: str) -> None:
        (self._bar.console if self._bar else self._console).print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def display(wanted: bool = True) -> Silent:
    if not wanted:
        return Silent()
    return Live() if sys.stderr.isatty() else Plain()


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


# --- at the end ----------------------------------------------------------------------------------------------------


def summarise(result: Result) -> None:
    """The closing table."""
    summary = result.summary
    title = escape(f"{summary['method']}, seed {summary['seed']}: {result.out}")  # folders may be named [like tags]
    table = Table(title=title, show_header=False)
    for name, value in _rows(result):
        table.add_row(name, escape(value))
    Console().print(table)


def _rows(result: Result) -> list[tuple[str, str]]:
    summary = result.summary
    per_class = [value for value in summary.get("per_class_accuracy", ()) if value is not None]
    rounds = str(summary["rounds"])
    if "stopped" in summary:
        rounds += f" (stopped: {summary['stopped']})"
    rows = [
        ("accuracy", f"{summary['accuracy']:.2%}" + (f" (batch norm {summary['bn']})" if summary["bn"] else "")),
        ("loss", "not finite" if summary["loss"] is None else f"{summary['loss']:.4f}"),
        *([("per class", f"{min(per_class):.1%} to {max(per_class):.1%}")] if per_class else []),
        *(
            (name.replace("_", " "), f"{value:.4g}")
            for name, value in summary.get("metrics", {}).items()
            if value is not None
        ),
        ("rounds", rounds),
        (
            "largest device",
            ", ".join(filter(None, (f"{show_bytes(summary['peak_bytes'])} measured peak", verdict(summary)))),
        ),
        ("upload", show_bytes(summary["upload_bytes"])),
        ("download", show_bytes(summary["download_bytes"])),
        ("training", f"{summary['train_flops'] / 1e12:.3g} TFLOP"),
        ("updates dropped", str(summary["dropped"])),
        ("time", f"{summary['seconds']:.1f} s"),
        ("model", str(result.out / "model.safetensors")),
    ]
    if "partial" in summary:
        rows.insert(4, ("recorded", f"{summary['partial']['recorded_rounds']} rounds: what follows is of these alone"))
    if "epsilon" in summary:
        rows.insert(-2, ("privacy", show_privacy(summary)))
    return rows


def show_privacy(summary: Mapping[str, Any]) -> str:
    bound = "no finite epsilon" if summary["epsilon"] is None else f"epsilon {summary['epsilon']:.3g}"
    return f"{bound} at delta {summary['delta']:.2g}, for a device ({summary['accountant']})"
