"""Training in secure sums, with real devices in this process: the same as in the clear, and whatever goes wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from strata.cli import main
from strata.core.errors import BadInput
from strata.engines.base import Outcome
from strata.federation.privacy import Privacy, PrivateSum, Reach
from strata.federation.summed import Summed, SumOfChanges
from strata.fleet.device import work
from strata.fleet.device.work import PreparedDevice
from strata.fleet.protocol import codec
from strata.fleet.protocol.failures import failure, sentence
from strata.fleet.protocol.secure_sum import error_bound, step_of
from strata.fleet.protocol.settings import DeviceSettings, RunSettings, Terms
from strata.fleet.server.engine import FlowerEngine
from strata.fleet.server.run import run_on_fleet
from strata.fleet.server.secure_checks import check_fleet, secure_terms
from strata.fleet.server.secure_training import SecureTerms
from strata.methods import FD, FedAvg, FjORD, HeteroFL
from strata.methods.aggregate import ClassRows, MeanOverAll, RunningMean
from strata.methods.base import Task
from strata.runs.config import RunConfig
from strata.training import Update
from tests.fleet import nets
from tests.fleet.inprocess import Answering, Grid, device, fleet, graph, job, prepared, state

pytestmark = pytest.mark.usefixtures("identity")

TERMS = SecureTerms(fewest=3, clip=1.0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that do not train, but change what they got a little: all in one way, and each in its own."""

    def train(workspace: Any, task: Task, tensors: Any, *rest: Any, **more: Any) -> Update:
        draw = torch.Generator().manual_seed(1000 * task.round + task.device)
        same = torch.Generator().manual_seed(task.round)
        made = {}
        for name in task.cut.trained:
            shape = tensors[name].shape
            change = 0.01 * torch.randn(shape, generator=same) + 0.01 * torch.randn(shape, generator=draw)
            made[name] = tensors[name] + change
        return Update(task.round, task.device, made, 25, 2.0, 1000 + task.device, task.cut.hash)

    monkeypatch.setattr(work, "train_device", train)


Answers = Callable[[PreparedDevice], Answering]


def secure_fleet(folder: Path, devices: int, others: dict[int, Answers] | None = None, **more: Any) -> FlowerEngine:
    """`others`: those that answer otherwise than honest ones."""
    names = [f"d{number}" for number in range(devices)]
    made = [prepared(folder, name, number) for number, name in enumerate(names)]
    grid = Grid({10 + number: (others or {}).get(number, device)(one) for number, one in enumerate(made)})
    return fleet(grid, names, **{"secure": TERMS, "deadline": 0.3, **more})


def silent_from(stage: str) -> Answers:
    """Answers until this stage of a sum, and never again."""

    def answers(made: PreparedDevice) -> Answering:
        return lambda data: None if stage_of(data) == stage else made.answer(codec.decode(data), 1)

    return answers


def stage_of(data: bytes) -> str:
    meta = codec.decode(data).meta
    return str(meta["stage"] if meta["what"] == "secure" else meta["what"])


def changing(stage: str, how: Callable[[codec.Packet], bytes]) -> Answers:
    def answers(made: PreparedDevice) -> Answering:
        def answer(data: bytes) -> bytes:
            said = made.answer(codec.decode(data), 1)
            return how(codec.decode(said)) if stage_of(data) == stage else said

        return answer

    return answers


def run(engine: FlowerEngine, devices: int, round: int = 0) -> dict[int, Outcome]:
    found = list(engine.run([job(round, number) for number in range(devices)], state()))
    assert sorted(outcome.index for outcome in found) == list(range(devices))
    return {outcome.index: outcome for outcome in found}


def totals(outcomes: dict[int, Outcome]) -> list[SumOfChanges]:
    found = [outcome.result.total for outcome in outcomes.values() if isinstance(outcome.result, Summed)]
    return [total for total in found if total is not None]


def test_the_sum_is_that_of_the_updates_in_the_clear(tmp_path: Path) -> None:
    grid = Grid({10 + number: device(prepared(tmp_path, f"d{number}", number)) for number in range(3)})
    clear = run(fleet(grid, [f"d{number}" for number in range(3)]), 3)
    secure = run(secure_fleet(tmp_path, 3), 3)
    (total,) = totals(secure)
    assert total.devices == 3 and secure[0].result.total is total  # with the first of its devices
    cut = job().task.cut
    received = cut.extract(state())
    for name in cut.trained:
        expected = sum(outcome.result.tensors[name].double() - received[name].double() for outcome in clear.values())
        assert float((total.changes[name] - expected).abs().max()) < error_bound(3, 1.0)
    losses = [outcome.result.loss for outcome in clear.values()]
    assert total.loss == pytest.approx(sum(losses) / 3, abs=64 * error_bound(3, 1.0))
    assert {n: outcome.result.peak_bytes for n, outcome in secure.items()} == {
        n: outcome.result.peak_bytes for n, outcome in clear.items()
    }


def test_the_same_updates_have_the_same_sum_under_other_keys(quick: None, tmp_path: Path) -> None:
    one, other = (totals(run(secure_fleet(tmp_path, 3), 3))[0] for _ in range(2))
    assert all(torch.equal(one.changes[name], other.changes[name]) for name in one.changes)
    assert not list(tmp_path.glob("*/secure_sum.json"))  # no secret is left behind


def test_the_server_is_sent_nothing_but_masked_values(quick: None, tmp_path: Path) -> None:
    """All that came from a device in a round, and all that was sent to it: no value of its update, no loss."""
    heard: list[codec.Packet] = []

    def recorded(packet: codec.Packet) -> bytes:
        heard.append(packet)
        return codec.encode(packet.meta, packet.tensors())

    run(secure_fleet(tmp_path, 3, {1: changing("train", recorded)}), 3)
    (packet,) = heard
    assert set(packet.meta) == {"token", "what", "round", "device", "cut", "samples", "peak_bytes", "holds", "wrong"}
    assert [entry.name for entry in packet.entries] == ["masked"]


@pytest.mark.parametrize("stage", ["keys", "shares", "train", "reveal"])
def test_a_device_that_is_lost_costs_its_own_update(quick: None, tmp_path: Path, stage: str) -> None:
    said: list[str] = []
    outcomes = run(secure_fleet(tmp_path, 4, {1: silent_from(stage)}, say=said.append), 4)
    (total,) = totals(outcomes)
    if stage == "reveal":  # what it sent is in the sum
        assert total.devices == 4 and isinstance(outcomes[1].result, Summed)
        assert any(text.startswith("d1, reveal of a sum: no answer") for text in said)
    else:
        assert total.devices == 3 and str(outcomes[1].reason).startswith("no answer within 0.")
        assert outcomes[1].sent == (stage == "train")


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ("keys", "2 of 4 devices gave their keys, and it takes at least 3"),
        ("shares", "2 of 4 devices shared their secrets, and it takes at least 3"),
        ("train", "2 of 4 devices sent masked values, and it takes at least 3"),
        ("reveal", "2 of the 3 devices that it takes revealed their shares"),
    ],
)
def test_with_too_few_left_the_sum_is_given_up(quick: None, tmp_path: Path, stage: str, said: str) -> None:
    log: list[str] = []
    engine = secure_fleet(tmp_path, 4, {1: silent_from(stage), 2: silent_from(stage)}, say=log.append)
    outcomes = run(engine, 4)
    assert not totals(outcomes)
    for number in (0, 3):
        result = outcomes[number].result
        assert said in str(outcomes[number].reason or result.lost)
        assert (result is not None) == (stage in ("train", "reveal"))  # else it has not worked
    assert any(said in text for text in log)
    for node in list(engine.messenger._grid.nodes):  # type: ignore[attr-defined]  # they are there again
        name = f"d{node - 10}"
        engine.messenger._grid.nodes[node] = device(prepared(tmp_path, name, node - 10))  # type: ignore[attr-defined]
    engine.messenger.open.clear()
    assert [total.devices for total in totals(run(engine, 4, 1))] == [4]


def test_a_spoilt_sum_is_made_anew_in_small_ones(quick: None, tmp_path: Path) -> None:
    log: list[str] = []
    engine = secure_fleet(tmp_path, 6, {1: changing("train", spoilt)}, say=log.append)
    first = run(engine, 6)
    assert not totals(first) and "one of them sent values of its own" in first[0].result.lost
    second = run(engine, 6)
    assert [total.devices for total in totals(second)] == [3]
    assert sum(outcome.result.lost is None for outcome in second.values()) == 3
    third = run(engine, 6, 1)
    assert [total.devices for total in totals(third)] == [3]  # those of the good sum, together again
    assert third[1].result.lost is not None
    assert all(text.startswith("a sum over d") for text in log) and len(log) == 3


def test_a_mean_far_from_the_usual_is_not_used(quick: None, tmp_path: Path) -> None:
    def large(packet: codec.Packet) -> bytes:
        return codec.encode(packet.meta, {"masked": packet.tensors()["masked"] + (1 << 20)})

    engine = secure_fleet(tmp_path, 3, secure=replace(TERMS, factor=5.0))
    for round in range(2):
        assert totals(run(engine, 3, round))
    engine.messenger._grid.nodes[10] = changing("train", large)(prepared(tmp_path, "d0", 0))  # type: ignore[attr-defined]
    lost = run(engine, 3, 2)[2].result.lost
    assert "times the usual one, above the bound of 5" in lost and "its sum is not used" in lost


# --- several sums, compared ---------------------------------------------------------------------------------------

COMPARED = replace(TERMS, factor=5.0)


def poisoned(packet: codec.Packet) -> bytes:
    """Nearly the clip in every value, on top of a change that is near zero."""
    return codec.encode(packet.meta, {"masked": packet.tensors()["masked"] + 2**21 - 2**17})


def spoilt(packet: codec.Packet) -> bytes:
    masked = packet.tensors()["masked"]
    rubbish = np.random.default_rng(0).integers(-(2**31), 2**31, masked.numel(), dtype=np.int32)
    return codec.encode(packet.meta, {"masked": torch.from_numpy(rubbish)})


def heard(outcomes: dict[int, Outcome]) -> set[int]:
    return {n for n, one in outcomes.items() if one.reason is None and one.result.lost is None}


def test_compared_sums_of_honest_devices_are_that_of_all(quick: None, tmp_path: Path) -> None:
    (whole,) = totals(run(secure_fleet(tmp_path, 12), 12))
    parts = totals(run(secure_fleet(tmp_path, 12, secure=COMPARED), 12))
    assert [part.devices for part in parts] == [4, 4, 4]
    for name in whole.changes:
        together = sum(part.changes[name] for part in parts)
        assert torch.allclose(together, whole.changes[name], rtol=0, atol=1e-12)  # the same steps, added otherwise
    assert sum(4 * part.loss for part in parts) / 12 == pytest.approx(whole.loss)


def test_poison_stands_out_and_who_it_comes_from_is_found(quick: None, tmp_path: Path) -> None:
    log: list[str] = []
    engine = secure_fleet(tmp_path, 12, {5: changing("train", poisoned)}, secure=COMPARED, say=log.append)
    first = run(engine, 12)
    assert len(heard(first)) == 8 and 5 not in heard(first)
    assert "times as far from the others as is usual among them" in first[5].result.lost
    again = run(engine, 12)  # the same round: from sums over a, b, c and a, b, d one could tell how c differs from d
    assert {one.reason for one in again.values()} == {
        "it was in a sum of this round before: from two sums one could tell what it sent"
    }
    last = first
    for round in range(1, 5):
        last = run(engine, 12, round)
        assert 5 not in heard(last)
    assert heard(last) == set(range(12)) - {5}
    assert "left out of this run's sums for a while" in str(last[5].reason)
    assert [text for text in log if text.startswith("d5 was alone in a sum")] == [
        "d5 was alone in a sum with devices whose sums are good, and it was bad once more: left out of the next 8"
    ]


def test_those_whose_sums_came_to_nothing_are_summed_again(quick: None, tmp_path: Path) -> None:
    """Two of three sums are spoilt; in the round's later sums some of their honest devices are heard."""
    spoiling = {1: changing("train", spoilt), 2: changing("train", spoilt)}
    outcomes = run(secure_fleet(tmp_path, 12, spoiling, secure=COMPARED), 12)
    assert not heard(outcomes) & set(spoiling)
    assert {outcomes[number].result.times for number in heard(outcomes)} == {1, 2}
    assert sum(total.devices for total in totals(outcomes)) == len(heard(outcomes)) == 8


def test_a_round_without_devices_has_no_sums(tmp_path: Path) -> None:
    """Differential privacy may sample none."""
    assert run(secure_fleet(tmp_path, 1, secure=COMPARED), 0) == {}


def test_who_is_lost_with_its_keys_is_in_no_group(quick: None, tmp_path: Path) -> None:
    gone = {number: silent_from("keys") for number in range(4)}
    outcomes = run(secure_fleet(tmp_path, 13, gone, secure=COMPARED), 13)
    assert sorted(total.devices for total in totals(outcomes)) == [3, 3, 3]


def test_who_lies_in_its_shares_is_in_no_further_sum(quick: None, tmp_path: Path) -> None:
    def other(packet: codec.Packet) -> bytes:
        seeds = dict.fromkeys(packet.meta["seeds"], "AQAAAAAA")
        return codec.encode({**packet.meta, "seeds": seeds})

    log: list[str] = []
    engine = secure_fleet(tmp_path, 4, {3: changing("reveal", other)}, say=log.append)
    assert [total.devices for total in totals(run(engine, 4))] == [4]
    assert log == ["d3 revealed another share than it was dealt: it is in no further sum of this run"]
    outcomes = run(engine, 4, 1)
    assert [total.devices for total in totals(outcomes)] == [3]
    assert "left out of this run's sums" in str(outcomes[3].reason)


@pytest.mark.parametrize(
    ("stage", "how", "reason"),
    [
        ("keys", lambda packet: codec.encode({**packet.meta, "token": "x"}), "answered another message"),
        ("keys", lambda packet: codec.encode({**packet.meta, "keys": 3}), "there are not two public keys"),
        ("shares", lambda packet: b"rubbish", "its answer cannot be read: .*"),
        ("train", lambda packet: codec.encode({**packet.meta, "device": 2}, packet.tensors()), ".*another device's.*"),
        ("train", lambda packet: codec.encode(packet.meta, {"masked": torch.zeros(3)}), "sent 12 bytes of tensors.*"),
        (
            "train",
            lambda packet: codec.encode({**packet.meta, "wrong": "all"}, packet.tensors()),
            "a list of devices.*",
        ),
        ("train", lambda packet: codec.encode({**packet.meta, "round": 7}, packet.tensors()), "not masked values.*"),
        ("train", lambda packet: codec.encode({"what": "failure", "kind": "late"}), sentence("late")),
    ],
)
def test_rubbish_costs_its_own_update(quick: None, tmp_path: Path, stage: str, how: Any, reason: str) -> None:
    outcomes = run(secure_fleet(tmp_path, 4, {1: changing(stage, how)}), 4)
    assert [total.devices for total in totals(outcomes)] == [3]
    assert re.fullmatch(reason, str(outcomes[1].reason))


def test_cuts_that_would_single_a_device_out_are_not_summed(quick: None, tmp_path: Path) -> None:
    engine = secure_fleet(tmp_path, 5)
    jobs = [job(0, number, frozen=2 if number < 3 else 3) for number in range(5)]
    outcomes = {outcome.index: outcome for outcome in engine.run(jobs, state())}
    assert [total.devices for total in totals(outcomes)] == [3]
    for number in (3, 4):
        assert outcomes[number].reason == "2 of its kind in this round, and a sum is over at least 3 devices"
        assert not outcomes[number].sent


def test_a_device_can_refuse_to_train_in_the_clear(quick: None, tmp_path: Path) -> None:
    made = prepared(tmp_path, "d0")
    careful = replace(made, settings=replace(made.settings, only_sums=4))

    def answer(data: bytes) -> bytes:
        try:
            return careful.answer(codec.decode(data), 1)
        except BadInput:
            return failure("refused")  # as its process says

    outcomes = run(secure_fleet(tmp_path, 4, {0: lambda _: answer}), 4)
    assert [total.devices for total in totals(outcomes)] == [
        3
    ]  # of four devices three are enough, and not for this one
    for what in ("train", "statistics", "evaluate"):
        with pytest.raises(BadInput, match="in the clear"):
            careful.answer(codec.decode(codec.encode({"what": what})), 1)
    with pytest.raises(BadInput, match="3 to 1000 devices, not 2"):
        replace(made.settings, only_sums=2)


# --- with differential privacy ------------------------------------------------------------------------------------


def test_with_differential_privacy_devices_clip_and_the_sum_is_noised(quick: None, tmp_path: Path) -> None:
    norm = 0.01  # far less than their changes
    outcomes = run(secure_fleet(tmp_path, 3, secure=SecureTerms(3, norm, norm)), 3)
    (total,) = totals(outcomes)
    assert total.loss is None
    size = float(sum(change.square().sum() for change in total.changes.values())) ** 0.5
    assert norm < size <= 3 * norm
    cut = job().task.cut
    privacy = Privacy(1.0, norm, 0.1, seed=1)
    values = {}
    for name, changes in (("with", total.changes), ("without", {})):
        made = PrivateSum(state(), Reach({cut: 3}), privacy, 1.0, 0)
        SumOfChanges(3, dict(changes)).add_to(made, cut)
        assert made.updates == 3
        values[name] = {key: value for key, value, _ in made.means()}
    for name in cut.trained:  # the same noise, so the rest is a third of the sum
        rest = cut.extract_one(name, values["with"][name] - values["without"][name])
        assert torch.allclose(rest.double(), total.changes[name] / 3, atol=1e-6)


# --- what it does not go with -------------------------------------------------------------------------------------


def config(**values: Any) -> RunConfig:
    return RunConfig.of(**{"model": "resnet20", "per_round": 5, "rounds": 2, **values})


SECURE = Terms(secure_aggregation=True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--aggregation median", "aggregation median compares single updates"),
        ("--aggregation trimmed:0.2", "--secure-clip bounds what one device can do"),
        ("--norm-bound 3", "--norm-bound measures single updates"),
        ("--weighted", "every device counts the same: leave out --weighted"),
        ("--evaluation devices", "give --evaluation server"),
        ("--per-round 2", "a secure sum is over at least 3 devices, and a round asks 2"),
        ("--quorum 7 --per-round 6", "over at least 7 devices, and a round asks 6"),
        ("--per-round 1001", "over at most 1000 devices"),
        ("--secure-fewest 2", "a secure sum is over 3 to 1000 devices, not 2"),
        ("--secure-clip nan", "above 0 and at most 1e+06, not nan"),
        ("--dp-noise 1 --dp-clip 1 --secure-clip 1", "leave out --secure-clip"),
    ],
)
def test_what_cannot_be_done_with_sums_is_said_at_the_start(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["fleet", "run", "--insecure", "--out", str(tmp_path / "run"), "--secure-aggregation", *arguments.split()]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_settings_of_sums_are_for_sums(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["fleet", "run", "--insecure", "--out", str(tmp_path / "run"), "--secure-fewest", "4"]) == 2
    assert "--secure-fewest is for --secure-aggregation" in capsys.readouterr().err


def test_methods_that_give_devices_a_part_of_their_own_are_refused() -> None:
    made = config()
    check_fleet(FedAvg(graph()), 5, made, SECURE, state())
    check_fleet(HeteroFL(graph(), constraints=(0.25, 0.5)), 6, made, SECURE, state())
    check_fleet(FjORD(graph(), constraints=(0.25,)), 6, made, SECURE, state())
    check_fleet(FD(graph(), constraints=(0.25,), variant="shared"), 6, made, SECURE, state())
    with pytest.raises(BadInput, match="6 of 6 devices would train a part of the model that fewer than 3 train"):
        check_fleet(FD(graph(), constraints=(0.25,)), 6, made, SECURE, state())
    with pytest.raises(BadInput, match="2 of 5 devices would train a part"):
        check_fleet(HeteroFL(graph(), constraints=(0.25, 0.5)), 5, made, SECURE, state())
    with pytest.raises(BadInput, match="2 devices can take part"):
        check_fleet(FedAvg(graph()), 2, made, SECURE, state())
    with pytest.raises(BadInput, match="heterofl as asked for looks at every device's own update"):
        check_fleet(HeteroFL(graph(), constraints=(0.25,), variant="original"), 5, made, SECURE, state())


def test_differential_privacy_needs_rounds_with_enough_devices() -> None:
    private = {"dp_noise": 1.0, "dp_clip": 0.5, "validation": 0.1}
    check_fleet(FedAvg(graph()), 5, config(devices=5, **private), SECURE, state())  # all, always
    check_fleet(FedAvg(graph()), 400, config(devices=400, **{**private, "per_round": 200}), SECURE, state())
    with pytest.raises(BadInput, match="show who took part"):
        check_fleet(FedAvg(graph()), 10, config(devices=10, **private), SECURE, state())
    terms = secure_terms(config(devices=5, **private), SECURE)
    assert terms == SecureTerms(3, 0.5, 0.5) and not terms.with_loss


def test_a_quorum_is_a_sums() -> None:
    """So that a round in which a sum was seen is never redone with some of its devices."""
    assert secure_terms(config(quorum=4), SECURE) == SecureTerms(4, 1.0)
    assert secure_terms(config(norm_factor=0.0), SECURE) == SecureTerms(3, 1.0)
    assert secure_terms(config(norm_factor=5.0), replace(SECURE, secure_clip=0.1)) == SecureTerms(3, 0.1, None, 5.0)
    assert secure_terms(config(), Terms()) is None


def test_a_sum_counts_as_its_devices() -> None:
    """By hand: two devices at 1 and 3 from a start of 1, and one at 4."""
    cut, name = graph().full(), graph().parameter_names[0]
    start = {name: torch.ones_like(state()[name])}
    sums = {name: torch.full_like(start[name], 2.0, dtype=torch.float64)}  # changes of 0 and 2
    for kind in (RunningMean, MeanOverAll):
        mean = kind(start)
        mean.add_sum(cut, sums, 2)
        mean.add(cut, {name: torch.full_like(start[name], 4.0)})
        assert mean.updates == 3
        assert [float(value.flatten()[0]) for _, value, _ in mean.means()] == pytest.approx([8 / 3])
    with pytest.raises(TypeError, match="needs every device's own update"):
        SumOfChanges(2, sums).add_to(object(), cut)  # type: ignore[arg-type]
    assert ClassRows  # its means are over devices that hold a class: check_fleet refuses it


# --- whole runs ---------------------------------------------------------------------------------------------------


def test_a_whole_run_equals_one_in_the_clear(quick: None, tmp_path: Path) -> None:
    model, budget = "tests.fleet.nets:small", nets.BUDGETS[0]
    request = {"model": model, "method": "slt", "budgets": [budget], "rounds": 2, "per_round": 3, "batch": 16}
    request |= {"eval_every": 2}
    found, weights = {}, {}
    own = DeviceSettings("d", budget=budget, partition="iid", devices=60, models=(model,), hard_limit=False)
    ready = PreparedDevice.of(model, own)
    for name, secure in (("clear", None), ("secure", True)):
        nodes = {
            7 + n: device(replace(ready, settings=replace(own, name=f"d{n}", cache=str(tmp_path / name / f"d{n}"))))
            for n in range(3)
        }
        out = tmp_path / name / "run"
        run_on_fleet(  # type: ignore[arg-type]
            Grid(nodes), RunSettings(request, str(out), minimum=3, wait=30.0, secure_aggregation=secure)
        )
        found[name] = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        weights[name] = load_file(out / "model.safetensors")
    kept = json.loads((tmp_path / "secure" / "run" / "fleet.json").read_text())
    assert (kept["secure_aggregation"], kept["secure_fewest"], kept["secure_clip"]) == (True, 3, 1.0)
    for clear, secure in zip(found["clear"], found["secure"], strict=True):
        assert secure["train_loss"] == pytest.approx(clear["train_loss"], abs=1e-4)
        for key in ("upload_bytes", "download_bytes", "train_flops", "peak_bytes", "devices", "dropped"):
            assert secure[key] == clear[key]
    for name in dict(
        nets.small().named_parameters()
    ):  # two rounds, each off by less than a step, and rounded to float32
        assert float((weights["clear"][name] - weights["secure"][name]).abs().max()) < 2 * step_of(1.0) + 1e-6
    with pytest.raises(BadInput, match="a run with secure aggregation goes on with it"):
        (tmp_path / "secure" / "run" / "summary.json").unlink()
        again = RunSettings(request, str(tmp_path / "secure" / "run"), resume=True, secure_aggregation=False)
        run_on_fleet(Grid(nodes), again)  # type: ignore[arg-type]
    assert (
        again.terms(kept).secure_fewest == 3 and replace(again, secure_aggregation=None).terms(kept).secure_aggregation
    )
