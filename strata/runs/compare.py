"""Several methods under the same budget, data and seeds: runs what is unfinished."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from strata.core.errors import BadInput
from strata.core.files import Lock, is_leftover, own_folder, read_object, remove_leftovers, said_plainly, write_json
from strata.core.settings import differences
from strata.methods import method_class
from strata.runs.config import RunConfig
from strata.runs.entries import Entry
from strata.runs.launch import Resources, launch
from strata.runs.progress import display
from strata.runs.unused import of_some_methods

FILE = "compare.json"


def compare(
    config: RunConfig, methods: Sequence[str], seeds: int, out: Path, *, progress: bool = True
) -> dict[str, list[Path]]:
    """Carries out the runs, in out/METHOD/seed-N: finished ones are kept, half-finished ones resumed. The folders of
    each method, one per seed. A method may come with settings of its own for how steps are taken (entries.py)."""
    entries = [Entry.of(method) for method in methods]
    _check(entries, seeds)
    config.check()
    runs = [
        (entry, entry.of_config(config, seed=config.course.seed + number, **_not_for(entry.method)))
        for number in range(seeds)
        for entry in entries
    ]
    configs = {_folder(out, entry, one): one for entry, one in runs}
    _check_folder(out, config, configs)  # before the slow part; again, under the lock, when the first run begins
    resources = Resources()
    try:
        resources.prepare_methods(list(configs.values()))
        show = display(progress)
        with _claimed(out, config, configs, {"methods": [entry.name for entry in entries], "seeds": seeds}):
            for entry, one in runs:
                show.say(f"{entry.name}, seed {one.course.seed}")
                folder = _folder(out, entry, one)
                resume = (folder / "config.json").exists()
                launch(one, folder, resume=resume, progress=progress, resources=resources)
        return {entry.name: [_folder(out, other, one) for other, one in runs if other == entry] for entry in entries}
    finally:
        resources.close()


def _check(entries: Sequence[Entry], seeds: int) -> None:
    if not entries or len({entry.name for entry in entries}) != len(entries):
        raise BadInput("give the methods to compare once each, such as slt,small,fd")
    for entry in entries:
        method_class(entry.method)
    if seeds < 1:
        raise BadInput(f"at least 1 seed is needed, not {seeds}")


def _not_for(method: str) -> dict[str, Any]:
    """Settings of some methods only that this one does not look at, with their defaults."""
    known = RunConfig.described()
    return {key: known[key].default for key in of_some_methods() if key not in method_class(method).card.options}


def _folder(out: Path, entry: Entry, config: RunConfig) -> Path:
    return out / entry.folder / f"seed-{config.course.seed}"


def _of_killed(name: str) -> bool:
    """Left by a comparison that was killed as it began."""
    return name == ".lock" or (name.startswith(f"{FILE}.") and is_leftover(name))


def _check_folder(out: Path, config: RunConfig, configs: Mapping[Path, RunConfig]) -> None:
    """A new folder, or one of the same comparison, perhaps of other methods or fewer seeds."""
    with said_plainly(out):
        ours = (out / FILE).exists()
        others = not ours and out.is_dir() and not all(_of_killed(child.name) for child in out.iterdir())
    if others:
        raise BadInput(f"{out} is not empty and holds no comparison: choose a new or empty folder")
    if not ours:
        return
    own = dict.fromkeys(("method", *of_some_methods()))  # not the same for all methods of a comparison
    saved = read_object(out / FILE).get("request", {})
    found = differences({**saved, **own}, {**config.to_json(), **own})
    if found:
        raise BadInput(f"{out} holds another comparison: {'; '.join(found)}. Choose another folder")
    for folder, one in configs.items():
        if (folder / "config.json").exists():
            card = method_class(one.approach.method).card
            looked_at = [key for key in of_some_methods() if key in card.options]
            taken = RunConfig.keys_of("execution")
            RunConfig.of_folder(folder, {key: getattr(one, key) for key in ("method", *taken, *looked_at)})


@contextlib.contextmanager
def _claimed(
    out: Path, config: RunConfig, configs: Mapping[Path, RunConfig], extent: Mapping[str, Any]
) -> Iterator[None]:
    """The folder is this comparison's, and no other process's. It leaves no trace if it is refused at its first run."""
    ours = not out.exists()
    own_folder(out, linked=True)
    lock = Lock(out)
    try:
        remove_leftovers(out)
        _check_folder(out, config, configs)  # another may have begun meanwhile
        write_json(out / FILE, {**extent, "request": config.to_json()})
        try:
            yield
        except BadInput:
            if ours and {child.name for child in out.iterdir()} == {FILE, ".lock"}:
                shutil.rmtree(out)
            raise
    finally:
        lock.release()
