"""Which parameters train when: per layer and round, the channels a device takes, and which layers are frozen."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from strata.report.reconstruction import UNFIT, Missing, Reconstruction
from strata.results.reading import RecordedRun, listed, mapping, number, whole

if TYPE_CHECKING:
    from strata.graph import ChannelGraph, Cut

FRAMES = 60  # pictures of an animation: more rounds than that are thinned out
STEADY = ("small", "fedavg")  # the same cut in every round, for every device


def parts_of(run: RecordedRun, rebuilt: Reconstruction) -> dict[str, Any]:
    """JSON for the page: layers, and frames of (first round, device, per layer: frozen?, share, kept channels).

    Kept channels are [from, to) as shares of the layer's width, so the page draws them at any size.
    """
    if not run.records:
        raise Missing("no round is done yet")
    try:
        made = _exact(run, rebuilt.graph(run))
        if run.plan.get("levels"):
            made["note"] = "Drawn for the weakest devices; stronger ones freeze fewer layers."
        if made["thinned"]:
            made["note"] = f"Of {len(run.records)} rounds {FRAMES} are drawn."
        return made
    except Missing as error:
        return {**_outline(run), "note": f"Drawn from the plan alone: {error}."}


def _thinned(run: RecordedRun) -> bool:
    """Whether a picture stands for one round among others that were different."""
    return run.method != "slt" and run.method not in STEADY and len(run.records) > FRAMES


def _frames(run: RecordedRun) -> list[tuple[int, int, int | None]]:
    """(first round, step, the first device asked then) of each picture."""
    rounds = [(int(r["round"]), whole(r.get("step")) or 0, _first(r.get("devices"))) for r in run.records]
    if run.method == "slt":
        return [next(same) for _, same in groupby(rounds, key=lambda one: one[1])]
    if run.method in STEADY:
        return rounds[:1]
    if not _thinned(run):
        return rounds
    return [rounds[round(i * (len(rounds) - 1) / (FRAMES - 1))] for i in range(FRAMES)]


def _first(devices: Any) -> int | None:
    return whole(devices[0]) if isinstance(devices, list) and devices else None


# --- with the network at hand ------------------------------------------------------------------------------------


def _exact(run: RecordedRun, graph: ChannelGraph) -> dict[str, Any]:
    layers = _layers(graph)
    frames = []
    for (first, _, device), cut in _cuts(run, graph):
        shown = [_layer(graph, cut, names, main) for names, main in layers.values()]
        trained = sum(math.prod(cut.shapes[name]) for name in cut.trained)
        frozen = sum(math.prod(cut.shapes[name]) for name in cut.frozen)
        frames.append({"round": first, "device": device, "layers": shown, "trained": trained, "frozen": frozen})
    total = sum(math.prod(graph.state_shapes[name]) for name in graph.parameter_names)
    named = [{"name": _title(graph, k), "width": graph.state_shapes[main][0]} for k, (_, main) in layers.items()]
    return {
        "layers": named,
        "frames": frames,
        "parameters": total,
        "exact": True,
        "rounds": len(run.records),
        "watched": None if run.method == "slt" else _watched(graph, layers),
        "thinned": _thinned(run),
    }


def _cuts(run: RecordedRun, graph: ChannelGraph) -> Iterator[tuple[tuple[int, int, int | None], Cut]]:
    from strata.methods import create

    frames = _frames(run)
    try:
        if run.method == "slt":
            steps = {whole(step.get("step")): step for step in map(mapping, listed(run.plan.get("steps")))}
            for frame in frames:
                step = steps[frame[1]]
                yield frame, graph.slt(int(step["k_frozen"]), int(step["k_trained"]), float(step["scale"]))
            return
        described = dict(mapping(run.settings.get("method")))
        name, constraints = described.pop("name"), described.pop("constraints", (1.0,))
        method = create(name, graph, constraints=constraints, **described)
        for frame in frames:
            yield frame, method.cut_for(frame[0], frame[2] or 0)
    except UNFIT as error:
        raise Missing(f"the method's settings cannot be read ({error})") from error


def _layers(graph: ChannelGraph) -> dict[int, tuple[list[str], str]]:
    """Layer number -> its parameters, and the one that stands for it: the largest."""
    members: dict[int, list[str]] = {}
    for name, layer in graph.layer_of.items():
        members.setdefault(layer, []).append(name)
    return {
        layer: (names, max(names, key=lambda name: math.prod(graph.state_shapes[name])))
        for layer, names in sorted(members.items())
    }


def _title(graph: ChannelGraph, layer: int) -> str:
    return graph.layer_names[layer - 1] if layer <= graph.depth else "classifier"


def _watched(graph: ChannelGraph, layers: Mapping[int, tuple[list[str], str]]) -> int:
    """Methods that cut widths treat all layers alike: one, the first of the widest, is shown channel by channel."""
    widths = [graph.state_shapes[main][0] for layer, (_, main) in layers.items() if layer <= graph.depth]
    return widths.index(max(widths))


def _layer(graph: ChannelGraph, cut: Cut, names: Sequence[str], main: str) -> dict[str, Any]:
    full = sum(math.prod(graph.state_shapes[name]) for name in names)
    trained = sum(math.prod(cut.shapes[name]) for name in names if name not in cut.frozen)
    width, kept = graph.state_shapes[main][0], cut.kept[main][0]
    channels = range(width) if kept is None else kept
    return {
        "frozen": all(name in cut.frozen for name in names),
        "share": round(trained / full, 5),
        "kept": [[round(a / width, 5), round(b / width, 5)] for a, b in spans(channels)],
    }


def spans(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Sorted indices as stretches: (0, 1, 4) -> [(0, 2), (4, 5)]."""
    found: list[tuple[int, int]] = []
    for index in indices:
        if found and found[-1][1] == index:
            found[-1] = (found[-1][0], index + 1)
        else:
            found.append((index, index + 1))
    return found


# --- without it --------------------------------------------------------------------------------------------------


def _outline(run: RecordedRun) -> dict[str, Any]:
    """SLT: the layers the plan speaks of and one for all above them. Others: the width of the whole model."""
    if run.method == "slt":
        return _outline_slt(run)
    ratios = mapping(run.settings.get("method")).get("constraints")
    known = [value for r in ratios if (value := number(r)) is not None] if isinstance(ratios, list) else []
    scale = min(1.0, max(0.0, 1.0 if run.method == "fedavg" else max(known, default=1.0)))
    layer = {"frozen": False, "share": scale * scale, "kept": [[0.0, scale]]}
    frame = {"round": 0, "device": None, "layers": [layer], "trained": None, "frozen": None}
    return {
        "layers": [{"name": "every layer", "width": None}],
        "frames": [frame],
        "parameters": None,
        "exact": False,
        "rounds": len(run.records),
    }


def _outline_slt(run: RecordedRun) -> dict[str, Any]:
    steps: dict[int | None, Mapping[str, Any]] = {
        whole(step.get("step")): step for step in map(mapping, listed(run.plan.get("steps")))
    }
    depth = min(1000, max((whole(step.get("k_trained")) or 0 for step in steps.values()), default=0))
    frames = []
    for first, number_of_step, device in _frames(run):
        step = steps.get(number_of_step)
        if step is None:
            raise Missing("the plan does not hold the steps of the rounds")
        frozen, trained = whole(step.get("k_frozen")) or 0, whole(step.get("k_trained")) or 0
        scale = min(1.0, max(0.0, number(step.get("scale")) or 0.0))
        layers = [
            {
                "frozen": k <= frozen,
                "share": 0.0 if k <= frozen else 1.0 if k <= trained else scale * scale,
                "kept": [[0.0, 1.0 if k <= trained else scale]],
            }
            for k in range(1, depth + 2)
        ]
        parameters = whole(step.get("trained_parameters"))
        frames.append({"round": first, "device": device, "layers": layers, "trained": parameters, "frozen": None})
    named = [{"name": f"layer {k}", "width": None} for k in range(1, depth + 1)]
    return {
        "layers": [*named, {"name": "all above", "width": None}],
        "frames": frames,
        "parameters": None,
        "exact": False,
        "rounds": len(run.records),
    }
