"""The child process of `verify`: `python -m strata.planning.trials` reads a request from stdin and writes one line of
JSON per trial. Every trial is a fork, so that it starts from the same memory and may die without taking others along.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from strata.core.errors import one_line
from strata.execution import Execution, measure_cut, memory, training_forward
from strata.execution.accountings import built
from strata.execution.mapped import is_mapped
from strata.execution.measured import Forward, example_batch, example_labels, training_step
from strata.execution.scratch import remember_scratch
from strata.graph import ChannelGraph, Cut
from strata.graph.inputs import InputSpec, input_from_json
from strata.models.loading import load_model
from strata.planning.runtime import data_bytes

Say = Callable[[dict[str, Any]], None]
Prepare = Callable[[nn.Module, InputSpec, dict[str, Any]], nn.Module]


def serve(prepare: Prepare | None = None) -> None:
    """`prepare`: makes of the loaded model, and of what was asked, the one that is cut (methods/trials.py)."""
    request = json.load(sys.stdin)
    # What a library prints must not end up among the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    torch.set_num_threads(1)
    inputs: Any = input_from_json(request["input"])
    shape = InputSpec.of(inputs).inputs[0].shape
    model = load_model(request["model"], request["classes"], shape, request["vocabulary"], request["task"])
    if prepare is not None:
        inputs = InputSpec.of(inputs, model)
        model = prepare(model, inputs, request)
    graph = ChannelGraph(model, inputs, width=request["width"])
    for one in request["configurations"]:
        cut, execution = Cut.from_json(one["cut"]), Execution(**one["execution"])
        trial = {
            **one["trial"],
            "predicted_bytes": memory(graph, cut, execution).total,
            "measured_bytes": None,
            "scratch_bytes": None,
            **in_fork(partial(measure, graph, cut, execution)),
        }
        if request["allowance"] is not None:
            capped = in_fork(partial(train_capped, graph, cut, execution, request["allowance"]))
            trial |= {"lived": "error" not in capped, "died_of": capped.pop("error", None), **capped}
        print(json.dumps(trial), file=answers)


def measure(graph: ChannelGraph, cut: Cut, execution: Execution, say: Say) -> None:
    found = measure_cut(graph, cut, execution)
    remember_scratch(graph, cut, execution, found.scratch)
    say({"measured_bytes": found.peak, "scratch_bytes": found.scratch})


def train_capped(graph: ChannelGraph, cut: Cut, execution: Execution, allowance: int, say: Say) -> None:
    """Two training steps with `allowance` bytes for the submodel's tensors and all that training adds to them.

    A step without the limit goes before: what torch and oneDNN load and compile once is the runtime's, not the
    model's. Its tensors have gone back to the kernel when the baseline is read.
    """
    model, last = built(graph, cut, execution)
    forward = training_forward(graph, cut, model, execution)
    train(model, graph, execution, forward, last, steps=1)
    model.zero_grad()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    tensors = [one for one in (*model.parameters(), *model.buffers()) if not is_mapped(one)]
    baseline = data_bytes() - sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    cap = baseline + allowance
    say({"baseline_bytes": baseline, "cap_bytes": cap})
    resource.setrlimit(resource.RLIMIT_DATA, (cap, cap))
    train(model, graph, execution, forward, last, steps=2)  # in the second momentum is there


def train(
    model: nn.Module, graph: ChannelGraph, execution: Execution, forward: Forward | None, last: bool, steps: int
) -> None:
    inputs = example_batch(graph.inputs, execution, last)
    labels = example_labels(graph.output_shape, execution.batch_size)
    _, step = training_step(model, inputs, labels, execution, forward)
    model.train()
    for _ in range(steps):
        step()


def in_fork(work: Callable[[Say], None]) -> dict[str, Any]:
    """All that `work` says, in a process of its own; with an `error` where that does not end well."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(read)
            code = _run(work, lambda values: _write(write, values))
        finally:
            os._exit(code)  # the parent's buffers and exit handlers are not ours to run
    os.close(write)
    with os.fdopen(read) as pipe:
        answer: dict[str, Any] = {}
        for line in pipe:
            answer |= json.loads(line)
    _, status = os.waitpid(pid, 0)
    if status and "error" not in answer:
        killed = os.WIFSIGNALED(status)
        answer["error"] = f"killed by {signal.Signals(os.WTERMSIG(status)).name}" if killed else "ended without a word"
    return answer


def _run(work: Callable[[Say], None], say: Say) -> int:
    try:
        work(say)
    except (MemoryError, RuntimeError) as error:  # how Python and torch say that memory is gone: an outcome
        say({"error": one_line(error, 300, kind=True)})
        return 1
    except BaseException:
        traceback.print_exc()
        raise
    return 0


def _write(descriptor: int, values: dict[str, Any]) -> None:
    os.write(descriptor, (json.dumps(values) + "\n").encode())


if __name__ == "__main__":
    serve()
