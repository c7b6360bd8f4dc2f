"""From steps to rounds: when training moves on to the next step.

`parameters(k_frozen, k_trained, scale)` is the paper's Q, the number of trained parameters, counted with kernels,
shortcuts, norms and the classifier. A schedule returns r_0..r_N: step n ends before round r_n, and r_N = R.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate

from strata.core.errors import BadInput

Parameters = Callable[[int, int, float], int]
Rounds = Sequence[Fraction | int]

SCHEDULES = ("cumulative", "paper", "authors", "equal", "early-stopping")
FILLS = ("published", "fan-in", "zero", "copies")  # what channels that a step brings start from (graph/filling.py)
AVERAGINGS = ("trained", "all")  # of a layer that only some levels train: over these devices, or over all
DEFAULT_PATIENCE = 15  # the paper tries 5, 15 and 25


def cumulative(parameters: Parameters, scales: Sequence[float], rounds: int) -> Rounds:
    """r_n = R Q(0, n, s_n) / Q(0, 0, 1): the share of the parameters that have been in training by then.

    Our reading of the paper; neither printed there nor what its authors ran.
    """
    full = parameters(0, 0, 1.0)
    return [Fraction(rounds * parameters(0, n, scale), full) for n, scale in enumerate(scales)]


def paper_equation(parameters: Parameters, scales: Sequence[float], rounds: int) -> Rounds:
    """As printed: r_n = R Q(n-1, n, s_n) / Q(0, 0, 1). Falls back where s stays the same, and r_N < R."""
    full = parameters(0, 0, 1.0)
    return [Fraction(rounds * parameters(max(0, n - 1), n, scale), full) for n, scale in enumerate(scales)]


def paper(parameters: Parameters, scales: Sequence[float], rounds: int) -> Rounds:
    """The printed equation made usable: its running maximum, with r_N := R."""
    return [*accumulate(paper_equation(parameters, scales, rounds)[:-1], max), rounds]


def authors(parameters: Parameters, scales: Sequence[float], rounds: int) -> Rounds:
    """The authors' code: int(s_1 R) rounds of pre-training, then steps as long as their share of trained parameters."""
    pretraining = int(scales[0] * rounds)
    trained = [parameters(n - 1, n, scale) for n, scale in enumerate(scales) if n > 0]
    shares = [Fraction(sum(trained[: n + 1]), sum(trained)) for n in range(len(trained))]
    return [pretraining, *(int(pretraining + share * (rounds - pretraining)) for share in shares)]


def equal(parameters: Parameters, scales: Sequence[float], rounds: int) -> Rounds:
    return [Fraction(rounds * (n + 1), len(scales)) for n in range(len(scales))]


_RULES = {"cumulative": cumulative, "paper": paper, "authors": authors, "equal": equal}


def until_rounds(
    schedule: str, parameters: Parameters, scales: Sequence[float], rounds: int
) -> tuple[int, ...] | tuple[None, ...]:
    """Per step (s_0 = s_1, s_1, .., s_N) the round before which it ends; all None where that is decided in training.

    With few rounds some steps get none; the last one always gets at least one.
    """
    if schedule not in SCHEDULES:
        raise BadInput(f"unknown schedule {schedule!r}: use {', '.join(SCHEDULES)}")
    if schedule == "early-stopping":
        return (None,) * len(scales)
    if len(scales) == 1:
        return (rounds,)
    ends = accumulate((round(r) for r in _RULES[schedule](parameters, scales, rounds)[:-1]), max)
    return (*(min(end, rounds - 1) for end in ends), rounds)
