"""The same number as peak.py for any operator: a training step on fake tensors, which have sizes but no memory.

Slower than the closed form (some hundred milliseconds) and blind to temporaries inside operators, but for batch norm's;
the fallback for networks with operators that the closed form neither knows nor can learn.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from strata.execution.execution import Execution
from strata.execution.measured import Forward, example_batch, example_labels, standing_tensors, training_step
from strata.graph.inputs import InputsLike, InputSpec
from strata.ops.tape import is_dense


def trace(
    module: nn.Module,
    input_shape: InputsLike,
    execution: Execution,
    classes: int | Sequence[int],
    forward: Forward | None = None,
    channels_last: bool = False,
) -> int:
    """Highest live tensor bytes of a steady-state training step of `module`, which is left alone."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(fake):
        module = copy.deepcopy(module)
    module.train()
    with fake:
        batch = example_batch(InputSpec.of(input_shape, module), execution, channels_last)
        labels = example_labels(classes, execution.batch_size)
        optimizer, step = training_step(module, batch, labels, execution, forward)
        module.zero_grad(set_to_none=True)
        step()
        with Storages(standing_tensors(module, optimizer, *batch, labels)) as storages:
            step()
    return storages.peak


class Storages(TorchDispatchMode):
    """Follows every storage that an operator returns until it is gone."""

    def __init__(self, standing: list[Tensor]) -> None:
        super().__init__()
        self.live = 0
        self.known: dict[int, tuple[Any, int]] = {}
        for tensor in standing:
            self._follow(tensor)
        self.start()

    def start(self) -> None:
        self.standing = self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        before = self.live
        for result in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(result, Tensor):
                self._follow(result)
        highest = before if _would_be_in_place(func, args) else self.live
        if func is torch.ops.aten.native_batch_norm_backward.default:
            highest += args[1].nbytes  # it builds the input's gradient in two tensors, of which one shows here
        self.peak = max(self.peak, highest)
        return results

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.known:
            size = storage.nbytes()
            self.known[key] = (weakref.ref(storage, self._forget(key)), size)
            self.live += size

    def _forget(self, key: int) -> Callable[[Any], None]:
        def forget(_: Any) -> None:
            self.live -= self.known.pop(key)[1]

        return forget


def _would_be_in_place(func: Any, args: Any) -> bool:
    """Under a dispatch mode the engine adds gradients at forks out of place; without one it reuses the first if dense.

    Additions during backward are taken for such ones. Whether another tensor shares the first one's memory cannot be
    seen here; dense gradients seldom do.
    """
    if func is not torch.ops.aten.add.Tensor or torch._C._current_graph_task_id() < 0:
        return False
    first, second = args[:2]
    same = isinstance(second, Tensor) and first.shape == second.shape
    return same and is_dense(tuple(first.shape), first.stride())
