"""The results as Markdown tables, and the goals beside what was reached. docs/performance.md is filled from here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Goal:
    text: str
    target: float
    reached: float | None  # None: not measured
    unit: str = "x"  # or "%"
    at_least: bool = True

    @property
    def met(self) -> bool | None:
        if self.reached is None:
            return None
        return self.reached >= self.target if self.at_least else self.reached < self.target

    def to_json(self) -> Json:
        return {**self.__dict__, "met": self.met}


def goals(results: Json) -> list[Goal]:
    """Those of the project's issue on speed."""
    cases = {one["case"]: one for one in results["training"]["cases"]}

    def at(case: str, key: str) -> float | None:
        return cases[case][key] if case in cases else None

    return [
        Goal("training at scale 0.125, over the plain loop at its best threads", 5, at("0.125", "over_plain_best")),
        Goal("training at scale 1, over the plain loop at its best threads", 2.2, at("1", "over_plain_best")),
        Goal("training at scale 0.125, over the plain loop at default threads", 30, at("0.125", "over_plain_default")),
        Goal("training at scale 1, over the plain loop at default threads", 4.4, at("1", "over_plain_default")),
        Goal("whole SLT@0.125 rounds, over the plain loop", 6, results["rounds"]["over_plain"]),
        Goal("share of the matrix-product peak at scale 1", 0.55, at("1", "share_of_peak"), "%"),
        Goal("training at scale 1, over Flower's simulation", 3, at("1", "over_flower")),
        Goal("training at scale 0.125, over Flower's simulation", 3, at("0.125", "over_flower")),
        Goal("share of a round outside training and evaluation (largest)", 0.05, results["rounds"]["outside_share"],
             "%", at_least=False),
    ]  # fmt: skip


def goal_table(results: Json) -> str:
    rows = [
        (one["text"], ("≥ " if one["at_least"] else "< ") + _in(one["target"], one["unit"]),
         _in(one["reached"], one["unit"]), {True: "yes", False: "**no**", None: "not measured"}[one["met"]])
        for one in results["goals"]
    ]  # fmt: skip
    return table(("goal", "target", "reached", "met"), rows)


def training(found: Json) -> str:
    rows = [
        (one["title"], _number(one["strata"]), _number(one["plain_default"]),
         f"{_number(one['plain_best'])} ({one['plain_best_threads']})", _number(one["flower"]),
         _in(one["over_plain_default"]), _in(one["over_plain_best"]), _in(one["over_flower"]),
         _in(one["share_of_peak"], "%"))
        for one in found["cases"]
    ]  # fmt: skip
    header = ("samples/s", "Strata", "plain, default threads", "plain, best (threads)", "Flower simulation",
              "Strata / default", "Strata / best", "Strata / Flower", "of peak")  # fmt: skip
    peak = found["peak"]
    notes = [f"Matrix-product peak: {peak['one_core_gflops']:.0f} GFLOP/s on one core, taken {peak['cores']} times."]
    if found["flower"]["status"] != "measured":
        notes.append(f"Flower: {found['flower']['status']}.")
    return table(header, rows) + "\n\n" + " ".join(notes)


def rounds(found: Json) -> str:
    rows = []
    for one in found["cases"]:
        ours, theirs = one["strata"], one["plain"]
        threads = f"{theirs['train_threads']} / {theirs['evaluate_threads']}"
        rows.append((
            one["title"], f"{ours['seconds']:.2f} s", f"{ours['train_seconds']:.2f} + {ours['evaluate_seconds']:.2f} s",
            _in(ours["outside_share"], "%"), f"{theirs['seconds']:.2f} s",
            f"{theirs['train_seconds']:.2f} + {theirs['evaluate_seconds']:.2f} s", threads, _in(one["over_plain"]),
        ))  # fmt: skip
    header = ("whole round", "Strata", "training + evaluation", "outside both", "plain", "training + evaluation",
              "its threads", "plain / Strata")  # fmt: skip
    together = f"All of them together: {_in(found['over_plain'])}. {found['images']:,} images are evaluated each round."
    return table(header, rows) + "\n\n" + together


def fleet(found: Json) -> str:
    rows = [
        (f"{one['devices']:,}", f"{one['server_mib']:.0f} MiB", f"{one['round_seconds'] * 1000:.0f} ms")
        for one in found["fleets"]
    ]
    return table(("devices", "server memory (RSS)", "round"), rows)


def planning(found: Json) -> str:
    rows = [
        (one["network"], f"{one['parameters']:,}", one["accounting"], str(one["constraint"]), str(one["steps"]),
         f"{one['export_seconds']:.2f} s", f"{one['plan_seconds']:.3f} s", f"{one['limit_seconds']:g} s",
         "yes" if one["plan_seconds"] < one["limit_seconds"] else "**no**")
        for one in found["results"]
    ]  # fmt: skip
    header = ("network", "parameters", "accounting", "constraint", "steps", "export", "plan", "limit", "met")
    return table(header, rows)


def profile(found: Json) -> str:
    """One column per profiled piece of work, shares of its time."""
    kinds = list(dict.fromkeys(kind for one in found["cases"] for kind in one["shares"]))
    rows = [(kind, *(_in(one["shares"].get(kind, 0.0), "%") for one in found["cases"])) for kind in kinds]
    return table(("share of time", *(one["title"] for one in found["cases"])), rows)


def source(results: Json) -> str:
    """Hardware, versions, commit and time, as one line."""
    machine, versions = results["machine"], results["versions"]
    quick = " **Sizes of --quick: these numbers mean nothing.**" if results["quick"] else ""
    return (
        f"{results['time']}, commit `{results['commit']}`, {machine['cores']} cores of {machine['cpu']}, "
        f"{machine['ram_gib']} GiB, load {machine['load_average_before']} before; "
        + ", ".join(f"{name} {number}" for name, number in versions.items())
        + f"; data: {results['data']}; {results['seconds'] / 60:.1f} minutes in all.{quick}"
    )


def sections(results: Json) -> dict[str, str]:
    return {
        "source": source(results), "goals": goal_table(results), "training": training(results["training"]),
        "rounds": rounds(results["rounds"]), "fleet": fleet(results["fleet"]),
        "planning": planning(results["planning"]), "profile": profile(results["profile"]),
    }  # fmt: skip


def write_docs(page: Path, results: Json) -> None:
    """Fills every place `<!-- bench:NAME -->` ... `<!-- /bench:NAME -->` of the page."""
    text = page.read_text(encoding="utf-8")
    for name, content in sections(results).items():
        place = re.compile(rf"(<!-- bench:{name} -->\n).*?(<!-- /bench:{name} -->)", re.DOTALL)
        if len(place.findall(text)) != 1:
            raise ValueError(f"{page} should have one place <!-- bench:{name} --> ... <!-- /bench:{name} -->")
        text = place.sub(lambda match, content=content: f"{match[1]}{content}\n{match[2]}", text)  # type: ignore[misc]
    page.write_text(text, encoding="utf-8")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown that also reads well as it is: columns aligned, numbers to the right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def joined(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return "| " + " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]) + " |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
    return "\n".join([joined(header), rule, *(joined(row) for row in lines[1:])])


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _in(value: float | None, unit: str = "x") -> str:
    if value is None:
        return "–"
    return f"{value:.1%}" if unit == "%" else f"{value:.1f}x"
