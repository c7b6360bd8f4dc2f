"""Several methods under the same budget, data and seeds: runs what is unfinished."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from strata.core.errors import BadInput
from strata.core.files import Lock, read_object, said_plainly, write_json
from strata.engines import Engine
from strata.engines.ray import Ray
from strata.graph import ChannelGraph
from strata.methods import method_class
from strata.methods.choice import OF_SOME
from strata.runs.folder import differences
from strata.runs.progress import display
from strata.runs.request import Request, jsonable
from strata.runs.running import make_engine, run

FILE = "compare.json"
LEFTOVERS = {".lock", f"{FILE}.tmp"}  # of a comparison that was killed as it began
OF_METHODS = ("method", *OF_SOME)  # of a request: not the same for all methods of a comparison


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
) -> dict[str, list[Path]]:
    """Runs go to out/METHOD/seed-N; finished ones are kept, half-finished ones resumed. The folders of each method."""
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
        if not request.validation:  # with a validation split the training images differ between seeds
            shared = make_engine(model, data, training, workers, timeout=timeout, ray=ray, source=request.load_split)
        graph = ChannelGraph(model, data.inputs)
        made = [one.make_method(graph) for one in requests]  # all of them first: what cannot be done is said at once
        show = display(progress)
        with _claimed(out, request, requests, {"methods": list(methods), "seeds": seeds}):
            for one, method in zip(requests, made, strict=True):
                if progress:
                    show.say(f"{one.method}, seed {one.seed}")
                folder = _folder(out, one.method, one.seed)
                rest, held = one.split(data)
                engine = shared or make_engine(model, rest, training, workers, held=held, timeout=timeout, ray=ray,
                                               source=one.load_split)  # fmt: skip
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
        return {name: [_folder(out, name, request.seed + n) for n in range(seeds)] for name in methods}
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
