"""Epsilon, and runs with differential privacy from end to end."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm
from torch import Tensor, nn

from strata.cli import main
from strata.core.errors import BadInput
from strata.data import hold_out
from strata.federation.privacy_accounting import Ledger, epsilon
from strata.graph import ChannelGraph
from strata.methods import create
from strata.runs import run
from strata.runs.config import RunConfig
from strata.runs.metrics import METRIC_KEYS
from strata.training import calibration_indices, reestimated
from tests.federation import tiny
from tests.federation.tiny import bits, tiny_run
from tests.runs.test_commands import NETS
from tests.workspaces import workspace_of

PRIVATE: dict[str, Any] = {"dp_noise": 1.0, "dp_clip": 0.5, "validation": 0.1}
SEEDED = {**PRIVATE, "dp_seed": 3}


# --- the accountant ------------------------------------------------------------------------------------------------


def gaussian_delta(bound: float, deviation: float) -> float:
    """Exact, of one Gaussian release of sensitivity 1 (Balle and Wang, ICML 2018, theorem 8)."""
    half = 1 / (2 * deviation)
    return float(norm.cdf(half - bound * deviation) - math.exp(bound) * norm.cdf(-half - bound * deviation))


@pytest.mark.parametrize(("noise", "releases"), [(1.0, 1), (4.0, 1), (5.0, 20)])
def test_without_sampling_it_is_the_exact_bound_of_the_gaussian(noise: float, releases: int) -> None:
    bound = epsilon(1.0, noise, releases, 1e-5)
    assert bound is not None
    as_one = noise / math.sqrt(releases)  # so many releases are one of less noise
    assert gaussian_delta(bound, as_one) <= 1e-5 <= gaussian_delta(bound - 0.01, as_one)


def test_one_sampled_release_against_the_integral() -> None:
    rate, noise, delta = 0.1, 1.0, 1e-3
    bound = epsilon(rate, noise, 1, delta)
    assert bound is not None

    def without(x: float) -> float:
        return float(norm.pdf(x, 0, noise))

    def with_device(x: float) -> float:
        return (1 - rate) * without(x) + rate * float(norm.pdf(x, 1, noise))

    def exceeds(p: Any, q: Any, bound: float) -> float:
        return float(quad(lambda x: max(0.0, p(x) - math.exp(bound) * q(x)), -12, 13, limit=500)[0])

    for slack, holds in ((0.0, True), (-0.01, False)):
        worst = max(exceeds(with_device, without, bound + slack), exceeds(without, with_device, bound + slack))
        assert (worst <= delta) is holds


def test_published_values() -> None:
    # Abadi et al., CCS 2016, section 3.2: q = 0.01, sigma = 4, 10,000 steps, delta = 1e-5 is (1.26, 1e-5) by the
    # moments accountant, an upper bound. dp-accounting 0.6.0 by RDP, which keeps track of the same moments: 1.0355.
    moments = epsilon(0.01, 4.0, 10_000, 1e-5)
    assert moments is not None and 0.9 < moments < 1.0355
    # dp-accounting 0.6.0 on its finer default grid, 1e-4
    for (rate, noise, releases, delta), golden in {
        (0.01, 4.0, 10_000, 1e-5): 0.9470,
        (0.1, 1.0, 500, 100**-1.1): 10.4595,
        (256 / 60_000, 1.1, 14_062, 1e-5): 2.3817,
    }.items():
        found = epsilon(rate, noise, releases, delta)
        assert found is not None and golden - 1e-3 <= found <= 1.02 * golden  # never below


def test_more_rounds_cost_more_and_none_nothing() -> None:
    spent = [epsilon(0.1, 1.0, releases, 1e-3) for releases in (0, 1, 10, 100)]
    assert spent[0] == 0.0 and spent == sorted(spent) and len(set(spent)) == 4  # type: ignore[type-var]


def test_the_ledger_forgets_nothing(tmp_path: Path) -> None:
    first = Ledger(tmp_path)
    for round in range(3):
        first.begin(round)
    again = Ledger(tmp_path)
    again.begin(2)
    assert first.releases == 3 and again.releases == Ledger(tmp_path).releases == 4
    (tmp_path / "privacy.jsonl").write_bytes((tmp_path / "privacy.jsonl").read_bytes() + b'{"ro')  # killed as it wrote
    assert Ledger(tmp_path).releases == 5
    path = tmp_path / "privacy.jsonl"
    content = path.read_bytes()
    for damage in ((b"\n", b"J"), (b"{", b"z")):  # a flipped bit hides no release
        path.write_bytes(content.replace(*damage, 1))
        assert Ledger(tmp_path).releases == 5


# --- runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["slt", "fd", "heterofl"])
def test_a_private_run_records_its_epsilon_and_no_loss(tmp_path: Path, name: str) -> None:
    result = tiny_run(tmp_path, name, **PRIVATE, eval_every=2)
    records = result.metrics
    for record in records:
        assert tuple(record) == (*METRIC_KEYS[:-1], "epsilon", "seconds")
        assert record["train_loss"] is None and (record["epsilon"] is None) == (record["accuracy"] is None)
    spent = [record["epsilon"] for record in records if record["epsilon"] is not None]
    assert spent == [epsilon(4 / 12, 1.0, rounds, 12**-1.1) for rounds in (2, 4, 6)]
    summary = result.summary
    assert summary["epsilon"] == spent[-1] and summary["delta"] == 12**-1.1 and summary["releases"] == 6
    assert summary["sampling_rate"] == 4 / 12 and summary["accountant"].startswith("dp-accounting ")
    config = json.loads((tmp_path / "config.json").read_text())["settings"]
    assert config["vectorised"] is None and config["dp_noise"] == 1.0 and "dp_seed" not in config


def test_devices_that_the_method_cannot_use_are_not_replaced(tmp_path: Path) -> None:
    """Who can be used may change in a fleet; the chance that the accountant is told of may not."""
    method = create("fedavg", tiny.graph(), constraints=(1.0, 0.5))
    result = tiny_run(tmp_path, method=method, **SEEDED, per_round=8, rounds=3)
    assert result.summary["sampling_rate"] == 8 / 12
    assert all(device % 2 == 0 for record in result.metrics for device in record["devices"])


def test_only_a_seed_makes_a_private_run_repeatable(tmp_path: Path) -> None:
    runs = [tiny_run(tmp_path / name, "fd", **options, rounds=2).out for name, options in (
        ("a", SEEDED), ("b", SEEDED), ("c", {**PRIVATE, "dp_seed": 4}), ("d", PRIVATE), ("e", PRIVATE))]  # fmt: skip
    assert bits(runs[0]) == bits(runs[1])
    assert len({bits(out)[1] for out in runs}) == 4


def stopped(monkeypatch: pytest.MonkeyPatch, out: Path, after: int, **options: Any) -> None:
    """A run that dies after so many rounds, its last one begun and not saved."""
    from strata.runs import session

    play, rounds = session.play, []

    def dies(*arguments: Any) -> Any:
        rounds.append(1)
        if len(rounds) > after:
            raise RuntimeError("power failure")
        return play(*arguments)

    monkeypatch.setattr(session, "play", dies)
    with pytest.raises(RuntimeError, match="power failure"):
        tiny_run(out, "slt", **options)
    monkeypatch.undo()


def test_a_resumed_run_counts_a_round_that_it_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    stopped(monkeypatch, out, after=5, checkpoint_every=2, **PRIVATE)  # saved after 4; rounds 4 and 5 were begun
    result = tiny_run(out, "slt", resume=True, checkpoint_every=2, **PRIVATE)
    begun = [json.loads(line)["round"] for line in (out / "privacy.jsonl").read_text().splitlines()]
    assert begun == [0, 1, 2, 3, 4, 5, 4, 5]
    assert result.summary["releases"] == 8 and [record["round"] for record in result.metrics] == list(range(6))
    assert result.summary["epsilon"] == epsilon(4 / 12, 1.0, 8, 12**-1.1)


def test_with_a_seed_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tiny_run(tmp_path / "whole", "slt", **SEEDED)
    stopped(monkeypatch, tmp_path / "run", after=3, checkpoint_every=2, **SEEDED)
    resumed = tiny_run(tmp_path / "run", "slt", resume=True, checkpoint_every=2, **SEEDED)
    assert bits(whole.out) == bits(resumed.out) and resumed.summary["releases"] == 6
    assert not (resumed.out / "privacy.jsonl").exists()


def test_statistics_of_batch_norm_come_from_the_servers_own_images(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="batch norm.*give --validation"):
        tiny_run(tmp_path / "none", "fedavg", dp_noise=1.0, dp_clip=0.5)
    assert not (tmp_path / "none").exists()
    result = tiny_run(tmp_path / "run", "fedavg", **SEEDED, rounds=1)
    _, held = hold_out(tiny.data(), 0.1, 0)
    state, chosen = result.state_dict(), held.subset(calibration_indices(len(held), 0))
    again = reestimated(workspace_of(tiny.graph()), tiny.graph().full(), state, chosen, tiny.training())
    assert all(torch.equal(state[name], again[name]) for name in state)


class WithoutNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=2)
        self.classifier = nn.Linear(4, tiny.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.relu(self.conv(x)).mean((2, 3)))


def test_a_model_without_batch_norm_needs_no_images_of_the_server(tmp_path: Path) -> None:
    model = WithoutNorm()
    method = create("fedavg", ChannelGraph(model, (3, tiny.SIZE, tiny.SIZE)))
    result = run(model, tiny.data(), method, out=tmp_path, rounds=1, devices=12, per_round=4, workers=0,
                 progress=False, training=tiny.training(), dp_noise=1.0, dp_clip=0.5)  # fmt: skip
    assert result.summary["releases"] == 1 and "validation_accuracy" not in result.summary


def test_without_the_accountant_nothing_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "dp_accounting" else find(name))
    with pytest.raises(BadInput, match=r"pip install 'strata-fl\[privacy\]'"):
        tiny_run(tmp_path / "run", "fd", **PRIVATE)
    assert not (tmp_path / "run").exists()


def test_a_run_of_an_older_strata_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(monkeypatch, tmp_path, after=2)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    later = {"aggregation", "dp_noise", "dp_clip", "dp_delta", "dp_seed"}
    assert not later & set(config["settings"])  # as in a folder from before there were these options
    with pytest.raises(BadInput, match='aggregation was null and is now "median"'):
        tiny_run(tmp_path, "slt", resume=True, aggregation="median")
    assert tuple(tiny_run(tmp_path, "slt", resume=True).metrics[-1]) == METRIC_KEYS
    # and what the command line asked for
    asked = RunConfig().to_json()
    assert not later & set(asked) and RunConfig.from_json(asked) == RunConfig()
    changed = RunConfig.of(aggregation="median", dp_noise=1.0, dp_clip=0.5, dp_delta=0.1)
    assert RunConfig.from_json(changed.to_json()) == changed != RunConfig()


COMMAND = ["run", "--model", "strata_run_nets:make", "--devices", "10", "--per-round", "4", "--rounds", "2",
           "--workers", "0", "--method", "fedavg"]  # fmt: skip


def test_by_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "strata_run_nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "strata_run_nets", raising=False)
    noise = ["--dp-noise", "1", "--dp-clip", "0.5", "--dp-delta", "0.01", "--validation", "0.05"]
    assert main([*COMMAND, *noise, "--out", "private"]) == 0
    shown = capsys.readouterr()
    assert "epsilon 1." in shown.out and "at delta 0.01" in shown.out and "loss" not in shown.err
    assert main([*COMMAND, "--aggregation", "trimmed:0.2", "--out", "trimmed", "--quiet"]) == 0
    request = json.loads((tmp_path / "trimmed" / "config.json").read_text())["request"]
    assert request["aggregation"] == "trimmed:0.2" and "dp_noise" not in request
    capsys.readouterr()
    for wrong, says in (
        (noise[:4], "give --validation"),
        ([*noise, "--weighted"], "leave out weighted"),
        (["--aggregation", "krum"], "mean, median or trimmed"),
    ):
        assert main([*COMMAND, *wrong, "--out", "wrong"]) == 2
        assert says in capsys.readouterr().err and not (tmp_path / "wrong").exists()


def test_on_a_fleet_nothing_else_may_say_what_devices_have(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from strata.fleet.protocol.settings import RunSettings
    from strata.fleet.server.run import run_on_fleet

    out = str(tmp_path / "run")
    for request, evaluation, says in (
        ({"dp_noise": 1.0, "dp_clip": 0.5}, "devices", "give --evaluation server"),
        ({"dp_noise": 1.0, "dp_clip": 0.5, "dp_seed": 1}, "server", "leave out --dp-seed"),
    ):
        with pytest.raises(BadInput, match=says):
            run_on_fleet(None, RunSettings(request, out, evaluation=evaluation))  # type: ignore[arg-type]
