"""All runs of an experiment: finished ones are kept, half-finished ones resumed, the rest begun; some at a time."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from strata.core.errors import BadInput
from strata.core.files import open_to_append, read_json, said_plainly
from strata.core.importing import child_command, child_path
from strata.core.paths import expanded
from strata.core.processes import end_or_kill, sigterm_as_ctrl_c
from strata.core.settings import differences
from strata.data import CATALOGUE, default_root
from strata.experiments.base import PlannedRun
from strata.experiments.progress import Overview
from strata.results.reading import is_finished

PATIENCE = 60.0  # seconds that stopped runs get to save themselves
REFRESH = 0.5
LOG = "experiment.log"


@dataclass(frozen=True)
class Failure:
    run: PlannedRun
    reason: str


def unfinished(runs: Sequence[PlannedRun], root: Path) -> list[PlannedRun]:
    """Those still to be done. A folder that holds a run with other settings is refused."""
    todo = []
    for run in runs:
        folder = root / run.name
        if (folder / "config.json").exists():
            before = read_json(folder / "config.json").get("request") or {}  # none: begun from Python
            saved, now = dict(before), run.request.to_json()
            for values in (saved, now):
                values.pop("data_dir", None)  # data may move
            if found := differences(saved, now):
                raise BadInput(f"{folder} holds a run with other settings: {'; '.join(found)}. Choose another --out")
        if not is_finished(folder):
            todo.append(run)
    return todo


def check_data(runs: Sequence[PlannedRun]) -> None:
    """What is missing is said before anything starts."""
    missing = {}
    for run in runs:
        problem = run.request.problem
        root = expanded(problem.data_dir) if problem.data_dir else default_root()
        if CATALOGUE[problem.data].find(root) is None:
            missing[problem.data] = root
    if missing:
        names, root = ", ".join(missing), next(iter(missing.values()))
        raise BadInput(
            f"{names} {'is' if len(missing) == 1 else 'are'} not in {root}: see `strata data`, name the folder with "
            "--data-dir, or choose runs on other data with --only"
        )


@dataclass
class _Worker:
    """A process of run_process.py and the run it is at."""

    log: IO[bytes]
    run: PlannedRun | None = None
    process: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            child_command("strata.experiments.run_process"),
            env={**os.environ, "PYTHONPATH": child_path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            start_new_session=True,  # Ctrl-C is for the parent, which tells the others
        )

    @property
    def answers(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def begin(self, run: PlannedRun, root: Path, workers: int, checkpoint_every: int) -> None:
        job = {
            "request": run.request.to_json(),
            "folder": str(root / run.name),
            "workers": workers,
            "checkpoint_every": checkpoint_every,
        }
        self.run = run
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is noticed where its answer is read
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()

    def stop(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()  # ends an idle one, and makes a busy one save and end


def carry_out(
    runs: Sequence[PlannedRun],
    root: Path,
    *,
    jobs: int,
    workers: int,
    checkpoint_every: int,
    overview: Overview,
) -> list[Failure]:
    """Each run in its folder below `root`; `jobs` runs at a time, each with `workers` processes (0: its own)."""
    waiting, failures = deque(runs), []
    team: list[_Worker] = []
    with said_plainly(root):
        root.mkdir(parents=True, exist_ok=True)
        file = open_to_append(root / LOG)
    with file as log, selectors.DefaultSelector() as ready, sigterm_as_ctrl_c():
        try:
            while waiting or any(worker.run for worker in team):
                while waiting and sum(worker.run is not None for worker in team) < jobs:
                    worker = next((worker for worker in team if worker.run is None), None)
                    if worker is None:
                        worker = _Worker(log)
                        team.append(worker)
                        ready.register(worker.answers, selectors.EVENT_READ, worker)
                    run = waiting.popleft()
                    worker.begin(run, root, workers, checkpoint_every)
                    overview.begin(run, root / run.name)
                for key, _ in ready.select(REFRESH):
                    worker = key.data
                    answer = worker.answers.readline()
                    run, worker.run = worker.run, None
                    if not answer:  # the process has ended
                        ready.unregister(worker.answers)
                        team.remove(worker)
                        if run is None:
                            continue
                    reason = _reason(answer, worker, root)
                    overview.end(run, reason)
                    if reason is not None:
                        failures.append(Failure(run, reason))
                overview.refresh()
        finally:
            for worker in team:
                worker.stop()
            for worker in team:
                end_or_kill(worker.process, PATIENCE)
            overview.close()
    return failures


def _reason(answer: str, worker: _Worker, root: Path) -> str | None:
    if answer:
        reason: str | None = json.loads(answer).get("error")
        return reason
    return f"its process ended with exit code {worker.process.wait()}: see {root / LOG}"
