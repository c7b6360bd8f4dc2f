"""Exported steps against torch: bytes against the plan, loss and gradient against double precision, and time.

    .venv/bin/python -m benchmarks.pocket                      all of it: run it on a quiet machine, about half an hour
    .venv/bin/python -m benchmarks.pocket --networks vgg,hf_vit --cuts full,slt --trials 0      without times

Needs `make native`. Random weights and inputs, one thread. A line is printed as soon as it is known. Times are
processor time of a training step (forward, loss, backward, SGD), the median of `--trials` after two that do not count;
torch's is the plain submodel as Strata lays it out. Gradients of three batches are held against double precision;
where one is off by more than 1e-4, against double precision with the ReLUs that it was made with
(strata/export/gates.py), and `relus` says how many are the other way. The exit code is 1 if a step is more than 3 %
above its plan, or a gradient is still off by more than 1e-4.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks import common
from strata.execution import Execution
from strata.execution.layout import submodel_as_trained
from strata.export.gates import Gates, with_its_relus
from strata.export.native import BUFFERS, FROZEN, TRAINED, NativeStep, NativeTraining
from strata.export.step import export_step
from strata.export.verify import MORE, ROUNDING, distance
from strata.graph import ChannelGraph, Cut
from strata.graph.inputs import images_last
from tests.networks import NETWORKS

SHOWN = ("resnet20", "resnet44", "resnet56", "densenet40", "mobilenet", "vgg", "gated", "hf_vit")
BATCH = 8


def full(graph: ChannelGraph) -> Cut:
    return graph.full()


def prefix(graph: ChannelGraph) -> Cut:
    return graph.prefix(0.25)


def slt(graph: ChannelGraph) -> Cut:
    """The first half frozen, the next layer trained, the rest narrow."""
    half = graph.depth // 2
    return graph.slt(half, half + 1, 0.25)


CUTS: dict[str, Callable[[ChannelGraph], Cut]] = {"full": full, "prefix": prefix, "slt": slt}


def without_dropout(model: nn.Module) -> nn.Module:
    """Native dropout draws other values than torch's."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def case(name: str, kind: str, trials: int, batch: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model, shape = NETWORKS[name]()
    graph = ChannelGraph(model, shape)
    cut = CUTS[kind](graph)
    began = time.process_time()
    program = export_step(graph, cut, model.state_dict(), Execution(batch_size=batch), evaluates=False)
    seconds = time.process_time() - began
    size = program.manifest["bytes"]
    drops = any(one.startswith("strata::dropout") for one in program.manifest["operators"])
    found: dict[str, Any] = {
        "network": name, "cut": kind, "batch": batch, "arena": size["arena"], "total": size["total"],
        "peak": size["peak"], "off": size["total"] / size["peak"] - 1, "program": len(program.program),
        "export_seconds": seconds, "drops": drops,
    }  # fmt: skip
    checked, checked_graph, checked_cut = program, graph, cut
    if drops:  # sizes with it, gradients without
        checked_graph = ChannelGraph(without_dropout(model), shape)
        checked_cut = CUTS[kind](checked_graph)
        checked = export_step(
            checked_graph, checked_cut, model.state_dict(), Execution(batch_size=batch), evaluates=False
        )
    with opened(checked) as step:
        begun = step.read(TRAINED)
        errors = [against_torch(step, begun, checked_graph, checked_cut, checked, model, shape) for _ in range(3)]
        found["loss_off"] = max(error[0] for error in errors)
        found["gradient_off"] = max(error[1] for error in errors)
        found["plainly_off"] = max(error[2] for error in errors)
        found["flipped"] = sum(error[3] for error in errors)
        if trials:
            step.write(TRAINED, begun)
            x, y = torch.randn(batch, *shape), torch.randint(10, (batch,))
            slow = NativeTraining(lr=1e-3, order=np.arange(batch), batch=batch)
            found["native_ms"] = median(lambda: step.train(x.numpy(), y.numpy(), slow), trials)
            found["torch_ms"] = median(torch_step(checked_graph, checked_cut, model, x, y), trials)
    return found


def against_torch(
    step: NativeStep, begun: Any, graph: ChannelGraph, cut: Cut, program: Any, model: nn.Module, shape: tuple[int, ...]
) -> tuple[float, float, float, int]:
    """How far loss and gradient of a drawn batch are from those in double precision: the gradient with the ReLUs it was
    made with, then plainly, and how many of these are the other way."""
    batch = program.manifest["batch"]
    x, y = torch.randn(batch, *shape), torch.randint(10, (batch,))
    step.write(TRAINED, begun)
    plain = NativeTraining(lr=1.0, momentum=0, weight_decay=0, order=np.arange(batch), batch=batch)
    loss = step.train(x.numpy(), y.numpy(), plain)
    found = begun.astype(np.float64) - step.read(TRAINED)
    sub = graph.submodel(cut, cut.extract(model.state_dict())).train().double()
    wanted_loss, wanted = torchs_own(sub, x, y, program)
    plainly, flipped = distance(found, wanted), 0
    if plainly > ROUNDING:
        wanted, flipped = with_its_relus(found, lambda gates: torchs_own(sub, x, y, program, gates)[1])
    return abs(loss / wanted_loss - 1), distance(found, wanted), plainly, flipped


def torchs_own(
    sub: nn.Module, x: torch.Tensor, y: torch.Tensor, program: Any, gates: Gates | None = None
) -> tuple[float, Any]:
    """Loss and gradient."""
    sub.zero_grad()
    with gates or contextlib.nullcontext():
        loss = functional.cross_entropy(sub(x.double()), y)
        loss.backward()
    own = dict(sub.named_parameters())
    parts = [own[name].grad.flatten().numpy().copy() for name in program.names["trained"]]  # type: ignore[union-attr]
    return loss.item(), np.concatenate(parts)


def opened(program: Any) -> NativeStep:
    step = NativeStep.of(program.manifest_bytes(), program.program)
    for which, kind in ((TRAINED, "trained"), (FROZEN, "frozen"), (BUFFERS, "buffers")):
        parts = [program.tensors[name].flatten().numpy() for name in program.names[kind]]
        step.write(which, np.concatenate([np.zeros(0, np.float32), *parts]))
    return step


def torch_step(
    graph: ChannelGraph, cut: Cut, model: nn.Module, x: torch.Tensor, y: torch.Tensor
) -> Callable[[], object]:
    module, last = submodel_as_trained(graph, cut)
    module.load_state_dict(cut.extract(model.state_dict()), strict=False)
    (inputs,) = images_last((x,)) if last else (x,)
    trained = [one for name, one in module.named_parameters() if name in set(cut.trained)]
    sgd = torch.optim.SGD(trained, lr=1e-3, momentum=0.9, weight_decay=1e-5)

    def step() -> None:
        sgd.zero_grad()
        functional.cross_entropy(module(inputs), y).backward()
        sgd.step()

    return step


def median(work: Callable[[], object], trials: int) -> float:
    taken = []
    for _ in range(trials + 2):
        began = time.process_time()
        work()
        taken.append(1000 * (time.process_time() - began))
    return statistics.median(taken[2:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(SHOWN))
    parser.add_argument("--cuts", default=",".join(CUTS))
    parser.add_argument("--trials", type=int, default=12, help="0: no times")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    where = common.provenance()
    machine = where["machine"]
    held = True
    if not asked.json:
        print(f"commit {where['commit']}, {machine['cpu']}, load {machine['load_average_before']} before", flush=True)
        print("| network | cut | step | plan's `peak` | off | arena | loss off | gradient off | relus | ms, torch's |")
        print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    rows = []
    for name in asked.networks.split(","):
        for kind in asked.cuts.split(","):
            row = case(name, kind, asked.trials, asked.batch)
            rows.append(row)
            held = held and row["off"] <= MORE and row["gradient_off"] <= ROUNDING
            if not asked.json:
                times = ", ".join(f"{row[key]:.1f}" if key in row else "" for key in ("native_ms", "torch_ms"))
                sizes = " | ".join(f"{row[key] / 2**20:.2f} MiB" for key in ("total", "peak"))
                errors = f"{row['loss_off']:.0e} | {row['gradient_off']:.0e} | {row['flipped']}"
                arena = f"{row['arena'] / 2**20:.2f} MiB"
                print(f"| {name} | {kind} | {sizes} | {row['off']:+.1%} | {arena} | {errors} | {times} |", flush=True)
    if asked.json:
        print(json.dumps({**where, "rows": rows}, indent=1))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
