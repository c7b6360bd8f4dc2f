"""Run folders as values. Files of a run are read with suspicion: it may still be running, half written or not ours."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strata.core.errors import BadInput
from strata.results.appearance import place_of
from strata.results.growing import GrowingRecords, line_of
from strata.runs.metrics import PARTIAL, SUMS

DEEPEST = 8  # levels below a given folder in which runs are looked for; strata experiment puts them eight below --out
LARGEST = 256 << 20  # bytes of a file that is read
LARGEST_NUMBER = 1e100  # nothing a run counts comes near; sums and squares of such numbers are still finite


@dataclass(frozen=True)
class RecordedRun:
    """A run as its folder tells it."""

    path: Path
    name: str  # how the page calls it
    config: Mapping[str, Any]
    plan: Mapping[str, Any]
    records: tuple[Mapping[str, Any], ...]  # one a round, in order
    summary: Mapping[str, Any] | None  # None: not finished
    problems: tuple[str, ...] = field(default=())

    @property
    def settings(self) -> Mapping[str, Any]:
        return mapping(self.config.get("settings"))

    @property
    def request(self) -> Mapping[str, Any]:
        """What the command line asked for; empty for a run started from Python."""
        return mapping(self.config.get("request"))

    @property
    def method(self) -> str:
        return str(mapping(self.settings.get("method")).get("name", "?"))

    @property
    def seed(self) -> int:
        return whole(self.settings.get("seed")) or 0

    @property
    def rounds(self) -> int:
        """How many were asked for."""
        return whole(self.settings.get("rounds")) or len(self.records)

    @property
    def accuracy(self) -> float | None:
        """At the end, or the newest so far."""
        if self.summary is not None and (end := number(self.summary.get("accuracy"))) is not None:
            return end
        return next((a for r in reversed(self.records) if (a := number(r.get("accuracy"))) is not None), None)

    @property
    def status(self) -> str:
        if self.summary is not None:
            return "finished"
        return "running" if is_running(self.path) else "unfinished"


def find_runs(places: Iterable[str | Path], known: dict[Path, GrowingRecords] | None = None) -> list[RecordedRun]:
    """The runs in these folders, each a run itself or a folder with runs in it (of `strata compare`, for one). `known`:
    what was read of their metrics before, for whoever looks again."""
    found: dict[Path, int] = {}  # where it really is: a run that is given twice is one
    places = list(places)
    several = len(places) > 1  # then the order is the user's
    for place in map(Path, places):
        try:
            there = place.is_dir()
        except OSError as error:  # a name that is too long, or a folder above it that may not be entered
            raise _unreadable(place, error) from error
        if not there:
            raise BadInput(f"there is no folder {place}: give run folders, such as runs/a, or one that holds them")
        here = list(_folders(place))
        if not here:
            raise BadInput(
                f"{place} is not a run and holds none down to {DEEPEST} levels below it: a run folder has a "
                "config.json that `strata run` wrote"
            )
        for folder in here:
            found.setdefault(folder.resolve(), len(found))
    runs = [read_run(folder, name, known) for folder, name in zip(found, _names(list(found)), strict=True)]
    return runs if several else sorted(runs, key=_rank)


def _rank(run: RecordedRun) -> tuple[int, int]:
    """Within one folder: SLT first, then as `strata methods` lists them."""
    return place_of(run.method), run.seed


def _folders(place: Path) -> Iterator[Path]:
    def refused(error: OSError) -> None:
        if error.filename == str(place):  # what is asked for must be readable; what lies below is passed over
            raise _unreadable(place, error) from error

    for folder, below, files in os.walk(place, onerror=refused):  # links are not followed: no loops
        path = Path(folder)
        if "config.json" in files and _is_run(path):
            yield path
            below.clear()
        elif len(path.relative_to(place).parts) >= DEEPEST:
            below.clear()
        else:
            below[:] = sorted(name for name in below if not name.startswith("."))


def _is_run(path: Path) -> bool:
    try:
        config = _json(path / "config.json")
    except BadInput:
        return False
    return isinstance(config, dict) and isinstance(config.get("settings"), dict) and "versions" in config


def _names(paths: list[Path]) -> list[str]:
    """The shortest endings of the paths that tell them apart."""
    for depth in range(1, 1 + max((len(path.parts) for path in paths), default=1)):
        names = [clean("/".join(path.parts[-depth:])) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{clean(str(path))} ({n})" for n, path in enumerate(paths, start=1)]  # they differ in what was cleaned


# --- one run ---------------------------------------------------------------------------------------------------------


def read_run(path: Path, name: str | None = None, known: dict[Path, GrowingRecords] | None = None) -> RecordedRun:
    config = _json(path / "config.json")
    problems: list[str] = []
    plan, summary = (_optional(path / file, problems) for file in ("plan.json", "summary.json"))
    growing = GrowingRecords(_record) if known is None else known.setdefault(path, GrowingRecords(_record))
    records = _records(path / "metrics.jsonl", problems, growing)
    if summary is not None and PARTIAL in summary:
        problems.append(f"lines of metrics.jsonl were lost: the sums are of {len(records)} rounds only")
    name = clean(path.name) if name is None else name
    return RecordedRun(path, name, mapping(config), mapping(plan), records, summary, tuple(map(clean, problems)))


def _records(path: Path, problems: list[str], growing: GrowingRecords) -> tuple[Mapping[str, Any], ...]:
    """Rounds 0, 1, 2, ...; lines that are none are counted and said."""
    if not path.exists():
        return ()
    try:
        if path.stat().st_size > LARGEST:
            raise BadInput(f"{path} is too large to be a run's file ({path.stat().st_size} bytes)")
        growing.update(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    records = growing.records()
    bad = growing.lines - len(records)
    if bad:
        problems.append(f"{bad} line{'s' if bad > 1 else ''} of {path.name} could not be read and left out")
    return tuple(records)


def _record(line: bytes) -> Mapping[str, Any] | None:
    record = line_of(line)
    if b"\\u" in line:  # only such an escape can name half a character
        record = _cleaned(record)
    round = whole(record.get("round")) if isinstance(record, dict) else None
    return None if round is None or round < 0 else record


def read_object(path: Path) -> dict[str, Any]:
    """One JSON file of a run that must be there and whole, such as the summary of a finished one."""
    if not path.exists():
        raise BadInput(f"there is no {path.name} in {path.parent}: is it a run folder?")
    value = _json(path)
    if not isinstance(value, dict):
        raise BadInput(f"{path} is not as Strata writes it: it holds no JSON object")
    return value


def read_number(path: Path, values: Mapping[str, Any], key: str) -> float:
    """Of the values that `path` holds: one that must be there, and of all rounds."""
    if PARTIAL in values and key in SUMS:
        raise BadInput(
            f"{path} has {key} of some rounds only, because lines of its metrics.jsonl were lost: run it again"
        )
    found = number(values.get(key))
    if found is None:
        raise BadInput(f"{path} is not as Strata writes it: it holds no number {key}")
    return found


def read_metrics(path: Path) -> tuple[Mapping[str, Any], ...]:
    """The records of a run folder whose every line counts: a bad one is refused, not left out."""
    file = path / "metrics.jsonl"
    _bytes(file)  # says so where there is none
    problems: list[str] = []
    records = _records(file, problems, GrowingRecords(_record))
    if problems:
        raise BadInput(f"cannot read {file}: {problems[0]}")
    return records


def is_finished(path: Path) -> bool:
    """The summary is written last. Weights may have been left out where results were copied from."""
    return (path / "summary.json").exists()


def _optional(path: Path, problems: list[str]) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        value = _json(path)
    except BadInput as error:
        problems.append(str(error))
        return None
    if not isinstance(value, dict):
        problems.append(f"{path.name} does not hold what it should")
        return None
    return value


def _json(path: Path) -> Any:
    try:
        return _cleaned(json.loads(_bytes(path).decode()))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"cannot read {path}: {error}") from error


def _cleaned(value: Any) -> Any:
    if isinstance(value, dict):
        return {clean(key): _cleaned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    return clean(value) if isinstance(value, str) else value


def _unreadable(path: Path, error: OSError) -> BadInput:
    return BadInput(f"cannot read {path}: {error.strerror or error}")


def _bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > LARGEST:
            raise BadInput(f"{path} is too large to be a run's file ({path.stat().st_size} bytes)")
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def is_running(path: Path) -> bool:
    """Whether a process holds the run's lock. Read from the kernel's list: trying the lock could get in a run's way."""
    try:
        status = (path / ".lock").stat()
        locks = Path("/proc/locks").read_text()
    except OSError:
        return False
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    return any(place in line.split() and "FLOCK" in line for line in locks.splitlines())


# --- values that may be anything ---------------------------------------------------------------------------------


def clean(text: str) -> str:
    """Text that any file can hold: half a character, or a byte of a file's name that is not UTF-8, becomes a ?."""
    return text.encode(errors="replace").decode()


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def number(value: Any) -> float | None:
    """A number that can be reckoned with, else None: NaN, null and text are all 'not known'."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) <= LARGEST_NUMBER else None


def whole(value: Any) -> int | None:
    exact = number(value)
    return None if exact is None else int(exact)


def numbers(records: Iterable[Mapping[str, Any]], key: str) -> list[float | None]:
    return [number(record.get(key)) for record in records]
