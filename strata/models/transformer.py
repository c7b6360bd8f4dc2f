"""A small decoder for text: which token follows each."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        query, key, value = (self._by_head(layer(y)) for layer in (self.query, self.key, self.value))
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.after(x))))

    def _by_head(self, x: Tensor) -> Tensor:
        """[batch, heads, positions, width / heads]"""
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)


class Transformer(nn.Module):
    def __init__(self, classes: int, vocabulary: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.register_buffer("numbers", torch.arange(length), persistent=False)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.scores = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, input_ids: Tensor) -> Tensor:
        numbers: Tensor = self.numbers  # type: ignore[assignment]
        x = self.tokens(input_ids) + self.positions(numbers[: input_ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.scores(self.norm(x))


def transformer4(num_classes: int, vocabulary: int) -> nn.Module:
    """Four layers for 80 characters, 0.8 M parameters."""
    return Transformer(num_classes, vocabulary, length=80, width=128, heads=8, layers=4)
