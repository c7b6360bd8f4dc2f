"""Recurrent layers: each is a layer that is frozen or trained on its own, and stays at full width. What torch's counter
sees of them are the products outside the fused kernel, which for an LSTM are none."""

from __future__ import annotations

from typing import Any

from strata.ops.channels import FxNode, Unsupported, Walk
from strata.ops.operator import Operator, register


def channels(p: Walk, node: FxNode) -> Any:
    weights = node.args[2]
    p.fixed_source(node, weights[0])
    raise Unsupported  # from here on as any operator without a rule: whole, and said so


register(Operator(("lstm.input",), channels=channels, learned_by_running=True))  # oneDNN keeps a workspace for backward
register(Operator(("gru.input", "rnn_tanh.input", "rnn_relu.input"), channels=channels))
