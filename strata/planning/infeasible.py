"""Where nothing fits: at which step, by how many bytes, and the nearest things that would."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from strata.core.errors import Infeasible
from strata.core.sizes import show_exactly
from strata.planning.search import Bytes

Fits = Callable[[int], bool]  # does this batch size fit?


@dataclass(frozen=True)
class Shortfall:
    """The first step that does not fit even with the narrowest head (or, at the last layer, with the full one)."""

    step: int
    k_frozen: int
    k_trained: int
    scale: float
    needed_bytes: int
    short_bytes: int


@dataclass(frozen=True)
class Remedies:
    smallest_budget_bytes: int
    largest_batch: int | None  # None: not even single samples
    largest_micro_batch: int | None  # samples at a time, gradients accumulated to the batch asked for
    accumulation_steps: int | None


class PlanInfeasible(Infeasible):
    """No plan fits: a sentence for people, `to_json()` for programs."""

    def __init__(self, request: dict[str, Any], shortfall: Shortfall, remedies: Remedies) -> None:
        self.request, self.shortfall, self.remedies = request, shortfall, remedies
        super().__init__(_sentence(request, shortfall, remedies))

    def to_json(self) -> dict[str, Any]:
        return {
            **self.request, "feasible": False, "reason": str(self), **asdict(self.shortfall), **asdict(self.remedies)
        }  # fmt: skip


def shortfall(memory: Bytes, depth: int, narrowest: float, budget: int) -> Shortfall | None:
    """None where a plan exists: some step fits at scale 1, and every step before it with the narrowest head."""

    def short(step: int, k_frozen: int, scale: float) -> Shortfall | None:
        needed = memory(k_frozen, step, scale)
        return Shortfall(step, k_frozen, step, scale, needed, needed - budget) if needed > budget else None

    if short(0, 0, 1.0) is None:
        return None
    if found := short(0, 0, narrowest):
        return found
    for n in range(1, depth + 1):
        if (last := short(n, n - 1, 1.0)) is None:
            return None
        if found := short(n, n - 1, narrowest):
            return found
    return last


def smallest_budget(memory: Bytes, depth: int, narrowest: float) -> int:
    """Over every choice of the last step: what it needs at scale 1, or what a step before it needs at the least."""
    best, before = memory(0, 0, 1.0), memory(0, 0, narrowest)
    for n in range(1, depth + 1):
        best = min(best, max(before, memory(n - 1, n, 1.0)))
        before = max(before, memory(n - 1, n, narrowest))
    return best


def remedies(smallest: int, batch_size: int, fits: Fits, fits_accumulating: Fits) -> Remedies:
    micro = largest_batch(fits_accumulating, batch_size - 1)
    return Remedies(
        smallest_budget_bytes=smallest,
        largest_batch=largest_batch(fits, batch_size - 1),
        largest_micro_batch=micro,
        accumulation_steps=None if micro is None else math.ceil(batch_size / micro),
    )


def largest_batch(fits: Fits, upper: int) -> int | None:
    """The largest batch size up to `upper` that fits: memory grows with the batch, so bisect."""
    low, high = 0, upper + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low or None


def _sentence(request: dict[str, Any], short: Shortfall, offer: Remedies) -> str:
    head = "at full width" if short.scale == 1 else f"even with the narrowest head (scale {short.scale})"
    where = "pre-training (step 0)" if short.step == 0 else f"step {short.step} ({short.k_frozen} layers frozen)"
    in_parts = f" in parts of {request['micro_batch']}" if "micro_batch" in request else ""
    recomputed = ", activations recomputed" if "activation_checkpointing" in request else ""
    text = (
        f"no plan fits {show_exactly(request['budget_bytes'])} by {request['accounting']} accounting at batch "
        f"{request['batch']}{in_parts}{recomputed}: {where} {head} needs {show_exactly(short.needed_bytes)}, "
        f"{show_exactly(short.short_bytes)} too much. The smallest budget that fits is "
        f"{show_exactly(offer.smallest_budget_bytes)}"
    )
    if offer.largest_batch is None:
        return f"{text}; within this one not even a batch of 1 fits."
    text += f"; within this one, batches of up to {offer.largest_batch} fit"
    if offer.largest_micro_batch is not None:
        text += (
            f", or micro-batches of {offer.largest_micro_batch} with gradients accumulated over "
            f"{offer.accumulation_steps} of them to make up the batch"
        )
    return f"{text}."
