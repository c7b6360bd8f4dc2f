"""Fixed statistics of batch norms: when the server measures them, and where they hold.

They are measured as for evaluation, on some training samples, before the first round that uses them: in frozen layers
when these freeze (anew, where a layer has been trained since), in all layers in the round that `fixed` begins with (of
SLT anew for what a step makes wider). From then on they are part of the server's model: devices are sent them,
evaluation uses them, the final model has them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from strata.core.errors import BadInput
from strata.execution.norm_statistics import fixed_norms
from strata.federation.jobs import StatisticsJob, results
from strata.training import Calibration

if TYPE_CHECKING:
    from torch import Tensor

    from strata.engines import Engine
    from strata.federation.state import FederationState
    from strata.graph import ChannelGraph, Cut
    from strata.graph.batch_norms import BatchNorm
    from strata.methods import Method, Task
    from strata.training import LocalTraining

MOST_DEVICES = 16  # that are looked at before a run


@dataclass(frozen=True)
class NormStatistics:
    """Norms are named by their running means."""

    graph: ChannelGraph
    training: LocalTraining
    seed: int
    calibration: Calibration = Calibration()  # what they are measured on

    def measured(self, state: FederationState, tasks: Sequence[Task], engine: Engine) -> FederationState:
        """The state with all statistics that these tasks need."""
        for cut in dict.fromkeys(phase.cut for task in tasks for phase in task.phases):  # most devices share one
            fixed = self._fixed(cut, state.round)
            lacking = frozenset(norm.mean for norm in self._named(fixed) if self._lacks(state, norm, cut))
            if lacking:
                state = self._measure(state, cut, lacking, fixed - lacking, engine)
        return state

    def in_force(self, state: FederationState) -> frozenset[str]:
        """Norms that are evaluated with their fixed statistics: as they are trained, or not trained any more."""
        all_are = self.training.norm_statistics == "fixed"
        return frozenset(norm.mean for norm in self._named(state.norms) if all_are or not _changed(state, norm))

    def download_bytes(self, task: Task, tensors: Mapping[str, Tensor]) -> int:
        """Of the statistics that a device is sent with its task."""
        names = {name for phase in task.phases for name in self._fixed(phase.cut, task.round)}
        buffers = [buffer for norm in self._named(names) for buffer in (norm.mean, norm.variance)]
        return sum(math.prod(task.cut.shapes[name]) * tensors[name].element_size() for name in buffers)

    def _fixed(self, cut: Cut, round: int) -> frozenset[str]:
        return fixed_norms(self.graph, cut, self.training.in_round(round))

    def _named(self, names: Collection[str]) -> list[BatchNorm]:
        return [norm for norm in self.graph.batch_norms if norm.mean in names]

    def _lacks(self, state: FederationState, norm: BatchNorm, cut: Cut) -> bool:
        if norm.mean not in state.norms:
            return True
        if self.training.norm_statistics == "frozen":
            return _changed(state, norm)
        return bool(state.norms[norm.mean]["network"] != self._network(cut, norm))

    def _network(self, cut: Cut, norm: BatchNorm) -> str:
        """A digest of what the cut has of the layers up to the norm."""
        layers = self.graph.layer_of
        last = max((layers[name] for name in norm.parameters), default=0)
        kept = [(name, kept) for name, kept in cut.entries if name in layers and layers[name] <= last]
        return hashlib.sha256(repr(kept).encode()).hexdigest()[:16]

    def _measure(
        self, state: FederationState, cut: Cut, lacking: frozenset[str], fixed: frozenset[str], engine: Engine
    ) -> FederationState:
        job = StatisticsJob(cut, self.seed, self.calibration, tuple(sorted(fixed)))
        (found,) = results(engine, [job], state.tensors)
        new = self._named(lacking)
        buffers = [name for norm in new for name in (norm.mean, norm.variance)]
        made = {name: state.tensors[name].clone() for name in buffers}
        cut.scatter(made, {name: found[name] for name in buffers})
        known = {norm.mean: {"round": state.round, "network": self._network(cut, norm)} for norm in new}
        return replace(state, tensors={**state.tensors, **made}, norms={**state.norms, **known})


def check_norms(method: Method, training: LocalTraining, rounds: int, model: str) -> None:
    """Says before a run where fixed statistics make no sense."""
    norms = method.graph.batch_norms
    if training.norm_statistics == "batch":
        return
    if not norms:
        raise BadInput(f"there is no batch norm in {model}, whose statistics could be fixed: leave out norm_statistics")
    if not all(norm.mean and norm.variance for norm in norms):
        raise BadInput(
            f"a batch norm of {model} keeps no statistics (track_running_stats=False), so there is nowhere to fix "
            "them: let it keep them, or leave out norm_statistics"
        )
    first = min(training.fixed_after or 0, rounds - 1)
    devices = range(min(method.period or MOST_DEVICES, MOST_DEVICES))
    plan = getattr(method, "plan", None)
    freezes = plan is not None and any(step.k_frozen for step in plan.steps)
    for round in (first, rounds - 1):
        phases = [phase for task in method.assign(round, devices) for phase in task.phases]
        fixing = [phase for phase in phases if fixed_norms(method.graph, phase.cut, training.in_round(round))]
        cuts = [cut for phase in fixing for cut in (phase.cut, *phase.levels)]
        if any(_differ(cut, method.evaluation_cut(round)) for cut in cuts):
            raise BadInput(
                f"fixed statistics are those of one network, and {method.name} trains parts of several widths of it: "
                "leave out norm_statistics, or choose slt, small or fedavg"
            )
        freezes = freezes or bool(fixing)
    if not freezes:
        raise BadInput(
            f"norm_statistics frozen is for layers that are frozen, and {method.name} freezes none in this run: leave "
            "it out, or give fixed"
        )


def _differ(one: Cut, other: Cut) -> bool:
    """In what they keep of what both have."""
    return any(kept != other.kept[name] for name, kept in one.entries if name in other.kept)


def _changed(state: FederationState, norm: BatchNorm) -> bool:
    """Whether a round has trained the layer since its statistics were measured."""
    measured = int(state.norms[norm.mean]["round"])
    return any(state.holdings.changed.get(name, -1) >= measured for name in norm.parameters)
