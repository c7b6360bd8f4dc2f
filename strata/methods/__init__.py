"""One file per method: which Cut each sampled device trains this round. See docs/methods.md."""

from strata.methods.base import Levels, Method, Task
from strata.methods.fd import FD
from strata.methods.fedavg import FedAvg
from strata.methods.fedrolex import FedRolex
from strata.methods.fjord import FjORD
from strata.methods.heterofl import HeteroFL
from strata.methods.registry import METHODS, Entry, create, register
from strata.methods.slt import SLT, Progress
from strata.methods.small import Small
from strata.planning.widths import largest_scale

__all__ = [
    "FD", "METHODS", "SLT", "Entry", "FedAvg", "FedRolex", "FjORD", "HeteroFL", "Levels", "Method", "Progress",
    "Small", "Task", "create", "largest_scale", "register",
]  # fmt: skip
