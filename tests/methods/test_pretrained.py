"""Methods that keep what is pretrained: which parameters they train and send in each round, within which bytes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import strata
from strata.cli import main
from strata.core.errors import BadInput, TooLittle
from strata.data import FederatedData, Samples
from strata.execution import Execution, measure_cut, memory
from strata.federation.norm_statistics import check_norms
from strata.graph import ChannelGraph, InputSpec
from strata.methods import Method, create
from strata.methods.choice import method_named
from strata.methods.heads import plain_state, prepared_model
from strata.methods.lora import Adapted, Lora, adapted
from strata.runs.checks import narrowing
from strata.training import LocalTraining

STEP = Execution(batch_size=8)
WIDE, CLASSES = 24, 3
LAYER = WIDE * WIDE + WIDE  # parameters of layers 2 to 4
CLASSIFIER = WIDE * CLASSES + CLASSES


def mlp() -> nn.Sequential:
    """Four layers (modules 0, 2, 4, 6) and a classifier (8)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = [6, *[WIDE] * 4]
        hidden = [part for a, b in zip(sizes, sizes[1:], strict=False) for part in (nn.Linear(a, b), nn.Tanh())]
        return nn.Sequential(*hidden, nn.Linear(WIDE, CLASSES))


@cache
def graph() -> ChannelGraph:
    return ChannelGraph(mlp(), (6,))


def bytes_of(low: int, high: int) -> int:
    return memory(graph(), graph().window(low, high), STEP).total


def made(name: str, *budgets: int, rounds: int = 12, **options: Any) -> Any:
    return method_named(name, graph(), budgets=budgets, execution=STEP, rounds=rounds, **options)


def trained(method: Method, round: int, device: int = 0) -> set[str]:
    """The modules of which something is trained."""
    return {name.partition(".")[0] for name in method.cut_for(round, device).trained}


def test_a_window_is_trained_with_the_classifier_and_nothing_else() -> None:
    cut = graph().window(1, 3)
    assert cut.trained == tuple(f"{part}.{kind}" for part in (2, 4, 8) for kind in ("weight", "bias"))
    assert graph().window(1, 4) == graph().freeze(graph().full(), 1) and graph().window(0, 4) == graph().full()
    assert graph().window(4, 4).trained == ("8.weight", "8.bias")
    with pytest.raises(BadInput, match="a window from 3 to 2: need 0 <= k_frozen <= k_trained <= 4 layers"):
        graph().window(3, 2)
    for window in ((0, 1), (1, 3), (2, 4), (4, 4)):  # what is frozen in between is counted as it is
        assert bytes_of(*window) == measure_cut(graph(), graph().window(*window), STEP).peak


def test_top_trains_as_many_layers_as_each_level_can_hold() -> None:
    method = made("top", bytes_of(3, 4), bytes_of(1, 4) - 1, bytes_of(0, 4))
    assert method.frozen == (3, 2, 0) and method.setting == "top 1, 2, 4 of 4 layers" and method.period == 3
    assert trained(method, 5, 0) == {"6", "8"} and trained(method, 9, 1) == {"4", "6", "8"}
    assert method.cut_for(0, 5) == graph().full() == method.server_cut()
    with pytest.raises(TooLittle, match=rf"\({bytes_of(4, 4):,} bytes\) for the classifier alone, 1 B more than"):
        made("top", bytes_of(4, 4) - 1)


def test_the_window_moves_up_and_each_is_as_wide_as_fits() -> None:
    assert bytes_of(0, 1) < bytes_of(2, 3) < bytes_of(1, 2) < bytes_of(0, 2) < bytes_of(2, 4) < bytes_of(0, 3)
    method = made("window", bytes_of(0, 2))
    assert method.bounds == (((0, 2), (2, 3), (3, 4)),) and method.setting == "3 windows of 1 to 2 layers"
    assert [method.step(round) for round in range(12)] == [0] * 6 + [1] * 3 + [2] * 3
    assert trained(method, 0) == {"0", "2", "8"} and trained(method, 6) == {"4", "8"}
    assert trained(method, 11) == {"6", "8"}, "what was passed is frozen"
    assert made("window", bytes_of(0, 2), rounds=2).step(1) == 1, "every window has a round, while there are any"
    strong = made("window", bytes_of(0, 2), bytes_of(0, 3))  # device 1 reaches higher from the same layers
    assert strong.bounds == (((0, 2), (2, 3), (3, 4)), ((0, 3), (2, 4), (3, 4)))
    assert trained(strong, 0, 1) == {"0", "2", "4", "8"} and strong.step(6) == 1


def test_a_window_begins_where_it_fits() -> None:
    """A convolution over many positions has activations that only layers above it can do without."""
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1), nn.Tanh(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3),
    )  # fmt: skip
    own = ChannelGraph(net, (3, 8, 8))
    need = memory(own, own.window(2, 3), STEP).total
    assert memory(own, own.window(1, 2), STEP).total > 1.5 * need < memory(own, own.window(0, 1), STEP).total
    method = method_named("window", own, budgets=[need], execution=STEP, rounds=4)
    assert method.bounds == (((2, 3),),), "the convolutions stay as they are"  # type: ignore[attr-defined]


def test_cycle_goes_round() -> None:
    method = made("cycle", bytes_of(0, 2))
    assert [method.step(round) for round in range(5)] == [0, 1, 2, 0, 1]
    assert trained(method, 3) == {"0", "2", "8"} == trained(method, 0)
    plain = create("cycle", graph())
    assert [trained(plain, round) for round in range(5)] == [
        {"0", "8"}, {"2", "8"}, {"4", "8"}, {"6", "8"}, {"0", "8"}
    ]  # fmt: skip
    assert made("cycle").bounds == plain.bounds, "without a budget: one layer at a time"


def test_bias() -> None:
    method = made("bias", bytes_of(0, 4))
    assert method.cut.trained == ("0.bias", "2.bias", "4.bias", "6.bias", "8.weight", "8.bias")
    need = memory(graph(), method.cut, STEP).total
    assert need == measure_cut(graph(), method.cut, STEP).peak
    with pytest.raises(TooLittle, match=rf"\({need:,} bytes\) on every device, 1 B more"):
        made("bias", need - 1)
    normed = ChannelGraph(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)), (6,))
    names = ("0.bias", "1.weight", "1.bias", "3.weight", "3.bias")
    assert create("bias", normed).cut_for(0, 0).trained == names


def test_frozen_statistics_without_frozen_layers_are_refused() -> None:
    normed = ChannelGraph(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)), (6,))
    training = LocalTraining(norm_statistics="frozen")
    with pytest.raises(BadInput, match="and fedavg freezes none in this run: leave it out, or give fixed"):
        check_norms(create("fedavg", normed), training, 3, "Net")
    check_norms(method_named("top", normed, constraints=(1.0,)), LocalTraining(norm_statistics="fixed"), 3, "Net")
    check_norms(method_named("bias", normed), LocalTraining(norm_statistics="fixed"), 3, "Net")


# --- lora --------------------------------------------------------------------------------------------------------


def with_pairs(**options: Any) -> Adapted:
    whole = prepared_model(Lora, mlp(), InputSpec.of((6,)), 0, options)
    assert isinstance(whole, Adapted)
    return whole


def test_lora_begins_as_the_model_and_merges_to_the_same_function() -> None:
    whole, plain, x = with_pairs(rank=2), mlp(), torch.randn(5, 6)
    assert torch.equal(whole(x), plain(x)), "up is zero"
    for pair in whole.adapters.values():
        nn.init.normal_(pair[1].weight)  # type: ignore[index]
    assert not torch.allclose(whole(x), plain(x))
    plain.load_state_dict(plain_state(whole, whole.model, whole.state_dict()))
    torch.testing.assert_close(plain(x), whole(x))
    down, up = (whole.adapters["2"][number].weight for number in (0, 1))  # type: ignore[index]
    torch.testing.assert_close(plain[2].weight, mlp()[2].weight + up @ down)  # type: ignore[operator]


@pytest.mark.parametrize(
    "part", [nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(3, 8, (1, 3), dilation=2, padding_mode="reflect")]
)
def test_lora_of_convolutions(part: nn.Conv2d) -> None:
    net = nn.Sequential(part, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    whole = adapted(net, InputSpec.of((3, 8, 8)), 4)
    assert list(whole.adapters) == ["0"]
    nn.init.normal_(whole.adapters["0"][1].weight)  # type: ignore[index]
    x = torch.randn(2, 3, 8, 8)
    merged = plain_state(whole, net, whole.state_dict())
    wanted = whole(x)
    net.load_state_dict(merged)
    torch.testing.assert_close(net(x), wanted)


def test_lora_trains_its_pairs_and_the_classifier_and_counts_them() -> None:
    whole = with_pairs(rank=2, targets="2,6")
    own = ChannelGraph(whole, (6,))
    method = Lora(own, rank=2, targets="2,6")
    pairs = [f"adapters.{part}.{number}.weight" for part in (2, 6) for number in (0, 1)]
    assert method.cut.trained == ("model.8.weight", "model.8.bias", *pairs) and method.setting == "rank 2"
    assert memory(own, method.cut, STEP).total == measure_cut(own, method.cut, STEP).peak
    with pytest.raises(BadInput, match="Sequential has no layer q_proj for lora: its layers end in 0, 2, 4, 6"):
        with_pairs(targets="2,q_proj")
    with pytest.raises(BadInput, match="no linear layer or convolution below its last"):
        adapted(nn.Sequential(nn.Flatten(), nn.Linear(6, 3)), InputSpec.of((6,)))


# --- runs --------------------------------------------------------------------------------------------------------


def data() -> FederatedData:
    draw = torch.Generator().manual_seed(0)

    def samples(count: int) -> Samples:
        labels = torch.randint(CLASSES, (count,), generator=draw)
        inputs = torch.randn(count, 6, generator=draw)
        inputs[:, :CLASSES] += 2 * nn.functional.one_hot(labels, CLASSES)
        return Samples({"input": inputs}, labels)

    return FederatedData(samples(96), samples(60), "points", CLASSES)


def run(out: Path, method: str | Method, **options: Any) -> strata.runs.Result:
    given: dict[str, Any] = {"rounds": 4, "devices": 4, "per_round": 2, "workers": 0, "progress": False, **options}
    return strata.run(mlp(), data(), method, out=out, training=LocalTraining(batch_size=8), **given)


PAIRS = 2 * (6 * 8 + 8 * WIDE + 3 * 2 * 8 * WIDE)  # of two devices, rank 8
SENT = {  # parameters that two devices send in each of four rounds
    "top": [2 * (2 * LAYER + CLASSIFIER)] * 4,
    "window": [2 * (6 * WIDE + WIDE + LAYER + CLASSIFIER)] * 2 + [2 * (LAYER + CLASSIFIER)] * 2,
    "cycle": [2 * (6 * WIDE + WIDE + LAYER + CLASSIFIER), *[2 * (LAYER + CLASSIFIER)] * 2,
              2 * (6 * WIDE + WIDE + LAYER + CLASSIFIER)],
    "bias": [2 * (4 * WIDE + CLASSIFIER)] * 4,
    "lora": [PAIRS + 2 * CLASSIFIER] * 4,
}  # fmt: skip


@pytest.mark.parametrize("name", SENT)
def test_a_run_sends_what_it_trains_keeps_the_rest_and_its_budget(name: str, tmp_path: Path) -> None:
    budget = {"top": bytes_of(2, 4), "window": bytes_of(0, 2), "cycle": bytes_of(0, 2)}.get(name, 4 * bytes_of(0, 4))
    result = run(tmp_path / "a", name, budget=budget)
    assert [record["upload_bytes"] for record in result.metrics] == [4 * sent for sent in SENT[name]]
    assert all(0 < record["peak_bytes"] <= budget for record in result.metrics)
    assert result.summary["budget"]["over_bytes"] == 0
    model, before = mlp(), mlp().state_dict()
    model.load_state_dict(result.state_dict())
    moved = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    everything = set(before)
    left = {"top": {"0.weight", "0.bias", "2.weight", "2.bias"}, "window": set(), "cycle": set()}
    weights = {key for key in everything if key.endswith("weight")}
    left |= {"bias": weights - {"8.weight"}, "lora": everything - weights - {"8.bias"}}
    assert moved == everything - left[name], "merged, of lora"
    if name == "lora":  # what is saved is what was evaluated
        inputs, labels = data().test.inputs["input"], data().test.targets
        assert (model(inputs).argmax(1) == labels).float().mean().item() == pytest.approx(result.accuracy)


@pytest.mark.parametrize("name", ["cycle", "lora"])
def test_same_bits_in_workers(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": "adamw", "warmup": 2}
    if name == "lora":
        options |= {"budget": 4 * bytes_of(0, 4), "lean": True, "rank": 4}
    inline, spread = run(tmp_path / "a", name, **options), run(tmp_path / "b", name, workers=2, **options)
    bits: list[dict[str, Tensor]] = [inline.state_dict(), spread.state_dict()]
    assert all(torch.equal(value, bits[1][key]) for key, value in bits[0].items())
    assert [{**one, "seconds": 0} for one in inline.metrics] == [{**one, "seconds": 0} for one in spread.metrics]
    assert [one["lr"] for one in inline.metrics] == pytest.approx([0.001 / 3, 0.002 / 3, 0.001, 0.0001])
    if name == "lora":
        assert inline.metrics[0]["upload_bytes"] == 4 * (PAIRS // 2 + 2 * CLASSIFIER), "half the rank"


def test_a_method_that_was_made_says_how_its_model_is_prepared(tmp_path: Path) -> None:
    whole = with_pairs(rank=3, targets="4")
    result = run(tmp_path / "a", Lora(ChannelGraph(whole, data().inputs), rank=3, targets="4"), rounds=1)
    assert result.metrics[0]["upload_bytes"] == 4 * 2 * (2 * 3 * WIDE + CLASSIFIER)


def test_narrowing_pretrained_weights_is_said() -> None:
    (said,) = narrowing(create("small", graph(), constraints=(0.5,)), True)
    assert said.startswith("WARNING: small trains narrow parts of these pretrained weights") and "window" in said
    plan = strata.plan(graph(), budget=f"{bytes_of(2, 3)}B", execution=STEP, rounds=8)
    assert narrowing(strata.SLT(plan), True) and not narrowing(strata.SLT(plan), False)
    for name in ("fedavg", "top", "window", "cycle", "bias"):
        assert narrowing(create(name, graph()), True) == []


# --- the command line --------------------------------------------------------------------------------------------


def test_lean_windows_each_in_their_own_way_and_fit() -> None:
    """Every window is within the budget by the execution that was chosen for it."""
    tight = bytes_of(0, 1) - 1
    assert bytes_of(2, 3) > tight > bytes_of(4, 4), "not one layer fits plainly"
    assert made("window", tight).setting == "the classifier alone"
    method = made("window", tight, lean=True)
    assert len(method.executions) == len(method.windows) and any(high > low for low, high in method.windows)
    for step in range(len(method.windows)):
        round = [method.step(round) for round in range(12)].index(step)
        task = method.assign(round, [0])[0]
        execution = task.phases[0].execution
        assert execution is not None and measure_cut(graph(), task.cut, execution).peak <= tight
    names = ["fedavg", "top", "window", "cycle", "bias", "lora"]
    found = strata.fit(
        graph(), f"{tight}B", execution=STEP, rounds=8, calibrate=False, plain=mlp(), pretrained=True
    )  # fmt: skip
    ways = {way.method: way for way in found.ways}
    assert list(ways) == names and not ways["fedavg"].fits and ways["bias"].fits
    assert ways["window"].setting == method.setting
    assert all((way.peak_bytes <= tight) == way.fits for way in found.ways)


def test_fit_keeps_outputs_on_disk_where_frozen_layers_run_twice() -> None:
    """cycle goes round several windows, so that what is below one of them is other weights in the next round; a run
    refuses to keep it. With two epochs the same weights come twice."""
    tight = bytes_of(2, 3)

    def kept(epochs: int) -> dict[str, bool]:
        keeping = Execution(batch_size=8, cache_prefix=2**20)
        found = strata.fit(
            graph(), f"{tight}B", execution=keeping, rounds=8, epochs=epochs, calibrate=False, pretrained=True,
            methods=["top", "window", "cycle"],
        )  # fmt: skip
        return {way.method: way.execution.caches for way in found.ways if way.fits}

    assert kept(1) == {"top": True, "window": True, "cycle": False}
    assert kept(2) == {"top": True, "window": True, "cycle": True}


def test_plan_of_a_method(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    where = ["--model", "tests.methods.test_pretrained:mlp", "--input", "6", "--batch", "8", "--rounds", "12"]
    assert main(["plan", *where, "--method", "window", "--budget", f"{bytes_of(0, 2)}B", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    steps = [(one["k_frozen"], one["k_trained"], one["until_round"], one["memory_bytes"]) for one in found["steps"]]
    assert steps == [(0, 2, 6, bytes_of(0, 2)), (2, 3, 9, bytes_of(2, 3)), (3, 4, 12, bytes_of(3, 4))]
    assert found["setting"] == "3 windows of 1 to 2 layers" and found["full_bytes"] == bytes_of(0, 4)
    assert [one["trained_parameters"] for one in found["steps"]][1:] == [LAYER + CLASSIFIER] * 2
    assert main(["plan", *where, "--method", "lora", "--rank", "2", "--targets", "2"]) == 0
    assert "rank 2" in capsys.readouterr().out
    assert main(["plan", *where, "--method", "top", "--budget", "1MiB", "--scratch"]) == 2
    assert "--scratch is for a plan of slt, not of top" in capsys.readouterr().err
    assert main(["plan", *where, "--method", "top", "--budget", "1000B"]) == 3
    assert "for the classifier alone" in capsys.readouterr().err
