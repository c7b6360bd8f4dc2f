"""FLOPs and bytes as time: what a device of a given speed needs for them. No torch here: `strata --help` reads this."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strata.core.errors import BadInput

if TYPE_CHECKING:
    from strata.planning.plans import Plan

SAMPLES = 500  # of a device, where nothing is said: CIFAR-10 over 100 devices


@dataclass(frozen=True)
class Speed:
    """Of a device: what it really reaches in training, and its link in either direction."""

    gflops: float  # 10^9 floating-point operations in a second
    mbit: float  # 10^6 bits in a second

    def __post_init__(self) -> None:
        for name, value in (("gflops", self.gflops), ("mbit", self.mbit)):
            if not 0 < value < float("inf"):
                raise BadInput(f"--{name} is a speed above 0, such as 2, not {value:g}")

    def training(self, flops: float) -> float:
        """Seconds."""
        return flops / (1e9 * self.gflops)

    def sending(self, size: float) -> float:
        """Seconds for so many bytes, up or down."""
        return 8 * size / (1e6 * self.mbit)

    def seconds(self, flops: float, size: float) -> float:
        """Of training and sending, one after the other."""
        return self.training(flops) + self.sending(size)

    def __str__(self) -> str:
        return f"{self.gflops:g} GFLOP/s and {self.mbit:g} Mbit/s"


def add_speed_flags(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--gflops", metavar="X", help="what a device computes in a second: says hours, with --mbit")
    parser.add_argument("--mbit", metavar="X", help="its link, up and down, in Mbit/s")


def speed_of(args: argparse.Namespace) -> Speed | None:
    """What was asked for with the flags; None: nothing."""
    if args.gflops is None and args.mbit is None:
        return None
    if args.gflops is None or args.mbit is None:
        raise BadInput("hours need both speeds of a device: give --gflops, such as 2, and --mbit, such as 5")
    return Speed(_number(args.gflops, "--gflops"), _number(args.mbit, "--mbit"))


def _number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadInput(f"{option} is a number, such as 2, not {text!r}") from None


# --- of a plan -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanTime:
    """Of a device that is asked in every round and trains its samples once in each; seconds."""

    speed: Speed
    samples: int
    rounds: tuple[int, ...]  # of each step
    training: tuple[float, ...]  # of each step, in one round
    sending: tuple[float, ...]  # up and down
    once: tuple[float, ...]  # in the first round of each step: the layers that it freezes come down, and stay

    def round_of(self, step: int) -> float:
        return self.training[step] + self.sending[step]

    @property
    def training_in_all(self) -> float:
        return sum(count * each for count, each in zip(self.rounds, self.training, strict=True))

    @property
    def sending_in_all(self) -> float:
        per_step = zip(self.rounds, self.sending, self.once, strict=True)
        return sum(count * each + first for count, each, first in per_step if count)

    @property
    def in_all(self) -> float:
        return self.training_in_all + self.sending_in_all

    def to_json(self) -> dict[str, Any]:
        return {
            "gflops": self.speed.gflops,
            "mbit": self.speed.mbit,
            "samples": self.samples,
            "round_seconds": [self.round_of(step) for step in range(len(self.rounds))],
            "training_seconds": self.training_in_all,
            "sending_seconds": self.sending_in_all,
        }

    def __str__(self) -> str:
        used = [self.round_of(step) for step, count in enumerate(self.rounds) if count]
        low, high = show_time(min(used)), show_time(max(used))
        one = low if low == high else f"{low} to {high}"
        return (
            f"On a device of {self.speed} with {self.samples} samples a round takes {one}; all {sum(self.rounds)} "
            f"rounds, if it is asked in each, {show_time(self.in_all)} ({show_time(self.training_in_all)} of training, "
            f"{show_time(self.sending_in_all)} of sending)."
        )


def time_of(plan: Plan, speed: Speed, samples: int = SAMPLES) -> PlanTime:
    """Where the next step begins in training (early-stopping), every step gets its equal share of the rounds."""
    from strata.execution import traffic

    moved = [traffic(plan.graph, plan.cut(step.step)) for step in plan.steps]
    frozen = [one.download - one.upload for one in moved]
    gained = [max(0, now - before) for before, now in zip([0, *frozen], frozen, strict=False)]
    return PlanTime(
        speed,
        samples,
        _rounds(plan),
        tuple(speed.training(step.train_flops_per_sample * samples) for step in plan.steps),
        tuple(speed.sending(2 * one.upload) for one in moved),  # what it trains comes down, and goes up again
        tuple(map(speed.sending, gained)),
    )


def _rounds(plan: Plan) -> tuple[int, ...]:
    ends = [step.until_round for step in plan.steps]
    if None in ends:
        share, rest = divmod(plan.rounds or 0, len(ends))
        return tuple(share + (number < rest) for number in range(len(ends)))
    return _differences([end or 0 for end in ends])


def _differences(ends: Sequence[int]) -> tuple[int, ...]:
    return tuple(end - before for before, end in zip([0, *ends], ends, strict=False))


def show_time(seconds: float) -> str:
    """In the unit that people would say it in."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.3g} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.3g} h"
    return f"{seconds / 86400:,.1f} days"
