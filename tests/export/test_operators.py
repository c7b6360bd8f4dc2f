"""What operators of exported steps compute, and their gradients, against torch's own: no ExecuTorch needed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from strata.export.operators import ops

SEEN = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1], [1, 0, 0, 0, 0]], dtype=torch.bool).view(1, 1, 3, 5)
CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[list[int]]]] = {
    "gelu": (lambda x: ops.gelu(x, False), functional.gelu, [[3, 5]]),
    "gelu tanh": (lambda x: ops.gelu(x, True), lambda x: functional.gelu(x, approximate="tanh"), [[3, 5]]),
    "slice": (lambda x: ops.slice(x, 1, 1, 6, 2), lambda x: x[:, 1:6:2], [[2, 7, 3]]),
    "silu": (ops.silu, functional.silu, [[3, 5]]),
    "softmax": (ops.softmax, lambda x: x.softmax(-1), [[2, 3, 5]]),
    "layer norm": (
        lambda x, w, b: ops.layer_norm(x, w, b, 20, 1e-5)[0],
        lambda x, w, b: functional.layer_norm(x, (4, 5), w, b),
        [[2, 3, 4, 5], [4, 5], [4, 5]],
    ),
    "layer norm without weights": (
        lambda x: ops.layer_norm(x, None, None, 5, 1e-3)[0],
        lambda x: functional.layer_norm(x, (5,), eps=1e-3),
        [[2, 3, 5]],
    ),
    "attention": (
        lambda q, k, v: ops.attention(q, k, v, None, False, 0.5),
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, scale=0.5),
        [[2, 2, 3, 4], [2, 2, 5, 4], [2, 2, 5, 4]],
    ),
    "masked attention": (
        lambda q, k, v: ops.attention(q, k, v, SEEN, False, 0.5),
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, attn_mask=SEEN, scale=0.5),
        [[2, 2, 3, 4], [2, 2, 5, 4], [2, 2, 5, 4]],
    ),
    "causal attention": (
        lambda q, k, v: ops.attention(q, k, v, None, True, 0.5),
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5),
        [[2, 2, 5, 4], [2, 2, 5, 4], [2, 2, 5, 4]],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_against_torch(name: str) -> None:
    own, torchs, shapes = CASES[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    found, wanted = own(*inputs), torchs(*inputs)
    torch.testing.assert_close(found, wanted)
    above = torch.randn_like(wanted)
    for one, other in zip(
        torch.autograd.grad(found, inputs, above), torch.autograd.grad(wanted, inputs, above), strict=True
    ):
        torch.testing.assert_close(one, other)
