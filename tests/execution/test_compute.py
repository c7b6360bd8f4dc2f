from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import flop_counter

from strata.execution import flops, traffic
from strata.graph import ChannelGraph, Cut
from tests.execution.graphs import cuts_of
from tests.golden import golden
from tests.networks import NAMES, graph_of, paper_graph

aten = torch.ops.aten
BATCH = 2
SLT = [key for key in golden()["cost"] if key.endswith("|SLT")]
WIDTH = [key for key in golden()["cost"] if not key.endswith("|SLT")]


def counted(graph: ChannelGraph, cut: Cut, **options: Any) -> tuple[int, int]:
    """What torch counts in a real training step of the real submodel."""
    model = graph.submodel(cut, zeros=True).train()
    x = torch.randn(BATCH, *graph.input_shape)
    with flop_counter.FlopCounterMode(display=False, **options) as counter:
        logits = model(x)
        forward = counter.get_total_flops()
        functional.cross_entropy(logits, torch.zeros(BATCH, dtype=torch.int64)).backward()
    return forward, counter.get_total_flops()


@pytest.mark.parametrize("name", NAMES)
def test_flops_equal_torchs_counter(name: str) -> None:
    graph = graph_of(name)
    for kind, cut in list(cuts_of(graph).items())[::2]:
        found = flops(graph, cut)
        assert (BATCH * found.forward, BATCH * found.train) == counted(graph, cut), kind


def test_attention_is_counted_by_torchs_formula_for_other_kernels() -> None:
    graph = graph_of("hf_vit")
    mapping = {
        aten._scaled_dot_product_flash_attention_for_cpu: (
            lambda q, k, v, *_, **__: flop_counter.sdpa_flop_count(q, k, v)
        ),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda g, q, k, v, *_, **__: flop_counter.sdpa_backward_flop_count(g, q, k, v)
        ),
    }
    for kind, cut in cuts_of(graph).items():
        found = flops(graph, cut)
        expected = counted(graph, cut, custom_mapping=mapping)
        assert (BATCH * found.real_forward, BATCH * found.real_train) == expected, kind
    # 17 positions, 4 heads of 16: two products forward and five backward, in 3 layers
    found = flops(graph, graph.full())
    assert found.attention_forward == 3 * 2 * (2 * 4 * 17 * 17 * 16)
    assert found.attention_train == 3 * 7 * (2 * 4 * 17 * 17 * 16)


def test_depthwise_convolution_by_hand() -> None:
    """8 channels of 6x6, 3x3 kernels: 2 * 9 * 8 * 36 FLOPs; torch counts the weight gradient eight times."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 1, bias=False)
            self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
            self.classifier = nn.Linear(8, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.classifier(self.depthwise(self.stem(x)).mean((2, 3)))

    graph = ChannelGraph(Net(), (3, 6, 6))
    stem, depthwise, classifier = 2 * 3 * 8 * 36, 2 * 9 * 8 * 36, 2 * 8 * 10
    found = flops(graph, graph.full())
    assert found.forward == stem + depthwise + classifier
    assert found.real_train == 2 * stem + 3 * depthwise + 3 * classifier
    assert found.grouped_excess == 7 * depthwise
    assert found.train == found.real_train + found.grouped_excess


class Attending(nn.Module):
    """Heads by einsum, or with a bias by baddbmm."""

    def __init__(self, einsum: bool) -> None:
        super().__init__()
        self.einsum = einsum
        self.embed, self.qkv, self.classifier = nn.Linear(5, 16), nn.Linear(16, 48), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(x)).unflatten(2, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        if self.einsum:
            scores = torch.einsum("bhid,bhjd->bhij", q, k)
            mixed = torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)
            return self.classifier(mixed.transpose(1, 2).flatten(2).mean(1))
        scores = torch.baddbmm(torch.ones(1, 1, 1), q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2))
        mixed = torch.bmm(scores.softmax(-1), v.flatten(0, 1))
        return self.classifier(mixed.unflatten(0, (-1, 4)).transpose(1, 2).flatten(2).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.classifier = nn.Linear(5, 16), nn.Linear(16, 4)
        self.gru = nn.GRU(16, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.gru(self.embed(x))[0].mean(1))


class Spectral(nn.Module):
    """Gradients pass through complex values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.classifier = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.fft.ifft(torch.fft.fft(self.embed(x), dim=1) * 2, dim=1).real
        return self.classifier(self.hidden(x).mean(1))


def pooled(*layers: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(2), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(width, 4))


SELDOM: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv1d": (lambda: pooled(nn.Conv1d(5, 8, 3, padding="same"), nn.Conv1d(8, 8, 3), width=8), (5, 16)),
    "conv3d": (lambda: pooled(nn.Conv3d(3, 4, 3), nn.Conv3d(4, 4, 3, padding="same"), width=4), (3, 6, 6, 6)),
    "up1d": (lambda: pooled(nn.Conv1d(5, 8, 3), nn.ConvTranspose1d(8, 6, 4, 2), width=6), (5, 16)),
    "up3d": (lambda: pooled(nn.Conv3d(3, 4, 3), nn.ConvTranspose3d(4, 6, 2, 2), width=6), (3, 5, 5, 5)),
    "einsum": (lambda: Attending(True), (9, 5)),
    "baddbmm": (lambda: Attending(False), (9, 5)),
    "gru": (Recurrent, (9, 5)),
    "complex": (Spectral, (9, 5)),
}


@pytest.mark.parametrize("name", SELDOM)
def test_flops_of_operators_that_are_seldom_used(name: str) -> None:
    make, shape = SELDOM[name]
    graph = ChannelGraph(make(), shape)
    for cut in (graph.full(), graph.prefix(0.5), graph.slt(1, 1, 0.5)):
        found = flops(graph, cut)
        assert (BATCH * found.forward, BATCH * found.train) == counted(graph, cut)


@pytest.mark.parametrize("key", WIDTH)
def test_golden_cost_of_width_scaled_models(key: str) -> None:
    network, scale = key.split("|")[0].split("@")
    graph = paper_graph(network)
    expected = golden()["cost"][key]
    cut = graph.prefix(float(scale))
    assert traffic(graph, cut).upload == expected["upload"]
    assert traffic(graph, cut).download == 4 * expected["params"]
    assert (flops(graph, cut).forward, flops(graph, cut).train) == (expected["fwd"], expected["train"])


@pytest.mark.parametrize("key", [key for key in SLT if key.split("|")[0] in golden()["configs"]])
def test_golden_cost_of_slt(key: str) -> None:
    """Upload, forward and training FLOPs of pre-training and every step, at the authors' scales."""
    config = key.split("|")[0]
    graph = paper_graph(config.split("@")[0])
    scales = golden()["configs"][config]["s_json"]
    cuts = [graph.slt(0, 0, scales[0]), *(graph.slt(step, step + 1, scale) for step, scale in enumerate(scales))]
    expected = golden()["cost"][key]
    assert [traffic(graph, cut).upload for cut in cuts] == expected["upload"]
    assert [flops(graph, cut).forward for cut in cuts] == expected["fwd"]
    assert [flops(graph, cut).train for cut in cuts] == expected["train"]


def test_golden_cost_whose_scales_are_not_in_the_file() -> None:
    """DenseNet40@0.66: for each step there must be one scale that gives all three numbers."""
    graph = paper_graph("DenseNet40")
    expected = golden()["cost"]["DenseNet40@0.66|SLT"]
    rows = list(zip(expected["upload"], expected["fwd"], expected["train"], strict=True))
    for step, row in enumerate(rows):
        frozen, trained = (0, 0) if step == 0 else (step - 1, step)
        uploads = Uploads(graph, frozen, trained)
        cut = uploads.cut(bisect_left(uploads, row[0]))
        found = flops(graph, cut)
        assert (traffic(graph, cut).upload, found.forward, found.train) == row, f"step {step}"


class Uploads(Sequence[int]):
    """By thousandths of scale; grows with it, so it can be searched by halving."""

    def __init__(self, graph: ChannelGraph, frozen: int, trained: int) -> None:
        self.cut: Callable[[int], Cut] = lambda index: graph.slt(frozen, trained, (index + 1) / 1000)
        self.graph = graph

    def __getitem__(self, index: Any) -> Any:
        return traffic(self.graph, self.cut(index)).upload

    def __len__(self) -> int:
        return 1000


def test_frozen_layers_are_not_uploaded() -> None:
    graph = graph_of("resnet20")
    found = traffic(graph, graph.slt(graph.depth, graph.depth, 1.0))
    assert found.upload == 4 * (256 * 10 + 10)
    assert found.download == 4 * 294_874
