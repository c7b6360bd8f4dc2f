"""Several methods under the same budget, data and seeds: runs what is unfinished, then the table and the picture."""

from __future__ import annotations

import contextlib
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from strata.core.errors import BadInput
from strata.core.files import Lock, read_json, read_object, said_plainly, write_json
from strata.engines import Engine
from strata.engines.ray import Ray
from strata.graph import ChannelGraph
from strata.methods import method_class
from strata.methods.choice import OF_SOME
from strata.methods.heads import is_prepared
from strata.results import colours
from strata.runs.folder import differences, read_metrics
from strata.runs.progress import display
from strata.runs.request import Request, jsonable
from strata.runs.running import make_engine, run

FILE = "compare.json"
LEFTOVERS = {".lock", f"{FILE}.tmp"}  # of a comparison that was killed as it began
OF_METHODS = ("method", *OF_SOME)  # of a request: not the same for all methods of a comparison


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
    timeout: float | None = None,
    checkpoint_every: int = 1,
    progress: bool = True,
    ray: Ray | None = None,
) -> list[Row]:
    """Runs go to out/METHOD/seed-N; finished ones are kept, half-finished ones resumed."""
    _check(methods, seeds)
    request.check_options()
    requests = [
        replace(request, method=method, seed=request.seed + number, **_own_options(request, method))
        for number in range(seeds)
        for method in methods
    ]
    _check_folder(out, request, requests)  # before the slow part; again, under the lock, when the first run begins
    data = request.load_data()
    training = request.make_training(data)
    model = request.make_model(data)
    shared: Engine | None = None
    try:
        own_models = any(is_prepared(method_class(method)) for method in methods)
        if not request.validation and not own_models:  # else the training images, or the models, differ
            shared = make_engine(model, data, training, workers, timeout=timeout, ray=ray, source=request.load_split)
        graph = ChannelGraph(model, data.inputs)
        graphs = [
            ChannelGraph(one.prepared(model, data), data.inputs) if is_prepared(method_class(one.method)) else graph
            for one in requests
        ]
        # all of them first: what cannot be done is said at once
        made = [one.make_method(own) for one, own in zip(requests, graphs, strict=True)]
        show = display(progress)
        with _claimed(out, request, requests, {"methods": list(methods), "seeds": seeds}):
            for one, method in zip(requests, made, strict=True):
                if progress:
                    show.say(f"{one.method}, seed {one.seed}")
                folder = _folder(out, one.method, one.seed)
                rest, held = one.split(data)
                engine = shared or make_engine(
                    one.prepared(model, data),
                    rest,
                    training,
                    workers,
                    held=held,
                    timeout=timeout,
                    ray=ray,
                    source=one.load_split,
                )
                try:
                    run(
                        one.make_model(data), data, method, out=folder, rounds=one.rounds, devices=one.devices,
                        partition=one.partition, training=training, engine=engine, checkpoint_every=checkpoint_every,
                        resume=(folder / "config.json").exists(), progress=progress, request=jsonable(one),
                        **one.run_options(),
                    )  # fmt: skip
                finally:
                    if engine is not shared:
                        engine.close()
            rows = [gather(name, [_folder(out, name, request.seed + n) for n in range(seeds)]) for name in methods]
            write_json(out / "summary.json", [row.to_json() for row in rows])
            draw(rows, out)
            return rows
    finally:
        if shared is not None:
            shared.close()


def _check(methods: Sequence[str], seeds: int) -> None:
    if not methods or len(set(methods)) != len(methods):
        raise BadInput("give the methods to compare once each, such as slt,small,fd")
    for method in methods:
        method_class(method)
    if seeds < 1:
        raise BadInput(f"at least 1 seed is needed, not {seeds}")


def _own_options(request: Request, method: str) -> dict[str, Any]:
    """Options that only some methods know are for those."""
    names = [name for name in OF_SOME if name not in method_class(method).card.options]
    return dict.fromkeys(names)


def _folder(out: Path, method: str, seed: int) -> Path:
    return out / method / f"seed-{seed}"


def _check_folder(out: Path, request: Request, requests: Sequence[Request]) -> None:
    """A new folder, or one of the same comparison, perhaps of other methods or fewer seeds."""
    with said_plainly(out):
        ours = (out / FILE).exists()
        others = not ours and out.is_dir() and any(child.name not in LEFTOVERS for child in out.iterdir())
    if others:
        raise BadInput(f"{out} is not empty and holds no comparison: choose a new or empty folder")
    if ours:
        saved = read_object(out / FILE).get("request", {})
        found = differences({**saved, **dict.fromkeys(OF_METHODS)}, {**jsonable(request), **dict.fromkeys(OF_METHODS)})
        if found:
            raise BadInput(f"{out} holds another comparison: {'; '.join(found)}. Choose another folder")
        for one in requests:
            folder = _folder(out, one.method, one.seed)
            if (folder / "config.json").exists():
                Request.of_folder(folder, {name: getattr(one, name) for name in OF_METHODS})


@contextlib.contextmanager
def _claimed(out: Path, request: Request, requests: Sequence[Request], extent: Mapping[str, Any]) -> Iterator[None]:
    """The folder is this comparison's, and no other process's. It leaves no trace if it is refused at its first run."""
    ours = not out.exists()
    with said_plainly(out):
        out.mkdir(parents=True, exist_ok=True)
    lock = Lock(out)
    try:
        _check_folder(out, request, requests)  # another may have begun meanwhile
        write_json(out / FILE, {**extent, "request": jsonable(request)})
        try:
            yield
        except BadInput:
            if ours and {child.name for child in out.iterdir()} == {FILE, ".lock"}:
                shutil.rmtree(out)
            raise
    finally:
        lock.release()


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
