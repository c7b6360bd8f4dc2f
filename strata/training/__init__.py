"""What a device does with its Cut, and how the server judges the result."""

from strata.training.cohorts import COHORT, WIDEST, cohorts, train_cohort
from strata.training.evaluation import BN_MODES, EvaluatedBatch, Evaluation, combine, evaluate, evaluate_units, units
from strata.training.loop import Update, train_device
from strata.training.memory import peak_bytes
from strata.training.schedule import cosine, rate
from strata.training.settings import LocalTraining, cross_entropy
from strata.training.statistics import Calibration, calibration_indices, plain_state, reestimated
from strata.training.workspace import Workspace

__all__ = [
    "BN_MODES",
    "COHORT",
    "WIDEST",
    "Calibration",
    "EvaluatedBatch",
    "Evaluation",
    "LocalTraining",
    "Update",
    "Workspace",
    "calibration_indices",
    "cohorts",
    "combine",
    "cosine",
    "rate",
    "cross_entropy",
    "evaluate",
    "evaluate_units",
    "peak_bytes",
    "plain_state",
    "reestimated",
    "train_cohort",
    "train_device",
    "units",
]
