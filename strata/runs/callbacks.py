"""Callbacks: objects that hear of a run while it goes on, and may stop it.

    class Curve(strata.Callback):
        def __init__(self):
            self.points = []

        def evaluated(self, evaluation):
            self.points.append((evaluation.round, evaluation.accuracy))
            if evaluation.accuracy > 0.9:
                raise strata.StopRun("90 % is enough")

    strata.run(model, data, "fedavg", callbacks=[Curve(), strata.EarlyStop(patience=5)], out="runs/a")

A callback that fails costs a line in run.log, never the run. What it does is no setting of the run: give the same ones
again where a run is resumed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from strata.core.errors import BadInput, one_line
from strata.core.files import write_atomic, write_json

if TYPE_CHECKING:
    from torch import Tensor

    from strata.runs.session import Result

SCALARS = ("accuracy", "train_loss", "lr", "step", "upload_bytes", "download_bytes", "train_flops", "peak_bytes")


class StopRun(Exception):
    """Raised by a callback: the run ends after this round, with its model; the text is `stopped` in summary.json."""


@dataclass(frozen=True)
class RunInfo:
    """What a callback is told when the run begins, or is resumed."""

    out: Path
    method: str
    rounds: int  # in all
    settings: Mapping[str, Any] = field(default_factory=dict)  # as in config.json
    done: int = 0  # rounds that were done before, where the run is resumed
    records: Sequence[Mapping[str, Any]] = ()  # and their lines of metrics.jsonl


@dataclass(frozen=True)
class Evaluated:
    """The model after a round, on the test data."""

    round: int
    accuracy: float
    loss: float
    per_class_accuracy: tuple[float | None, ...]
    validation_accuracy: float | None  # where the run has a validation split and a callback that judges by it
    state_dict: Callable[[], dict[str, Tensor]]  # of the plain module, ready for inference; takes a moment

    @property
    def score(self) -> float:
        """What to decide by: not the test data, where there is a validation split."""
        return self.accuracy if self.validation_accuracy is None else self.validation_accuracy


class Callback:
    """Override what you need. Each hook but `close` may raise StopRun to end the run."""

    judges: ClassVar[bool] = False  # it decides by accuracy: evaluations are made on a validation split too, if any

    def run_begins(self, run: RunInfo) -> None:
        """Before the first round, or the first after a resume. BadInput raised here refuses the run."""

    def evaluated(self, evaluation: Evaluated) -> None:
        """After each round that was evaluated, before `round_ends`."""

    def round_ends(self, record: Mapping[str, Any]) -> None:
        """After every round, with its line in metrics.jsonl."""

    def run_ends(self, result: Result) -> None:
        """When the model and summary.json are written; not where a run is interrupted."""

    def close(self) -> None:
        """At the very end, however the run ended."""


class EarlyStop(Callback):
    """Ends the run after `patience` evaluations in a row that were not better than the best before by `least`."""

    judges = True

    def __init__(self, patience: int = 10, least: float = 0.0) -> None:
        if patience < 1:
            raise BadInput(f"the patience of EarlyStop is 1 or more evaluations, not {patience}")
        self.patience, self.least = patience, least
        self.best: float | None = None
        self.waited = 0

    def run_begins(self, run: RunInfo) -> None:
        self.best, self.waited = None, 0
        for record in run.records:
            score = score_of(record)
            if score is not None:
                self._see(score)

    def evaluated(self, evaluation: Evaluated) -> None:
        self._see(evaluation.score)

    def _see(self, score: float) -> None:
        if self.best is None or score > self.best + self.least:
            self.best, self.waited = score, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            raise StopRun(f"no better than {self.best:.4f} in {self.waited} evaluations")


class KeepBest(Callback):
    """Keeps the best model so far in the run folder's best.safetensors, and its round and accuracy in best.json."""

    judges = True

    def __init__(self) -> None:
        self.best: float | None = None
        self.round: int | None = None

    def run_begins(self, run: RunInfo) -> None:
        self._out, self.best, self.round = run.out, None, None
        for record in run.records:
            self._is_better(record["round"], score_of(record))

    def evaluated(self, evaluation: Evaluated) -> None:
        from safetensors.torch import save

        if not self._is_better(evaluation.round, evaluation.score):
            return
        write_atomic(self._out / "best.safetensors", save(evaluation.state_dict()))
        write_json(self._out / "best.json", {"round": self.round, "accuracy": self.best})

    def _is_better(self, round: int, score: float | None) -> bool:
        better = score is not None and (self.best is None or score > self.best)
        if better:
            self.best, self.round = score, round
        return better


def score_of(record: Mapping[str, Any]) -> float | None:
    """Of a line of metrics.jsonl, what `Evaluated.score` was; None where it was not evaluated."""
    found: float | None = record.get("validation_accuracy", record["accuracy"])
    return found


class TensorBoard(Callback):
    """Event files in the run folder's tensorboard/."""

    def run_begins(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run.out / "tensorboard"))

    def round_ends(self, record: Mapping[str, Any]) -> None:
        for name in SCALARS:
            if record[name] is not None:
                self._writer.add_scalar(name, record[name], record["round"])

    def close(self) -> None:
        self._writer.close()


class MLflow(Callback):
    """An MLflow run where MLFLOW_TRACKING_URI says, or in ./mlruns."""

    def run_begins(self, run: RunInfo) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        mlflow.start_run(run_name=run.out.name)
        mlflow.log_params({key: str(value)[:250] for key, value in run.settings.items()})

    def round_ends(self, record: Mapping[str, Any]) -> None:
        values = {name: float(record[name]) for name in SCALARS if record[name] is not None}
        self._mlflow.log_metrics(values, step=record["round"])

    def close(self) -> None:
        self._mlflow.end_run()


def trackers(tensorboard: bool, mlflow: bool) -> list[Callback]:
    """Those that are asked for; each is an extra that may be missing, which is said before anything is written."""
    found: list[Callback] = []
    for kind, package, wanted in ((TensorBoard, "tensorboard", tensorboard), (MLflow, "mlflow", mlflow)):
        if not wanted:
            continue
        if importlib.util.find_spec(package) is None:
            raise BadInput(f"{kind.__name__} is not installed: pip install 'strata-fl[{package}]'")
        found.append(kind())
    return found


class Callbacks:
    """All callbacks of a run. Of one that fails, `log` hears once; then it is left alone."""

    def __init__(self, callbacks: Iterable[Callback], log: Callable[[str], None] = lambda text: None) -> None:
        self._given = list(callbacks)
        self._active: list[Callback] = []  # from the run's beginning on
        self.log = log
        for callback in self._given:
            if not isinstance(callback, Callback):
                raise BadInput(f"a callback is an object of a class made from strata.Callback, not {callback!r}")

    @property
    def judge(self) -> bool:
        return any(callback.judges for callback in self._given)

    def run_begins(self, run: RunInfo) -> StopRun | None:
        """Trackers that were asked for have to start."""
        stop = None
        for callback in self._given:
            try:
                callback.run_begins(run)
            except StopRun as asked:
                stop = stop or asked
            except BadInput:
                raise
            except Exception as error:
                name = type(callback).__name__
                if isinstance(callback, TensorBoard | MLflow):
                    raise BadInput(f"{name} could not start: {one_line(error, 300)}") from error
                self.log(f"{name} could not start: {one_line(error, 300)}")
                continue
            self._active.append(callback)
        return stop

    def evaluated(self, evaluation: Evaluated) -> StopRun | None:
        return self._tell(lambda callback: callback.evaluated(evaluation))

    def round_ends(self, record: Mapping[str, Any]) -> StopRun | None:
        return self._tell(lambda callback: callback.round_ends(record))

    def run_ends(self, result: Result) -> None:
        self._tell(lambda callback: callback.run_ends(result))

    def _tell(self, hook: Callable[[Callback], None]) -> StopRun | None:
        """All of them hear of it, also where one wants to stop."""
        stop = None
        for callback in list(self._active):
            try:
                hook(callback)
            except StopRun as asked:
                stop = stop or asked
            except Exception as error:
                self._give_up(callback, error)
        return stop

    def _give_up(self, callback: Callback, error: Exception) -> None:
        self._active.remove(callback)
        self.log(f"{type(callback).__name__} stopped taking records: {one_line(error, 300)}")
        self._close(callback)

    def close(self) -> None:
        active, self._active = self._active, []
        for callback in active:
            self._close(callback)

    def _close(self, callback: Callback) -> None:
        try:
            callback.close()
        except Exception as error:
            self.log(f"{type(callback).__name__} could not be closed: {one_line(error, 300)}")
