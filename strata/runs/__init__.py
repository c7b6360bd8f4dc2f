"""From settings to a run folder: build, launch, session, checkpoints, comparison, progress."""

from strata.runs.folder import read_metrics
from strata.runs.options import Options
from strata.runs.running import run
from strata.runs.session import Result

__all__ = ["Options", "Result", "read_metrics", "run"]
