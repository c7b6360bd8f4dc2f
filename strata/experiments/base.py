"""An experiment is a value: its runs, and how their results become a table or a figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.core.errors import BadInput
from strata.experiments.setups import SETUPS
from strata.runs.config import RunConfig

if TYPE_CHECKING:
    from strata.experiments.cells import Results


@dataclass(frozen=True)
class Asked:
    """What the user chooses about an experiment."""

    scale: float = 1.0  # share of the paper's rounds
    seeds: int = 3
    data_dir: str | None = None
    evaluations: int = 100  # of each run: they cost more than the training of a narrow network

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1:
            raise BadInput(f"the scale is a share of the paper's rounds, above 0 and at most 1, not {self.scale:g}")
        if self.seeds < 1:
            raise BadInput(f"at least 1 seed is needed, not {self.seeds}")
        if self.evaluations < 1:
            raise BadInput(f"at least 1 evaluation is needed, not {self.evaluations}")

    def rounds(self, full: int) -> int:
        return max(1, round(self.scale * full))

    def eval_every(self, rounds: int) -> int:
        return math.ceil(rounds / self.evaluations)


def level_text(constraints: Sequence[float]) -> str:
    """What devices can hold: 0.125, or 0.125+0.25 for two kinds of them."""
    return "+".join(f"{constraint:g}" for constraint in constraints)


@dataclass(frozen=True)
class Cell:
    """What is trained, apart from rounds and seed. Experiments that need the same cell share its runs."""

    data: str
    model: str
    partition: str
    constraints: tuple[float, ...]
    method: str
    variant: str = ""  # distinguishes cells of one method, such as equal or pool-5
    options: tuple[tuple[str, Any], ...] = ()  # keys of RunConfig

    @property
    def level(self) -> str:
        return level_text(self.constraints)

    @property
    def name(self) -> str:
        """Also its folder: cifar10/resnet20/iid/0.125/slt."""
        method = f"{self.method}-{self.variant}" if self.variant else self.method
        return "/".join((self.data, self.model, self.partition.replace(":", "-"), self.level, method))

    def request(self, seed: int, asked: Asked) -> RunConfig:
        setup = SETUPS[self.data]
        rounds = asked.rounds(setup.rounds)
        return RunConfig.of(
            model=self.model,
            data=self.data,
            data_dir=asked.data_dir,
            partition=self.partition,
            method=self.method,
            constraints=self.constraints,
            rounds=rounds,
            devices=setup.devices,
            per_round=setup.per_round,
            seed=seed,
            bn="batch",
            eval_every=asked.eval_every(rounds),
            **dict(self.options),
        )


@dataclass(frozen=True)
class PlannedRun:
    """One run of an experiment, done or still to be done."""

    cell: Cell
    request: RunConfig

    @property
    def name(self) -> str:
        """Also its folder below the experiments' one."""
        return f"{self.cell.name}/rounds-{self.request.course.rounds}/seed-{self.request.course.seed}"


@dataclass(frozen=True)
class Experiment:
    name: str
    title: str
    runs: tuple[PlannedRun, ...]
    render: Callable[[Results, Path], list[Path]]  # results and a folder -> the files written there


def runs_of(cells: list[Cell], asked: Asked) -> tuple[PlannedRun, ...]:
    """Each cell once, with every seed; all cells with the first seed come first."""
    unique = list(dict.fromkeys(cells))
    return tuple(PlannedRun(cell, cell.request(seed, asked)) for seed in range(asked.seeds) for cell in unique)
