"""All that the page, the tables and the figures show, as one JSON value without NaN."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from strata import __version__
from strata.report.reconstruction import Missing, Reconstruction
from strata.report.trained_parts import parts_of
from strata.results.appearance import shades_of
from strata.results.curves import COSTS
from strata.results.groups import Group, budget_text, drops, group_runs
from strata.results.reading import RecordedRun, clean, listed, mapping, number, numbers, whole
from strata.results.verdict import Candidate, in_words

MOST_REASONS = 12
LONGEST_REASON = 300


def page_data(
    runs: Sequence[RecordedRun], rebuilt: Reconstruction | None, title: str = "Strata report"
) -> dict[str, Any]:
    """Without a Reconstruction the parts that must be rebuilt, which takes seconds, are left for later."""
    groups = group_runs(runs)
    methods = [group.method for group in groups]
    colours = shades_of(methods)
    shown = [_group(group, colour, rebuilt) for group, colour in zip(groups, colours, strict=True)]
    for place, group in enumerate(shown):
        group["nth"] = methods[:place].count(methods[place])  # of its method
    value = {
        "title": clean(title),
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "strata": __version__,
        "lead": _lead(runs),
        "groups": shown,
        "verdict": verdict(shown),
        "data": _data(groups, rebuilt),
        "settings": _settings(groups),
        "problems": [f"{run.name}: {problem}" for run in runs for problem in run.problems],
    }
    made: dict[str, Any] = finite(value)
    return made


def verdict(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Who is the most accurate within which true bytes, and for which upload; nothing where there is one alone."""
    said: list[str] = []
    for key, within in (("peak_bytes", "within {} of true bytes on a device"), ("upload_bytes", "for {} of upload")):
        known = [
            Candidate(one["label"], one["accuracy"], one["accuracy_std"], len(one["counted"]), one[key])
            for one in groups
            if one["accuracy"] is not None and one[key]
        ]
        said += in_words(known, within) if len(known) > 1 else []
    return said


def finite(value: Any) -> Any:
    """JSON has no NaN: None stands for it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def _lead(runs: Sequence[RecordedRun]) -> list[str]:
    """What all runs have in common, in a line."""

    def common(values: list[str]) -> str:
        return values[0] if len(set(values)) == 1 else ""

    model = common([str(r.request.get("model") or mapping(r.settings.get("model")).get("class") or "") for r in runs])
    data = common([str(mapping(run.settings.get("data")).get("name", "")) for run in runs])
    partition = common([str(run.settings.get("partition", "")) for run in runs])
    budget = common([budget_text(run) for run in runs])
    fleet = common([f"{r.settings.get('per_round')} of {r.settings.get('devices')} devices a round" for r in runs])
    by_ratio = any(run.request.get("constraints") for run in runs)
    kind = "constraint" if by_ratio else "budget"
    spread = f"{data}, {partition}" if data and partition else data
    limit = f"{kind} {budget}" if budget else ""
    return [text for text in (model, spread, limit, fleet) if text]


# --- a group -----------------------------------------------------------------------------------------------------


def _group(group: Group, colour: str, rebuilt: Reconstruction | None) -> dict[str, Any]:
    curve, standing = group.curve(), group.standing()
    memory = _memory(group, rebuilt)
    return {
        "label": group.label,
        "method": group.method,
        "colour": colour,
        "status": group.status,
        "done": group.done,
        "rounds": group.rounds,
        "seeds": [run.seed for run in group.runs],
        "basis": standing.basis,
        "counted": list(standing.seeds),
        "at": standing.round,
        "accuracy": standing.accuracy,
        "accuracy_std": standing.std,
        "best": standing.best,
        **standing.costs,
        "peak_bytes": group.peak_bytes,
        "dropped": group.dropped,
        "privacy": group.privacy,
        "budget": budget_text(group.runs[0]),
        "bn": _batch_norm(group.runs[0]),
        "curve": {"rounds": curve.rounds, "mean": curve.mean, "std": curve.std, "runs": curve.runs, **curve.costs},
        "runs": [_run(run) for run in group.runs],
        "memory": memory,
        "over_bytes": _over(group, memory),
        "per_class": group.per_class(),
        "failures": _failures(group),
        "parts": _parts(group.runs[0], rebuilt),
    }


def _batch_norm(run: RecordedRun) -> str:
    """How it is evaluated; empty for a network without it, as a finished run says."""
    told = run.settings if run.summary is None or "bn" not in run.summary else run.summary
    return str(told.get("bn") or "")


def _run(run: RecordedRun) -> dict[str, Any]:
    return {
        "name": run.name,
        "seed": run.seed,
        "status": run.status,
        "round": [int(record["round"]) + 1 for record in run.records],
        "step": [whole(record.get("step")) for record in run.records],
        "dropped": [len(drops(record)) for record in run.records],
        **{key: numbers(run.records, key) for key in ("accuracy", "train_loss", "lr", "peak_bytes", *COSTS)},
    }


def _memory(group: Group, rebuilt: Reconstruction | None) -> dict[str, Any]:
    """Per step: what the accounting says (of the plan) and the largest device measured, never mixed up."""
    run, note = group.runs[0], ""
    accounting: str | None = None
    steps: list[Mapping[str, Any]] = []
    budgets: list[float] = []
    if isinstance(run.plan.get("steps"), list):
        accounting = str(run.plan.get("accounting"))
        steps = [mapping(step) for step in run.plan["steps"]]
        levels = [mapping(level) for level in listed(run.plan.get("levels"))]
        found = {number(one.get("budget_bytes")) for one in (levels or [run.plan])}
        budgets = sorted(size for size in found if size is not None)
    elif rebuilt is not None:
        try:
            made = rebuilt.accounted(run)
            steps, accounting, budgets = [made], made["accounting"], made["budgets"]
        except Missing as error:
            note = f"Only measured: {error}."
    accounted = _accounted(steps)
    measured = _measured(group)
    rows = [
        {"step": step, **accounted.get(step, {}), "measured": measured.get(step)}
        for step in sorted({*accounted, *measured})
    ]
    return {"accounting": accounting, "budgets": budgets, "note": note, "steps": rows}


def _over(group: Group, memory: Mapping[str, Any]) -> float:
    """Bytes above the budget, 0 for within it. A run of an older version did not record it for each device: its
    largest device is held against the largest budget."""
    if group.over_budget_bytes or memory["accounting"] != "peak" or not memory["budgets"]:
        return group.over_budget_bytes
    return max(0.0, (group.peak_bytes or 0) - max(memory["budgets"]))


def _accounted(steps: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, float | None]]:
    keys = ("memory_bytes", "weights_bytes", "gradients_bytes", "activations_bytes", "scale", "trained_parameters")
    found = {}
    for step in steps:
        at = whole(step.get("step"))
        if at is not None:
            found[at] = {key: number(step.get(key)) for key in keys}
    return found


def _measured(group: Group) -> dict[int, float]:
    """By step, of the largest device of all runs."""
    largest: dict[int, float] = {}
    for run in group.runs:
        for record in run.records:
            step, peak = whole(record.get("step")) or 0, number(record.get("peak_bytes"))
            if peak:
                largest[step] = max(largest.get(step, 0.0), peak)
    return largest


def _failures(group: Group) -> dict[str, Any]:
    reasons: Counter[str] = Counter()
    asked: Counter[int] = Counter()
    failed: Counter[int] = Counter()
    for run in group.runs:
        for record in run.records:
            asked.update(d for d in map(whole, listed(record.get("devices"))) if d is not None)
            for drop in drops(record):
                reasons[str(drop.get("reason", "?"))[:LONGEST_REASON]] += 1
                if (device := whole(drop.get("id"))) is not None:
                    failed[device] += 1
    return {
        "asked": asked.total(),
        "dropped": reasons.total(),
        "reasons": [{"reason": reason, "times": times} for reason, times in reasons.most_common(MOST_REASONS)],
        "worst": [{"device": one, "times": times, "asked": asked[one]} for one, times in failed.most_common(5)],
    }


def _parts(run: RecordedRun, rebuilt: Reconstruction | None) -> dict[str, Any]:
    if rebuilt is None:
        return {"missing": "It is being rebuilt."}
    try:
        return parts_of(run, rebuilt)
    except Missing as error:
        return {"missing": f"Left out: {error}."}


# --- over groups -------------------------------------------------------------------------------------------------


def _data(groups: Sequence[Group], rebuilt: Reconstruction | None) -> list[dict[str, Any]]:
    """One picture per partition; of several seeds the first is drawn."""
    shown: dict[str, dict[str, Any]] = {}
    for group in groups:
        run = group.runs[0]
        try:
            if rebuilt is None:
                raise Missing("it is being rebuilt")
            value = {**rebuilt.holdings(run), "name": str(mapping(run.settings.get("data")).get("name"))}
            key = repr([value[k] for k in ("name", "partition", "seed", "devices")] + [value["counts"][:3]])
        except Missing as error:
            value = {"missing": f"Who holds what is left out: {error}."}
            key = value["missing"]
        shown.setdefault(key, {**value, "labels": []})["labels"].append(group.label)
    return list(shown.values())


def _settings(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """A row per setting, a column per group."""
    columns = [_flat_settings(group.runs[0]) for group in groups]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [{"name": name, "values": [column.get(name, "") for column in columns]} for name in names]
    return [{**row, "differs": len(set(row["values"])) > 1} for row in rows]


def _flat_settings(run: RecordedRun) -> dict[str, str]:
    flat = {"run": run.name, **_flat(run.settings)}
    for name in ("constraints", "budgets", "data_dir"):
        if run.request.get(name):
            flat[name] = _text(run.request[name])
    if run.request.get("model"):
        flat["model.name"] = str(run.request["model"])
    for name in ("schedule", "accounting", "budget_bytes", "full_bytes"):
        if name in run.plan:
            flat[f"plan.{name}"] = _text(run.plan[name])
    flat |= {f"version of {name}": _text(v) for name, v in mapping(run.config.get("versions")).items()}
    commit = _text(run.config.get("commit"))
    flat["commit"] = commit[:12] + ("+ (with changes)" if commit.endswith("+") else "")
    return flat


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = _text(value)
    return found


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return "–" if value is None else "yes" if value is True else "no" if value is False else str(value)
