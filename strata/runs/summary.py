"""How a finished run is shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from strata.core.sizes import show_bytes
from strata.runs.session import Result


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
        ("accuracy", f"{summary['accuracy']:.2%} (batch norm {summary['bn']})"),
        ("loss", "not finite" if summary["loss"] is None else f"{summary['loss']:.4f}"),
        *([("per class", f"{min(per_class):.1%} to {max(per_class):.1%}")] if per_class else []),
        ("rounds", rounds),
        ("largest device", f"{show_bytes(summary['peak_bytes'])} measured peak"),
        ("upload", show_bytes(summary["upload_bytes"])),
        ("download", show_bytes(summary["download_bytes"])),
        ("training", f"{summary['train_flops'] / 1e12:.3g} TFLOP"),
        ("updates dropped", str(summary["dropped"])),
        ("time", f"{summary['seconds']:.1f} s"),
        ("model", str(result.out / "model.safetensors")),
    ]
    if "epsilon" in summary:
        rows.insert(-2, ("privacy", show_privacy(summary)))
    return rows


def show_privacy(summary: Mapping[str, Any]) -> str:
    bound = "no finite epsilon" if summary["epsilon"] is None else f"epsilon {summary['epsilon']:.3g}"
    return f"{bound} at delta {summary['delta']:.2g}, for a device ({summary['accountant']})"
