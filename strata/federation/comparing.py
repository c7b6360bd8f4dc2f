"""Several methods under the same budget, data and seeds: runs what is unfinished, then the table and the picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from strata import colours
from strata.cutting import ChannelGraph
from strata.engines.ray import Ray
from strata.errors import BadInput
from strata.federation.files import Lock, read_json, said_plainly, write_json
from strata.federation.folder import differences, read_metrics
from strata.federation.progress import display
from strata.federation.request import Request, jsonable
from strata.federation.running import make_engine, run
from strata.methods import METHODS


@dataclass(frozen=True)
class Row:
    """One method, over all seeds."""

    method: str
    accuracies: tuple[float, ...]
    upload_bytes: float  # mean over seeds
    download_bytes: float
    train_flops: float
    peak_bytes: int
    seconds: float
    rounds: tuple[int, ...]  # where it was evaluated
    curve: tuple[float, ...]  # mean accuracy there
    spread: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracies)

    @property
    def std(self) -> float | None:
        """Sample standard deviation; None from a single seed."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.method, "accuracy_mean": self.mean, "accuracy_std": self.std,
            "accuracies": list(self.accuracies), "upload_bytes": self.upload_bytes,
            "download_bytes": self.download_bytes, "train_flops": self.train_flops, "peak_bytes": self.peak_bytes,
            "seconds": self.seconds, "rounds": list(self.rounds), "curve": list(self.curve),
        }  # fmt: skip


def compare(
    request: Request,
    methods: Sequence[str],
    seeds: int,
    out: Path,
    *,
    workers: int | None = None,
    checkpoint_every: int = 1,
    progress: bool = True,
    ray: Ray | None = None,
) -> list[Row]:
    """Runs go to out/METHOD/seed-N; finished ones are kept, half-finished ones resumed."""
    _check(methods, seeds)
    requests = [
        replace(request, method=method, seed=request.seed + number, **_own_options(request, method))
        for number in range(seeds)
        for method in methods
    ]
    data = request.load_data()
    training = request.make_training(data)
    model = request.make_model(data)
    shared = None
    _claim(out, request, methods, seeds)
    lock = Lock(out)
    try:
        if not request.validation:  # with a validation split the training images differ between seeds
            shared = make_engine(model, data, training, workers, ray=ray, source=request.load_split)
        graph = ChannelGraph(model, data.input_shape)
        made = [one.make_method(graph) for one in requests]  # all of them first: what cannot be done is said at once
        show = display(progress)
        for one, method in zip(requests, made, strict=True):
            folder = out / one.method / f"seed-{one.seed}"
            if progress:
                show.say(f"{one.method}, seed {one.seed}")
            run(
                one.make_model(data), data, method, out=folder, rounds=one.rounds, devices=one.devices,
                partition=one.partition, training=training, engine=shared or ray, workers=workers,
                checkpoint_every=checkpoint_every, resume=(folder / "config.json").exists(), progress=progress,
                request=jsonable(one), **one.run_options(),
            )  # fmt: skip
        rows = [gather(method, [out / method / f"seed-{request.seed + n}" for n in range(seeds)]) for method in methods]
        write_json(out / "summary.json", [row.to_json() for row in rows])
        draw(rows, out)
        return rows
    finally:
        if shared is not None:
            shared.close()
        lock.release()


def _check(methods: Sequence[str], seeds: int) -> None:
    if not methods or len(set(methods)) != len(methods):
        raise BadInput("give the methods to compare once each, such as slt,small,fd")
    for method in methods:
        if method not in METHODS:
            raise BadInput(f"there is no method {method!r}: choose among {', '.join(METHODS)}")
    if seeds < 1:
        raise BadInput(f"at least 1 seed is needed, not {seeds}")


def _own_options(request: Request, method: str) -> dict[str, Any]:
    """Options that only some methods know are for those."""
    names = [name for name in ("variant", "pool") if name not in METHODS[method].options]
    return dict.fromkeys(names)


def _claim(out: Path, request: Request, methods: Sequence[str], seeds: int) -> None:
    """A new folder, or one of the same comparison."""
    path = out / "compare.json"
    wanted = {"methods": list(methods), "seeds": seeds, "request": jsonable(request)}
    if path.exists():
        found = differences(read_json(path)["request"], wanted["request"])  # type: ignore[arg-type]
        if found:
            raise BadInput(f"{out} holds another comparison: {'; '.join(found)}. Choose another folder")
    elif out.is_dir() and any(out.iterdir()):
        raise BadInput(f"{out} is not empty and holds no comparison: choose a new or empty folder")
    with said_plainly(out):
        out.mkdir(parents=True, exist_ok=True)
    write_json(path, wanted)


def gather(method: str, folders: Sequence[Path]) -> Row:
    """What these runs, one per seed, came to."""
    summaries = [read_json(folder / "summary.json") for folder in folders]
    curves = [
        {r["round"] + 1: r["accuracy"] for r in read_metrics(folder) if r["accuracy"] is not None} for folder in folders
    ]
    rounds = sorted(set.intersection(*map(set, curves)))
    columns = [[curve[round] for curve in curves] for round in rounds]

    def mean(key: str) -> float:
        return statistics.fmean(summary[key] for summary in summaries)

    return Row(
        method, tuple(summary["accuracy"] for summary in summaries), mean("upload_bytes"), mean("download_bytes"),
        mean("train_flops"), max(summary["peak_bytes"] for summary in summaries), mean("seconds"), tuple(rounds),
        tuple(map(statistics.fmean, columns)),
        tuple(statistics.stdev(column) if len(column) > 1 else 0.0 for column in columns),
    )  # fmt: skip


def draw(rows: Sequence[Row], out: Path) -> None:
    """accuracy.png and accuracy.svg: mean over seeds, with a band of one standard deviation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for row in rows:
        colour = colours.METHODS[row.method]
        values = [100 * value for value in row.curve]
        axes.plot(row.rounds, values, color=colour, label=f"{row.method} ({100 * row.mean:.1f} %)", linewidth=1.8)
        if any(row.spread):
            low = [value - 100 * spread for value, spread in zip(values, row.spread, strict=True)]
            high = [value + 100 * spread for value, spread in zip(values, row.spread, strict=True)]
            axes.fill_between(row.rounds, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set(xlabel="round", ylabel="test accuracy in %", ylim=(0, 100))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    for suffix in ("png", "svg"):
        figure.savefig(out / f"accuracy.{suffix}", dpi=150)
    pyplot.close(figure)
