"""Fit: every way to train a model within a budget, what each costs, and which one to take. A value: printable, JSON.

How ways are found is in methods/fitting.py; here they are only compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from strata.core.sizes import show_bytes
from strata.execution.execution import Execution
from strata.planning.executions import FEWEST_NORMED

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from strata.graph.inputs import InputSpec

ENOUGH_SAMPLES = 8  # at a time, under batch norm: the whole model learns almost as with the whole batch
SMALL_ENOUGH = 1 / 4  # of the parameters: a small model with fewer gives way to SLT, which trains them all


@dataclass(frozen=True)
class AtLevel:
    """What a way is on the devices of one budget."""

    peak_bytes: int
    execution: Execution


@dataclass(frozen=True)
class Way:
    """One method at its best within the budget. Totals are over the run and the devices of a round."""

    method: str
    setting: str  # for people: the width, or how many steps
    execution: Execution  # SLT: of its largest step
    fits: bool
    peak_bytes: int  # where it does not fit: the fewest that it needs
    short_bytes: int | None = None  # where it does not fit
    remedy: str = ""  # the same: settings with which it would, as flags
    ceiling: str = ""  # the same: it would, but costs more than this
    mapped_bytes: int = 0
    trained_share: float = 0.0  # of the parameters, in the end
    train_flops: int = 0
    simulated_flops: int = 0  # the same where recomputation is only counted, as simulated devices have it
    upload_bytes: int = 0
    download_bytes: int = 0
    minutes: float | None = None
    normed: bool = False  # there is batch norm, over what is taken at a time
    everywhere: bool = True  # every level of devices takes part
    levels: tuple[AtLevel, ...] = ()  # of those that take part, where there are several budgets
    norm_samples: int | None = None  # a batch norm's fewest, where this way was held to more than the others
    beaten_by: int | None = None  # the number of a way that is as good in every column, and better in one
    accuracy: float | None = None  # of a pilot
    command: str = ""

    @property
    def weakest(self) -> Execution:
        """Of the devices of the smallest budget."""
        return self.levels[0].execution if self.levels else self.execution

    @property
    def at_once(self) -> int:
        """The fewest samples that any of its devices takes at a time."""
        return min([self.execution.at_once, *(level.execution.at_once for level in self.levels)])

    def to_json(self) -> dict[str, Any]:
        said = {
            "method": self.method,
            "setting": self.setting,
            "execution": _told(self.execution),
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "mapped_bytes": self.mapped_bytes,
            "trained_share": round(self.trained_share, 4),
            "train_flops": self.train_flops,
            "upload_bytes": self.upload_bytes,
            "download_bytes": self.download_bytes,
            "minutes": None if self.minutes is None else round(self.minutes, 2),
            "beaten_by": self.beaten_by,
            "accuracy": self.accuracy,
            "command": self.command,
        }
        if self.levels:
            said["levels"] = [
                {"peak_bytes": level.peak_bytes, "execution": _told(level.execution)} for level in self.levels
            ]
        if self.fits:
            return said
        return said | {"short_bytes": self.short_bytes, "remedy": self.remedy, "ceiling": self.ceiling}


def _told(execution: Execution) -> dict[str, Any]:
    return {"batch_size": execution.batch_size} | execution.differences(Execution())


@dataclass(frozen=True)
class Fit:
    model: str
    input_shape: tuple[int, ...] | InputSpec
    batch: int
    budgets: tuple[int, ...]  # of each level of devices
    full_bytes: int  # of the whole model, trained plainly
    rounds: int
    ways: tuple[Way, ...]
    recommended: int | None  # None: nothing fits
    reason: str
    time_on: str = ""  # what the minutes are of
    samples: int = field(default=0, kw_only=True)  # of a device
    per_round: int = field(default=1, kw_only=True)

    @property
    def best(self) -> Way | None:
        return None if self.recommended is None else self.ways[self.recommended]

    def to_json(self) -> dict[str, Any]:
        from strata.graph.inputs import input_json

        return {
            "model": self.model,
            "input": input_json(self.input_shape),
            "batch": self.batch,
            "budget_bytes": min(self.budgets),
            **({"levels": list(self.budgets)} if len(self.budgets) > 1 else {}),
            "full_bytes": self.full_bytes,
            "rounds": self.rounds,
            "ways": [way.to_json() for way in self.ways],
            "recommended": self.recommended,
            "reason": self.reason,
        }

    def __str__(self) -> str:
        from strata.planning.fit_table import render

        return render(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from strata.planning.fit_table import renderable

        yield renderable(self)


def with_beaten(ways: Sequence[Way], spared: int | None = None) -> tuple[Way, ...]:
    """Each with the first way that beats it in every column: bytes, FLOPs, traffic, the share that is trained, and
    accuracy where it is known. `spared`: the recommended one, for which the rule has other reasons."""
    found = list(ways)
    for number, way in enumerate(ways):
        better = (n for n, other in enumerate(ways) if number != spared and _beats(other, way))
        found[number] = replace(way, beaten_by=next(better, None))
    return tuple(found)


def _beats(one: Way, other: Way) -> bool:
    if not (one.fits and other.fits):
        return False
    mine, theirs = _columns(one), _columns(other)
    return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


def _columns(way: Way) -> tuple[float, ...]:
    """Less is better in each."""
    memory = way.peak_bytes + way.mapped_bytes
    costs = memory, way.train_flops, way.upload_bytes, way.download_bytes
    return *costs, -way.trained_share, _inexactness(way), -(way.accuracy or 0.0)


def _inexactness(way: Way) -> float:
    return way.execution.batch_size / way.execution.at_once if way.normed else 1.0


def recommend(ways: Sequence[Way]) -> tuple[int | None, str]:
    """The rule, with its reason (docs/fit.md says what it rests on).

    The whole model, where every device can train it. Otherwise the widest small model; but SLT, where it fits and the
    small model has less than a quarter of the parameters. At last, whatever trains most. Of the whole model in parts
    too small for batch norm to learn almost as from the whole batch, the reason says so."""
    known = {way.method: number for number, way in enumerate(ways) if way.fits and way.everywhere}
    whole, small, slt = (known.get(name) for name in ("fedavg", "small", "slt"))
    if whole is not None:
        fits = f"the whole model fits ({ways[whole].weakest})"
        if enough_samples(ways[whole]):
            return whole, f"{fits}, and no part of it learns as well"
        return whole, f"{fits}; batch norm over so few samples slows it, so a somewhat narrower one may do as well"
    if small is not None and ways[small].trained_share >= SMALL_ENOUGH:
        return small, (
            f"{_why_not_whole(ways)}; a small one with {ways[small].trained_share:.0%} of its parameters does, "
            "and learns more than layer by layer"
        )
    if slt is not None:
        share = f"a small model has {ways[small].trained_share:.0%} of the parameters" if small is not None else ""
        return slt, f"{share or 'no small model fits'}: successive layers train all of them within the budget"
    if small is not None:
        return small, (
            f"neither the whole model nor its successive layers fit; of what does, the small model "
            f"({ways[small].trained_share:.0%} of the parameters) has learned most"
        )
    fitting = [number for number, way in enumerate(ways) if way.fits]
    if not fitting:
        return None, nothing_fits(ways)
    most = max(fitting, key=lambda number: (ways[number].trained_share, -ways[number].train_flops))
    return most, f"of what fits, it trains the largest share of the parameters ({ways[most].trained_share:.0%})"


def _why_not_whole(ways: Sequence[Way]) -> str:
    whole = next((way for way in ways if way.method == "fedavg"), None)
    if whole is not None and whole.fits:
        return "the whole model does not fit on every device"
    if whole is not None and whole.ceiling:
        return f"the whole model is above the ceiling of {whole.ceiling}"
    return "the whole model does not fit"


def enough_samples(way: Way) -> bool:
    """At a time, for batch norm: eight, or all of a smaller batch that has as many as norms need."""
    if not way.normed or way.at_once >= ENOUGH_SAMPLES:
        return True
    return FEWEST_NORMED <= way.at_once == way.execution.batch_size


def nothing_fits(ways: Sequence[Way]) -> str:
    least = min(ways, key=lambda way: way.peak_bytes, default=None)
    if least is None:
        return "no method could be planned"
    return (
        f"nothing fits; the smallest budget that would do is {least.peak_bytes} bytes "
        f"({show_bytes(least.peak_bytes)}): {least.method} at {least.setting}, {least.execution}"
    )
