from __future__ import annotations

import copy
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from strata.core.errors import BadInput
from strata.data import from_indices, iid
from strata.federation import RoundFailed, ServerOptimizer
from strata.methods import SLT
from strata.planning import plan
from strata.results.reading import read_number, read_run
from strata.runs import run, session
from strata.runs.metrics import METRIC_KEYS
from strata.training import COHORT, WIDEST, LocalTraining
from tests.federation import tiny
from tests.federation.tiny import bits, tiny_run


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reference") / "run"
    tiny_run(out)
    return out


def test_the_folder_holds_what_the_design_says(reference: Path) -> None:
    names = {path.name for path in reference.iterdir()} - {".lock"}
    assert names == {
        "config.json", "plan.json", "metrics.jsonl", "run.log", "checkpoint", "model.safetensors", "summary.json",
    }  # fmt: skip
    records = [json.loads(line) for line in (reference / "metrics.jsonl").read_text().splitlines()]
    assert [record["round"] for record in records] == list(range(tiny.ROUNDS))
    assert all(tuple(record) == METRIC_KEYS for record in records)
    assert records[0]["lr"] == 0.1 and records[-1]["lr"] == pytest.approx(0.01)
    assert all(0 <= record["accuracy"] <= 1 and record["peak_bytes"] > 0 for record in records)
    assert all(len(set(record["devices"])) == 4 and record["dropped"] == [] for record in records)
    config = json.loads((reference / "config.json").read_text())
    assert config["settings"]["method"]["name"] == "fd" and config["settings"]["seed"] == 0
    assert config["versions"]["torch"] == torch.__version__ and "commit" in config
    summary = json.loads((reference / "summary.json").read_text())
    assert summary["accuracy"] == records[-1]["accuracy"] and len(summary["per_class_accuracy"]) == tiny.CLASSES
    assert summary["upload_bytes"] == sum(record["upload_bytes"] for record in records)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_of_other_types_than_float32_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    model = copy.deepcopy(tiny.model()).to(dtype)
    kind = str(dtype).removeprefix("torch.")
    with pytest.raises(BadInput, match=rf"conv1.weight is {kind} and runs train in float32: give model.float\(\)"):
        run(model, tiny.data(), "fedavg", out=tmp_path / "run", rounds=1, devices=12, per_round=4, workers=0)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["fedavg", "small", "slt"])
def test_the_model_file_is_the_evaluated_model_in_the_plain_module_at_any_batch(name: str, tmp_path: Path) -> None:
    result = tiny_run(tmp_path / "run", name)
    model = tiny.TinyNet()
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    model.eval()
    test = tiny.data().test
    images = test.normalise(test.images)
    with torch.inference_mode():
        singly = torch.cat([model(image[None]) for image in images])
        accuracy = (singly.argmax(1) == test.labels).double().mean().item()
        loss = torch.nn.functional.cross_entropy(model(images), test.labels).item()
    assert accuracy == pytest.approx(result.accuracy, abs=1e-9) and loss == pytest.approx(result.loss, abs=1e-4)
    assert result.accuracy > 0.5 or name != "fedavg"  # it learns


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_number_of_workers_changes_no_bit(reference: Path, tmp_path: Path, workers: int) -> None:
    tiny_run(tmp_path / "run", workers=workers)
    assert bits(tmp_path / "run") == bits(reference)


def test_sums_over_lost_lines_are_marked(reference: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(reference, out)
    whole = json.loads((out / "summary.json").read_text())
    (out / "summary.json").unlink()
    lines = (out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (out / "metrics.jsonl").write_bytes(b"".join([lines[0].replace(b"{", b"z"), *lines[1:]]))
    result = tiny_run(out, resume=True)
    assert result.summary["partial"] == {"recorded_rounds": len(lines) - 1, "rounds": len(lines)}
    assert result.summary["upload_bytes"] == whole["upload_bytes"] - json.loads(lines[0])["upload_bytes"]
    assert "partial" not in whole and result.summary["model_sha256"] == whole["model_sha256"]
    assert any("the sums are of" in problem for problem in read_run(out).problems)
    with pytest.raises(BadInput, match="of some rounds only"):
        read_number(out / "summary.json", result.summary, "upload_bytes")


class Stop(Exception):
    pass


def stop_after(monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    """The run breaks off (as by an unforeseen error) when it has played this many rounds."""
    count = 0

    def counted(*arguments: Any) -> Any:
        nonlocal count
        if count == rounds:
            raise Stop
        count += 1
        return original(*arguments)

    original = session.play
    monkeypatch.setattr(session, "play", counted)


@pytest.mark.parametrize("every", [1, 4])
def test_resumed_or_not_changes_no_bit(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Stop):
        stop_after(patch, 5)
        tiny_run(tmp_path / "run", checkpoint_every=every)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 5
    tiny_run(tmp_path / "run", resume=True)
    assert bits(tmp_path / "run") == bits(reference)
    before = (tmp_path / "run" / "summary.json").read_bytes()
    tiny_run(tmp_path / "run", resume=True)  # finished: nothing to do
    assert (tmp_path / "run" / "summary.json").read_bytes() == before and bits(tmp_path / "run") == bits(reference)


@pytest.mark.parametrize(
    "options",
    [
        {"server": ServerOptimizer("adam", lr=0.05)},
        {"server": ServerOptimizer("momentum", lr=0.5), "weighted": True},
        {"name": "slt", "dropout": 0.3, "quorum": 3, "stragglers": "0.3:3", "deadline": 2.0},
        {"method": "early"},
    ],
    ids=["adam", "momentum", "slt with faults", "early stopping"],
)
def test_all_that_a_run_remembers_is_in_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    if options.get("method") == "early":
        from strata.methods import create
        from strata.planning import plan

        made = plan(
            tiny.graph(), batch_size=8, constraint=0.65, schedule="early-stopping", patience=1, accounting="paper",
            rounds=tiny.ROUNDS,
        )  # fmt: skip
        options = {"method": create("slt", tiny.graph(), plan=made), "validation": 0.2}
    tiny_run(tmp_path / "whole", **options)
    with monkeypatch.context() as patch, pytest.raises(Stop):
        stop_after(patch, 3)
        tiny_run(tmp_path / "run", **options)
    tiny_run(tmp_path / "run", resume=True, **options)
    assert bits(tmp_path / "run") == bits(tmp_path / "whole")


def test_slt_freezes_to_the_bit_and_sends_frozen_layers_once(tmp_path: Path) -> None:
    result = tiny_run(tmp_path / "run", "slt", devices=4)  # everyone takes part in every round
    steps = [record["step"] for record in result.metrics]
    assert steps == sorted(steps) and steps[-1] > 1
    sent = {}
    for record in result.metrics:
        sent.setdefault(record["step"], []).append((record["upload_bytes"], record["download_bytes"]))
    cut = tiny.method("slt").plan.cut(steps[-1])  # type: ignore[attr-defined]
    frozen = 4 * sum(int(np.prod(cut.shapes[name])) for name in cut.frozen)
    assert frozen > 0
    rounds_of_last = sent[steps[-1]]
    if len(rounds_of_last) > 1:  # in the step's later rounds each of the 4 devices has all that is frozen
        assert rounds_of_last[-1][1] == rounds_of_last[-1][0]
        assert rounds_of_last[0][1] > rounds_of_last[0][0]


def test_options_of_the_loop_work_with_every_method(tmp_path: Path) -> None:
    for name in ("fd", "slt", "small", "fedrolex", "heterofl", "fjord"):
        plain = tiny_run(tmp_path / f"{name}-plain", name, rounds=2)
        tuned = tiny_run(
            tmp_path / name, name, rounds=2, server=ServerOptimizer("momentum", lr=0.7), eval_every=2, bn="batch",
            training=LocalTraining(batch_size=8, proximal=0.1, mean=(0.3,) * 3, std=(0.15,) * 3),
        )  # fmt: skip
        assert tuned.summary["bn"] == "batch" and tuned.metrics[0]["accuracy"] is None
        assert tuned.summary["model_sha256"] != plain.summary["model_sha256"]


def test_a_method_by_its_name(reference: Path, tmp_path: Path) -> None:
    tiny_run(tmp_path / "run", method="fd", constraint=0.5)
    assert bits(tmp_path / "run") == bits(reference)
    result = tiny_run(tmp_path / "slt", method="slt", budget="40 KiB")
    assert result.summary["method"] == "slt"


def test_a_plans_batches_are_taken_and_larger_ones_refused(tmp_path: Path) -> None:
    graph = tiny.graph()
    method = SLT(plan(graph, graph.input_shape, 6, budget="40 KiB", rounds=2, micro_batch=3))
    result = tiny_run(tmp_path / "run", method=method, rounds=2, training=None)
    used = json.loads((tmp_path / "run" / "config.json").read_text())["settings"]["training"]
    assert (used["batch_size"], used["micro_batch"]) == (6, 3)
    assert result.summary["peak_bytes"] <= 1.001 * 40 * 1024
    with pytest.raises(BadInput, match="the plan counts 3 samples at a time and training takes 4"):
        tiny_run(tmp_path / "larger", method=method, rounds=2, training=LocalTraining(batch_size=4))
    assert not (tmp_path / "larger").exists()


def test_bad_input_is_one_sentence_and_leaves_no_folder(tmp_path: Path) -> None:
    out = tmp_path / "run"
    lists = [[0, 1], [], [2]]
    for options, says in (
        ({"per_round": 20}, "20 devices per round cannot be chosen from 12"),
        ({"partition": lists, "devices": None, "per_round": 1}, "device 1 of the partition has no samples"),
        ({"partition": [[0], [1]], "devices": 3, "per_round": 1}, "over 2 devices, not 3"),
        ({"devices": 500}, "would leave devices empty"),
        ({"partition": "zipf"}, "no partition 'zipf'"),
        ({"rounds": 0}, "at least 1 round"),
        ({"bn": "running"}, "bn is one of"),
        ({"stragglers": "half"}, "SHARE:SLOWDOWN"),
        ({"stragglers": "0.2:3"}, "give a deadline"),
        ({"deadline": float("inf")}, "the deadline is a number"),
        ({"norm_bound": float("inf")}, "the norm bound must be a number above 0"),
        ({"devices": 0, "dp_noise": 1.0, "dp_clip": 1.0}, "at least 1 device, not 0"),
        ({"quorums": 3}, "no option quorums"),
        ({"workers": -1}, "workers are 0"),
        ({"checkpoint_every": 0}, "every 1 or more"),
        ({"seed": -1}, "seed"),
        ({"method": "fd"}, "fd needs to know what a device can hold"),
        ({"method": "magic", "constraint": 0.5}, "no method 'magic'"),
        ({"constraint": 0.5}, "already knows what devices can hold"),
        ({"name": "slt", "method": tiny.method("slt", rounds=5)}, "for 5 rounds and the run for 6"),
    ):
        with pytest.raises(BadInput, match=says):
            tiny_run(out, **options)
        assert not (out / "config.json").exists()
    from dataclasses import replace

    from strata.runs import run

    with pytest.raises(BadInput, match="the model has 3 outputs and tiny has 4 classes"):
        run(tiny.model(), replace(tiny.data(), classes=4), tiny.method(), out=out)
    with pytest.raises(BadInput, match="cannot write"):
        tiny_run(Path("/proc/strata/run"))


def test_resuming_with_other_settings_lists_them(reference: Path) -> None:
    before = bits(reference)
    with pytest.raises(BadInput, match="per_round was 4 and is now 3; seed was 0 and is now 1"):
        tiny_run(reference, resume=True, per_round=3, seed=1)
    with pytest.raises(BadInput, match="already holds a run"):
        tiny_run(reference)
    assert bits(reference) == before


def test_ctrl_c_saves_and_says_how_to_resume(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = 0
    original = session.play

    def interrupted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(session, "play", interrupted)
        tiny_run(tmp_path / "run", checkpoint_every=100, progress=True)
    assert "stopped after 3 of 6 rounds; continue with: strata run --resume" in capsys.readouterr().err
    tiny_run(tmp_path / "run", resume=True)
    assert bits(tmp_path / "run") == bits(reference)


def test_ctrl_c_inside_a_checkpoint_waits_until_it_is_written(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.replace

    def interrupted(source: Any, target: Any) -> None:
        if "round-00000002.safetensors" in str(target):
            os.kill(os.getpid(), signal.SIGINT)
        original(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", interrupted)
        tiny_run(tmp_path / "run")
    assert (tmp_path / "run" / "checkpoint" / "round-00000002.json").exists()
    tiny_run(tmp_path / "run", resume=True)
    assert bits(tmp_path / "run") == bits(reference)


def test_a_failed_round_keeps_what_is_done(tmp_path: Path) -> None:
    with pytest.raises(RoundFailed, match="rounds are saved in"):
        tiny_run(tmp_path / "run", dropout=0.97, quorum=4, checkpoint_every=50)
    assert (tmp_path / "run" / "checkpoint" / "round-00000000.json").exists()


def test_server_memory_is_flat_in_the_size_of_the_fleet(tmp_path: Path) -> None:
    """What the run keeps between rounds, measured as the size of its checkpoint and the largest allocation."""
    import tracemalloc

    sizes = {}
    tiny_run(tmp_path / "warm", "slt", rounds=3)
    for devices in (100, 10_000, 100_000):
        tracemalloc.start()
        tiny_run(tmp_path / str(devices), "slt", rounds=3, devices=devices, per_round=10, partition="lazy:8")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        checkpoint = (tmp_path / str(devices) / "checkpoint" / "round-00000003.safetensors").stat().st_size
        sizes[devices] = (peak, checkpoint)
    assert sizes[100_000][0] < 1.1 * sizes[100][0] + 200_000
    assert sizes[100_000][1] < sizes[100][1] + 1000


def test_cohorts_give_the_reference_up_to_rounding_and_are_recorded(tmp_path: Path) -> None:
    together, alone = tiny_run(tmp_path / "together", rounds=2), tiny_run(tmp_path / "alone", rounds=2, exact=True)
    settings = [json.loads((run.out / "config.json").read_text())["settings"] for run in (together, alone)]
    assert settings[0]["vectorised"] == {"devices": COHORT, "widest": WIDEST} and settings[1]["vectorised"] is None
    for record, reference in zip(together.metrics, alone.metrics, strict=True):
        same = ("round", "devices", "dropped", "upload_bytes", "download_bytes", "train_flops", "peak_bytes")
        assert all(record[key] == reference[key] for key in same)
        assert record["train_loss"] == pytest.approx(reference["train_loss"], rel=1e-4)
    weights, reference_weights = together.state_dict(), alone.state_dict()
    assert any(not torch.equal(weights[name], reference_weights[name]) for name in weights), "cohorts were not used"
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, reference_weights[name], rtol=1e-3, atol=1e-4)


def test_a_partition_of_numbers_does_not_go_with_a_validation_split(tmp_path: Path) -> None:
    """The split renumbers the training samples: the numbers given would silently mean others."""
    halves = [range(0, 120), range(120, 240)]
    for partition in (halves, from_indices(halves, 240)):
        with pytest.raises(BadInput, match="renumbers the training samples"):
            tiny_run(tmp_path / "run", devices=None, partition=partition, validation=0.1, per_round=2)
    assert not (tmp_path / "run").exists()


def test_a_partition_of_other_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="with 240 training samples indices should be 0 to 239"):
        tiny_run(tmp_path / "run", devices=None, partition=iid(1000, 2, 0), per_round=2)
    assert not (tmp_path / "run").exists()
