"""What `strata fit` compares and recommends."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import strata
from strata.core.errors import BadInput
from strata.core.sizes import show_bytes
from strata.execution import Execution, flops, memory, traffic
from strata.methods.fitting import flags_for
from strata.planning.fit import Fit, Way, recommend, with_beaten
from strata.training import LocalTraining
from tests.methods.tiny import tiny_graph

STEP = Execution(16)


def adamw(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr)


KEYS = [
    "method", "setting", "execution", "fits", "peak_bytes", "mapped_bytes", "trained_share", "train_flops",
    "upload_bytes", "download_bytes", "minutes", "beaten_by", "accuracy", "command",
]  # fmt: skip


def way(method: str, peak: int, share: float, cost: int = 10, **more: object) -> Way:
    made = Way(
        method, "", STEP, True, peak, trained_share=share, train_flops=cost, upload_bytes=cost, download_bytes=cost
    )
    return replace(made, **more)  # type: ignore[arg-type]


def test_a_way_is_beaten_only_in_every_column() -> None:
    ways = [way("a", 10, 0.5), way("b", 9, 0.5), way("c", 10, 0.6), way("d", 11, 0.6), way("e", 10, 0.5)]
    assert [one.beaten_by for one in with_beaten(ways)] == [1, None, None, 2, 1]
    assert [one.beaten_by for one in with_beaten(ways, spared=0)] == [None, None, None, 2, 1]
    assert with_beaten([way("a", 10, 0.5, fits=False), way("b", 9, 0.5)])[0].beaten_by is None
    accurate = with_beaten([way("a", 10, 0.5, accuracy=0.8), way("b", 9, 0.5, accuracy=0.7)])
    assert accurate[0].beaten_by is None
    # under batch norm fewer samples at a time are a price too
    parts = [way("a", 10, 0.5, normed=True), way("b", 9, 0.5, normed=True, execution=Execution(16, 4))]
    assert with_beaten(parts)[0].beaten_by is None


def test_the_rule() -> None:
    whole, wide, narrow = way("fedavg", 9, 1.0), way("small", 8, 0.5), way("small", 8, 0.2)
    slt, other = way("slt", 8, 1.0), way("heterofl", 8, 0.1)
    missing = way("fedavg", 90, 0.0, fits=False)
    assert recommend([slt, whole, wide])[0] == 1
    assert recommend([slt, missing, wide])[0] == 2
    assert recommend([slt, missing, narrow])[0] == 0
    assert recommend([slt, replace(whole, everywhere=False), narrow])[0] == 0
    assert recommend([missing, other])[0] == 1
    assert recommend([missing, other, narrow])[0] == 2 and "has learned most" in recommend([missing, other, narrow])[1]
    few = replace(whole, normed=True, execution=Execution(16, 4))
    assert "slows it" in recommend([few])[1] and "slows it" not in recommend([whole])[1]
    number, reason = recommend([replace(missing, short_bytes=80)])
    assert number is None and "smallest budget that would do is 90 bytes" in reason


def test_settings_are_named_by_flags_that_can_be_pasted() -> None:
    lean = Execution(16, 4, activation_checkpointing="auto", release_gradients=True)
    assert flags_for(lean) == "with --micro-batch 4 --activation-checkpointing auto --release-gradients"
    assert flags_for(Execution(16)) == "as it is"


def fitted(budget: int | str, **options: object) -> Fit:
    return strata.fit(tiny_graph(), budget, **{"execution": STEP, "rounds": 20, "calibrate": False, **options})  # type: ignore[arg-type]


def test_every_way_is_within_the_budget_and_costs_what_it_costs() -> None:
    graph = tiny_graph()
    whole = memory(graph, graph.full(), STEP).total
    found = fitted(whole, devices=40, per_round=4, samples=32)
    assert found.best is not None and found.best.method == "fedavg"
    assert [one.method for one in found.ways] == ["fedavg"]  # all others come to the same
    plain = found.best
    assert plain.peak_bytes == whole == found.full_bytes
    assert plain.train_flops == 20 * 4 * 32 * flops(graph, graph.full()).real_train
    assert plain.upload_bytes == plain.download_bytes == 20 * 4 * traffic(graph, graph.full()).upload
    tight = fitted(whole // 6)
    assert {one.method for one in tight.ways if one.fits} >= {"small", "fd"}
    for one in tight.ways:
        assert (one.peak_bytes <= whole // 6) == one.fits == (one.short_bytes is None)
        assert 0 < one.trained_share <= 1 or not one.fits
    small = next(one for one in tight.ways if one.method == "small")
    scale = float(small.setting.removeprefix("width "))
    assert small.peak_bytes == memory(graph, graph.prefix(scale), small.execution).total


def test_json() -> None:
    graph = tiny_graph()
    whole = memory(graph, graph.full(), STEP).total
    data = fitted(whole // 3).to_json()
    assert list(data)[:7] == ["model", "input", "batch", "budget_bytes", "full_bytes", "rounds", "ways"]
    assert data["recommended"] in range(len(data["ways"])) and data["budget_bytes"] == whole // 3
    for one in data["ways"]:
        assert list(one) == KEYS + ([] if one["fits"] else ["short_bytes", "remedy", "ceiling"])
        assert one["fits"] or one["short_bytes"] == one["peak_bytes"] - whole // 3 > 0


def test_what_does_not_fit_names_the_settings_with_which_it_would() -> None:
    """Those that `fit` does not choose by itself: mapped weights (slt freezes some), and momentum that is rounded. Of
    four samples, as batch norm leaves no smaller parts: in parts gradients go into momentum, if that is not rounded."""
    step = Execution(4)

    def smallest(method: str, **changes: str) -> int:
        execution = replace(step, **changes)  # type: ignore[arg-type]
        found = strata.fit(tiny_graph(), 100, execution=execution, rounds=20, calibrate=False, methods=[method])
        return found.ways[0].peak_bytes

    def said(method: str, budget: int) -> tuple[str, str]:
        found = fitted(budget, methods=[method], execution=step)
        return found.ways[0].remedy, str(found)

    for method, changes in (("slt", {"frozen_weights": "mapped"}), ("fedavg", {"momentum_dtype": "bfloat16"})):
        need = smallest(method, **changes)
        assert need < smallest(method)
        name, value = next(iter(changes.items()))
        flag = f"--{name.replace('_', '-')} {value}"
        remedy, text = said(method, need)
        assert remedy == flag and f"; with {flag} it would fit." in text
    both = smallest("slt", frozen_weights="mapped", momentum_dtype="bfloat16")
    assert said("slt", both)[0] == "--frozen-weights mapped --momentum-dtype bfloat16"
    remedy, text = said("slt", both - 1)
    assert remedy == "" and "would fit" not in text


def test_mapped_weights_have_a_column_of_their_own() -> None:
    whole = memory(tiny_graph(), tiny_graph().full(), STEP).total
    mapped = replace(STEP, frozen_weights="mapped")
    found = strata.fit(tiny_graph(), whole // 5, execution=mapped, rounds=20, calibrate=False)
    text = str(found)
    assert " mapped " in text.splitlines()[2] and "frozen weights mapped" not in text
    assert " mapped " not in str(fitted(whole // 5))
    assert [one.execution.maps for one in found.ways if one.fits] == [
        bool(one.mapped_bytes) for one in found.ways if one.fits
    ]


def test_minutes_of_a_device() -> None:
    graph = tiny_graph()
    found = fitted(10 * memory(graph, graph.full(), STEP).total, gflops=2, mbit=5, per_round=4)
    best = found.best
    assert best is not None and best.minutes is not None
    seconds = best.train_flops / 4 / 2e9 + 8 * (best.upload_bytes + best.download_bytes) / 4 / 5e6
    assert best.minutes == pytest.approx(seconds / 60)
    assert "2 GFLOP/s and 5 Mbit/s" in str(found) and "Take fedavg" in str(found)


def test_levels() -> None:
    graph = tiny_graph()
    lean = replace(STEP, micro_batch=4, activation_checkpointing="auto", release_gradients=True)
    need = memory(graph, graph.full(), lean).total
    found = strata.fit(graph, [int(0.9 * need), 4 * need], execution=STEP, rounds=20, calibrate=False)
    whole = next(one for one in found.ways if one.method == "fedavg")
    assert whole.fits and not whole.everywhere
    assert found.best is not None and found.best.method != "fedavg"
    assert "does not fit on every device" in found.reason
    assert found.to_json()["levels"] == [int(0.9 * need), 4 * need]
    small = next(one for one in found.ways if one.method == "small")
    assert [level.peak_bytes <= size for level, size in zip(small.levels, found.budgets, strict=True)] == [True, True]
    assert len(found.to_json()["ways"][0]["levels"]) in (1, 2)  # fedavg: of those that take part


def test_a_second_larger_level_makes_no_answer_worse() -> None:
    """Gradients may be released whatever the number of levels, but for FjORD, whose levels share them."""
    graph = tiny_graph()
    lean = replace(STEP, micro_batch=4, activation_checkpointing="auto", release_gradients=True)
    need = memory(graph, graph.full(), lean).total

    def of(*sizes: int) -> Fit:
        return strata.fit(graph, sizes, execution=STEP, rounds=20, calibrate=False)

    one, two = of(need), of(need, 3 * need)
    assert one.best is not None and two.best is not None and one.best.method == two.best.method == "fedavg"
    assert two.best.levels[0].execution == one.best.execution and two.best.levels[0].execution.release_gradients
    shared = next((way.levels for way in two.ways if way.method == "fjord"), ())
    assert not any(level.execution.release_gradients for level in shared)
    assert f"{show_bytes(need)}, " in str(two)
    assert of(100).reason == of(100, 300).reason


def test_what_costs_too_much_is_not_said_to_lack_memory() -> None:
    graph = tiny_graph()
    whole = memory(graph, graph.full(), STEP).total
    found = fitted(whole, max_flops=0.5)
    fedavg = next(one for one in found.ways if one.method == "fedavg")
    assert not fedavg.fits and fedavg.short_bytes == 0 and fedavg.ceiling == "0.5 times the FLOPs of plain training"
    assert "fedavg is above the ceiling of 0.5 times" in str(found) and "fedavg does not fit" not in str(found)
    assert found.reason.startswith("the whole model is above the ceiling of 0.5 times")


def test_where_the_whole_model_takes_few_samples_others_are_shown_with_more() -> None:
    graph = tiny_graph()
    lean = replace(STEP, micro_batch=4, activation_checkpointing="auto")
    found = fitted(memory(graph, graph.full(), lean).total)
    assert found.best is not None and found.best.method == "fedavg" and found.best.execution.at_once == 4
    others = [way for way in found.ways if way.method != "fedavg"]
    assert {"small", "fd"} <= {way.method for way in others}
    assert all(way.norm_samples == 8 <= way.execution.at_once for way in others)
    assert "at least twice as many" in str(found)


def test_an_optimizer_of_the_users_own_where_something_does_not_fit() -> None:
    own = LocalTraining(16, optimizer=adamw)
    found = strata.fit(tiny_graph(), 100, execution=own, rounds=5, calibrate=False)
    assert found.recommended is None and all(not way.fits for way in found.ways)


def test_bad_requests() -> None:
    with pytest.raises(BadInput, match="whatever the memory"):
        fitted(10**9, max_upload="1B")
    with pytest.raises(BadInput, match="20 devices per round cannot be chosen from 10 devices"):
        fitted(10**9, devices=10, per_round=20)
    with pytest.raises(BadInput, match="rounds"):
        fitted(10**9, rounds=0)
    with pytest.raises(BadInput, match="both of its speeds"):
        fitted(10**9, gflops=2)
    with pytest.raises(BadInput, match="above 0"):
        fitted(10**9, max_flops=0)
    nothing = fitted("100B")
    assert nothing.recommended is None and nothing.best is None
    assert f"{min(one.peak_bytes for one in nothing.ways)} bytes" in nothing.reason
