"""A run while it runs: rounds, evaluation, records and checkpoints, until the final model or an interruption."""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save
from torch import Tensor, nn

from strata.core.files import write_atomic
from strata.core.processes import Interrupts
from strata.data.objectives import Classification, Objective
from strata.engines import Engine
from strata.execution import flops
from strata.federation.device_store import DeviceStore
from strata.federation.jobs import evaluate, final_state
from strata.federation.kept_prefixes import DISK
from strata.federation.membership import MEMBERS
from strata.federation.privacy_accounting import Account
from strata.federation.rounds import RoundFailed, RoundSettings, play
from strata.federation.state import FederationState
from strata.graph.initial import own_fan_in
from strata.graph.tied import own_state
from strata.runs.allowance import OVER, Allowance, warning
from strata.runs.callbacks import Callbacks, Evaluated, RunInfo, StopRun
from strata.runs.config import RunOptions
from strata.runs.folder import RunFolder, describe_method, is_finished, read_summary
from strata.runs.metrics import EPSILON, FURTHER, METRIC_KEYS, PARTIAL, VALIDATION, read_metrics
from strata.training import Evaluation

if TYPE_CHECKING:
    from strata.execution import Execution
    from strata.graph import Cut
    from strata.methods import Method, Task


@dataclass(frozen=True)
class Result:
    """A finished run. Everything comes from its folder."""

    out: Path
    summary: Mapping[str, Any]

    @property
    def accuracy(self) -> float:
        return float(self.summary["accuracy"])

    @property
    def loss(self) -> float:
        """NaN where the model has gone to pieces (JSON has no word for it: null there)."""
        return math.nan if self.summary["loss"] is None else float(self.summary["loss"])

    @property
    def per_class_accuracy(self) -> list[float | None]:
        """Empty where the model does something else than to classify."""
        return list(self.summary.get("per_class_accuracy", ()))

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.out)

    def state_dict(self) -> dict[str, Tensor]:
        """For `model.load_state_dict`."""
        return load_file(self.out / "model.safetensors")


@dataclass
class Session:
    method: Method
    options: RunOptions
    rounds: RoundSettings
    engine: Engine
    folder: RunFolder
    checkpoint_every: int
    samples: Mapping[str, int]  # in "test" and, with a validation split, "validation"
    callbacks: Callbacks
    account: Account | None = None  # with differential privacy
    saved: int = -1  # the newest checkpoint's round
    pretrained: bool = False  # the model's weights are trained ones
    to_plain: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = dict  # the user's model's state, of the prepared
    objective: Objective = Classification()  # of the data
    allowance: Allowance | None = None  # None: devices may hold whatever the method takes
    warned: bool = False  # that a device took more
    token: str = field(default_factory=lambda: secrets.token_hex(8))  # of this process's part of the run
    from_round: int | None = None  # None: resume after the newest checkpoint

    def run(self, model: nn.Module, interrupts: Interrupts) -> Result:
        folder, total = self.folder, self.options.course.rounds
        state = self._begin(model)
        before = _finished(folder.path, state.round >= total)
        if before is not None:
            folder.say(f"{folder.path} is finished: nothing to do")
            return before
        if self.method.device_state is not None:
            store = DeviceStore(folder.path / "devices", lambda: min(folder.checkpoints.rounds(), default=0))
            self.rounds = replace(self.rounds, store=store)
        flops = flops_of_tasks(self.method, self.rounds.recomputed_flops)
        if self.rounds.privacy:
            self.account = Account.of(self.rounds, folder.path)
        last: Evaluation | None = None  # of the newest state, where it was evaluated on the test data
        stop = self._tell_begin(state)
        try:
            while state.round < total and stop is None:
                began = time.monotonic()
                if self.account:
                    self.account.begin(state.round)
                with interrupts.allowed():
                    after, costs = play(state, self.method, self.rounds, self.engine, flops, folder.log)
                    last, validation, method = self._judge(after)
                self.method, state = method, replace(after, method=method.state)
                stop = self._record(state, last, validation, costs, began)
                if state.round % self.checkpoint_every == 0 or state.round == total or stop is not None:
                    self._save(state)
            with interrupts.allowed():
                result = self._finish(state, last, stop if state.round < total else None)
        except KeyboardInterrupt:
            self._save(state)
            self.callbacks.close()
            folder.say(
                f"stopped after {state.round} of {total} rounds; continue with: strata run --resume {folder.path} "
                "(or strata.run(..., resume=True))"
            )
            raise
        except RoundFailed as error:
            self._save(state)
            raise RoundFailed(f"{error}. {state.round} rounds are saved in {folder.path}") from error
        self.callbacks.run_ends(result)
        return result

    def _begin(self, model: nn.Module) -> FederationState:
        """The newest checkpoint's state, or the model's own weights."""
        folder, total = self.folder, self.options.course.rounds
        plan = getattr(self.method, "plan", None)
        described = plan.to_json() if plan is not None else describe_method(self.method)
        folder.checkpoints.every = self.options.course.keep_every
        if folder.checkpoints.rounds():
            folder.write_or_compare("plan.json", described)
            state = folder.checkpoints.load(folder.say, lambda state: self._check(state, model), self.from_round)
            folder.truncate_metrics(state.round)
            self.saved = state.round
            self.method = self.method.with_state(state.method)
            if state.round < total and not is_finished(folder.path):
                folder.say(f"resuming {folder.path} after {state.round} of {total} rounds")
            return state
        folder.truncate_metrics(0)
        folder.write("plan.json", described)
        if plan is not None and plan.skipped:
            folder.say(f"with {total} rounds these steps get none: {', '.join(map(str, plan.skipped))}")
        tensors = {name: tensor.detach().clone().cpu() for name, tensor in own_state(model).items()}
        if not self.pretrained:
            own_fan_in(model, self.method.server_cut(), tensors)
        state = FederationState(0, tensors, method=self.method.state)
        self._save(state)
        return state

    def _check(self, state: FederationState, model: nn.Module) -> None:
        """A checkpoint may be whole and yet fit nothing here."""
        own = {name: (tensor.shape, tensor.dtype) for name, tensor in own_state(model).items()}
        if {name: (tensor.shape, tensor.dtype) for name, tensor in state.tensors.items()} != own:
            raise ValueError("its tensors are not the model's")
        self.method.with_state(state.method)

    def _save(self, state: FederationState) -> None:
        if state.round != self.saved:
            self.folder.sync()
            self.folder.checkpoints.save(state)
            self.saved = state.round

    # --- evaluation ----------------------------------------------------------------------------------------------

    def _evaluated_cut(self, state: FederationState) -> Cut:
        return self.method.evaluation_cut(max(0, state.round - 1))

    def _evaluate(self, state: FederationState, part: str, bn: str | None = None) -> Evaluation:
        return evaluate(
            self.engine,
            state.tensors,
            self._evaluated_cut(state),
            self.samples[part],
            part,
            bn or self.options.evaluation.bn,
            state.round,
            self.options.course.seed,
            self.options.calibration,
            self.objective,
            self._fixed(state),
            self._weights(state),
        )

    def _weights(self, state: FederationState) -> str:
        """A name for what is evaluated after this round, which only this process uses."""
        return f"{self.token} {state.round}"

    def _fixed(self, state: FederationState) -> frozenset[str]:
        """Batch norms whose statistics are fixed."""
        return frozenset() if self.rounds.norms is None else self.rounds.norms.in_force(state)

    def _judge(self, after: FederationState) -> tuple[Evaluation | None, float | None, Method]:
        """On the test data and the validation split, where this round is due, and the method after it has seen it.

        What decides (early stopping) is the validation split where there is one, else the test data, as published.
        """
        options, method = self.options, self.method
        due = after.round % options.evaluated_every == 0 or after.round == options.course.rounds
        apart = "validation" in self.samples
        test = self._evaluate(after, "test") if due or (method.needs_accuracy and not apart) else None
        validation = None
        if apart and (method.needs_accuracy or (due and self.callbacks.judge)):
            validation = self._evaluate(after, "validation").accuracy
        if not method.needs_accuracy:
            return test, validation, method
        seen = test.accuracy if test is not None and not apart else validation
        assert seen is not None
        return test, validation, method.observe(after.round - 1, seen)

    def _state_dict(self, state: FederationState) -> dict[str, Tensor]:
        """Of the plain module: what is evaluated after this round."""
        cut = self._evaluated_cut(state)
        seed, fixed = self.options.course.seed, self._fixed(state)
        final = final_state(
            self.engine, state.tensors, cut, seed, self.options.calibration, fixed, self._weights(state)
        )
        return self.to_plain(final)

    # --- records -------------------------------------------------------------------------------------------------

    def _tell_begin(self, state: FederationState) -> StopRun | None:
        folder, course = self.folder, self.options.course
        records = read_metrics(folder.path) if state.round else []
        run = RunInfo(folder.path, self.method.name, course.rounds, folder.settings, state.round, records)
        return self.callbacks.run_begins(run)

    def _record(
        self,
        state: FederationState,
        test: Evaluation | None,
        validation: float | None,
        costs: Mapping[str, Any],
        began: float,
    ) -> StopRun | None:
        """The round's line in metrics.jsonl; then callbacks hear of it, and may want to stop."""
        round = state.round - 1
        values = {
            **costs,
            "round": round,
            "step": self.method.step(round),
            "lr": self.rounds.lr(round),
            "accuracy": test.accuracy if test else None,
        }
        record = {key: values[key] for key in METRIC_KEYS[:-1]}
        if self.account:  # it takes a moment: where there is an accuracy to go with it
            record[EPSILON] = self.account.epsilon(round + 1) if test else None
        if self.callbacks.judge and "validation" in self.samples:
            record[VALIDATION] = validation if test else None
        if self.objective != Classification():  # those of classes are in summary.json
            record[FURTHER] = numbers(test.metrics) if test else None
        over = self._over(round, costs["peaks"])
        if over:
            record[OVER] = over
        if DISK in costs:
            record[DISK] = costs[DISK]
        if MEMBERS in costs:
            record[MEMBERS] = costs[MEMBERS]
        record["seconds"] = rounded(time.monotonic() - began)
        self.folder.append(record)
        stop = None
        if test is not None:
            per_class = tuple(test.metrics.get("per_class_accuracy", ()))
            seen = record.get(VALIDATION)
            stop = self.callbacks.evaluated(
                Evaluated(round, test.accuracy, test.loss, per_class, seen, lambda: self._state_dict(state))
            )
        return self.callbacks.round_ends(record) or stop

    def _over(self, round: int, peaks: Mapping[int, int]) -> int:
        """Bytes that a device took above its budget, at the most; said once, where it first happens."""
        device, over = self.allowance.excess(peaks) if self.allowance else (-1, 0)
        if over and not self.warned:
            self.warned = True
            self.folder.say(warning(round, device, peaks[device], over))
        return over

    def _finish(self, state: FederationState, last: Evaluation | None, stop: StopRun | None) -> Result:
        """model.safetensors, which is what was evaluated, then summary.json."""
        folder, options = self.folder, self.options
        if stop is not None:
            folder.say(f"ended after {state.round} of {options.course.rounds} rounds: {stop}")
        test = last or self._evaluate(state, "test")
        data = save(self._state_dict(state))
        plain = test if options.evaluation.bn == "re-estimated" else self._evaluate(state, "test", "re-estimated")
        records = read_metrics(folder.path)
        sums = ("upload_bytes", "download_bytes", "train_flops")
        summary = {
            "method": self.method.name,
            "seed": options.course.seed,
            "rounds": state.round,
            "accuracy": test.accuracy,
            "loss": test.loss if math.isfinite(test.loss) else None,
            **{name: value for name, value in test.metrics.items() if isinstance(value, list)},
            FURTHER: numbers(test.metrics),
            "bn": test.bn if self.method.graph.buffer_names else None,  # of batch norm, where there is any
            "model_accuracy": plain.accuracy,  # of model.safetensors in ordinary inference
            **{key: sum(record[key] for record in records) for key in sums},
            "peak_bytes": _most(records, "peak_bytes"),
            **({"budget": self.allowance.to_json(_most(records, OVER))} if self.allowance else {}),
            **({DISK: _most(records, DISK)} if self.rounds.kept else {}),
            "dropped": sum(len(record["dropped"]) for record in records),
            "seconds": rounded(sum(record["seconds"] for record in records)),
            "model_sha256": hashlib.sha256(data).hexdigest(),
        }
        if len(records) < state.round:  # lines were lost: the sums, the peak and the budget's excess are of the others
            summary[PARTIAL] = {"recorded_rounds": len(records), "rounds": state.round}
        if stop is not None:
            summary["stopped"] = str(stop) or type(stop).__name__
        if "validation" in self.samples:
            summary["validation_accuracy"] = self._evaluate(state, "validation").accuracy
        if self.account:
            summary |= self.account.summary(state.round)
        write_atomic(folder.path / "model.safetensors", data)
        folder.write("summary.json", summary)
        return Result(folder.path, summary)


def _finished(folder: Path, all_rounds: bool) -> Result | None:
    """The result of a run that was finished before: after all its rounds, or where a callback stopped it."""
    if not is_finished(folder):
        return None
    summary = read_summary(folder)
    return Result(folder, summary) if all_rounds or "stopped" in summary else None


def _most(records: Sequence[Mapping[str, Any]], key: str) -> int:
    return max((record.get(key, 0) for record in records), default=0)


def numbers(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Without lists: of each class, say."""
    return {name: value for name, value in metrics.items() if not isinstance(value, list)}


def rounded(seconds: float) -> float:
    return round(seconds, 3)


def flops_of_tasks(
    method: Method, recomputed: Callable[[Cut, Execution | None], int] | None = None
) -> Callable[[Task], int]:
    """FLOPs per training sample of a task, over its phases; of FjORD's levels, the mean. Remembered per shape.

    `recomputed`: what a cut's activation checkpointing adds by this execution; None: by the run's."""
    known: dict[Any, int] = {}

    def of_cut(cut: Cut, execution: Execution | None) -> int:
        key = (cut.output, tuple(cut.shapes.values()), cut.frozen, execution)
        if key not in known:
            more = recomputed(cut, execution) if recomputed else 0
            known[key] = flops(method.graph, cut).real_train + more
        return known[key]

    def of_task(task: Task) -> int:
        total = 0
        for phase in task.phases:
            levels = phase.levels or (phase.cut,)
            counts = [of_cut(cut, phase.execution) for cut in levels]
            if phase.distilled:  # the largest in every mini-batch; a smaller one where it is drawn
                total += counts[-1] + sum(counts[:-1]) // len(levels)
            else:
                total += sum(counts) // len(levels)
        return total

    return of_task
