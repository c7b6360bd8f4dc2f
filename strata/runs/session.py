"""A run while it runs: rounds, evaluation, records and checkpoints, until the final model or an interruption."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save
from torch import Tensor, nn

from strata.core.files import read_json, write_atomic
from strata.core.interrupts import Interrupts
from strata.data.objectives import Classification, Objective
from strata.engines import Engine
from strata.execution import flops
from strata.federation.device_store import DeviceStore
from strata.federation.jobs import evaluate, final_state
from strata.federation.privacy_accounting import Account
from strata.federation.rounds import RoundFailed, RoundSettings, play
from strata.federation.state import FederationState
from strata.graph.initial import own_fan_in
from strata.runs import description as describing
from strata.runs.folder import EPSILON, METRIC_KEYS, RunFolder, is_finished, read_metrics
from strata.runs.options import Options
from strata.runs.progress import Silent
from strata.runs.trackers import Tracker
from strata.training import Evaluation

if TYPE_CHECKING:
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
    options: Options
    rounds: RoundSettings
    engine: Engine
    folder: RunFolder
    checkpoint_every: int
    samples: Mapping[str, int]  # in "test" and, with a validation split, "validation"
    show: Silent
    trackers: list[Tracker] = field(default_factory=list)
    last: Evaluation | None = None  # of the newest state, where it was evaluated on the test data
    account: Account | None = None  # with differential privacy
    saved: int = -1  # the newest checkpoint's round
    pretrained: bool = False  # the model's weights are trained ones
    names: Mapping[str, str] = field(default_factory=dict)  # of the plain model's entries, by the prepared one's
    objective: Objective = Classification()  # of the data

    def run(self, model: nn.Module, interrupts: Interrupts) -> Result:
        folder, total = self.folder, self.options.rounds
        state = self._begin(model)
        if state.round >= total and is_finished(folder.path):
            folder.say(f"{folder.path} is finished: nothing to do")
            return Result(folder.path, read_json(folder.path / "summary.json"))
        if self.method.device_state is not None:
            store = DeviceStore(folder.path / "devices", lambda: min(folder.checkpoints.rounds(), default=0))
            self.rounds = replace(self.rounds, store=store)
        self.show.start(self.method.name, state.round, total)
        flops = flops_of_tasks(self.method, self.rounds.recomputed_flops)
        if self.rounds.privacy:
            self.account = Account.of(self.rounds, folder.path)
        try:
            while state.round < total:
                began = time.monotonic()
                if self.account:
                    self.account.begin(state.round)
                with interrupts.allowed():
                    after, costs = play(state, self.method, self.rounds, self.engine, flops, folder.log)
                    accuracy, method = self._judge(after)
                self.method, state = method, replace(after, method=method.state)
                self._record(state.round - 1, accuracy, costs, began)
                if state.round % self.checkpoint_every == 0 or state.round == total:
                    self._save(state)
            with interrupts.allowed():
                return self._finish(state)
        except KeyboardInterrupt:
            self._save(state)
            self.show.stop()
            folder.say(
                f"stopped after {state.round} of {total} rounds; continue with: strata run --resume {folder.path} "
                "(or strata.run(..., resume=True))"
            )
            raise
        except RoundFailed as error:
            self._save(state)
            raise RoundFailed(f"{error}. {state.round} rounds are saved in {folder.path}") from error

    def _begin(self, model: nn.Module) -> FederationState:
        """The newest checkpoint's state, or the model's own weights."""
        folder = self.folder
        if folder.checkpoints.rounds():
            state = folder.checkpoints.load(folder.say)
            folder.truncate_metrics(state.round)
            self.saved = state.round
            self.method = self.method.with_state(state.method)
            if state.round < self.options.rounds:
                folder.say(f"resuming {folder.path} after {state.round} of {self.options.rounds} rounds")
            return state
        folder.truncate_metrics(0)
        plan = getattr(self.method, "plan", None)
        folder.write("plan.json", plan.to_json() if plan is not None else describing.describe_method(self.method))
        if plan is not None and plan.skipped:
            folder.say(f"with {self.options.rounds} rounds these steps get none: {', '.join(map(str, plan.skipped))}")
        tensors = {name: tensor.detach().clone().cpu() for name, tensor in model.state_dict().items()}
        if not self.pretrained:
            own_fan_in(model, self.method.server_cut(), tensors)
        state = FederationState(0, tensors, method=self.method.state)
        self._save(state)
        return state

    def _save(self, state: FederationState) -> None:
        if state.round != self.saved:
            self.folder.sync()
            self.folder.checkpoints.save(state)
            self.saved = state.round

    def _evaluate(self, state: FederationState, part: str, bn: str | None = None) -> Evaluation:
        cut = self.method.evaluation_cut(state.round - 1)
        return evaluate(
            self.engine, state.tensors, cut, self.samples[part], part, bn or self.options.bn, state.round,
            self.options.seed, self._calibration, self.objective,
        )  # fmt: skip

    @property
    def _calibration(self) -> str:
        """Whose images batch norm's statistics come from. Under differential privacy not the devices'."""
        return "validation" if self.rounds.privacy and "validation" in self.samples else "train"

    def _judge(self, after: FederationState) -> tuple[float | None, Method]:
        """Test accuracy where this round is due, and the method after it has seen how it does.

        What decides (early stopping) is the validation split where there is one, else the test data, as published.
        """
        options, method = self.options, self.method
        assert options.eval_every is not None
        due = after.round % options.eval_every == 0 or after.round == options.rounds
        apart = "validation" in self.samples
        self.last = self._evaluate(after, "test") if due or (method.needs_accuracy and not apart) else None
        accuracy = self.last.accuracy if self.last else None
        if not method.needs_accuracy:
            return accuracy, method
        seen = self._evaluate(after, "validation").accuracy if apart else accuracy
        assert seen is not None
        return accuracy, method.observe(after.round - 1, seen)

    def _record(self, round: int, accuracy: float | None, costs: Mapping[str, Any], began: float) -> None:
        values = {
            **costs, "round": round, "step": self.method.step(round), "lr": self.rounds.lr(round),
            "accuracy": accuracy, "seconds": rounded(time.monotonic() - began),
        }  # fmt: skip
        record = {key: values[key] for key in METRIC_KEYS[:-1]}
        if self.account:  # it takes a moment: where there is an accuracy to go with it
            record[EPSILON] = None if accuracy is None else self.account.epsilon(round + 1)
        record["seconds"] = values["seconds"]
        self.folder.append(record)
        self.show.round(record)
        for tracker in list(self.trackers):
            try:
                tracker.round(record)
            except Exception as error:  # a log elsewhere must not cost the run
                self.trackers.remove(tracker)
                self.folder.say(
                    f"{type(tracker).__name__} stopped taking records: {' '.join(str(error).split())[:200]}"
                )

    def _finish(self, state: FederationState) -> Result:
        """model.safetensors, which is what was evaluated, then summary.json."""
        folder, options = self.folder, self.options
        cut = self.method.evaluation_cut(options.rounds - 1)
        test = self.last or self._evaluate(state, "test")
        final = final_state(self.engine, state.tensors, cut, options.seed, self._calibration)
        data = save({self.names[name]: tensor for name, tensor in final.items() if name in self.names})
        plain = test if options.bn == "re-estimated" else self._evaluate(state, "test", "re-estimated")
        records = read_metrics(folder.path)
        summary = {
            "method": self.method.name, "seed": options.seed, "rounds": options.rounds, "accuracy": test.accuracy,
            "loss": test.loss if math.isfinite(test.loss) else None, **test.metrics,
            "bn": test.bn,
            "model_accuracy": plain.accuracy,  # of model.safetensors in ordinary inference
            **{key: sum(record[key] for record in records)
               for key in ("upload_bytes", "download_bytes", "train_flops")},
            "peak_bytes": max((record["peak_bytes"] for record in records), default=0),
            "dropped": sum(len(record["dropped"]) for record in records),
            "seconds": rounded(sum(record["seconds"] for record in records)),
            "model_sha256": hashlib.sha256(data).hexdigest(),
        }  # fmt: skip
        if "validation" in self.samples:
            summary["validation_accuracy"] = self._evaluate(state, "validation").accuracy
        if self.account:
            summary |= self.account.summary(options.rounds)
        write_atomic(folder.path / "model.safetensors", data)
        folder.write("summary.json", summary)
        return Result(folder.path, summary)


def rounded(seconds: float) -> float:
    return round(seconds, 3)


def flops_of_tasks(method: Method, recomputed: Callable[[Cut], int] | None = None) -> Callable[[Task], int]:
    """FLOPs per training sample of a task, over its phases; of FjORD's levels, the mean. Remembered per shape."""
    known: dict[Any, int] = {}

    def of_cut(cut: Cut) -> int:
        key = (cut.output, tuple(cut.shapes.values()), cut.frozen)
        if key not in known:
            known[key] = flops(method.graph, cut).real_train + (recomputed(cut) if recomputed else 0)
        return known[key]

    def of_task(task: Task) -> int:
        total = 0
        for phase in task.phases:
            levels = phase.levels or (phase.cut,)
            total += sum(map(of_cut, levels)) // len(levels)
        return total

    return of_task
