"""Real faults: processes ended by SIGKILL at random moments, damaged files, two runs in one folder."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from strata.core.errors import BadInput
from strata.engines import LocalEngine
from strata.federation.jobs import CohortJob, DeviceProgram, TrainJob
from strata.runs import session
from tests.federation import tiny
from tests.federation.tiny import bits, tiny_run

ROOT = Path(__file__).parents[2]
OPTIONS: dict[str, Any] = {"name": "slt", "rounds": 5, "dropout": 0.2, "quorum": 2}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reference") / "run"
    tiny_run(out, **OPTIONS)
    return out


def at_event(number: int, act: Callable[[], None]) -> Callable[[FrameType, str, Any], None]:
    """A profiler that acts at the number-th call or return in strata/federation: a moment without any clock."""
    count = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        if "strata/federation" in frame.f_code.co_filename:
            if count == number:
                act()
            count += 1

    profile.count = lambda: count  # type: ignore[attr-defined]
    return profile


def killed_at(number: int, out: Path, **options: Any) -> bool:
    """Runs, or resumes, in a process of its own that gets SIGKILL at this event; False if it finished before."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)  # threads do not survive a fork
            sys.setprofile(at_event(number, lambda: os.kill(os.getpid(), signal.SIGKILL)))
            tiny_run(out, resume=(out / "config.json").exists(), **{**OPTIONS, **options})
            code = 0
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return status != 0


def events_of_a_run(out: Path) -> int:
    profile = at_event(-1, lambda: None)
    sys.setprofile(profile)
    try:
        tiny_run(out, **OPTIONS)
    finally:
        sys.setprofile(None)
    return int(profile.count())  # type: ignore[attr-defined]


def test_killed_at_20_random_moments_and_resumed_to_the_same_bits(reference: Path, tmp_path: Path) -> None:
    total = events_of_a_run(tmp_path / "counted")
    moments = random.Random(0)
    kills = 0
    for folder in range(20):
        out = tmp_path / str(folder)
        alive = True
        while alive and kills < 20:  # each time it gets a random part of the way further
            alive = killed_at(moments.randrange(total // 3), out)
            kills += alive
        tiny_run(out, resume=(out / "config.json").exists(), **OPTIONS)
        assert bits(out) == bits(reference)
        if kills == 20:
            break
    assert kills == 20


def test_killed_at_every_event_of_a_checkpoint(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second checkpoint is broken off at each of its calls in turn, the disk being what it then is."""
    from strata.runs.checkpoints import Checkpoints

    original = Checkpoints.save
    moments = list(range(0, 400, 9))
    for number in moments:
        out = tmp_path / str(number)
        pid = os.fork()
        if pid == 0:

            def save(self: Checkpoints, state: Any, number: int = number) -> None:
                if state.round == 2:
                    sys.setprofile(at_event(number, lambda: os.kill(os.getpid(), signal.SIGKILL)))
                original(self, state)
                if state.round == 2:
                    os._exit(0)

            Checkpoints.save = save  # type: ignore[method-assign]
            try:
                torch.set_num_threads(1)
                tiny_run(out, **OPTIONS)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        tiny_run(out, resume=True, **OPTIONS)
        assert bits(out) == bits(reference)
        if status == 0:  # the moment lies after the end of the save
            assert number > 0
            return
        assert status == -signal.SIGKILL
    raise AssertionError("a save has more events than were tried")


RUN = """
import sys
from pathlib import Path
from tests.federation import test_faults, tiny
print("ready", flush=True)
tiny.tiny_run(Path(sys.argv[1]), workers=2, **test_faults.OPTIONS)
"""


def children_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 300) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_a_killed_run_leaves_no_worker_and_no_lock_and_resumes_at_once(reference: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-c", RUN, out], cwd=ROOT)
    lines = out / "metrics.jsonl"
    assert wait_for(lambda: lines.exists() and lines.read_bytes().count(b"\n") >= 2)
    nursery = children_of(process.pid)
    family = [*nursery, *(worker for pid in nursery for worker in children_of(pid))]
    assert len(family) >= 2
    process.kill()
    process.wait()
    tiny_run(out, resume=True, **OPTIONS)  # at once, while orphans may still be about to exit
    assert wait_for(lambda: not any(map(is_running, family)), 5)
    assert bits(out) == bits(reference)


def test_devices_that_cannot_be_trained_together_are_trained_one_by_one_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise MemoryError("no room for four")

    monkeypatch.setattr("strata.federation.jobs.train_cohort", broken)
    with pytest.warns(UserWarning, match=r"only be trained one by one: \d+ \(MemoryError: no room for four\)"):
        tiny_run(tmp_path / "alone", name="small", workers=0)
    monkeypatch.undo()
    tiny_run(tmp_path / "exact", name="small", workers=0, exact=True)
    assert bits(tmp_path / "alone") == bits(tmp_path / "exact")


class KillsItself(DeviceProgram):
    """The first time a device of `victims` trains, its worker gets SIGKILL; `always`: every time."""

    folder: Path
    victims: tuple[int, ...]
    always: bool

    def __call__(self, job: Any, state: Mapping[str, Tensor]) -> Any:
        jobs = job.jobs if isinstance(job, CohortJob) else (job,) if isinstance(job, TrainJob) else ()
        victims = [one.task for one in jobs if one.task.device in self.victims]
        marks = [self.folder / f"{task.round}-{task.device}" for task in victims]
        if marks and (self.always or not all(mark.exists() for mark in marks)):
            for mark in marks:
                mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(job, state)


def killing_engine(folder: Path, victims: tuple[int, ...], always: bool = False) -> LocalEngine:
    from strata.graph import Cut

    program = KillsItself(tiny.model(), (3, 8, 8), tiny.data().train, {"test": tiny.data().test}, tiny.training())
    program.folder, program.victims, program.always = folder, victims, always
    folder.mkdir()
    return LocalEngine(program, 2, shared=(Cut,))


def test_workers_killed_in_mid_task_cost_nothing(reference: Path, tmp_path: Path) -> None:
    engine = killing_engine(tmp_path / "marks", tuple(range(0, 12, 2)))
    try:
        tiny_run(tmp_path / "run", engine=engine, **OPTIONS)
    finally:
        engine.close()
    assert len(list((tmp_path / "marks").iterdir())) >= 3
    assert bits(tmp_path / "run") == bits(reference)


def test_a_task_that_always_kills_its_worker_loses_its_update(tmp_path: Path) -> None:
    engine = killing_engine(tmp_path / "marks", (3,), always=True)
    try:
        result = tiny_run(tmp_path / "run", engine=engine, per_round=12, rounds=2, name="fd")
    finally:
        engine.close()
    for record in result.metrics:
        assert record["dropped"] == [{"id": 3, "reason": "its worker process was killed 2 times"}]


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_a_truncated_checkpoint_is_said_and_the_previous_one_used(
    reference: Path, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    tiny_run(out, **OPTIONS)
    (out / "summary.json").unlink()
    newest = out / "checkpoint" / f"round-00000005{suffix}"
    with open(newest, "r+b") as file:
        file.truncate(newest.stat().st_size // 2)
    tiny_run(out, resume=True, **{**OPTIONS, "progress": True})
    said = capsys.readouterr().err
    assert "the checkpoint of round 5 is damaged" in said and "resuming" in said and "after 4 of 5 rounds" in said
    assert bits(out) == bits(reference)


def test_two_runs_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    original = session.play

    def other_meanwhile(*arguments: Any) -> Any:
        for resume in (True, False):
            with pytest.raises(BadInput, match="in use by another run|already holds a run"):
                tiny_run(out, resume=resume, **OPTIONS)
        return original(*arguments)

    monkeypatch.setattr(session, "play", other_meanwhile)
    tiny_run(out, **OPTIONS)
    assert (out / "summary.json").exists()


def test_a_full_disk_stops_the_run_with_the_last_checkpoint_intact(reference: Path, tmp_path: Path) -> None:
    """A real limit: the process may not write files beyond what the first checkpoints need."""
    import resource

    out = tmp_path / "run"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            original = session.play

            def play(*arguments: Any) -> Any:
                if arguments[0].round == 3:
                    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
                return original(*arguments)

            session.play = play
            tiny_run(out, **OPTIONS)
        except BadInput as error:
            code = 0 if "the last checkpoint is intact" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    tiny_run(out, resume=True, **OPTIONS)
    assert bits(out) == bits(reference)
