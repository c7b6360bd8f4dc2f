from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from strata.core.errors import BadInput
from strata.data import iid
from strata.engines import InlineEngine, Outcome
from strata.federation.aggregation import ServerOptimizer
from strata.federation.jobs import DeviceProgram, evaluate
from strata.federation.rounds import RoundFailed, RoundSettings, play
from strata.federation.simulated_fleet import SimulatedFleet
from strata.federation.state import FederationState
from strata.federation.summed import Summed
from strata.federation.usual_change import WINDOW, UsualChange
from strata.graph import Cut
from strata.training import LocalTraining, Workspace, reestimated
from tests.federation import tiny
from tests.workspaces import workspace_of

Lie = Callable[[Any], Any]
TRAINING = LocalTraining(batch_size=8, mean=(0.3,) * 3, std=(0.15,) * 3)


class Lying(InlineEngine):
    """Devices whose answers are changed on the way; `order` is that of arrival."""

    def __init__(self, lies: Mapping[int, Lie] | None = None, backwards: bool = False) -> None:
        program = DeviceProgram(tiny.model(), (3, 8, 8), tiny.data().train, {}, TRAINING)
        program.workspace = workspace_of(tiny.graph())
        super().__init__(program)
        self.lies, self.backwards = lies or {}, backwards
        self.asked: list[int] = []

    def run(self, jobs: Sequence[Any], state: Mapping[str, Tensor]) -> Iterator[Outcome]:
        self.asked += [job.task.device for job in jobs]
        outcomes = []
        for outcome in super().run(jobs, state):
            lie = self.lies.get(jobs[outcome.index].task.device)
            if lie is not None:
                changed = lie(outcome.result)
                outcome = (
                    Outcome(outcome.index, None, changed)
                    if isinstance(changed, str)
                    else replace(outcome, result=changed)
                )
            outcomes.append(outcome)
        yield from reversed(outcomes) if self.backwards else outcomes


def settings(**changes: Any) -> RoundSettings:
    fleet = {key: changes.pop(key) for key in ("dropout", "straggler_share", "slowdown", "deadline") if key in changes}
    devices = changes.pop("devices", 12)
    base: dict[str, Any] = {
        "fleet": SimulatedFleet(0, devices, **fleet), "partition": iid(240, devices, 0), "per_round": 4, "quorum": 1,
        "lr": lambda round: 0.1, "seed": 0,
    }  # fmt: skip
    return RoundSettings(**{**base, **changes})


def start() -> FederationState:
    return FederationState(0, {name: tensor.clone() for name, tensor in tiny.model().state_dict().items()})


def one_round(engine: InlineEngine, name: str = "fedavg", state: FederationState | None = None, **changes: Any):
    log: list[str] = []
    method = tiny.method(name, 1.0 if name == "fedavg" else 0.5)
    after, record = play(state or start(), method, settings(**changes), engine, lambda task: 1000, log.append)
    return after, record, log


def same(a: FederationState, b: FederationState) -> bool:
    return all(torch.equal(a.tensors[name], b.tensors[name]) for name in a.tensors)


def nan(update: Any) -> Any:
    first = next(iter(update.tensors))
    return replace(update, tensors={**update.tensors, first: torch.full_like(update.tensors[first], math.nan)})


def transposed(update: Any) -> Any:
    return replace(update, tensors={**update.tensors, "classifier.weight": update.tensors["classifier.weight"].T})


LIES: dict[str, tuple[Lie, str]] = {
    "nan": (nan, "not finite"),
    "shape": (transposed, "shape (8, 3), not (3, 8)"),
    "old round": (lambda update: replace(update, round=-1), "round -1"),
    "raises": (lambda update: "ValueError: disk broken", "ValueError: disk broken"),
    "nothing": (lambda update: None, "sent nothing"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_device_that_lies_costs_its_own_update_and_no_more(lie: str) -> None:
    change, reason = LIES[lie]
    honest = Lying()
    one_round(honest)
    liar = honest.asked[1]
    after, record, log = one_round(Lying({liar: change}))
    assert record["devices"] == honest.asked
    assert [entry["id"] for entry in record["dropped"]] == [liar]
    assert reason in record["dropped"][0]["reason"] and reason in log[0]
    # by hand: the mean of the other three
    program = honest.program
    tensors = []
    for device in honest.asked:
        if device != liar:
            task = tiny.method("fedavg", 1.0).assign(0, [device])[0]
            from strata.federation.jobs import TrainJob

            job = TrainJob(task, settings().partition[device], 0.1, 0)
            tensors.append(program(job, start().tensors).tensors)
    for name in tensors[0]:
        mean = (tensors[0][name].double() + tensors[1][name].double() + tensors[2][name].double()) / 3
        assert torch.equal(after.tensors[name], mean.float()), name


def test_order_of_arrival_changes_nothing() -> None:
    for name in ("fedavg", "fd"):
        forward, record, _ = one_round(Lying(), name)
        backward, again, _ = one_round(Lying(backwards=True), name)
        assert same(forward, backward) and record == again


def test_a_round_is_a_function_of_its_state() -> None:
    before = start()
    copy = {name: tensor.clone() for name, tensor in before.tensors.items()}
    after, _, _ = one_round(Lying(), state=before)
    assert before.round == 0 and after.round == 1
    assert all(torch.equal(copy[name], before.tensors[name]) for name in copy)
    assert not same(before, after)


def test_under_quorum_the_round_is_redone_with_others_and_said() -> None:
    first = Lying()
    one_round(first)
    liars = dict.fromkeys(first.asked[:3], nan)
    engine = Lying(liars)
    after, record, log = one_round(engine, quorum=2)
    assert engine.asked[:4] == first.asked and len(engine.asked) == 8 and len(set(engine.asked)) == 8
    assert record["devices"] == engine.asked
    reasons = {entry["id"]: entry["reason"] for entry in record["dropped"]}
    assert set(reasons) == set(first.asked)  # the honest one's update was given up with the round
    assert reasons[first.asked[3]] == "the round was redone: 1 of 2 updates"
    assert "round 0 had 1 of 2 updates and is redone with other devices" in log
    # costs are of all who were asked
    full = 4 * sum(p.numel() for p in tiny.model().parameters())
    assert record["upload_bytes"] == record["download_bytes"] == 8 * full
    assert record["train_flops"] == 8 * 20 * 1000


def test_a_round_that_never_succeeds_ends_with_the_reasons() -> None:
    with pytest.raises(RoundFailed, match=r"tried 10 times and never had 2 good updates.*not finite \(4x\)"):
        one_round(Lying(dict.fromkeys(range(12), nan)), quorum=2)


def test_a_fleet_with_no_others_asks_the_same_devices_again() -> None:
    engine = Lying(dict.fromkeys((0, 1), nan))
    with pytest.raises(RoundFailed):
        one_round(engine, devices=4, quorum=3)
    assert len(engine.asked) == 40


def test_frozen_layers_are_sent_once_however_often_a_round_is_redone() -> None:
    first_time = iter([nan, nan])
    engine = Lying({device: lambda update: next(first_time, lambda same: same)(update) for device in (0, 1)})
    last = tiny.ROUNDS - 1
    _, record, _ = one_round(engine, "slt", replace(start(), round=last), devices=4, quorum=3)
    assert sorted(engine.asked) == sorted([0, 1, 2, 3] * 2)
    cut = tiny.method("slt").assign(last, [0])[0].cut
    every, trained = (
        4 * sum(math.prod(cut.shapes[name]) for name in names) for names in (tiny.graph().parameter_names, cut.trained)
    )
    assert trained < every and record["download_bytes"] == 4 * (every + trained)


def test_dropouts_and_late_devices_on_the_virtual_clock() -> None:
    engine = Lying()
    _, record, _ = one_round(engine, per_round=12, dropout=0.3, straggler_share=0.4, slowdown=5.0, deadline=2.0)
    reasons = [entry["reason"] for entry in record["dropped"]]
    dropouts, late = reasons.count("dropped out"), sum(reason.startswith("late: took") for reason in reasons)
    assert dropouts > 0 and late > 0 and dropouts + late == len(reasons)
    assert len(record["devices"]) == 12 and len(engine.asked) == 12 - len(reasons)  # nobody works in vain here
    assert record["train_flops"] == (12 - dropouts) * 20 * 1000  # but the late ones did, in the simulation
    full = 4 * sum(p.numel() for p in tiny.model().parameters())
    assert record["upload_bytes"] == len(engine.asked) * full and record["download_bytes"] == 12 * full


def test_weighted_by_samples_and_the_loss() -> None:
    class Uneven:
        def __len__(self) -> int:
            return 12

        def __getitem__(self, device: int) -> Any:
            return iid(240, 12, 0)[device][: 4 + device]

    _, even, _ = one_round(Lying(), partition=Uneven())
    after, record, _ = one_round(Lying(), partition=Uneven(), weighted=True)
    assert record == even  # costs and training loss do not depend on the weights
    assert not same(after, one_round(Lying(), partition=Uneven())[0])


class Boasting(Lying):
    """One device says that it has so many samples; all train on twenty."""

    def __init__(self, liar: int, samples: int) -> None:
        super().__init__({liar: lambda update: replace(update, samples=samples)})

    def run(self, jobs: Sequence[Any], state: Mapping[str, Tensor]) -> Iterator[Outcome]:
        yield from super().run([replace(job, samples=np.array(job.samples[:20])) for job in jobs], state)


def test_no_device_weighs_more_than_a_few_others() -> None:
    """One that says 2**40 counts as 4 times the median, in the mean and in what is recorded."""

    def played(samples: int, **more: Any) -> tuple[FederationState, dict[str, Any]]:
        fleet = [np.arange(20)] * 11 + [np.broadcast_to(np.int64(0), (samples,))]
        after, record, _ = one_round(Boasting(11, samples), partition=fleet, per_round=12, weighted=True, **more)
        return after, record

    capped, record = played(2**40, most_counted=80)
    honest, expected = played(80)
    assert same(capped, honest) and record == expected
    assert record["train_flops"] == (11 * 20 + 80) * 1000
    owned, _ = played(2**40)
    assert not same(owned, honest)


def times(factor: float) -> Lie:
    """So many times its honest change."""
    start_of = tiny.model().state_dict()

    def changed(update: Any) -> Any:
        moved = {name: start_of[name] + factor * (one - start_of[name]) for name, one in update.tensors.items()}
        return replace(update, tensors=moved)

    return changed


def test_the_bound_follows_the_changes_seen() -> None:
    """From the first round on, in which updates wait for each other; the bits are those of who is left."""
    honest, record, _ = one_round(Lying(), per_round=12, norm_factor=5.0)
    assert record["dropped"] == [] and len(honest.seen) == 12
    assert same(honest, one_round(Lying(), per_round=12)[0])
    guarded, record, _ = one_round(Lying({3: times(1000.0)}), per_round=12, norm_factor=5.0)
    ((refused),) = record["dropped"]
    assert refused["id"] == 3 and refused["reason"].endswith("times the usual one, above the bound of 5")
    assert same(guarded, one_round(Lying({3: lambda update: "gone"}), per_round=12)[0])
    (few,) = one_round(Lying({3: times(1000.0)}), devices=4, norm_factor=5.0)[1]["dropped"]  # of four
    assert few["id"] == 3


def test_the_bound_follows_honest_changes_that_grow() -> None:
    usual = UsualChange(5.0, (1.0,) * WINDOW)
    refused = 0
    for _ in range(WINDOW):
        usual.note(100.0)
        refused += usual.problem(100.0) is not None
    assert refused == WINDOW // 2 and usual.seen == (100.0,) * WINDOW
    assert usual.problem(501.0) == "its change is 5.01 times the usual one, above the bound of 5"


def test_a_model_that_goes_to_pieces_is_not_kept() -> None:
    lies = {device: times(1e6) for device in range(12)}
    for limits in ({"most_growth": 10.0}, {"server": ServerOptimizer("none", 1e38)}):
        with pytest.raises(RoundFailed, match="round 0 would have left no model .*The round is not kept"):
            one_round(Lying(lies), **limits)
    one_round(Lying(lies))  # in a simulation nobody lies, and a norm may grow


def test_impossible_settings() -> None:
    for wrong, says in (
        ({"per_round": 13}, "13 devices per round cannot be chosen from 12"),
        ({"per_round": 0}, "at least 1 device"),
        ({"quorum": 5}, "from 1 to the 4 devices"),
        ({"quorum": 0}, "from 1 to the 4 devices"),
    ):
        with pytest.raises(BadInput, match=says):
            settings(**wrong)


def test_an_engine_shared_by_runs_never_mixes_their_weights_up() -> None:
    """The same cut, round and seed, but another run's weights."""
    program = DeviceProgram(tiny.model(), (3, 8, 8), tiny.data().train, {"test": tiny.data().test}, TRAINING)
    program.workspace = workspace_of(tiny.graph())
    engine, cut = InlineEngine(program), tiny.graph().full()
    other = {name: tensor * 2 if name == "conv3.weight" else tensor for name, tensor in start().tensors.items()}
    other["classifier.weight"] = torch.roll(other["classifier.weight"], 1, 0)

    def loss(engine: InlineEngine, tensors: Mapping[str, Tensor]) -> float:
        return evaluate(engine, tensors, cut, len(tiny.data().test), "test", "re-estimated", 3, 0).loss

    first, second = loss(engine, start().tensors), loss(engine, other)
    assert first != second == loss(InlineEngine(replace(program)), other)


class Unreachable(Lying):
    """The first device asked is not connected; `sent` False as a real fleet's engine says it."""

    def run(self, jobs: Sequence[Any], state: Mapping[str, Tensor]) -> Iterator[Outcome]:
        for outcome in super().run(jobs, state):
            yield outcome if outcome.index else Outcome(0, None, "not connected", sent=False)


def test_work_that_was_done_twice_counts_twice() -> None:
    """A device whose first secure sum came to nothing trained and sent again."""
    found = [
        one_round(Lying({0: lambda update, times=times: Summed(lost="its sum is not used", times=times)}), devices=4)[1]
        for times in (1, 2)
    ]
    for key in ("upload_bytes", "download_bytes", "train_flops"):
        assert found[1][key] * 4 == found[0][key] * 5  # four devices' work, and one's once more


def test_what_never_reached_a_device_is_no_download_and_it_holds_nothing() -> None:
    late = replace(start(), round=tiny.ROUNDS - 1)  # layers are frozen by then
    after, record, _ = one_round(Lying(), "slt", late)
    reached, less, _ = one_round(Unreachable(), "slt", late)
    assert record["devices"] == less["devices"] and [one["id"] for one in less["dropped"]] == less["devices"][:1]
    assert less["download_bytes"] * 4 == record["download_bytes"] * 3, "one of four devices was sent nothing"
    assert sorted(record["devices"]) == after.holdings.devices.tolist()
    assert sorted(record["devices"][1:]) == reached.holdings.devices.tolist()


def test_statistics_of_the_last_evaluation_are_those_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take longer than anything else in a short run: they are measured once."""
    measured: list[Cut] = []

    def counted(workspace: Workspace, cut: Cut, *rest: Any) -> dict[str, Tensor]:
        measured.append(cut)
        return reestimated(workspace, cut, *rest)

    monkeypatch.setattr("strata.federation.jobs.reestimated", counted)
    result = tiny.tiny_run(tmp_path / "run", "fedavg", rounds=2)
    assert len(measured) == 2 and result.summary["model_accuracy"] == result.accuracy
