"""A round as a pure function of state: sample, assign, run, check, aggregate."""

from strata.federation.aggregation import ServerOptimizer
from strata.federation.rounds import RoundFailed
from strata.federation.state import FederationState

__all__ = ["FederationState", "RoundFailed", "ServerOptimizer"]
