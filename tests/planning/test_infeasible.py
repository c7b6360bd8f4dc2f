from __future__ import annotations

import pytest

from strata.planning.infeasible import (
    PlanInfeasible,
    Remedies,
    Shortfall,
    largest_batch,
    remedies,
    shortfall,
    smallest_budget,
)
from strata.planning.search import distinct_scales, search
from tests.planning.reference import PaperResNet, paper_resnet

SCALES = distinct_scales((16, 32, 64))


def hand_made(k_frozen: int, k_trained: int, scale: float) -> int:
    """Three layers of 10 bytes; a trained one counts double, a head layer by its width."""
    return 30 + 10 * (k_trained - k_frozen) + round((3 - k_trained) * 10 * scale)


def test_by_hand() -> None:
    # narrowest head 0.1: step 0 33; step 1 42 (full 60), step 2 41 (full 50), step 3 40
    assert smallest_budget(hand_made, 3, 0.1) == 42  # step 1 at its thinnest; then 41, then 40
    assert shortfall(hand_made, 3, 0.1, 42) is None
    assert shortfall(hand_made, 3, 0.1, 41) == Shortfall(1, 0, 1, 0.1, 42, 1)
    assert shortfall(hand_made, 3, 0.1, 32) == Shortfall(0, 0, 0, 0.1, 33, 1)


def test_no_step_fits_whole() -> None:
    def memory(k_frozen: int, k_trained: int, scale: float) -> int:
        return 100 if scale == 1 else 10

    assert shortfall(memory, 3, 0.1, 50) == Shortfall(3, 2, 3, 1.0, 100, 50)
    assert smallest_budget(memory, 3, 0.1) == 100


@pytest.mark.parametrize("name", ["ResNet20", "ResNet44"])
def test_the_smallest_budget_is_the_smallest(name: str) -> None:
    network = paper_resnet(name)
    least = smallest_budget(network.memory, network.depth, SCALES[0])
    assert search(network.memory, network.depth, SCALES, least) is not None
    assert search(network.memory, network.depth, SCALES, least - 1) is None
    assert shortfall(network.memory, network.depth, SCALES[0], least) is None
    short = shortfall(network.memory, network.depth, SCALES[0], least - 1)
    assert short is not None and short.short_bytes == 1


def test_largest_batch_that_fits() -> None:
    budget = smallest_budget(paper_resnet("ResNet20").memory, 19, SCALES[0]) * 2 // 3

    def fits(batch: int) -> bool:
        return shortfall(PaperResNet(3, 32, 10, batch).memory, 19, SCALES[0], budget) is None

    found = largest_batch(fits, 31)
    assert found is not None and fits(found) and not fits(found + 1)
    assert [largest_batch(lambda b, limit=limit: b <= limit, 31) for limit in (0, 1, 7, 31, 40)] == [None, 1, 7, 31, 31]


def test_remedies() -> None:
    assert remedies(99, 32, lambda b: b <= 20, lambda b: b <= 9) == Remedies(99, 20, 9, 4)  # 4 x 9 >= 32
    assert remedies(99, 32, lambda b: False, lambda b: False) == Remedies(99, None, None, None)


def test_sentence_and_json() -> None:
    request = {"model": "net", "batch": 32, "accounting": "peak", "budget_bytes": 12 * 2**20}
    short = Shortfall(3, 2, 3, 0.031, 13 * 2**20, 2**20)
    error = PlanInfeasible(request, short, Remedies(14 * 2**20, 20, 9, 4))
    assert str(error) == (
        "no plan fits 12.00 MiB (12,582,912 bytes) by peak accounting at batch 32: step 3 (2 layers frozen) even with "
        "the narrowest head (scale 0.031) needs 13.00 MiB (13,631,488 bytes), 1.00 MiB (1,048,576 bytes) too much. "
        "The smallest budget that fits is 14.00 MiB (14,680,064 bytes); within this one, batches of up to 20 fit, or "
        "micro-batches of 9 with gradients accumulated over 4 of them to make up the batch."
    )
    assert error.to_json() == {
        **request, "feasible": False, "reason": str(error), "step": 3, "k_frozen": 2, "k_trained": 3, "scale": 0.031,
        "needed_bytes": 13 * 2**20, "short_bytes": 2**20, "smallest_budget_bytes": 14 * 2**20, "largest_batch": 20,
        "largest_micro_batch": 9, "accumulation_steps": 4,
    }  # fmt: skip
