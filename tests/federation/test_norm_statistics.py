"""Whole runs with fixed statistics of batch norms: when they are measured, that they stay, and what they cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from strata.cli import main
from strata.core.errors import BadInput
from strata.data import FederatedData
from strata.federation.state import FederationState
from strata.graph import ChannelGraph
from strata.methods import SLT, Method, create
from strata.runs import run
from strata.runs.checkpoints import Checkpoints
from strata.runs.config import RunConfig
from strata.runs.folder import describe_training
from strata.runs.launch import make_training
from strata.runs.running import settled
from strata.training import calibration_indices, reestimated
from tests.federation.tiny import SIZE, bits, data, graph, tiny_run, training
from tests.methods.tiny import hand_plan
from tests.workspaces import workspace_of

torch.set_num_threads(1)  # as devices train

FIXED = replace(training(), norm_statistics="fixed", fixed_after=2)
FROZEN = replace(training(), norm_statistics="frozen")
MEANS = ("bn1.running_mean", "bn2.running_mean", "bn3.running_mean")


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[FederationState]:
    """Every state that a run saves, in order: one per round, and the first."""
    states: list[FederationState] = []
    save = Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", lambda self, state: (states.append(state), save(self, state)))
    return states


def by_hand(state: FederationState, method: Method, fixed: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The statistics of what is trained next, in the cut's shapes."""
    cut, own = method.cut_for(state.round, 0), data().train
    chosen = own.subset(calibration_indices(len(own), 0))
    return reestimated(
        workspace_of(graph()), cut, cut.extract(state.tensors), chosen, replace(training(), kernels=True), fixed
    )


def statistics(state: FederationState) -> list[Tensor]:
    return [state.tensors[name.replace("mean", kind)] for name in MEANS for kind in ("mean", "var")]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_fixed_from_a_round_on(tmp_path: Path, saved: list[FederationState]) -> None:
    method = create("fedavg", graph())
    result = tiny_run(tmp_path / "fixed", method=method, rounds=5, training=FIXED)
    before, after = saved[:3], saved[3:6]
    assert all(not state.norms and same(statistics(state), statistics(before[0])) for state in before)
    found = by_hand(before[2], method)
    for name in MEANS:
        for buffer in (name, name.replace("mean", "var")):
            for state in after:
                torch.testing.assert_close(state.tensors[buffer], found[buffer], rtol=1e-5, atol=1e-6)
    assert all(same(statistics(state), statistics(after[0])) for state in after), "they no longer change"
    assert set(after[0].norms) == set(MEANS) and after[0].norms == after[2].norms
    model = result.state_dict()
    assert same([model[name] for name in MEANS], [after[0].tensors[name] for name in MEANS]), "nor in the final model"
    assert result.accuracy == result.summary["model_accuracy"]

    batch = tiny_run(tmp_path / "batch", "fedavg", rounds=5, training=training())
    same_rounds = [a == b for a, b in zip(bits(batch.out)[0], bits(result.out)[0], strict=True)]
    assert same_rounds == [True, True, False, False, False]
    extra = [a["download_bytes"] - b["download_bytes"] for a, b in zip(result.metrics, batch.metrics, strict=True)]
    assert extra == [0, 0, *[4 * 2 * (4 + 8 + 8) * 4] * 3], "4 devices get a mean and a variance per channel"


@pytest.mark.parametrize("kind", ["fixed", "frozen"])
def test_resumed_the_same_bits(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And, of one of them, with other workers."""
    settings = {"method": steps(), "rounds": 6, "training": replace(FIXED, norm_statistics=kind, fixed_after=1)}
    whole = tiny_run(tmp_path / "whole", **settings)
    save = Checkpoints.save

    def stop(self: Checkpoints, state: FederationState) -> None:
        save(self, state)
        if state.round == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Checkpoints, "save", stop)
        tiny_run(tmp_path / "resumed", **settings)
    resumed = tiny_run(tmp_path / "resumed", **settings, resume=True, workers=2 if kind == "fixed" else 0)
    assert bits(whole.out) == bits(resumed.out)


def steps(levels: tuple[tuple[int, ...], ...] = ()) -> SLT:
    """Layers freeze before rounds 2 and 4."""
    return SLT(hand_plan(graph(), (0, 1, 0.5, 2), (1, 2, 0.5, 4), (2, 3, 1.0, 6), levels=levels))


def test_layers_get_their_statistics_when_they_freeze(tmp_path: Path, saved: list[FederationState]) -> None:
    method = steps()
    result = tiny_run(tmp_path / "run", method=method, rounds=6, training=FROZEN)
    assert [sorted(state.norms) for state in saved] == [[], [], [], *[[*MEANS[:1]]] * 2, *[[*MEANS[:2]]] * 2]
    for number, state in enumerate(saved):
        first = statistics(state)[:2]
        assert same(first, statistics(saved[3 if number >= 3 else 0])[:2])
        assert same(statistics(state)[2:4], statistics(saved[5 if number >= 5 else 0])[2:4])
    for now, mean, fixed in ((2, MEANS[0], ()), (4, MEANS[1], (MEANS[0],))):
        found = by_hand(saved[now], method, fixed)
        torch.testing.assert_close(saved[now + 1].tensors[mean], found[mean], rtol=1e-5, atol=1e-6)
    model = result.state_dict()
    assert same([model[name] for name in MEANS[:2]], [saved[-1].tensors[name] for name in MEANS[:2]])
    assert not torch.equal(model[MEANS[2]], saved[-1].tensors[MEANS[2]]), "the last layer's are measured at the end"


def test_a_layer_that_stronger_devices_still_train_is_measured_anew(
    tmp_path: Path, saved: list[FederationState]
) -> None:
    """Weak devices freeze layer 1 from round 2 on, strong ones never do: its statistics follow its weights."""
    tiny_run(tmp_path / "run", method=steps(((0, 1, 2), (0, 0, 0))), rounds=6, training=FROZEN)
    rounds = [state.norms[MEANS[0]]["round"] for state in saved[3:]]
    assert rounds == [2, 3, 4, 5]
    assert not same(statistics(saved[3])[:2], statistics(saved[4])[:2])


def test_slt_measures_anew_what_a_step_makes_wider(tmp_path: Path, saved: list[FederationState]) -> None:
    tiny_run(tmp_path / "run", method=steps(), rounds=6, training=replace(FIXED, fixed_after=1))
    rounds = [[state.norms[name]["round"] for name in MEANS] if state.norms else None for state in saved]
    assert rounds == [None, None, [1, 1, 1], [1, 2, 2], [1, 2, 2], [1, 2, 4], [1, 2, 4]]


def test_where_fixed_statistics_make_no_sense(tmp_path: Path) -> None:
    for name in ("fd", "fedrolex", "heterofl", "fjord"):
        method = create(name, graph(), constraints=(0.5, 1.0))
        with pytest.raises(BadInput, match=f"those of one network, and {name} trains parts of several widths"):
            tiny_run(tmp_path / "run", method=method, training=FIXED)
    tiny_run(tmp_path / "small", "small", rounds=1, training=replace(FIXED, fixed_after=0))
    with pytest.raises(BadInput, match="for layers that are frozen, and fd freezes none in this run"):
        tiny_run(tmp_path / "run", "fd", rounds=1, training=FROZEN)
    with pytest.raises(BadInput, match="fixed after round 2 never are in a run of 2"):
        tiny_run(tmp_path / "run", "fedavg", rounds=2, training=FIXED)
    for norm, said in ((nn.GroupNorm(2, 4), "there is no batch norm in"),
                       (nn.BatchNorm2d(4, track_running_stats=False), "keeps no statistics")):  # fmt: skip
        model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
        with pytest.raises(BadInput, match=said):
            run_of(model, data(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def run_of(model: nn.Module, own: FederatedData, out: Path) -> None:
    method = create("fedavg", ChannelGraph(model, (3, SIZE, SIZE)))
    run(model, own, method, out=out, rounds=4, devices=12, per_round=2, workers=0, progress=False, training=FIXED)


def test_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert settled(replace(FIXED, fixed_after=None), 30).fixed_after == 15
    assert settled(FROZEN, 30).fixed_after is None
    assert not {"norm_statistics", "fixed_after"} & {*describe_training(training()), *RunConfig().to_json()}
    assert describe_training(FIXED)["norm_statistics"] == "fixed" and describe_training(FIXED)["fixed_after"] == 2
    config = RunConfig.of(norm_statistics="fixed", fixed_after=7, rounds=9)
    assert RunConfig.from_json(config.to_json()) == config
    assert config.counted.norm_statistics == "batch", "before round 7 a device needs as much as ever"
    assert config.changed(fixed_after=0).counted.norm_statistics == "fixed"
    assert make_training(config.changed(fixed_after=None), data()).fixed_after == 4
    words = ["run", "--method", "fedavg", "--rounds", "2", "--out", str(tmp_path / "run")]
    cases = (
        (["--fixed-after", "1"], "--fixed-after is for --norm-statistics fixed"),
        (["--norm-statistics", "fixed", "--fixed-after", "2"], "never are in a run of 2"),
    )
    for wrong, said in cases:
        assert main([*words, *wrong]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
