"""TensorBoard and MLflow, each an extra that is imported only when asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from strata.core.errors import BadInput, one_line

SCALARS = ("accuracy", "train_loss", "lr", "step", "upload_bytes", "download_bytes", "train_flops", "peak_bytes")


class Tracker(Protocol):
    def round(self, record: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


def check_extras(tensorboard: bool, mlflow: bool) -> None:
    """Before anything is written."""
    for name, package, wanted in (("TensorBoard", "tensorboard", tensorboard), ("MLflow", "mlflow", mlflow)):
        if wanted and importlib.util.find_spec(package) is None:
            raise BadInput(f"{name} is not installed: pip install 'strata-fl[{package}]'")


def started(name: str, make: Callable[[], Tracker]) -> Tracker:
    try:
        return make()
    except Exception as error:
        raise BadInput(f"{name} could not start: {one_line(error, 300)}") from error


class TensorBoard:
    """Event files in the run folder's tensorboard/."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def round(self, record: Mapping[str, Any]) -> None:
        for name in SCALARS:
            if record[name] is not None:
                self._writer.add_scalar(name, record[name], record["round"])

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """An MLflow run where MLFLOW_TRACKING_URI says, or in ./mlruns."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        import mlflow

        self._mlflow: Any = mlflow
        mlflow.start_run(run_name=name)
        mlflow.log_params({key: str(value)[:250] for key, value in settings.items()})

    def round(self, record: Mapping[str, Any]) -> None:
        values = {name: float(record[name]) for name in SCALARS if record[name] is not None}
        self._mlflow.log_metrics(values, step=record["round"])

    def close(self) -> None:
        self._mlflow.end_run()
