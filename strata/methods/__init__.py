"""One file per method: what each sampled device trains in a round. See docs/methods.md."""

from strata.methods.aggregate import Aggregate, RunningMean
from strata.methods.base import Levels, Method, Phase, Task
from strata.methods.budget import Budget
from strata.methods.card import Card
from strata.methods.device_state import DeviceState, PersonalLayers
from strata.methods.fd import FD
from strata.methods.fedavg import FedAvg
from strata.methods.fedrolex import FedRolex
from strata.methods.fjord import FjORD
from strata.methods.heads import WithHeads, with_classifiers
from strata.methods.heterofl import HeteroFL
from strata.methods.registry import METHODS, create, method_class, register
from strata.methods.slt import SLT, Progress
from strata.methods.small import Small
from strata.planning.widths import largest_scale

__all__ = [
    "FD", "METHODS", "SLT", "Aggregate", "Budget", "Card", "DeviceState", "FedAvg", "FedRolex", "FjORD", "HeteroFL",
    "Levels", "Method", "PersonalLayers", "Phase", "Progress", "RunningMean", "Small", "Task", "WithHeads", "create",
    "largest_scale", "method_class", "register", "with_classifiers",
]  # fmt: skip
