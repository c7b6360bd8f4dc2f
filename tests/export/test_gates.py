"""Which ReLUs a gradient was made with, of a small network in double precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from strata.export.gates import Gates, with_its_relus


class Both(nn.Module):
    """One ReLU in place and one not, two ways that meet, and a frozen layer with a ReLU of its own below."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.left, self.right, self.top = (nn.Linear(16, 16) for _ in range(4))
        for one in self.frozen.parameters():
            one.requires_grad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.frozen(x))
        return self.top(torch.relu(self.left(x)) + self.right(x).relu_())


@pytest.fixture
def case() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Both().double(), torch.randn(64, 16, dtype=torch.float64)


def gradient(case: tuple[nn.Module, torch.Tensor], gates: Gates) -> np.ndarray:
    model, x = case
    model.zero_grad()
    with gates:
        model(x).square().mean().backward()
    return np.concatenate([one.grad.flatten().numpy() for one in model.parameters() if one.grad is not None])


def test_those_that_were_flipped_are_found(case: tuple[nn.Module, torch.Tensor]) -> None:
    plain = Gates()
    own = gradient(case, plain)
    assert len(plain.found) == 2 and {place[0] for _, place in plain.nearest} == {0, 1}
    places = [plain.nearest[1][1], plain.nearest[7][1]]
    found = gradient(case, Gates(flipped=places))
    assert np.linalg.norm(found - own) > 1e-3 * np.linalg.norm(own)
    again, flipped = with_its_relus(found, lambda gates: gradient(case, gates))
    assert flipped == 2
    np.testing.assert_allclose(again, found, rtol=1e-12, atol=1e-15)


def test_a_mistake_is_not_explained_away(case: tuple[nn.Module, torch.Tensor]) -> None:
    own = gradient(case, Gates())
    for wrong in (1.01 * own, np.concatenate([own[:-16], own[-16:] * 1.2])):
        again, _ = with_its_relus(wrong, lambda gates: gradient(case, gates))
        assert np.linalg.norm(again - wrong) > 0.5 * np.linalg.norm(own - wrong)


def test_recorded_gates_are_given_back(case: tuple[nn.Module, torch.Tensor]) -> None:
    plain = Gates()
    own = gradient(case, plain)
    np.testing.assert_array_equal(gradient(case, Gates(given=plain.found)), own)
