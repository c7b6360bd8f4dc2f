"""What each operator allocates, saves and hands back, on a CPU in eager mode: one rule per aten operator.

A rule gets the simulation, the SizedOp and the operator's arguments with tensors as `Value`s; it returns the result.
Results hold a reference of their own; what a rule makes and does not return or save it must drop. The saved tensors
are those of torch's derivatives.yaml. Temporaries of library calls (oneDNN, BLAS) are not counted, see measured.py.
"""

from strata.ops.bytes import elementwise, norms, products, shapes
from strata.ops.bytes.base import RULES, NoRule, itemsize

__all__ = ["RULES", "NoRule", "elementwise", "itemsize", "norms", "products", "shapes"]
