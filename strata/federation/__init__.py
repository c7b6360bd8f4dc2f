"""The round loop: sample, assign, run, check, aggregate, evaluate, record, checkpoint."""

from strata.federation.aggregation import ServerOptimizer
from strata.federation.folder import read_metrics
from strata.federation.options import Options
from strata.federation.rounds import RoundFailed
from strata.federation.running import run
from strata.federation.session import Result
from strata.federation.state import FederationState

__all__ = ["FederationState", "Options", "Result", "RoundFailed", "ServerOptimizer", "read_metrics", "run"]
