"""Recurrent layers. Their channels stay at full width; what torch's counter sees of them are the products outside the
fused kernel, which for an LSTM are none."""

from __future__ import annotations

from strata.ops.operator import Operator, register

register(Operator(("lstm.input",), learned_by_running=True))  # oneDNN's kernel keeps a workspace for backward
