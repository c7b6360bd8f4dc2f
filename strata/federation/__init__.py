"""The round loop: sample, assign, run, check, aggregate, evaluate, record, checkpoint."""

from strata.federation.aggregation import ServerOptimizer
from strata.federation.folder import read_metrics
from strata.federation.rounds import RoundFailed
from strata.federation.running import Options, Result, run
from strata.federation.state import FederationState

__all__ = ["FederationState", "Options", "Result", "RoundFailed", "ServerOptimizer", "read_metrics", "run"]
