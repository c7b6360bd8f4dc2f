"""One round: sample, assign, run, check, aggregate. A function from state to state, and a record of what happened."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from strata.core.errors import BadInput
from strata.core.sizes import check_sampled
from strata.engines import Engine, Outcome
from strata.federation.aggregation import Aggregate, RunningMean, ServerOptimizer, in_order
from strata.federation.checking import LARGEST_LOSS, problem_with
from strata.federation.device_store import DeviceStore
from strata.federation.jobs import CohortJob, Failed, TrainJob
from strata.federation.kept_prefixes import DISK, KeptPrefixes
from strata.federation.membership import MEMBERS, Present
from strata.federation.norm_statistics import NormStatistics
from strata.federation.privacy import Privacy, PrivateSum, Reach
from strata.federation.robust import FEWEST, KeptUpdates, Robust, updates_needed
from strata.federation.simulated_fleet import SimulatedFleet
from strata.federation.state import FederationState
from strata.federation.summed import Summed
from strata.federation.usual_change import UsualChange, change_size

if TYPE_CHECKING:
    from torch import Tensor

    from strata.data import Partition
    from strata.execution import Execution
    from strata.graph import Cut
    from strata.methods import Method, Task
    from strata.training import Update

ATTEMPTS = 10


class RoundFailed(Exception):
    """No attempt of a round got enough updates. The last checkpoint stands."""


@dataclass(frozen=True)
class RoundSettings:
    fleet: SimulatedFleet
    partition: Partition
    per_round: int
    quorum: int
    lr: Callable[[int], float]
    seed: int
    epochs: int = 1
    weighted: bool = False
    server: ServerOptimizer = ServerOptimizer()
    norm_bound: float | None = None
    together: Callable[[Sequence[TrainJob]], list[list[int]]] | None = None  # which jobs to vectorise; None: none
    robust: Robust | None = None
    privacy: Privacy | None = None
    # per sample, that activation checkpointing adds to a cut by this execution; None: by the run's
    recomputed_flops: Callable[[Cut, Execution | None], int] | None = None
    present: Callable[[int, int], Present] | None = None  # who is there in this round and attempt; None: always all
    adjusted: Callable[[Method, int], Method] | None = None  # the method for this attempt at a round: levels may change
    largest_loss: float = LARGEST_LOSS  # that is believed of a device
    store: DeviceStore | None = None  # where devices keep what the method wants them to keep
    norms: NormStatistics | None = None  # batch norms with fixed statistics; None: there are none
    norm_factor: float | None = None  # refuse changes so many times as large as usual; None: as large as they are
    most_growth: float = math.inf  # of the model in one round: more is no training
    kept: KeptPrefixes | None = None  # what devices keep of frozen layers' outputs; None: nothing
    most_counted: int | None = None  # samples of a device that count; None: as many as it says

    def __post_init__(self) -> None:
        if self.per_round < 1:
            raise BadInput(f"at least 1 device per round is needed, not {self.per_round}")
        check_sampled(self.per_round, self.fleet.devices)
        if not 1 <= self.quorum <= self.per_round:
            raise BadInput(f"the quorum is from 1 to the {self.per_round} devices of a round, not {self.quorum}")
        if self.robust and self.per_round < FEWEST:
            raise BadInput(f"a median or trimmed mean needs {FEWEST} or more devices per round, not {self.per_round}")

    @property
    def rate(self) -> float:
        """The chance of each device in a round, the same throughout a run (only differential privacy samples so)."""
        return self.per_round / self.fleet.devices

    def counted(self, samples: int) -> int:
        """In weighted means and in the record: no device is worth more than a few others, whatever it says it has."""
        return samples if self.most_counted is None else min(samples, self.most_counted)

    @property
    def needed(self) -> int:
        """Updates, or the round is redone. Under differential privacy it never is: who answered must not matter."""
        if self.privacy:
            return 0
        return updates_needed(self.quorum, self.robust)


@dataclass
class Tally:
    """What a round's devices did and cost, over all its attempts."""

    asked: dict[int, Cut] = field(default_factory=dict)
    reached: dict[int, Cut] = field(default_factory=dict)  # of those: what each was really sent
    dropped: dict[int, str] = field(default_factory=dict)
    upload_bytes: int = 0
    download_bytes: int = 0
    train_flops: int = 0
    disk_bytes: int | None = None  # of the largest device; None: nothing is kept on any
    peaks: dict[int, int] = field(default_factory=dict)  # measured bytes of each device that answered
    loss_sum: float = 0.0
    samples: int = 0

    def record(self, with_loss: bool = True) -> dict[str, Any]:
        return {
            "train_loss": self.loss_sum / self.samples if with_loss else None,
            "upload_bytes": self.upload_bytes,
            "download_bytes": self.download_bytes,
            "train_flops": self.train_flops,
            "peak_bytes": max(self.peaks.values(), default=0),
            "devices": list(self.asked),
            "dropped": [{"id": device, "reason": reason} for device, reason in self.dropped.items()],
            "peaks": self.peaks,
            **({} if self.disk_bytes is None else {DISK: self.disk_bytes}),
        }


def play(
    state: FederationState,
    method: Method,
    settings: RoundSettings,
    engine: Engine,
    flops: Callable[[Task], int],
    log: Callable[[str], None],
) -> tuple[FederationState, dict[str, Any]]:
    """The state after the next round, and its costs. `flops`: per training sample of a task."""
    round, tally = state.round, Tally()
    state = replace(state, tensors=dict(method.begin(round, state.tensors)))
    present: Present | None = None
    for attempt in range(ATTEMPTS):
        present = settings.present(round, attempt) if settings.present else None
        assigning = settings.adjusted(method, round) if settings.adjusted else method
        state, mean, cuts = _attempt(state, assigning, settings, engine, flops, log, attempt, tally, present)
        if mean.updates >= settings.needed:
            break
        reasons = Counter(tally.dropped[device] for device in cuts if device in tally.dropped)
        log(f"round {round} had {mean.updates} of {settings.needed} updates and is redone with other devices")
        for device in cuts:
            tally.dropped.setdefault(device, f"the round was redone: {mean.updates} of {settings.needed} updates")
        tally.loss_sum, tally.samples = 0.0, 0
    else:
        common = "; ".join(f"{reason} ({count}x)" for reason, count in reasons.most_common(3))
        raise RoundFailed(
            f"round {round} was tried {ATTEMPTS} times and never had {settings.needed} good updates. "
            f"Of the last devices: {common or 'none could be asked'}. Lower the quorum or ask more devices per round"
        )
    tensors, slots = settings.server.apply(state.tensors, state.slots, mean)
    _check_growth(round, {name: (state.tensors[name], tensors[name]) for name in mean.changed}, settings.most_growth)
    holdings = state.holdings.after(round, tally.reached, mean.changed)
    after = replace(state, round=round + 1, tensors=tensors, slots=slots, holdings=holdings)
    costs = tally.record(with_loss=settings.privacy is None)
    if present is not None and (present.joined or present.left):
        costs[MEMBERS] = present.to_json()
    return after, costs


def _attempt(
    state: FederationState,
    method: Method,
    settings: RoundSettings,
    engine: Engine,
    flops: Callable[[Task], int],
    log: Callable[[str], None],
    attempt: int,
    tally: Tally,
    present: Present | None = None,
) -> tuple[FederationState, Aggregate, dict[int, Cut]]:
    """What came of the devices, and the state with all that they needed."""
    round, fleet = state.round, settings.fleet
    if settings.privacy:
        reach = Reach.of(method, round, fleet.devices)
        draws = settings.privacy.uniform(fleet.devices, "sampling", round)
        devices = fleet.sample_each(draws, settings.rate, method.can_train)
        mean: Aggregate = PrivateSum(state.tensors, reach, settings.privacy, settings.rate, round)
    else:
        devices = sampled(fleet, settings, method, present, round, attempt, tally.asked)
        if len(devices) < settings.needed:  # the fleet has no others: the same ones once more
            devices = sampled(fleet, settings, method, present, round, attempt)
        mean = _aggregate(state, method, settings)
    cuts: dict[int, Cut] = {}
    jobs: list[TrainJob] = []
    value_bytes = {name: state.tensors[name].element_size() for name in method.graph.parameter_names}

    def trained_bytes(cut: Cut) -> int:
        return sum(value_bytes[name] * math.prod(cut.shapes[name]) for name in cut.trained)

    def count_download(task: Task) -> None:
        if tally.reached.get(task.device) == task.cut:  # reached before in this round: it has the frozen layers
            tally.download_bytes += trained_bytes(task.cut)
        else:
            tally.download_bytes += state.holdings.download_bytes(task.device, task.cut, value_bytes)
        if settings.norms is not None:
            tally.download_bytes += settings.norms.download_bytes(task, state.tensors)
        tally.reached[task.device] = task.cut

    def count_work(task: Task, samples: int) -> None:
        counted, kept = settings.counted(samples), settings.kept
        tally.train_flops += flops(task) * counted * settings.epochs
        if kept is not None:
            known = state.holdings.has_frozen(task.device, task.cut)
            tally.train_flops -= kept.saved_flops(task, counted, settings.epochs, known)
            tally.disk_bytes = max(tally.disk_bytes or 0, kept.disk_bytes(task, counted))

    tasks = method.assign(round, devices)
    if settings.norms is not None:
        state = settings.norms.measured(state, tasks, engine)
    for task in tasks:
        device = task.device
        cuts[device] = task.cut
        tally.dropped.pop(device, None)
        excuse = fleet.excuse(round, attempt, device)
        if excuse is None:
            job = TrainJob(task, settings.partition[device], settings.lr(round), settings.seed)
            if settings.store is not None:
                job = replace(job, keeping=method.device_state, kept=settings.store.read(device, round))
            if settings.kept is not None:
                job = replace(job, disk=settings.kept.folder_of(device))
            jobs.append(job)
        else:
            tally.dropped[device] = excuse
            count_download(task)
            if excuse.startswith("late"):  # it worked, in vain
                count_work(task, len(settings.partition[device]))
    tally.asked |= cuts
    usual = None if settings.norm_factor is None else UsualChange(settings.norm_factor, state.seen)
    waiting: list[tuple[TrainJob, Update, float]] = []

    def drop(device: int, reason: str, detail: str = "") -> None:
        tally.dropped[device] = reason
        log(f"round {round}, device {device}: {reason}" + (f"\n{detail}" if detail else ""))

    def take(job: TrainJob, update: Update) -> None:
        device, samples = job.task.device, settings.counted(update.samples)
        mean.add(job.task.cut, update.tensors, float(samples) if settings.weighted else 1.0)
        if settings.store is not None and update.kept is not None:
            settings.store.write(device, round, update.kept)
        tally.peaks[device] = max(tally.peaks.get(device, 0), update.peak_bytes)
        tally.loss_sum += update.loss * samples
        tally.samples += samples

    def take_summed(task: Task, part: Summed) -> None:
        tally.peaks[task.device] = max(tally.peaks.get(task.device, 0), part.peak_bytes)
        total = part.total
        if total is None:
            return
        total.add_to(mean, task.cut)
        if total.loss is not None:  # every device's counts the same
            tally.loss_sum += total.loss * total.devices
            tally.samples += total.devices

    def take_usual() -> None:
        """Those that waited, in their order."""
        for job, update, size in waiting:
            unusual = None if usual is None else usual.problem(size)
            if unusual is None:
                take(job, update)
            else:
                drop(job.task.device, unusual)
        waiting.clear()

    for job, outcome in _answers(engine, jobs, settings, state):
        task, update = job.task, outcome.result
        times = update.times if isinstance(update, Summed) else 1
        if outcome.sent:
            for _ in range(times):
                count_download(task)
        reason = outcome.reason
        if reason is None and isinstance(update, Summed):  # the engine has checked what can be
            reason = update.lost
        elif reason is None:
            reason = problem_with(
                update, task, state.tensors, settings.norm_bound, len(job.samples), settings.largest_loss
            )
        if outcome.reason is None:  # whatever came, the device worked and sent
            for _ in range(times):
                count_work(task, len(job.samples))
                tally.upload_bytes += trained_bytes(task.cut)
        if reason is not None:
            drop(task.device, reason, outcome.detail)
        elif isinstance(update, Summed):
            take_summed(task, update)
        elif usual is None:
            take(job, update)
        else:
            size = change_size(task.cut, update.tensors, state.tensors)
            usual.note(size)
            waiting.append((job, update, size))
            if usual.known:
                take_usual()
    take_usual()
    return state if usual is None else replace(state, seen=usual.seen), mean, cuts


def sampled(
    fleet: SimulatedFleet,
    settings: RoundSettings,
    method: Method,
    present: Present | None,
    round: int,
    attempt: int,
    asked: Collection[int] = (),
) -> list[int]:
    """Who is asked: of those who are there, where that changes."""
    if present is None:
        return fleet.sample(round, attempt, settings.per_round, asked, method.can_train)
    members = present.members
    return replace(fleet, devices=present.numbers).sample(
        round, attempt, present.per_round, asked, lambda device: device in members and method.can_train(device)
    )


def _check_growth(round: int, changed: Mapping[str, tuple[Tensor, Tensor]], most: float) -> None:
    """Before the round counts: what has gone to pieces must not get into a checkpoint."""
    before = math.hypot(*(float(old.norm(dtype=torch.float64)) for old, _ in changed.values()))
    after = math.hypot(*(float(new.norm(dtype=torch.float64)) for _, new in changed.values()))
    if math.isfinite(after) and after <= most * max(before, 1.0):
        return
    raise RoundFailed(
        f"round {round} would have left no model (the norm of its weights goes from {before:.3g} to {after:.3g}): one "
        "of its devices may lie, or the learning rate is too high. The round is not kept; go on with --resume once "
        "that device is gone, or begin anew with --aggregation median"
    )


def _aggregate(state: FederationState, method: Method, settings: RoundSettings) -> Aggregate:
    own = method.aggregation(state.round, state.tensors)
    if own is not None:
        return own
    return KeptUpdates(state.tensors, settings.robust) if settings.robust else RunningMean(state.tensors)


def _answers(
    engine: Engine, jobs: list[TrainJob], settings: RoundSettings, state: FederationState
) -> Iterator[tuple[TrainJob, Outcome]]:
    """One outcome per device, cohort by cohort. A cohort that fails as a whole is tried again device by device."""
    groups = settings.together(jobs) if settings.together else [[index] for index in range(len(jobs))]
    asked = [jobs[group[0]] if len(group) == 1 else CohortJob(tuple(jobs[i] for i in group)) for group in groups]
    again: list[TrainJob] = []
    for outcome in in_order(engine.run(asked, state.tensors)):
        members = [jobs[index] for index in groups[outcome.index]]
        if len(members) == 1:
            yield members[0], outcome
        elif outcome.reason is not None:
            again += members
        else:
            for job, one in zip(members, outcome.result, strict=True):
                failed = isinstance(one, Failed)
                yield job, Outcome(0, None, one.reason, one.detail) if failed else Outcome(0, one)
    if again:
        for outcome in in_order(engine.run(again, state.tensors)):
            yield again[outcome.index], outcome
