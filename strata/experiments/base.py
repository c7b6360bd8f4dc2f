"""An experiment is a value: its runs, and how their results become a table or a figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.core.errors import BadInput
from strata.data.augmentation import check_augmentation
from strata.experiments.setups import SETUPS
from strata.methods import method_class
from strata.planning.schedules import DEFAULT_PATIENCE
from strata.runs.config import RunConfig
from strata.runs.unused import of_some_methods

if TYPE_CHECKING:
    from strata.experiments.cells import Results


# Their authors evaluate with static batch norm: statistics of all training images.
STATIC_NORMS = ("heterofl", "fedrolex")


@dataclass(frozen=True)
class Asked:
    """What the user chooses about an experiment."""

    scale: float = 1.0  # share of the paper's rounds
    seeds: int = 3
    data_dir: str | None = None
    evaluations: int = 100  # of each run: they cost more than the training of a narrow network
    settings: tuple[tuple[str, Any], ...] = ()  # keys of RunConfig, other than the paper's

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1:
            raise BadInput(f"the scale is a share of the paper's rounds, above 0 and at most 1, not {self.scale:g}")
        if self.seeds < 1:
            raise BadInput(f"at least 1 seed is needed, not {self.seeds}")
        if self.evaluations < 1:
            raise BadInput(f"at least 1 evaluation is needed, not {self.evaluations}")
        RunConfig.of(**dict(self.settings))  # says what is out of bounds
        if (augmentation := dict(self.settings).get("augmentation")) is not None:
            check_augmentation(augmentation)

    def rounds(self, full: int) -> int:
        return max(1, round(self.scale * full))

    def eval_every(self, rounds: int) -> int:
        return math.ceil(rounds / self.evaluations)

    def titled(self, title: str) -> str:
        said = [f"{key.replace('_', ' ')} {shown(value)}" for key, value in self.settings]
        return f"{title}; {', '.join(said)}" if said else title

    def named(self, name: str) -> str:
        return "-".join([name, *(setting_name(key, value) for key, value in self.settings)])

    def varied(self, cell: Cell) -> Cell:
        """The cell with the settings asked for, under a name of its own. Itself where it has them anyway: by default,
        or because its method does not look at them."""
        for key, value in self.settings:
            own = dict(cell.options)
            if key in own and own[key] != value:
                raise BadInput(f"{cell.name} has a {key.replace('_', ' ')} of its own: leave out {option(key)}")
            if key in own or not _looked_at(cell, key, value) or value == _default(cell, key):
                continue
            added: dict[str, Any] = {key: value}
            if value == "original" and cell.method in STATIC_NORMS:
                added |= {"bn": "re-estimated", "bn_images": SETUPS[cell.data].samples}
            if value == "early-stopping":
                added["patience"] = self.rounds(DEFAULT_PATIENCE)  # compressed with the rounds
            variant = "-".join(filter(None, [cell.variant, setting_name(key, value)]))
            cell = replace(cell, variant=variant, options=(*cell.options, *added.items()))
        return cell


def option(key: str) -> str:
    return RunConfig.described()[key].option


def shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def setting_name(key: str, value: Any) -> str:
    """In names of cells: schedules and variants by themselves, as figures have them; others with what they are."""
    if value == "early-stopping":
        return f"{value}-{DEFAULT_PATIENCE}"
    return shown(value) if key in ("schedule", "variant") else f"{key.replace('_', '-')}-{shown(value)}"


def _looked_at(cell: Cell, key: str, value: Any) -> bool:
    if key not in of_some_methods():
        return True
    known = method_class(cell.method).card.options.get(key)
    return known is not None and (known.choices is None or value in known.choices)


def _default(cell: Cell, key: str) -> Any:
    return SETUPS[cell.data].augmentation if key == "augmentation" else RunConfig.described()[key].default


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
        budgets = dict(self.options).get("budgets", ())
        return "+".join(f"{budget / 2**20:g}MiB" for budget in budgets) or level_text(self.constraints)

    @property
    def name(self) -> str:
        """Also its folder: cifar10/resnet20/iid/0.125/slt."""
        method = f"{self.method}-{self.variant}" if self.variant else self.method
        return "/".join((self.data, self.model, self.partition.replace(":", "-"), self.level, method))

    def request(self, seed: int, asked: Asked) -> RunConfig:
        setup = SETUPS[self.data]
        rounds = asked.rounds(setup.rounds)
        paper = {
            "model": self.model,
            "data": self.data,
            "data_dir": asked.data_dir,
            "partition": setup.partition(self.partition),
            "method": self.method,
            "constraints": self.constraints,
            "rounds": rounds,
            "devices": setup.devices,
            "per_round": setup.per_round,
            "seed": seed,
            "bn": "batch",
            "eval_every": asked.eval_every(rounds),
        }
        return RunConfig.of(**{**paper, **dict(self.options)})


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
    unique = list(dict.fromkeys(map(asked.varied, cells)))
    return tuple(PlannedRun(cell, cell.request(seed, asked)) for seed in range(asked.seeds) for cell in unique)
