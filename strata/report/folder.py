"""The report's folder. It remembers which files are its own, and writes over no other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strata.core.errors import BadInput
from strata.core.paths import writing_to
from strata.report import figures, tables
from strata.report.page import page, plotly_script
from strata.report.page_data import page_data
from strata.report.reconstruction import Reconstruction
from strata.results.reading import find_runs

MARK = ".strata-report.json"  # the list of files that a report wrote here


def write_report(
    places: Sequence[str | Path], out: str | Path, *, title: str | None = None, with_figures: bool = True
) -> dict[str, Any]:
    """index.html, tables/ and figures/ in `out`, of the runs in `places`. Returns the page's data."""
    folder = Path(out)
    runs = find_runs(places)
    plotly = plotly_script()  # before the slow part: without it there is no page
    check_place(folder)
    made = page_data(runs, Reconstruction(), title or _title([run.method for run in runs]))
    files = tables.files(made)
    if with_figures:
        files |= figures.files(made)
    made["files"] = sorted(files)
    files["index.html"] = page(made, plotly).encode()
    write_files(folder, files)
    return made


def _title(methods: Sequence[str]) -> str:
    names = list(dict.fromkeys(methods))
    if len(names) == 1:
        return f"{names[0]}: {len(methods)} runs" if len(methods) > 1 else f"{names[0]}: one run"
    return f"{', '.join(names[:-1])} and {names[-1]} compared" if len(names) <= 4 else f"{len(names)} methods compared"


def check_place(folder: Path) -> set[str]:
    """The files in it that are ours; refuses a folder of something else."""
    with writing_to(folder):
        if folder.exists() and not folder.is_dir():
            raise BadInput(f"{folder} is not a folder: choose another place for the report")
        if (folder / "config.json").exists():
            raise BadInput(f"{folder} is a run: choose another folder for the report, such as report")
        ours = _ours(folder)
        if ours is None and folder.exists() and any(folder.iterdir()):
            raise BadInput(f"{folder} is not empty and holds no report: choose a new or empty folder")
    return ours or set()


def _ours(folder: Path) -> set[str] | None:
    try:
        listed = json.loads((folder / MARK).read_bytes())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(listed, list):
        return None
    return {name for name in listed if isinstance(name, str) and _inside(name)}


def _inside(name: str) -> bool:
    """Only what a report writes: a mark that was tampered with must not make us remove other files."""
    parts = name.split("/")
    return name == "index.html" or (len(parts) == 2 and parts[0] in ("tables", "figures") and parts[1].strip(".") != "")


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """All of `files`; files of an earlier report that are no longer made are removed."""
    from strata.core.files import write_atomic

    ours = check_place(folder)
    with writing_to(folder):
        for name in files:
            path = folder / name
            if path.parent.is_symlink() or (name not in ours and (path.exists() or path.is_symlink())):
                raise BadInput(f"{path} was not written by a report: move it away or choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        for name in {str(Path(name).parent) for name in files}:
            (folder / name).mkdir(exist_ok=True)
    # the mark first, with old and new: if we are stopped midway, the next report knows what is ours
    write_atomic(folder / MARK, _mark(ours | set(files)))
    for name, data in files.items():
        write_atomic(folder / name, data)
    with writing_to(folder):
        for name in ours - set(files):
            if not (folder / name).parent.is_symlink():
                (folder / name).unlink(missing_ok=True)
    write_atomic(folder / MARK, _mark(set(files)))


def _mark(names: set[str]) -> bytes:
    return (json.dumps({"made by": "strata report", "files": sorted(names)}, indent=1) + "\n").encode()
