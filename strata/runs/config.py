"""RunConfig: everything about a run, as one frozen tree of components (components.py); flags, `--help`, config.json's
`request`, the comparison on resume and the fleet's messages follow from them.

Python's `strata.run` takes the settings of `RunOptions`, the part that goes without a command line. No torch here:
`strata --help` reads this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from strata.core.errors import BadInput, one_line
from strata.core.files import check_own, read_object, said_plainly
from strata.core.settings import Tree, check_digest, differences, part
from strata.data.reading import Reading
from strata.execution.execution import Execution
from strata.runs.components import (
    DEFAULT_ROUNDS,
    Approach,
    Course,
    Evaluations,
    Fleet,
    Local,
    Machine,
    MethodOptions,
    PrivacySettings,
    Problem,
    Server,
    Updates,
)

if TYPE_CHECKING:
    from strata.federation.privacy import Privacy
    from strata.federation.robust import Robust
    from strata.federation.simulated_fleet import SimulatedFleet
    from strata.training import Calibration

FORMAT = 2  # of config.json; 1 had no number, and neither robust aggregation, privacy nor recomputation
ADAM_LR = 0.001
AUTO = "auto"  # the method that `strata fit` would choose
WARMUP = 5  # rounds


def with_learning_rates(values: Mapping[str, Any]) -> dict[str, Any]:
    """The learning rate falls to a tenth, as by default, where only its beginning was asked for; and warms up where
    Strata chooses how to train."""
    if values.get("method") == AUTO and "warmup" not in values:
        values = {**values, "warmup": warmup_of(values.get("rounds", DEFAULT_ROUNDS))}
    if "lr" not in values and values.get("optimizer") in ("adam", "adamw"):
        values = {**values, "lr": ADAM_LR}
    lr = values.get("lr")
    if "lr_end" in values or not isinstance(lr, int | float):
        return dict(values)
    return {**values, "lr_end": lr / 10}


def warmup_of(rounds: int) -> int:
    """What lean ways need to begin well (docs/fit.md), and no more than a tenth of the run."""
    return max(0, min(WARMUP, rounds // 10))


@dataclass(frozen=True)
class RunOptions(Tree):
    """What `strata.run` takes as keywords: all that is not model, data, method or training on a device."""

    course: Course = part(Course, "rounds")
    fleet: Fleet = part(Fleet, "fleet")
    updates: Updates = part(Updates, "server")
    privacy: PrivacySettings = part(PrivacySettings, "differential privacy of devices")
    evaluation: Evaluations = part(Evaluations, "evaluation")

    @classmethod
    def of(cls, **values: Any) -> Self:
        return super().of(**with_learning_rates(values))

    def __post_init__(self) -> None:
        """What components cannot know of each other."""
        rule, weighted = self.updates.aggregation, self.updates.weighted
        if self.robust and weighted:
            raise BadInput(f"aggregation {rule} gives every device one voice: leave out weighted")
        if self.private is None:
            return
        if weighted:
            raise BadInput("with differential privacy how many samples a device has is private: leave out weighted")
        if self.robust:
            raise BadInput(f"differential privacy bounds a sum, and {rule} is none: leave one of them out")
        if self.fleet.quorum != 1:
            raise BadInput(
                "with differential privacy a round counts whoever answers, and is never redone: leave out the quorum"
            )

    @property
    def evaluated_every(self) -> int:
        """In rounds: as asked, else 100 times in a run."""
        asked = self.evaluation.eval_every
        return max(1, self.course.rounds // 100) if asked is None else asked

    @property
    def robust(self) -> Robust | None:
        from strata.federation.robust import parse_aggregation

        return parse_aggregation(self.updates.aggregation)

    @property
    def private(self) -> Privacy | None:
        return self.privacy.of(self.fleet.devices)

    @property
    def calibration(self) -> Calibration:
        """What batch norm's statistics are measured on. Under differential privacy not the devices' samples."""
        from strata.training.statistics import Calibration

        part = "validation" if self.private and self.evaluation.validation else "train"
        return Calibration(part, self.evaluation.bn_images)

    def simulated_fleet(self) -> SimulatedFleet:
        from strata.federation.simulated_fleet import SimulatedFleet, parse_stragglers

        fleet = self.fleet
        share, slowdown = parse_stragglers(fleet.stragglers)
        return SimulatedFleet(self.course.seed, fleet.devices, fleet.dropout, share, slowdown, fleet.deadline)


@dataclass(frozen=True)
class RunConfig(Tree):
    """A run as the command line, an experiment or an operator of a fleet asks for it: plain values only."""

    problem: Problem = part(Problem, "model and data")
    reading: Reading = part(Reading, "text, tables and your own pictures (docs/own-data.md)")
    approach: Approach = part(Approach, "method and memory")
    method_options: MethodOptions = part(MethodOptions, "of some methods only")
    execution: Execution = part(Execution, "a training step")
    local: Local = part(Local, "training on a device")
    course: Course = part(Course, "rounds")
    fleet: Fleet = part(Fleet, "fleet")
    updates: Updates = part(Updates, "server")
    server: Server = part(Server, "server's optimizer")
    privacy: PrivacySettings = part(
        PrivacySettings, "differential privacy of devices (docs/security.md says what it covers)"
    )
    evaluation: Evaluations = part(Evaluations, "evaluation")
    machine: Machine = part(Machine, "machine (changes no result, but for --task-timeout)", kept=False)

    @classmethod
    def of(cls, **values: Any) -> Self:
        return super().of(**with_learning_rates(values))

    @property
    def options(self) -> RunOptions:
        return RunOptions(self.course, self.fleet, self.updates, self.privacy, self.evaluation)

    @property
    def counted(self) -> Execution:
        """The execution whose bytes a device must be able to hold: before --fixed-after each batch keeps statistics of
        its own, which takes a little more."""
        fixed = self.execution.norm_statistics == "fixed" and self.local.fixed_after != 0
        return replace(self.execution, norm_statistics="batch", cache_prefix=None) if fixed else self.execution

    @property
    def pretrained(self) -> bool:
        """Whether training begins from trained weights: a folder of Hugging Face's has some."""
        return self.problem.init is not None or self.problem.model.startswith("hf:")

    @property
    def may_use_kernels(self) -> bool:
        """Our own code in C, where there is a compiler for it."""
        return self.local.kernels != "off" and not self.course.exact

    def check(self, levels_needed: bool = True) -> None:
        """What the run itself would say, but before anything is read, written or sent. `levels_needed` False: what
        devices can hold may still be unknown, as before a fleet of real ones has reported."""
        from strata.methods.choice import check_levels

        self.options.simulated_fleet()
        self.server.optimizer()
        approach = self.approach
        check_levels(approach.method, approach.constraints, approach.budgets, levels_needed)
        if approach.lean and (approach.constraints or approach.accounting == "paper"):
            raise BadInput(
                "--lean chooses how steps are executed by the bytes that they take: give a --budget, counted by peak"
            )

    @classmethod
    def of_folder(cls, folder: Path, given: Mapping[str, Any]) -> Self:
        """What the folder's run was asked for; `given` now may repeat it, but not change it."""
        with said_plainly(folder):
            if not (folder / "config.json").exists():
                raise BadInput(f"there is no run to resume in {folder}")
        check_own(folder)  # it names code, which is run to go on
        check_own(folder / "config.json")
        written = read_object(folder / "config.json")
        check_digest(written, folder / "config.json")
        if written.get("format", 1) not in range(1, FORMAT + 1):
            raise BadInput(f"{folder} was written by a later version of Strata: resume it with that")
        saved = written.get("request")
        if not isinstance(saved, dict):
            raise BadInput(f"{folder} was started from Python: resume it there, with strata.run(..., resume=True)")
        try:
            config = cls.from_json(saved)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise BadInput(f"{folder / 'config.json'} is not as Strata writes it ({one_line(error)})") from error
        changed = config.changed(**given)
        found = differences(config.to_json(), changed.to_json())
        if found:
            raise BadInput(
                f"{folder} was started with other settings: {'; '.join(found)}. "
                "Resume with the same ones (or none), or start another run in another folder"
            )
        return changed  # the machine may be another
