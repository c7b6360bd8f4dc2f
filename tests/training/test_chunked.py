"""Evaluation in chunks: the batch's own statistics, whatever the size of the chunks."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from strata.execution.chunks import statistics_of, together
from strata.graph import ChannelGraph
from strata.models import resnet20
from strata.training import chunked
from strata.training.chunked import Chunked, NotChunkable
from strata.training.statistics import BatchStatistics
from tests.networks import NETWORKS
from tests.workspaces import workspace_of


def _graph(model: nn.Module, size: int = 16) -> ChannelGraph:
    return ChannelGraph(model, input_shape=(3, size, size))


@cache
def double(name: str) -> tuple[nn.Module, ChannelGraph]:
    torch.manual_seed(0)
    model, shape = NETWORKS[name]()
    return model.double(), ChannelGraph(model, shape)


@pytest.mark.parametrize("name", ["resnet20", "densenet"])
@pytest.mark.parametrize("kind", ["full", "prefix", "slt", "random"])
def test_equals_the_whole_batch_in_float64(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "FEWEST", 4)
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 1)  # chunks of 4
    model, graph = double(name)
    torch.manual_seed(0)
    cut = {
        "full": graph.full, "prefix": lambda: graph.prefix(0.25), "slt": lambda: graph.slt(3, 4, 0.3),
        "random": lambda: graph.random(0.5, torch.Generator().manual_seed(1)),
    }[kind]()  # fmt: skip
    small = workspace_of(graph).submodel(cut)
    small.load(cut.extract(model.state_dict()))
    small.module.eval()
    images = small.arranged((torch.randn(18, *graph.input_shape, dtype=torch.float64),))  # the last chunk is short
    with torch.inference_mode():
        with BatchStatistics():
            whole = small.module(*images)
        assert small.by_chunks is not None
        torch.testing.assert_close(small.by_chunks(small, images), whole, rtol=1e-9, atol=1e-9)


def test_statistics_of_unequal_chunks_by_hand() -> None:
    # one channel, 1 2 3 | 7 : mean 13/4, biased variance (1 + 4 + 9 + 49)/4 - (13/4)^2 = 83/16
    chunks = [torch.tensor([[1.0], [2.0], [3.0]]).view(3, 1, 1, 1), torch.tensor([[7.0]]).view(1, 1, 1, 1)]
    mean, variance = together([statistics_of(chunk) for chunk in chunks])
    assert mean.tolist() == [3.25]
    assert variance.tolist() == pytest.approx([83 / 16])


class Odd(nn.Module):
    """Samples meet: each is compared with the mean of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x)).mean((2, 3))
        return self.head(h - h.mean(0))


class Turned(nn.Module):
    """The batch does not stay the first dim."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).transpose(0, 1).mean((2, 3)).transpose(0, 1))


@pytest.mark.parametrize("make", [Odd, Turned])
def test_where_samples_might_meet_the_batch_stays_whole(make) -> None:
    graph = _graph(make(), 8)
    with pytest.raises(NotChunkable):
        Chunked(graph, graph.full())
    assert workspace_of(graph).submodel(graph.full()).by_chunks is None


def test_a_large_batch_in_float32_is_nearer_to_the_truth_than_as_a_whole() -> None:
    torch.manual_seed(0)
    model = resnet20(10, 16)
    graph = _graph(model)
    exact = copy.deepcopy(model).double().train()
    small = workspace_of(graph).submodel(graph.full())
    small.load(model.state_dict())
    small.module.eval()
    images = torch.randn(256, 3, 16, 16)
    with torch.no_grad():
        truth = exact(images.double())
        assert small.by_chunks is not None
        torch.testing.assert_close(small.by_chunks(small, small.arranged((images,))).double(), truth, rtol=0, atol=1e-4)
