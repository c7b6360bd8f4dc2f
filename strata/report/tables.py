"""Which tables a report has: CSV holds exact numbers, Markdown and LaTeX the rounded ones, to be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strata.core.sizes import show_bytes
from strata.results.statistics import show_percent
from strata.results.tables import Table, comma_separated, latex, markdown, markdown_text

PageData = Mapping[str, Any]


@dataclass(frozen=True)
class ReportTable:
    """`rows` hold exact values; `shown` is the same for readers, None where it is too long for them."""

    header: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    shown: Table | None = None


def _for_readers(title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    return Table(title, header, tuple(rows), align="r", foreign=True)


def summary(data: PageData) -> ReportTable:
    records = [_summary_of(group) for group in data["groups"]]
    shown: list[tuple[str, ...]] = []
    for group, record in zip(data["groups"], records, strict=True):
        seeds, runs = record["seeds"], record["runs"]
        shown.append(
            (
                group["label"],
                accuracy_text(group),
                f"{group['at']}/{group['rounds']}",
                f"{seeds} of {runs}" if seeds < runs else str(seeds),
                _size(group["peak_bytes"]) + _over(group),
                _size(group["upload_bytes"]),
                _size(group["download_bytes"]),
                _tera(group["train_flops"]),
            )
        )
    title = f"Test accuracy, mean ± standard deviation over seeds. {', '.join(data['lead'])}."
    columns = ("method", "accuracy in %", "rounds", "seeds", "largest device", "upload", "download", "TFLOP")
    header = tuple(records[0]) if records else ()
    return ReportTable(header, [tuple(record.values()) for record in records], _for_readers(title, columns, shown))


def _over(group: Mapping[str, Any]) -> str:
    return f" ({_size(group['over_bytes'])} OVER ITS BUDGET)" if group["over_bytes"] else ""


def _summary_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "method": group["label"],
        "status": group["status"],
        "rounds_done": group["at"],
        "rounds": group["rounds"],
        "seeds": len(group["counted"]),
        "accuracy_mean": group["accuracy"],
        "accuracy_std": group["accuracy_std"],
        "best_accuracy": group["best"],
        "peak_bytes": group["peak_bytes"],
        "over_budget_bytes": group["over_bytes"],
        "upload_bytes": group["upload_bytes"],
        "download_bytes": group["download_bytes"],
        "train_flops": group["train_flops"],
        "seconds": group["seconds"],
        "dropped": group["dropped"],
        "runs": len(group["seeds"]),
        "counted": group["basis"],
    }


def steps(data: PageData) -> ReportTable:
    sizes = ("memory_bytes", "weights_bytes", "gradients_bytes", "activations_bytes")
    rows: list[tuple[Any, ...]] = []
    shown: list[tuple[str, ...]] = []
    for group in data["groups"]:
        accounting = group["memory"]["accounting"]
        for step in group["memory"]["steps"]:
            scale, measured = step.get("scale"), step.get("measured")
            exact = (scale, step.get("trained_parameters"), accounting, *(step.get(key) for key in sizes), measured)
            rows.append((group["label"], step["step"], *exact))
            width = "–" if scale is None else f"{scale:g}"
            bytes_of_step = (_size(step.get("memory_bytes")), accounting or "–", _size(measured))
            shown.append((group["label"], str(step["step"]), width, *bytes_of_step))
    header = ("method", "step", "scale", "trained_parameters", "accounting", *sizes, "measured_peak_bytes")
    title = "Memory of each step: as accounted, and measured at the largest device."
    columns = ("method", "step", "scale", "accounted", "accounting", "measured")
    return ReportTable(header, rows, _for_readers(title, columns, shown))


def per_class(data: PageData) -> ReportTable:
    groups = [group for group in data["groups"] if group["per_class"]]
    most = max((len(group["per_class"]) for group in groups), default=0)
    known = (one.get("classes", []) for one in data["data"])
    names = next((names for names in known if len(names) == most), None) or range(most)
    rows: list[tuple[Any, ...]] = []
    shown: list[tuple[str, ...]] = []
    for c, name in enumerate(names):
        values = [group["per_class"][c] if c < len(group["per_class"]) else None for group in groups]
        rows.append((str(name), *values))
        shown.append((str(name), *("–" if value is None else f"{100 * value:.1f}" for value in values)))
    header = ("class", *(group["label"] for group in groups))
    return ReportTable(header, rows, _for_readers("Test accuracy per class in %, of the final model.", header, shown))


def rounds(data: PageData) -> ReportTable:
    """Every round of every run: for one's own plots."""
    costs = ("upload_bytes", "download_bytes", "train_flops", "peak_bytes", "seconds", "dropped")
    keys = ("round", "step", "accuracy", "train_loss", "lr", *costs)
    rows: list[tuple[Any, ...]] = []
    for group in data["groups"]:
        for run in group["runs"]:
            for values in zip(*(run[key] for key in keys), strict=True):
                rows.append((group["label"], run["name"], run["seed"], *values))
    return ReportTable(("method", "run", "seed", *keys), rows)


TABLES = {"summary": summary, "steps": steps, "per-class": per_class, "rounds": rounds}


def files(data: PageData) -> dict[str, bytes]:
    """tables/NAME.csv and, where it is short enough to be read, .md and .tex."""
    made: dict[str, bytes] = {}
    for name, make in TABLES.items():
        table = make(data)
        made[f"tables/{name}.csv"] = comma_separated(table.header, table.rows).encode()
        if table.shown is not None:
            title = markdown_text(table.shown.title, table.shown.foreign)
            made[f"tables/{name}.md"] = f"{markdown(table.shown)}\n\n{title}\n".encode()
            made[f"tables/{name}.tex"] = latex([table.shown]).encode()
    return made


def accuracy_text(group: Mapping[str, Any]) -> str:
    return "–" if group["accuracy"] is None else show_percent(group["accuracy"], group["accuracy_std"])


def _size(value: float | None) -> str:
    return "–" if value is None else show_bytes(round(value))


def _tera(value: float | None) -> str:
    return "–" if value is None else f"{value / 1e12:.3g}"
