"""From traced methods to an ExecuTorch program: edge dialect, memory plan, bytes."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from strata.core.errors import BadInput, one_line
from strata.export.joint import Traced
from strata.export.planner import planning_pass

aten = torch.ops.aten
VERSION = "1.5.1"
OWN = str(Path(__file__).parent)  # lines of ours say nothing of the user's
INSTALL = f"pip install --no-deps executorch=={VERSION} && pip install flatbuffers tabulate ruamel.yaml"


@dataclass(frozen=True)
class Lowered:
    program: bytes
    arenas: Mapping[str, int]  # by method
    operators: tuple[str, ...]


def missing_executorch() -> str | None:
    """Why nothing can be exported here."""
    if importlib.util.find_spec("executorch") is None:
        return f"exporting needs ExecuTorch, which is not installed: {INSTALL}"
    return None


def require_executorch() -> None:
    lacking = missing_executorch()
    if lacking is not None:
        raise BadInput(lacking)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import executorch.exir  # noqa: F401
    except ImportError as error:
        raise BadInput(f"ExecuTorch is there, but not all that it imports ({error}): {INSTALL}") from error


def lower(methods: Mapping[str, Traced]) -> Lowered:
    require_executorch()
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge

    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            edge = to_edge(
                {name: one.program for name, one in methods.items()},
                compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
            )
            sources = _sources(edge.exported_program(name).graph for name in methods)
            made = edge.to_executorch(ExecutorchBackendConfig(memory_planning_pass=planning_pass()))
    except RuntimeError as error:
        raise BadInput(_unlowered(error)) from error
    finally:
        logging.disable(level)
    plans = {plan.name: plan for plan in made.executorch_program.execution_plan}
    arenas = {name: sum(plans[name].non_const_buffer_sizes) for name in methods}
    found = {_full_name(one) for name in methods for one in plans[name].operators}
    refuse_unknown(found, sources)
    return Lowered(bytes(made.buffer), arenas, tuple(sorted(found)))


def _full_name(operator: Any) -> str:
    return f"{operator.name}.{operator.overload}" if operator.overload else str(operator.name)


def _sources(graphs: Iterable[fx.Graph]) -> dict[str, str]:
    """By the name of an operator without its overload: the user's line that it comes from, where that is known."""
    found: dict[str, str] = {}
    for graph in graphs:
        for node in graph.nodes:
            line = node.meta.get("stack_trace")
            schema = getattr(node.target, "_schema", None)
            if schema is not None and line and OWN not in line:
                found.setdefault(schema.name, one_line(line, 200))
    return found


def refuse_unknown(operators: Iterable[str], sources: Mapping[str, str]) -> None:
    """Of the program's operators, those that no kernel of the native device computes."""
    known = known_operators()
    lacking = sorted(name for name in operators if not name.startswith("strata::") and name not in known)
    if not lacking:
        return
    named = []
    for name in lacking:
        line = sources.get(name.split(".")[0])
        named.append(name.removesuffix(".out") + ("" if line is None else f" ({line})"))
    raise BadInput(f"the native device has no kernel for {', '.join(named)}: this network cannot be exported")


def known_operators() -> frozenset[str]:
    """Of ExecuTorch's own kernels, as its Python runtime has them: the same library that the native device links."""
    import executorch.extension.pybindings.portable_lib as runtime

    return frozenset(runtime._get_operator_names())


def _unlowered(error: Exception) -> str:
    """ExecuTorch names operators without a variant that writes into given memory."""
    return f"ExecuTorch cannot lower this network: {one_line(error, 300)}"
