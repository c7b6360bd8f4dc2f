"""Real clusters of real processes: a head with two CPUs, and further nodes that join and are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from strata.cli import main
from strata.core.errors import BadInput
from strata.engines import EngineFailed
from strata.engines.ray import Ray
from strata.engines.ray.packing import pack, unpack
from strata.federation.jobs import cuts_of
from strata.graph import Cut
from strata.runs.config import RunConfig
from strata.runs.launch import load_data, make_method, make_model, make_training, split_data
from strata.runs.workers import make_engine
from tests.engines.programs import Broken, Echo
from tests.engines.ray_programs import Held, Located
from tests.engines.test_local import answers, eventually, is_running
from tests.federation import tiny

pytest.importorskip("ray")
DIGITS = ["run", "--data", "digits", "--model", "tests.engines.ray_programs:make", "--method", "slt", "--constraint",
          "0.75", "--devices", "10", "--per-round", "4", "--rounds", "3", "--quiet"]  # fmt: skip
ON_DEATH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 3}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 2, "num_gpus": 1, "include_dashboard": False, "_system_config": ON_DEATH}  # the GPU is a number
    cluster = started(lambda: Cluster(initialize_head=True, head_node_args=head))
    yield cluster
    import ray

    ray.shutdown()
    cluster.shutdown()


def started(start: Callable[[], Any]) -> Any:
    """Ray gives its own processes 30 seconds, which other tests can use up: tried again."""
    for _ in range(4):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
    return start()


def engine_on(cluster: Any, program: Any, workers: int | None = None, gpus: float = 0.0, **options: Any) -> Any:
    from strata.engines.ray.engine import RayEngine

    return RayEngine(program, Ray(cluster.address, gpus), workers, **options)


def gather(engine: Any, count: int) -> None:
    """Until this many workers are ready."""
    end = time.monotonic() + 300
    while sum(member.is_ready for member in engine._pool.members) < count:
        assert time.monotonic() < end
        engine._pool.adjust()
        for member in engine._done(engine._pool):
            engine._pool.advance(member)


class TestWorkers:
    @pytest.fixture(scope="class")
    @staticmethod
    def engine(cluster: Any) -> Iterator[Any]:
        program = Located()
        grey = torch.arange(1 << 20, dtype=torch.uint8).view(1024, 1, 1024).expand(-1, 3, -1)
        program.held = {"big": torch.arange(1 << 18, dtype=torch.float32), "grey": grey}
        engine = engine_on(cluster, program)
        yield engine
        engine.close()
        engine.close()

    def test_every_job_is_answered_with_this_rounds_state(self, engine: Any) -> None:
        jobs = [("add", float(n)) for n in range(7)]
        assert answers(engine, jobs) == [n + 3.0 for n in range(7)]
        assert answers(engine, jobs, {"w": torch.tensor([10.0, 0.5])}) == [n + 10.5 for n in range(7)]
        assert answers(engine, []) == []
        assert answers(engine, [("add", 1.0), ("raise", "bad device")]) == [4.0, "ValueError: bad device"]

    def test_workers_are_single_threaded_and_hold_the_data(self, engine: Any) -> None:
        grey = float(torch.arange(1 << 20, dtype=torch.uint8).double().sum()) * 3
        assert answers(engine, [("threads",), ("held", "big"), ("held", "grey")]) == [1, (1 << 18) * 131071.5, grey]

    def test_a_killed_worker_is_replaced_and_its_job_tried_again(self, engine: Any, tmp_path: Path) -> None:
        jobs = [("add", 0.0), ("die once", tmp_path / "mark"), ("add", 1.0), ("add", 2.0)]
        assert answers(engine, jobs) == [3.0, "survived", 4.0, 5.0]

    def test_a_job_that_kills_every_worker_is_given_up(self, engine: Any) -> None:
        assert answers(engine, [("add", 0.0), ("die",), ("add", 1.0)]) == [
            3.0, "its worker process was killed 2 times", 4.0,
        ]  # fmt: skip

    def test_idle_workers_killed_between_rounds_cost_no_job_a_try(self, engine: Any, tmp_path: Path) -> None:
        marks = [tmp_path / "a", tmp_path / "b"]  # both workers at once: each waits for the other's mark
        answers(engine, [("wait", *marks), ("wait", *reversed(marks))])
        pids = set(answers(engine, [("pid",)] * 20))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            assert eventually(lambda pid=pid: not is_running(pid), 120)
        mark = tmp_path / "mark"
        assert answers(engine, [("add", 0.0), ("die once", mark)]) == [3.0, "survived"]  # one death is still allowed

    def test_a_hanging_job_ends_at_the_timeout(self, engine: Any, tmp_path: Path) -> None:
        engine._timeout = 5.0
        try:
            assert answers(engine, [("hang", tmp_path / "pid")]) == ["no answer within 5 s"]
        finally:
            engine._timeout = None
        assert eventually(lambda: not is_running(int((tmp_path / "pid").read_text())), 120)


def test_leaving_a_cluster_that_others_started_does_not_end_it(cluster: Any) -> None:
    import ray

    first = engine_on(cluster, Echo(), 1)
    assert answers(first, [("add", 0.0)]) == [3.0]
    pid = answers(first, [("pid",)])[0]
    first.close()
    assert not ray.is_initialized() and eventually(lambda: not is_running(pid), 120)
    assert cluster.head_node.remaining_processes_alive()
    second = engine_on(cluster, Located(), gpus=0.5)  # and GPU shares are counted: 2 CPUs, 1 GPU
    assert answers(second, [("gpus",), ("add", 0.0)]) == [1, 3.0]
    assert second._connection.capacity(0.5) == 2 and second._connection.capacity(0.6) == 1
    second.close()
    with pytest.raises(BadInput, match="no node with 1 CPU and 2 GPU"):
        engine_on(cluster, Echo(), gpus=2)


def test_a_cluster_that_others_fill_is_not_waited_for_without_end(cluster: Any) -> None:
    first = engine_on(cluster, Echo())
    second = engine_on(cluster, Echo(), patience=2.0)  # in the same process: one connection for both
    gather(first, 2)  # both CPUs are taken
    with pytest.raises(EngineFailed, match="had room for a worker in 2 s"):
        answers(second, [("add", 0.0)])
    first.close()
    second.close()


def test_a_program_that_does_not_start_is_no_devices_fault(cluster: Any) -> None:
    engine = engine_on(cluster, Broken(), 1)
    with pytest.raises(EngineFailed, match="no network here"):
        answers(engine, [("add", 0.0)])
    engine.close()


def test_a_node_with_the_data_loads_it_and_only_what_cuts_keep_travels(cluster: Any) -> None:
    config = RunConfig.of(model="tests.engines.ray_programs:make", method="fd", constraints=(0.5,), rounds=1)
    data = load_data(config)
    model = make_model(config, data)
    wrong = RunConfig.of(data="cifar10", data_dir="/nowhere")
    sizes = []
    for asked in (config, wrong):
        engine: Any = make_engine(
            model, data, make_training(config, data), 1, ray=Ray(cluster.address),
            source=lambda asked=asked: split_data(asked, load_data(asked)),
        )  # fmt: skip
        try:
            from strata.federation.jobs import CohortJob, FinishJob, TrainJob
            from strata.graph import ChannelGraph

            method = make_method(config, ChannelGraph(model, data.input_shape))
            tasks = method.assign(0, [0, 1, 2])
            jobs = [TrainJob(task, torch.arange(8).numpy(), 0.1, 0) for task in (*tasks, tasks[0])]
            state = model.state_dict()
            outcomes = list(engine.run([*jobs, CohortJob(tuple(jobs[:2])), FinishJob(tasks[0].cut, 0)], state))
            assert [one.reason for one in outcomes] == [None] * 6
            kept = {task.cut.hash: task.cut.extract(state) for task in tasks}
            expected = sum(t.numel() * t.element_size() for part in kept.values() for t in part.values())
            assert len(kept) == 3 and engine.bytes_put == expected  # each once, though five jobs use the first
            sizes.append(len(engine._pool._sent))
        finally:
            engine.close()
    assert sizes == [0, 1]  # the training images, the only large tensor


def test_a_node_that_joins_is_used_and_one_that_is_killed_in_mid_round_costs_no_bit(
    cluster: Any, tmp_path: Path
) -> None:
    tiny.tiny_run(tmp_path / "local", exact=True)
    head = cluster.head_node.node_id
    engine = engine_on(cluster, Located())
    marks = [tmp_path / name for name in ("first", "second", "third")]
    with ThreadPoolExecutor(1) as thread:
        jobs = [("wait", marks[0], marks[2]), ("wait", marks[1], marks[2]), ("mark", marks[2])]
        running = thread.submit(answers, engine, jobs)  # two wait on the head's two CPUs for the third
        assert eventually(lambda: marks[0].exists() and marks[1].exists(), 300)
        second = started(lambda: cluster.add_node(num_cpus=1))
        assert running.result(300) == [head, head, second.node_id]
    engine.close()

    program = Held(tiny.model(), (3, tiny.SIZE, tiny.SIZE), tiny.data().train, {"test": tiny.data().test},
                   tiny.training(), folder=tmp_path)  # fmt: skip
    engine = engine_on(cluster, program, cuts=cuts_of, shared=(Cut,))
    gather(engine, 3)  # a round has four jobs: each of the three gets one at once
    (tmp_path / second.node_id).touch()
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(tiny.tiny_run, tmp_path / "ray", exact=True, engine=engine)
        assert eventually((tmp_path / "began").exists, 300)
        cluster.remove_node(second, allow_graceful=False)
        running.result(300)
    engine.close()
    assert tiny.bits(tmp_path / "local") == tiny.bits(tmp_path / "ray")


def marked(mark: str) -> list[int]:
    """The processes that have it in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes() and is_running(int(path.parent.name)):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def listening(pids: list[int]) -> set[str]:
    """The addresses, as /proc says them, on which these processes take connections."""
    sockets = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(descriptor))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(fields[1].split(":")[0])
    return found


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def test_without_an_address_a_cluster_is_started_and_ended_and_a_run_may_change_its_engine(tmp_path: Path) -> None:
    mark, digits = f"STRATA_TEST={tmp_path}", [*DIGITS, "--rounds", "12"]
    nowhere = {"RAY_ADDRESS": "127.0.0.1:1", "STRATA_TEST": str(tmp_path)}  # it does not go where others point
    (tmp_path / "safetensors.py").write_text("raise RuntimeError('the current folder is no place for packages')")
    own = subprocess.Popen(
        [sys.executable, "-m", "strata", *digits, "--engine", "ray", "--workers", "1", "--out", "two"], cwd=tmp_path,
        env={**os.environ, **nowhere, "PYTHONPATH": str(Path(__file__).parents[2])}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert eventually(lambda: (tmp_path / "two/metrics.jsonl").exists() or own.poll() is not None, 300)
    assert own.poll() is None and len(marked(mark)) > 3, own.communicate()[1]
    assert LOOPBACK >= listening(marked(mark)) != set()  # nobody else can reach it
    os.killpg(own.pid, signal.SIGINT)  # as a terminal does
    assert own.communicate(timeout=300)[0] == "" and own.returncode == 130
    assert eventually(lambda: not marked(mark), 120)
    # rounds on Ray and rounds here: the bits of rounds here alone (with --exact: the test of a killed node)
    assert main([*digits, "--workers", "0", "--out", str(tmp_path / "one")]) == 0
    assert main(["run", "--resume", str(tmp_path / "two"), "--workers", "0", "--quiet"]) == 0
    assert tiny.bits(tmp_path / "one") == tiny.bits(tmp_path / "two")


def test_tensors_are_known_by_what_is_in_them() -> None:
    values = torch.arange(1 << 19, dtype=torch.float32)
    data, arrays = pack({"a": values, "b": values.clone(), "c": values.to(torch.bfloat16), "d": values.view(2, -1)})
    assert len(arrays) == 3 and len(data) < 5000  # a and b are one
    found = unpack(data, arrays)
    assert torch.equal(found["b"], values) and torch.equal(found["c"], values.to(torch.bfloat16))
    assert found["d"].shape == (2, 1 << 18)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ray-address", "127.0.0.1:9"], "give that too"),
        (["--engine", "ray", "--ray-address", "ray://there:10001"], "HOST:PORT"),
        (["--engine", "ray", "--ray-address", "there"], "HOST:PORT"),
        (["--engine", "ray", "--ray-gpus", "1.5"], "whole number"),
        (["--engine", "ray", "--ray-gpus", "0.5"], "belong together"),
        (["--engine", "ray", "--workers", "0"], "at least 1 worker"),
    ],
)
def test_bad_options_are_one_sentence(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*DIGITS, *options, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and not (tmp_path / "run").exists()


def test_an_address_where_nobody_answers_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.monotonic()
    assert main([*DIGITS, "--engine", "ray", "--ray-address", "127.0.0.1:1", "--out", str(tmp_path / "run")]) == 2
    assert "nobody answers at 127.0.0.1:1" in capsys.readouterr().err and time.monotonic() - begin < 120
    assert not (tmp_path / "run").exists()


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from strata.engines.ray.engine import RayEngine

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BadInput, match=r"pip install 'strata-fl\[ray\]'"):
        RayEngine(Echo(), Ray(), 1)
