"""The closed form against real training, network by network and operator by operator, and against numbers by hand.

The work asks for -1 % to +3 %. The closed form gives the very bytes, and these tests hold it to a thousandth: a wrong
rule that happens to stay within the tolerance on these networks would not on others.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strata.execution import measure, measure_cut, memory
from strata.execution.execution import Execution
from strata.graph import ChannelGraph
from tests.execution.graphs import cuts_of
from tests.networks import NAMES, graph_of

EXACT = 0.0015  # all but to the byte; of random channels of `gated`, whose images are channels last, 0.1 % is missing


@pytest.mark.parametrize("name", NAMES)
def test_networks_against_real_training(name: str) -> None:
    graph = graph_of(name)
    batches = cycle((16, 5, 8))  # from 16 on torch takes other kernels for 1x1 convolutions
    for kind, cut in cuts_of(graph).items():
        batch = next(batches)
        predicted = memory(graph, cut, Execution(batch), "peak").total
        measured = measure_cut(graph, cut, Execution(batch)).peak
        assert predicted == pytest.approx(measured, rel=EXACT), f"{name}, {kind}, batch {batch}"


def test_batch_of_one_uses_other_convolutions() -> None:
    """torch's own convolution unfolds its input: for one image the columns are most of the memory."""
    for name in ("resnet20", "vgg", "hf_mobilenet"):
        graph = graph_of(name)
        for cut in (graph.full(), graph.slt(1, 2, 0.5)):
            predicted = memory(graph, cut, Execution(1), "peak").total
            assert predicted == pytest.approx(measure_cut(graph, cut, Execution(1)).peak, rel=0.01)


def test_without_momentum() -> None:
    graph = graph_of("vgg")
    cut = graph.slt(1, 2, 0.5)
    predicted = memory(graph, cut, Execution(16, momentum=0.0), "peak")
    assert predicted.total == measure_cut(graph, cut, Execution(16, momentum=0.0)).peak
    assert predicted.total < memory(graph, cut, Execution(16), "peak").total


@pytest.mark.parametrize("name", ["resnet20", "mobilenet"])
def test_fixed_norm_statistics(name: str) -> None:
    """The batch's mean and deviation are neither made nor kept; a frozen norm between trained layers counts too."""
    graph = graph_of(name)
    upper = frozenset(p for p in graph.parameter_names if 3 < graph.layer_of[p] <= graph.depth)
    cases = [
        (Execution(8, 4, norm_statistics="fixed"), graph.full()),
        (Execution(8, None, "auto", norm_statistics="fixed"), graph.slt(2, 4, 0.5)),
        (Execution(5, norm_statistics="frozen"), graph.full().with_frozen(upper)),
        (Execution(8, None, "auto", norm_statistics="frozen"), graph.slt(2, 4, 0.5)),
    ]
    for execution, cut in cases:
        found = memory(graph, cut, execution).total
        assert found == pytest.approx(measure_cut(graph, cut, execution).peak, abs=512), execution
    channels = sum(graph.state_shapes[norm.mean][0] for norm in graph.batch_norms)
    fixed = memory(graph, graph.full(), Execution(5, norm_statistics="fixed")).total
    assert 0 < memory(graph, graph.full(), Execution(5)).total - fixed <= 8 * channels


def test_two_linear_layers_by_hand() -> None:
    """Every byte of Linear(8, 16), ReLU, Linear(16, 4) at batch 3."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    graph = ChannelGraph(model, (8,))
    first, second = 8 * 16 + 16, 16 * 4 + 4
    batch, labels, hidden = 3 * 8 * 4, 3 * 8, 3 * 16 * 4
    weights = 4 * (first + second)
    standing = weights + weights + batch + labels  # weights, momentum, batch
    # Backward of the first layer: all gradients of the second are there, its own, that of the ReLU's input, the loss
    # and its own gradient. The optimizer takes nothing on top of the gradients.
    backward = weights + hidden + 4 + 4
    found = memory(graph, graph.full(), Execution(3), "peak")
    assert found.total == standing + backward
    # momentum, and the second layer's gradients: the first's are on their way
    assert (found.weights, found.gradients) == (weights, weights + 4 * second)
    assert found.activations == found.total - found.weights - found.gradients
    assert found.total == measure(model, (8,), Execution(3), 4).peak


def test_a_wider_frozen_part_counts_while_it_runs() -> None:
    """The paper's accounting sees nothing of frozen layers; a step of theirs may well be the peak."""
    graph = graph_of("resnet20")
    frozen = graph.slt(graph.depth, graph.depth, 1.0)
    two_values_of_the_first_stage = 2 * 32 * 16 * 32 * 32 * 4
    assert memory(graph, frozen, Execution(32), "peak").activations > two_values_of_the_first_stage
    assert memory(graph, frozen, Execution(32), "paper").activations < two_values_of_the_first_stage / 10


def test_split_adds_up_and_activations_dominate() -> None:
    graph = graph_of("resnet20")
    for accounting in ("peak", "paper"):
        found = memory(graph, graph.full(), Execution(32), accounting)
        assert found.total == found.weights + found.gradients + found.activations
        assert found.activations > 0.9 * found.total


class Around(nn.Module):
    """A convolution, the operators under test, and a classifier."""

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.middle = middle
        with torch.no_grad():
            features = self._features(torch.zeros(2, 3, 8, 8)).shape[1]
        self.classifier = nn.Linear(features, 10)

    def _features(self, x: Tensor) -> Tensor:
        return self.middle(self.stem(x)).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self._features(x))


def _tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Attention written out: products, softmax, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(-1, 64, 4, 4).transpose(1, 2) for part in self.project(_tokens(x)).split(16, dim=-1))
        scores = torch.matmul(q, k.transpose(-1, -2)) / 2.0
        return torch.matmul(functional.dropout(scores.softmax(-1), 0.1), v).transpose(1, 2).reshape(-1, 64, 16)


class Norm(nn.Module):
    """Layer norm over channels of an image: of a view that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(x.permute(0, 2, 3, 1)) * self.scale).permute(0, 3, 1, 2).relu()


OPERATORS: dict[str, Callable[[], Around]] = {
    "relu6": lambda: Around(lambda x: functional.relu6(x).sigmoid()),
    "relu6 in place": lambda: Around(nn.ReLU6(inplace=True)),
    "silu and hardswish in place": lambda: Around(nn.Sequential(nn.SiLU(True), nn.Hardswish(True))),
    "leaky relu in place": lambda: Around(
        nn.Sequential(nn.LeakyReLU(0.1, True), nn.Conv2d(16, 16, 1), nn.ELU(1, True))
    ),
    "gelu, tanh, elu, softplus": lambda: Around(
        lambda x: functional.softplus(functional.elu(functional.gelu(x).tanh()))
    ),
    "hardsigmoid, mish, selu": lambda: Around(lambda x: functional.hardsigmoid(functional.mish(functional.selu(x)))),
    "scalars": lambda: Around(lambda x: ((x + 1) * 2 - 3) / 4),
    "add with alpha": lambda: Around(lambda x: torch.add(x, x.sigmoid(), alpha=0.5)),
    "sub": lambda: Around(lambda x: x.relu() - x.sigmoid()),
    "div": lambda: Around(lambda x: x.relu() / (x.sigmoid() + 1)),
    "broadcast gate": lambda: Around(lambda x: x * x.mean((2, 3), keepdim=True).sigmoid()),
    "broadcast difference": lambda: Around(lambda x: x - x.mean(1, keepdim=True)),
    "powers": lambda: Around(lambda x: (x.pow(2) + 1).rsqrt() * (x.exp() + 1).sqrt()),
    "clone": lambda: Around(lambda x: x.clone().relu_() + x),
    "dropout": lambda: Around(lambda x: functional.dropout(x, 0.3)),
    "dropout in place": lambda: Around(nn.Sequential(nn.GELU(), nn.Dropout(0.3, inplace=True))),
    "slice of a fork": lambda: Around(lambda x: torch.cat([x[:, :8].relu(), x[:, 4:].sigmoid()], 1)),
    "select": lambda: Around(lambda x: _tokens(x)[:, 0]),
    "chunk, one part unused": lambda: Around(lambda x: x.chunk(2, dim=1)[0].relu()),
    "split": lambda: Around(lambda x: torch.cat([p.relu() for p in x.split([4, 12], dim=1)][::-1], 1)),
    "unbind and stack": lambda: Around(lambda x: torch.stack(x.unbind(2)[::-1], 2)),
    "pad": lambda: Around(lambda x: functional.pad(x, (1, 2, 0, 1, 3, 3)).relu()),
    "negative pad": lambda: Around(lambda x: functional.pad(x, (-1, -1, -1, -1)).relu()),
    "sum": lambda: Around(lambda x: x.relu().sum((2, 3))),
    "expand": lambda: Around(lambda x: x.mean((2, 3), keepdim=True).expand(-1, -1, 4, 4).relu()),
    "max pooling": lambda: Around(lambda x: functional.max_pool2d(x.relu(), 2)),
    "average pooling to 2x2": lambda: Around(lambda x: functional.adaptive_avg_pool2d(x.relu(), 2)),
    "upsampling": lambda: Around(lambda x: functional.interpolate(x, scale_factor=2.0).relu()),
    "mask": lambda: Around(lambda x: x.relu() * (x.detach() > 0)),
    "softmax": lambda: Around(lambda x: x.softmax(1) + x.log_softmax(1)),
    "log and abs": lambda: Around(lambda x: (x.abs() + 1).log().clamp(0.1, 2)),
    "depthwise": lambda: Around(nn.Sequential(nn.Conv2d(16, 16, 3, 2, 1, groups=16), nn.ReLU())),
    "grouped": lambda: Around(nn.Sequential(nn.Conv2d(16, 32, 3, groups=4, bias=False), nn.ReLU())),
    "transposed": lambda: Around(nn.Sequential(nn.ConvTranspose2d(16, 8, 2, 2), nn.ReLU())),
    "dilated": lambda: Around(nn.Sequential(nn.Conv2d(16, 8, 3, dilation=2, padding=2), nn.ReLU())),
    "group norm": lambda: Around(nn.Sequential(nn.GroupNorm(4, 16), nn.ReLU())),
    "batch norm without running statistics": lambda: Around(nn.BatchNorm2d(16, track_running_stats=False)),
    "layer norm of a view": lambda: Around(Norm()),
    "convolution of channels-last images": lambda: Around(nn.Sequential(Norm(), nn.Conv2d(16, 64, 3), nn.ReLU())),
    "attention": lambda: Around(Attention()),
    "tokens": lambda: Around(nn.Sequential(nn.Flatten(2), nn.Linear(64, 32), nn.GELU(), nn.LayerNorm(32))),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_against_real_training(name: str) -> None:
    graph = ChannelGraph(OPERATORS[name](), (3, 8, 8))
    for cut in (graph.full(), graph.prefix(0.5), graph.slt(1, 1, 1.0)):
        for batch in (32, 4):
            predicted = memory(graph, cut, Execution(batch), "peak").total
            measured = measure_cut(graph, cut, Execution(batch)).peak
            assert predicted == pytest.approx(measured, rel=0.005, abs=256), f"{name}, batch {batch}"


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.classifier = nn.Linear(5, 16), nn.Linear(16, 4)
        self.lstm = nn.LSTM(16, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.lstm(self.embed(x))[0].mean(1))


def test_an_lstm_keeps_a_workspace_that_only_a_real_run_shows() -> None:
    """Exact where it is frozen; where it trains an upper bound, by less than 6 %."""
    graph = ChannelGraph(Recurrent(), (64, 5))
    before = torch.random.get_rng_state()
    for cut, excess in ((graph.full(), 0.06), (graph.slt(2, 2, 1.0), 0.0)):
        predicted = memory(graph, cut, Execution(16), "peak").total
        measured = measure_cut(graph, cut, Execution(16)).peak
        assert measured <= predicted <= (1 + excess) * measured
    assert torch.equal(torch.random.get_rng_state(), before)
