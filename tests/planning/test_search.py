from __future__ import annotations

from dataclasses import replace

import pytest

from strata.planning.search import (
    Configuration,
    distinct_scales,
    last_fitting,
    search,
    smallest_frozen,
    with_narrower_head,
)
from tests.golden import golden
from tests.planning.reference import paper_resnet

RESNETS = [name for name in golden()["configs"] if name.startswith("ResNet")]
SCALES = distinct_scales((16, 32, 64))


def test_distinct_scales_are_the_largest_thousandths_of_their_channel_counts() -> None:
    assert len(SCALES) == 64
    assert SCALES[:4] == (0.031, 0.046, 0.062, 0.078)  # 64 s stays below 2, 3, 4, 5
    assert SCALES[-3:] == (0.984, 0.999, 1.0)
    assert distinct_scales((2, 3)) == (0.666, 0.999, 1.0)  # 1/1, 1/2, then 2/3; at 0.5..0.666 2s = 1 as below


@pytest.mark.parametrize("name", ["ResNet20", "ResNet44"])
@pytest.mark.parametrize("scale", [0.125, 0.25, 0.5, 1.0])
def test_the_reference_counts_what_the_golden_values_say(name: str, scale: float) -> None:
    assert paper_resnet(name).memory(0, 0, scale) == golden()["memory"][f"{name}@{scale}"]["A_all_leaf"]


@pytest.mark.parametrize("name", RESNETS)
def test_scales_and_steps_are_the_golden_ones(name: str) -> None:
    network, row = paper_resnet(name.split("@")[0]), golden()["configs"][name]
    budget = network.memory(0, 0, float(name.split("@")[1]))
    steps = search(network.memory, network.depth, SCALES, budget)
    assert steps is not None
    assert len(steps) - 1 == row["N_exact"]
    assert [step.scale for step in steps[1:]] == row["s_exact"]
    assert steps[0] == Configuration(0, 0, steps[1].scale)
    assert [(s.k_frozen, s.k_trained) for s in steps[1:]] == [(n - 1, n) for n in range(1, len(steps))]
    assert all(network.memory(s.k_frozen, s.k_trained, s.scale) <= budget for s in steps)


def test_whole_model_fits_one_step() -> None:
    network = paper_resnet("ResNet20")
    full = network.memory(0, 0, 1.0)
    assert search(network.memory, network.depth, SCALES, full) == (Configuration(0, 0, 1.0),)
    assert len(search(network.memory, network.depth, SCALES, full - 1) or ()) > 1


def test_nothing_fits() -> None:
    network = paper_resnet("ResNet20")
    assert search(network.memory, network.depth, SCALES, 1000) is None


def test_search_by_hand() -> None:
    # three layers of 4 channels, 10 bytes per full layer not frozen, scaled in the head
    def memory(k_frozen: int, k_trained: int, scale: float) -> int:
        return 10 * (k_trained - k_frozen) + (3 - k_trained) * round(10 * int(4 * scale) / 4)

    scales = distinct_scales([4])  # 0.499 (1 channel), 0.749 (2), 0.999 (3), 1.0
    # whole model 30; step 1: 10 + 2 h, step 2: 10 + h, step 3: 10; h = 2, 5, 8, 10 by channels
    assert search(memory, 3, scales, 30) == (Configuration(0, 0, 1.0),)
    assert search(memory, 3, scales, 20) == (
        Configuration(0, 0, 0.749),
        Configuration(0, 1, 0.749),
        Configuration(1, 2, 1.0),
    )
    assert search(memory, 3, scales, 18) == (
        Configuration(0, 0, 0.499),
        Configuration(0, 1, 0.499),
        Configuration(1, 2, 0.999),
        Configuration(2, 3, 1.0),
    )
    assert search(memory, 3, scales, 13) is None  # step 1 needs 14 at the least


def test_pretraining_has_to_fit_too() -> None:
    # An odd model whose pre-training needs more than its first step: s_1 gives way.
    def memory(k_frozen: int, k_trained: int, scale: float) -> int:
        return round(1000 * scale) if k_trained == 0 else round(100 * scale)

    def memory_whole_step_too_large(k_frozen: int, k_trained: int, scale: float) -> int:
        return 10**6 if (k_trained, scale) == (1, 1.0) else memory(k_frozen, k_trained, scale)

    assert search(memory_whole_step_too_large, 2, (0.25, 0.5, 1.0), 500) == (
        Configuration(0, 0, 0.5),
        Configuration(0, 1, 0.5),
        Configuration(1, 2, 1.0),
    )


def test_last_fitting_agrees_with_a_walk() -> None:
    for size in range(1, 20):
        for limit in range(-1, size):
            assert last_fitting(lambda i, limit=limit: i <= limit, size - 1) == (None if limit < 0 else limit)


def test_last_fitting_asks_little() -> None:
    asked: list[int] = []
    assert last_fitting(lambda i: (asked.append(i) or i) <= 400, 999) == 400
    assert len(asked) <= 20


@pytest.mark.parametrize("level", [0.25, 0.5, 1.0])
def test_stronger_devices_freeze_as_little_as_the_golden_rows(level: float) -> None:
    network = replace(
        paper_resnet("ResNet44"), classes=10
    )  # as the authors' tool, whose scales these rows are fed with
    budget = network.memory(0, 0, level)
    row = golden()["heterogeneous"][f"ResNet44@0.125->{level}"]
    scales = golden()["configs"]["ResNet44@0.125"]["s_json"]
    steps = [Configuration(n - 1, n, scale) for n, scale in enumerate(scales, start=1)]
    assert [smallest_frozen(network.memory, step, budget) for step in steps] == row["min_KF_json_s"]


@pytest.mark.parametrize("level", [0.25, 0.5, 1.0])
def test_stronger_devices_with_scales_of_our_own(level: float) -> None:
    network = paper_resnet("ResNet44")
    steps = search(network.memory, network.depth, SCALES, network.memory(0, 0, 0.125))
    assert steps is not None
    frozen = [smallest_frozen(network.memory, step, network.memory(0, 0, level)) for step in steps[1:]]
    assert frozen == golden()["heterogeneous"][f"ResNet44@0.125->{level}"]["min_KF_recomputed_s"]


def test_narrower_head_spends_the_rest_on_depth() -> None:
    network = paper_resnet("ResNet20")
    budget = network.memory(0, 0, 0.25)
    plain = search(network.memory, network.depth, SCALES, budget)
    assert plain is not None
    assert with_narrower_head(network.memory, plain, SCALES, budget, 1.0)[-1] == plain[-1]
    half = with_narrower_head(network.memory, plain, SCALES, budget, 0.5)
    # 0.218 -> 0.109: 6 of 64 channels, the largest such thousandth is 0.109; 0.578 -> 0.289: 18, up to 0.296
    assert half[1].scale == 0.109 and half[9].scale == 0.296
    for before, after in zip(plain[:-1], half[:-1], strict=True):
        assert after.k_trained == before.k_trained and after.k_frozen <= before.k_frozen
        assert network.memory(after.k_frozen, after.k_trained, after.scale) <= budget
        if after.k_frozen:  # one fewer would not fit
            assert network.memory(after.k_frozen - 1, after.k_trained, after.scale) > budget
    assert any(after.k_frozen < before.k_frozen for before, after in zip(plain, half, strict=True))
