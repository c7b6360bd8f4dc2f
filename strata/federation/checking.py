"""Nothing a device sends is believed: an update that does not fit its task costs that device its update, no more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from strata.core.errors import one_line
from strata.data.objectives import Objective

if TYPE_CHECKING:
    from strata.methods import Task


LARGEST_LOSS = Objective.largest_loss  # far above what a network has that still learns, unless the objective says so
MOST_SAMPLES, MOST_BYTES = 2**40, 2**50
LARGEST_COUNT = 2**62  # sums of a few still fit into 64 bits


def problem_with(
    update: Any,
    task: Task,
    state: Mapping[str, Tensor],
    norm_bound: float | None = None,
    most_samples: int = MOST_SAMPLES,
    largest_loss: float = LARGEST_LOSS,
) -> str | None:
    """The first thing wrong with this answer to `task`, or None. `most_samples`: that the device is known to have."""
    try:
        return _problem(update, task, state, norm_bound, most_samples, largest_loss)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:  # not even the form of an update
        return f"not an update ({one_line(error, kind=True)})"


def _problem(
    update: Any,
    task: Task,
    state: Mapping[str, Tensor],
    norm_bound: float | None,
    most_samples: int,
    largest_loss: float,
) -> str | None:
    if update is None:
        return "sent nothing"
    if not is_count(update.round) or update.round != task.round:
        return f"sent an update of round {_shown(update.round)}"
    if not is_count(update.device) or update.device != task.device:
        return f"sent an update in the name of device {_shown(update.device)}"
    if update.cut_hash != task.cut.hash:
        return "trained another cut than it was given"
    expected = set(task.cut.trained)
    if set(update.tensors) != expected:
        missing, extra = sorted(expected - set(update.tensors)), sorted(map(str, set(update.tensors) - expected))
        return f"wrong tensors: missing {missing[:3]}, not asked for {_shown(extra[:3])}"
    squares = 0.0
    for name in task.cut.trained:
        tensor = update.tensors[name]
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            return f"{name} is not a plain tensor"
        if tensor.dtype != state[name].dtype:
            return f"{name} is {tensor.dtype}, not {state[name].dtype}"
        if tuple(tensor.shape) != tuple(task.cut.shapes[name]):
            return f"{name} has shape {tuple(tensor.shape)}, not {tuple(task.cut.shapes[name])}"
        if not bool(torch.isfinite(tensor).all()):
            return f"{name} has values that are not finite"
    if norm_bound is not None:
        received = task.cut.extract(state)
        for name in task.cut.trained:
            squares += float((update.tensors[name].double() - received[name].double()).square().sum())
        if squares > norm_bound**2:
            return f"its change has norm {math.sqrt(squares):.3g}, above the bound of {norm_bound:g}"
    if not is_count(update.samples) or not 1 <= update.samples <= most_samples:
        return f"says it trained on {_shown(update.samples)} samples, of at most {most_samples}"
    if not isinstance(update.loss, float) or not abs(update.loss) <= largest_loss:
        return f"its loss is {_shown(update.loss)}"
    if not is_count(update.peak_bytes) or update.peak_bytes > MOST_BYTES:
        return f"its peak memory is {_shown(update.peak_bytes)}"
    return None


def is_count(value: Any) -> bool:
    """A plain whole number, as JSON may hold one; neither True nor something that only looks like it."""
    return type(value) is int and 0 <= value < LARGEST_COUNT


def _shown(value: Any) -> str:
    """For logs: on one line, without control characters, and short."""
    return ascii(value)[:60]
