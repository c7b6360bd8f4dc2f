"""What verifies other methods than SLT, as a child process: `python -m strata.methods.trials`. It is planning/trials.py
on the model that the method makes of the given one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strata.methods.heads import prepared_model
from strata.methods.registry import method_class
from strata.planning.trials import serve

if TYPE_CHECKING:
    from torch import nn

    from strata.graph import InputSpec


def prepare(model: nn.Module, inputs: InputSpec, request: dict[str, Any]) -> nn.Module:
    return prepared_model(method_class(request["method"]), model, inputs, request["seed"], request["options"])


if __name__ == "__main__":
    serve(prepare)
