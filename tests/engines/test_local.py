from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from strata.core.errors import BadInput
from strata.engines import EngineFailed, InlineEngine, LocalEngine, wire
from strata.engines.base import time_limit
from strata.federation.jobs import CohortJob, EvaluateJob, FinishJob, TrainJob
from tests.engines.programs import Asks, Broken, Calls, Echo, Label
from tests.federation import tiny

STATE = {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(3), "none": torch.zeros(0, 4)}


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    engine = LocalEngine(Echo(), workers=2, shared=(Label,))
    yield engine
    engine.close()


def answers(engine: LocalEngine | InlineEngine, jobs: list[tuple], state: dict = STATE) -> list:
    outcomes = sorted(engine.run(jobs, state), key=lambda outcome: outcome.index)
    assert [outcome.index for outcome in outcomes] == list(range(len(jobs)))
    return [outcome.result if outcome.reason is None else outcome.reason for outcome in outcomes]


def eventually(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_every_job_is_answered_with_this_rounds_state(engine: LocalEngine) -> None:
    jobs = [("add", float(n)) for n in range(7)]
    assert answers(engine, jobs) == [n + 3.0 for n in range(7)]
    assert answers(engine, jobs, {**STATE, "w": torch.tensor([10.0, 0.5])}) == [n + 10.5 for n in range(7)]
    assert answers(InlineEngine(Echo()), jobs) == [n + 3.0 for n in range(7)]
    assert answers(engine, []) == []


def test_workers_stay_warm_and_are_single_threaded(engine: LocalEngine) -> None:
    first = set(answers(engine, [("pid",)] * 6))
    assert first <= set(engine.worker_pids) and len(engine.worker_pids) == 2
    assert set(answers(engine, [("pid",)] * 6)) <= set(engine.worker_pids) and os.getpid() not in first
    assert answers(engine, [("threads",)]) == [1]


def test_a_state_of_other_shapes_is_taken_too(engine: LocalEngine) -> None:
    assert answers(engine, [("add", 0.0)], {"w": torch.ones(5)}) == [5.0]
    assert answers(engine, [("add", 0.0)]) == [3.0]


def test_an_error_costs_only_its_own_job(engine: LocalEngine) -> None:
    for each in (engine, InlineEngine(Echo())):
        assert answers(each, [("add", 1.0), ("raise", "bad device"), ("add", 2.0)]) == [
            4.0, "ValueError: bad device", 5.0,
        ]  # fmt: skip


def test_a_shared_value_is_sent_once_per_worker(engine: LocalEngine) -> None:
    sender, receiver = wire.Sender((Label,)), wire.Receiver()
    label = Label("x" * 1000)
    first, second = sender.dump(("job", label)), sender.dump(("job", label))
    assert len(first) > 1000 and len(second) < 1100 and receiver.load(first) == ("job", label)
    assert receiver.load(second)[1] is receiver._known[label.hash]
    for n in range(wire.KEPT + 5):  # forgets on both ends alike
        message = receiver.load(sender.dump((n, Label(str(n)), label)))
        assert message == (n, Label(str(n)), label)
    assert len(receiver._known) <= wire.KEPT + 2
    tensor = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    assert torch.equal(wire.load(wire.dump({"t": tensor}))["t"], tensor)


def test_a_killed_worker_is_replaced_and_its_job_tried_again(engine: LocalEngine, tmp_path: Path) -> None:
    before = set(engine.worker_pids)
    jobs = [("add", 0.0), ("die once", tmp_path / "mark"), ("add", 1.0), ("add", 2.0)]
    assert answers(engine, jobs) == [3.0, "survived", 4.0, 5.0]
    assert set(engine.worker_pids) != before


def test_a_job_that_kills_every_worker_is_given_up(engine: LocalEngine) -> None:
    assert answers(engine, [("add", 0.0), ("die",), ("add", 1.0)]) == [
        3.0, "its worker process was killed 2 times", 4.0,
    ]  # fmt: skip


def test_an_idle_worker_killed_between_rounds_is_replaced(engine: LocalEngine) -> None:
    answers(engine, [("pid",)] * 4)
    for pid in engine.worker_pids:
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda pid=pid: not is_running(pid), 120)
    assert answers(engine, [("add", 0.0)] * 4) == [3.0] * 4


def test_idle_workers_that_died_cost_a_job_none_of_its_tries(engine: LocalEngine, tmp_path: Path) -> None:
    answers(engine, [("pid",)] * 4)
    for pid in engine.worker_pids:
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda pid=pid: not is_running(pid), 120)
    assert answers(engine, [("die once", tmp_path / "mark")]) == ["survived"]


def test_the_time_limit_is_for_each_device_and_never_for_the_servers_own_work() -> None:
    cut, task = tiny.graph().full(), tiny.method("fedavg").assign(0, [0])[0]
    train = TrainJob(task, np.arange(4), 0.1, 0)
    assert time_limit(train, 2.0) == 2 and time_limit(CohortJob((train,) * 3), 2.0) == 6
    assert time_limit(EvaluateJob(cut, 0, "test", "batch", (0,), 0), 2.0) == math.inf
    assert time_limit(FinishJob(cut, 0), 2.0) == time_limit(train, None) == math.inf


def test_the_process_that_starts_workers_may_be_killed(engine: LocalEngine) -> None:
    answers(engine, [("pid",)] * 4)
    pids = engine.worker_pids
    assert engine._process is not None
    os.kill(engine._process.pid, signal.SIGKILL)
    assert all(eventually(lambda pid=pid: not is_running(pid), 120) for pid in pids)
    assert answers(engine, [("add", 0.0)] * 4) == [3.0] * 4


def test_a_hanging_job_ends_at_the_timeout_or_when_the_caller_gives_up(tmp_path: Path) -> None:
    engine = LocalEngine(Echo(), workers=2, timeout=5.0)
    try:
        pids = tmp_path / "pid"
        assert answers(engine, [("hang", pids), ("add", 0.0)]) == ["no answer within 5 s", 3.0]
        assert eventually(lambda: not is_running(int(pids.read_text())), 120)
        engine._timeout = None
        pids.unlink()
        running = engine.run([("hang", pids), ("add", 0.0)], STATE)
        assert next(running).result == 3.0
        assert eventually(lambda: pids.exists() and pids.read_text() != "", 120)
        running.close()
        assert eventually(lambda: not is_running(int(pids.read_text())), 120)
    finally:
        engine.close()
        engine.close()


def test_the_programs_large_tensors_lie_in_shared_memory() -> None:
    big = torch.arange(1 << 18, dtype=torch.float32)
    grey = torch.arange(1 << 20, dtype=torch.uint8).view(1024, 1, 1024).expand(-1, 3, -1)
    program = Echo()
    program.held = {"big": big, "again": big, "grey": grey, "small": big[:10], "parameter": torch.nn.Parameter(big)}
    data, blocks = wire.dump_program(program)
    assert len(blocks) == 3 and len(data) < 10_000
    held = wire.load_program(data, blocks).held
    assert held["big"] is held["again"] and held["grey"].stride() == grey.stride()
    for name, tensor in program.held.items():
        assert torch.equal(held[name], tensor) and type(held[name]) is type(tensor)
    engine = LocalEngine(program, workers=2)
    try:
        assert engine._process is not None
        assert answers(engine, [("held", "big"), ("held", "grey")]) == [float(big.sum()), float(grey.double().sum())]
        os.kill(engine._process.pid, signal.SIGKILL)  # and it finds them again when started anew
        assert eventually(lambda: not any(map(is_running, engine.worker_pids)), 120)
        assert answers(engine, [("held", "grey")] * 2) == [float(grey.double().sum())] * 2
    finally:
        engine.close()


def test_a_program_that_does_not_start_is_no_devices_fault() -> None:
    engine = LocalEngine(Broken(), workers=1)
    with pytest.raises(EngineFailed, match="no network here"):
        answers(engine, [("add", 0.0)])
    engine.close()


@pytest.mark.parametrize(("program", "said"), [(Asks(), "EOFError"), (Calls(), "returned non-zero exit status 1")])
def test_what_a_program_does_to_get_ready_is_its_own(program: Broken, said: str) -> None:
    engine = LocalEngine(program, workers=1)
    with pytest.raises(EngineFailed, match=said):
        answers(engine, [("add", 0.0)])
    engine.close()


def test_what_cannot_be_sent_is_bad_input() -> None:
    program = Echo()
    program.folder = lambda: None  # type: ignore[assignment]
    with pytest.raises(BadInput, match="top level of a module"):
        LocalEngine(program, workers=1)
    with pytest.raises(BadInput, match="at least 1"):
        LocalEngine(Echo(), workers=0)


ORPHANS = """
import sys, threading
from pathlib import Path
import torch
from strata.engines import LocalEngine
from tests.engines.programs import Echo
engine = LocalEngine(Echo(), workers=2)
folder = Path(sys.argv[1])
print(engine._process.pid, flush=True)
list(engine.run([("hang", folder / "a"), ("hang", folder / "b")], {"w": torch.ones(1)}))
"""


def test_workers_exit_within_5_seconds_of_the_parents_death_even_in_mid_task(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", ORPHANS, tmp_path], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    fork_server = int(parent.stdout.readline())
    marks = [tmp_path / "a", tmp_path / "b"]
    assert eventually(lambda: all(mark.exists() and mark.read_text() for mark in marks), 300)
    pids = [fork_server, *(int(mark.read_text()) for mark in marks)]
    assert all(map(is_running, pids))
    parent.kill()
    parent.wait()
    assert eventually(lambda: not any(map(is_running, pids)), 5)
    parent.stdout.close()
