"""`strata plan --method M --verify --hard-cap`: real steps of other methods than SLT, in child processes, under real
kernel limits."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from strata.cli import main
from strata.execution import Execution, memory, state_bytes
from strata.methods import FjORD, Small
from strata.methods.outline import configurations, outline
from strata.planning.verify import FULL, Claim, request_of, trials_of
from tests.networks import graph_of

NETS = """
from torch import nn

def deep():
    sizes = [3072, *[600] * 5]
    hidden = [part for a, b in zip(sizes, sizes[1:]) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(600, 10))
"""
WHERE = ["--model", "strata_method_nets:deep", "--batch", "4", "--rounds", "6"]
STEP = Execution(batch_size=8)


@pytest.fixture(autouse=True)
def nets(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("nets")
    (folder / "strata_method_nets.py").write_text(NETS)
    monkeypatch.syspath_prepend(str(folder))


def verified(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["plan", *WHERE, *arguments, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["verification"]
    return found


def test_windows_live_within_their_budget_and_the_whole_model_dies(capsys: pytest.CaptureFixture[str]) -> None:
    budget = 28 * 2**20  # of 38: the weights of all, and gradients and momentum of the large first layer
    *steps, whole = verified(capsys, "--method", "window", "--budget", f"{budget}B", "--hard-cap")
    assert [one["step"] for one in steps] == [0, 1]
    for one in steps:
        assert one["lived"] is True and one["measured_bytes"] <= one["predicted_bytes"] * 1.01 <= budget * 1.01
        assert one["predicted_bytes"] <= 1.03 * one["measured_bytes"]
    assert whole["step"] == "whole" and whole["lived"] is False and whole["measured_bytes"] > 1.3 * budget


def test_a_method_that_adds_to_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    (one,) = verified(capsys, "--method", "lora", "--rank", "2", "--budget", "20MiB", "--verify")
    assert one["predicted_bytes"] == one["measured_bytes"] <= 20 * 2**20 and one["lived"] is None


def test_a_false_claim_is_found_out() -> None:
    graph = graph_of("vgg")
    made = Small(graph, (0.5,))
    # large enough that what a process happens to have free of its own is no room for it
    step = replace(STEP, batch_size=128)
    need = memory(graph, graph.prefix(0.5), step).total
    claim = Claim(need // 3, memory(graph, graph.full(), step).total // 2)
    request = {**request_of(graph, graph.inputs, "tests.networks:VggNet", None, None), "method": "small", "seed": 0}
    tried = configurations(made, step, 3, claim)
    assert [one.step for one in tried] == [0, FULL]
    one, whole = trials_of(tried, claim, {**request, "options": {}}, "strata.methods.trials")
    assert one.predicted_bytes == one.measured_bytes == need
    assert one.lived is False and not one.holds and whole.lived is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "lora", "--hard-cap"], "say with --budget how many bytes"),
        (["--method", "small", "--budget", "8MiB,16MiB", "--verify"], "take one --budget"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["plan", *WHERE, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_levels_of_one_device_are_counted_and_not_verified() -> None:
    graph = graph_of("vgg")
    made = FjORD(graph, (0.5, 1.0))
    large = memory(graph, graph.full(), STEP).total
    stages = outline(made, STEP, 3, "vgg").stages
    assert stages[1].memory_bytes == large + state_bytes(graph, graph.prefix(0.5))
    assert stages[0].memory_bytes == memory(graph, graph.prefix(0.5), STEP).total
    with pytest.raises(Exception, match="devices of fjord change among 2"):
        configurations(made, STEP, 3, None)


def test_small_is_the_weakest_devices_model_for_all() -> None:
    """Stronger devices take no more for it, and are given no execution for a wider one."""
    graph = graph_of("vgg")
    made = Small(graph, (0.25, 1.0))
    assert made.setting == "width 0.25"
    need = memory(graph, graph.prefix(0.25), STEP).total
    assert made.most_bytes(lambda cut: memory(graph, cut, STEP).total) == [need, need]
    assert made == replace(made, constraints=(0.25, 0.25))
