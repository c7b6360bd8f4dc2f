"""What a method is: a rule that says what each sampled device trains in this round. See docs/adding-a-method.md.

A method is a value. Which task a device gets is a pure function of the method's settings, the round and the device, so
a resumed run, or one with another number of workers, gets the same tasks.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

from strata.core.errors import BadInput, TooLittle
from strata.core.settings import Setting, check_value
from strata.core.sizes import show_bytes, show_exactly
from strata.methods.card import Card

if TYPE_CHECKING:
    from torch import Tensor, nn

    from strata.execution import Execution
    from strata.graph import ChannelGraph, Cut, InputSpec
    from strata.methods.aggregate import Aggregate
    from strata.methods.budget import Budget
    from strata.methods.device_state import DeviceState


@dataclass(frozen=True)
class Phase:
    """A stretch of a device's round: so many local epochs on one cut, with an optimizer of its own.

    `execution` and `objective` replace the run's where the method has its own. With `levels` (FjORD) each mini-batch
    trains one of them.
    """

    cut: Cut
    execution: Execution | None = None
    levels: tuple[Cut, ...] = ()  # nested in `cut`, smallest first, `cut` itself last
    objective: Any = None  # a strata.data.Objective
    clip: float | None = None  # gradients of a step are scaled down to this norm; None: as the run says
    scaler: float | None = None  # what layers put out, the classifier excepted, is divided by this in training
    masked: bool = False  # scores of classes that the device does not hold count as zero, and their rows stay
    distilled: bool = False  # the largest level learns from labels, and the level of the mini-batch from it


@dataclass(frozen=True)
class Task:
    """One device's work in one round: its phases, one after another. Without any given: one, of the whole cut."""

    round: int
    device: int
    cut: Cut  # what is sent to the device, and what it sends back
    phases: tuple[Phase, ...] = ()

    def __post_init__(self) -> None:
        if not self.phases:
            object.__setattr__(self, "phases", (Phase(self.cut),))
        if len(self.phases) == 1 and self.phases[0].cut == self.cut:
            return
        for phase in self.phases:
            phase.cut.within(self.cut)
            lacking = sorted(set(phase.cut.trained) - set(self.cut.trained))
            if lacking:
                raise BadInput(f"a phase trains {lacking[0]}, which the task's cut does not send back")


@dataclass(frozen=True)
class Method(ABC):
    """Subclass it, give it a card and say which cut a device trains; override the rest only where the method differs.

    ```python
    @dataclass(frozen=True)
    class UpperHalf(Method):
        card = Card("upper-half", trains="the upper half of the layers", evaluates="the whole model")

        def cut_for(self, round, device):
            return self.graph.freeze(self.graph.full(), self.graph.depth // 2)
    ```
    """

    card: ClassVar[Card]
    name: ClassVar[str]  # the card's
    needs_budget: ClassVar[bool] = False  # it cannot be made without knowing what a device can hold
    graph: ChannelGraph
    # per level, how its devices take a step; None: as the run says. Empty: all as the run says
    executions: tuple[Execution | None, ...] = field(default=(), kw_only=True)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "card" not in cls.__dict__:  # one of its own: a subclass is another method than what it is made from
            cls.card = Card(str(cls.__dict__.get("name", cls.__name__)))
        cls.name = cls.card.name

    # --- how it is made ----------------------------------------------------------------------------------------

    @classmethod
    def prepare(cls, model: nn.Module, inputs: InputSpec) -> nn.Module:
        """The model that devices train parts of: the given one, or one around it with further heads (heads.py)."""
        return model

    @classmethod
    def from_budget(cls, graph: ChannelGraph, budget: Budget) -> Self:
        """The method for devices that can hold so much: here, one that every device must be able to hold."""
        made = cls.made(graph, budget.seed, (1.0,), budget.options)
        need = max(made.most_bytes(lambda cut: budget.need(graph, cut)))
        least = min(budget.limits(graph), default=need)
        if need > least:
            raise TooLittle(
                f"{cls.name} needs up to {show_exactly(need)} on every device, {show_bytes(need - least)} more than "
                f"the budget of {show_bytes(least)}",
                need,
                made.setting,
            )
        return made

    @classmethod
    def gradients_wait(cls, budget: Budget) -> bool:
        """Whether a step needs all gradients of its devices at the same time, so that none can be released."""
        return False

    @classmethod
    def made(cls, graph: ChannelGraph, seed: int, constraints: tuple[float, ...], options: Mapping[str, Any]) -> Self:
        """Not every method draws from a seed or scales width: it gets what it has fields for, and all the options."""
        known = {one.name for one in fields(cls) if one.init}
        common: dict[str, Any] = {"seed": seed, "constraints": constraints}
        given = {name: value for name, value in common.items() if name in known}
        return cls(graph, **{**given, **options})

    def most_bytes(self, count: Callable[[Cut], int]) -> list[int]:
        """What a device of each level takes at the most. `count`: the bytes of a step of a cut."""
        return [count(self.graph.full())]

    def most_bytes_at(self, level: int, count: Callable[[Cut], int]) -> int:
        """The same of one level: a method may be the same for all."""
        sizes = self.most_bytes(count)
        return sizes[min(level, len(sizes) - 1)]

    def most_executed(self, count: Callable[[Cut, Execution | None], int]) -> list[int]:
        """The most of each level, by its own execution; None: the run's."""
        if not self.executions:
            return self.most_bytes(lambda cut: count(cut, None))

        def of_level(level: int, execution: Execution | None) -> int:
            return self.most_bytes_at(level, lambda cut: count(cut, execution))

        return [of_level(level, execution) for level, execution in enumerate(self.executions)]

    @property
    def setting(self) -> str:
        """What was made of the budget, for people: a width, or how many layers."""
        return "the whole model"

    def executed(self, budget: Budget) -> Self:
        """With the cheapest execution that suits each level's bytes, where the budget leaves that open."""
        budget = budget.of(type(self))
        return replace(self, executions=budget.executions_for(self)) if budget.lean else self

    # --- what devices do ---------------------------------------------------------------------------------------

    def cut_for(self, round: int, device: int) -> Cut:
        """The part of the model that this device trains in this round."""
        phases = self.phases_for(round, device)
        return phases[0].cut if len(phases) == 1 else self.graph.union([phase.cut for phase in phases])

    def phases_for(self, round: int, device: int) -> tuple[Phase, ...]:
        """The same with all that can be said of it; instead of `cut_for`, where there is more to say than a cut."""
        if type(self).cut_for is Method.cut_for:
            raise NotImplementedError(f"{type(self).__name__} says neither cut_for nor phases_for")
        return (Phase(self.cut_for(round, device)),)

    def execution_for(self, round: int, device: int) -> Execution | None:
        """How this device takes its steps in this round; None: as the run says."""
        return self.executions[device % len(self.executions)] if self.executions else None

    def can_train(self, device: int) -> bool:
        """False: the method has no use for this device (it must not be sampled)."""
        return True

    @property
    def period(self) -> int | None:
        """Devices d and d + period get the same cut in every round; None: each device may have its own."""
        return None

    def assign(self, round: int, devices: Sequence[int]) -> list[Task]:
        """The tasks of the sampled devices, in their order."""
        return [self._task(round, device) for device in devices if self.can_train(device)]

    def _task(self, round: int, device: int) -> Task:
        execution = self.execution_for(round, device)
        phases = tuple(
            phase if execution is None or phase.execution is not None else replace(phase, execution=execution)
            for phase in self.phases_for(round, device)
        )
        if len(phases) == 1:
            return Task(round, device, phases[0].cut, phases)
        return Task(round, device, self.graph.union([phase.cut for phase in phases]), phases)

    @property
    def device_state(self) -> DeviceState | None:
        """What a device keeps between its rounds; None: nothing."""
        return None

    # --- what the server does ----------------------------------------------------------------------------------

    def server_cut(self) -> Cut:
        """The part of the model that the server trains at all: full unless the method shrinks it."""
        return self.graph.full()

    def evaluation_cut(self, round: int) -> Cut:
        """What is evaluated after this round."""
        return self.server_cut()

    def begin(self, round: int, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The server's tensors as this round begins: as they are, or others in their place (SLT's new channels). Of its
        arguments alone: a round that is redone, or resumed, begins alike."""
        return tensors

    @property
    def aggregates(self) -> bool:
        """Whether `aggregation` says anything: then the run cannot choose another one."""
        return type(self).aggregation is not Method.aggregation

    def aggregation(self, round: int, tensors: Mapping[str, Tensor]) -> Aggregate | None:
        """What makes new values of the devices' updates, from the server's `tensors`; None: as the run says."""
        return None

    def step(self, round: int) -> int:
        """The step of the plan in this round; 0 for methods without steps."""
        return 0

    @property
    def needs_accuracy(self) -> bool:
        """While it is True, `observe` must hear of every round's accuracy, so every round is evaluated."""
        return False

    def observe(self, round: int, accuracy: float) -> Self:
        """The method after it saw this round's accuracy (early stopping); itself where accuracy decides nothing."""
        return self

    @property
    def state(self) -> dict[str, Any]:
        """What `observe` has learnt, as JSON: goes into the checkpoint."""
        return {}

    def with_state(self, state: Mapping[str, Any]) -> Self:
        """The method as it was when `state` was saved."""
        return self


def original_variant(what: str) -> Setting:
    """Of a card, for a method whose own authors train in another way than the SLT paper's comparison does."""
    return Setting(f"original: as its authors train ({what})", metavar="NAME", choices=("original",))


@dataclass(frozen=True)
class Levels(Method):
    """A method that scales width: device d has the constraint (a width ratio in (0, 1]) number d % len(constraints)."""

    needs_budget = True
    constraints: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "constraints", tuple(float(scale) for scale in self.constraints))
        if not self.constraints:
            raise BadInput("at least one constraint is needed, such as 0.25")
        for scale in self.constraints:
            if not 0 < scale <= 1:
                raise BadInput(f"a constraint is a width ratio above 0 and at most 1, not {scale:g}")
        known, variant = self.card.options.get("variant"), getattr(self, "variant", None)
        if known is not None and variant is not None:
            check_value(variant, known, f"the variant of {self.name}")

    @classmethod
    def from_budget(cls, graph: ChannelGraph, budget: Budget) -> Self:
        """Of each level the widest model that trains within its bytes."""
        budget = budget.of(cls)
        found: dict[int, float] = {}
        beside = 0
        for size in sorted(set(budget.sizes)):
            found[size] = budget.widest(graph, size - beside)
            beside += cls.kept_beside(graph, graph.prefix(found[size]))
        scales = budget.constraints or tuple(found[size] for size in budget.sizes) or (1.0,)
        return cls.made(graph, budget.seed, scales, budget.options)

    @classmethod
    def kept_beside(cls, graph: ChannelGraph, smaller: Cut) -> int:
        """Bytes of a smaller level that a device keeps beside its own."""
        return 0

    def most_bytes(self, count: Callable[[Cut], int]) -> list[int]:
        sizes = []
        beside = 0
        for scale in self.constraints:  # ascending, where the devices' own budgets made them
            cut = self.graph.prefix(scale)
            sizes.append(count(cut) + beside)
            beside += self.kept_beside(self.graph, cut)
        return sizes

    @property
    def setting(self) -> str:
        widths = ", ".join(f"{scale:g}" for scale in dict.fromkeys(self.constraints))
        return "the whole model" if widths == "1" else f"width {widths}"

    def scale(self, device: int) -> float:
        return self.constraints[device % len(self.constraints)]

    @property
    def period(self) -> int | None:
        return len(self.constraints)

    @cached_property
    def prefixes(self) -> dict[float, Cut]:
        """The prefix cut of each level, smallest level first."""
        return {scale: self.graph.prefix(scale) for scale in sorted(set(self.constraints))}


class OneCut(Method):
    """All devices train the same part, `cut`, in all rounds."""

    @property
    def cut(self) -> Cut:
        raise NotImplementedError

    def most_bytes(self, count: Callable[[Cut], int]) -> list[int]:
        return [count(self.cut)]

    @property
    def period(self) -> int | None:
        return 1

    def cut_for(self, round: int, device: int) -> Cut:
        return self.cut
