"""What Strata knows of each operator, and how you tell it of your own (docs/operators.md).

`register(Operator(names, channels=…, bytes=…, flops=…))`: one record per family of operators, one file per family.
"""

from strata.ops import families
from strata.ops.bytes import NoRule
from strata.ops.channels import RuleFailed, Unsupported, Walk, elementwise
from strata.ops.flops import Count
from strata.ops.operator import (
    UNKNOWN,
    Operator,
    SamplesApart,
    keeps_samples_apart,
    operator_of,
    operators,
    register,
    registered,
)
from strata.ops.sized import Ref, SizedOp
from strata.ops.tape import Simulation, Value

__all__ = [
    "UNKNOWN",
    "Count",
    "NoRule",
    "Operator",
    "Ref",
    "RuleFailed",
    "SamplesApart",
    "Simulation",
    "SizedOp",
    "Unsupported",
    "Value",
    "Walk",
    "elementwise",
    "families",
    "keeps_samples_apart",
    "operator_of",
    "operators",
    "register",
    "registered",
]
