"""Networks that Strata has never seen: each either works, or is kept whole where it must be, and says where."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strata.core.errors import BadInput
from strata.graph import ChannelGraph, Cut
from strata.ops import Operator, elementwise, registered
from tests.graph.reference import assert_equals_zeroed

SHAPE = (3, 8, 8)

CUTS: dict[str, Callable[[ChannelGraph], Cut]] = {
    "prefix": lambda g: g.prefix(0.5),
    "rolling": lambda g: g.rolling(0.25, 5),
    "random": lambda g: g.random(0.3, torch.Generator().manual_seed(2)),
    "slt": lambda g: g.slt(0, 1, 0.4),
    "slt-frozen": lambda g: g.slt(1, g.depth // 2 + 1, 0.3),
}


class Between(nn.Module):
    """conv - norm - (something with channels) - conv - pool - classifier."""

    def __init__(self, between: Callable[[Tensor], Tensor], out: int = 16, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.between = between
        self.conv2 = nn.Conv2d(out, 12, 3, padding=1)
        self.classifier = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(functional.relu(self.norm(self.conv1(x))))
        return self.classifier(functional.gelu(self.conv2(x)).mean((2, 3)))


def shuffled(x: Tensor) -> Tensor:
    """ShuffleNet's channel shuffle, written with views."""
    n, c, h, w = x.shape
    return x.view(n, 4, c // 4, h, w).transpose(1, 2).reshape(n, c, h, w)


def glu(x: Tensor) -> Tensor:
    a, b = x.split([8, 8], dim=1)
    return a * torch.sigmoid(b)


WORKING: dict[str, Callable[[], nn.Module]] = {
    "flip": lambda: Between(lambda x: x.flip(1)),
    "shuffle": lambda: Between(shuffled),
    "split-gate": lambda: Between(glu, out=8),
    "slices": lambda: Between(lambda x: torch.cat([x[:, 8:], x[:, :8]], 1)),
    "strided-slice": lambda: Between(lambda x: x[:, 1::2], out=8),
    "pixel-shuffle": lambda: Between(lambda x: functional.pixel_shuffle(x, 2), out=4),
    "mean-over-channels": lambda: Between(lambda x: x * torch.sigmoid(x.sum(1, keepdim=True))),
    "max-of-two": lambda: Between(lambda x: torch.maximum(x[:, :8], x[:, 8:]), out=8),
    "pad-channels": lambda: Between(lambda x: functional.pad(x, (1, 1, 1, 1, 2, 3)), out=21),
    "stack": lambda: Between(lambda x: torch.stack([x, -x], 2).flatten(1, 2), out=32),
    "unbind": lambda: Between(lambda x: torch.stack(x.view(x.shape[0], 2, 8, 8, 8).unbind(1), 0).sum(0), out=8),
    "one-channel-gate": lambda: SpatialGate(),
    "transformer": lambda: TorchTransformer(),
    "class-token": lambda: ClassToken(),
    "grouped": lambda: Grouped(),
    "multi-branch": lambda: Inception(),
    "u-net": lambda: UNet(),
    "position-buffer": lambda: PositionBuffer(),
    "mixer": lambda: Mixer(),
    "literals": lambda: Literals(),
}


class SpatialGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.gate = nn.Conv2d(16, 1, 1)
        self.conv = nn.Conv2d(16, 16, 3)
        self.classifier = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu_()
        x = x * self.gate(x).sigmoid()
        return self.classifier(self.conv(x).amax((2, 3)))


class TorchTransformer(nn.Module):
    """nn.TransformerEncoderLayer merges batch and heads into one dim."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 2, 2)
        self.position = nn.Parameter(torch.randn(1, 16, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(32)
        self.classifier = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.position
        return self.classifier(self.norm(self.encoder(x)).mean(1))


class ClassToken(nn.Module):
    """A hand-written ViT: q, k, v in one projection, attention by matmul and softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 2, 2)
        self.token = nn.Parameter(torch.randn(1, 1, 32))
        self.position = nn.Parameter(torch.randn(1, 17, 32))
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)
        self.gamma = nn.Parameter(torch.randn(32))
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.classifier = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        n, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(n, tokens, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * 8**-0.5).softmax(-1)
        x = x + self.gamma * self.out((weights @ v).transpose(1, 2).reshape(n, tokens, -1))
        x = x + self.mlp(self.norm2(x))
        return self.classifier(x[:, 0])


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, padding=1)
        self.grouped = nn.Conv2d(24, 48, 3, groups=4)  # 6 in and 12 out per group
        self.norm = nn.GroupNorm(8, 48)
        self.depthwise = nn.Conv2d(48, 48, 3, groups=48)
        self.classifier = nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.grouped(self.stem(x).relu()))
        return self.classifier(self.depthwise(x).mean((-2, -1)))


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.one = nn.Conv2d(16, 8, 1)
        self.three = nn.Sequential(nn.Conv2d(16, 8, 1), nn.ReLU(), nn.Conv2d(8, 12, 3, padding=1))
        self.shortcut = nn.Conv2d(16, 20, 1)
        self.last = nn.Conv2d(20, 20, 3)
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(20 * 36, 24), nn.SiLU(), nn.Linear(24, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.cat((self.one(x), self.three(x)), 1) + self.shortcut(x)
        return self.classifier(self.last(x))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 12, 3, padding=1)
        self.middle = nn.Conv2d(12, 24, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(24, 12, 2, stride=2)
        self.join = nn.Conv2d(24, 16, 3, padding=1)
        self.classifier = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down(x)
        b = functional.interpolate(functional.hardswish(self.middle(a)), size=(4, 4), mode="bilinear")
        return self.classifier(functional.max_pool2d(self.join(torch.cat([a, self.up(b)], 1)), 8).flatten(1))


class PositionBuffer(nn.Module):
    """A fixed position code that is not in the state dict must be cut with what it is added to."""

    position: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 16)
        self.register_buffer("position", torch.randn(64, 16, dtype=torch.float64), persistent=False)
        self.hidden = nn.Linear(16, 16)
        self.classifier = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.flatten(2).transpose(1, 2)) + self.position
        return self.classifier(torch.tanh(self.hidden(x)).mean(1))


class Literals(nn.Module):
    """Other literals in evaluation than in training; export gives them the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.hidden = nn.Linear(16, 12)
        self.classifier = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).mean((2, 3))
        x = x * torch.tensor(2.0) + torch.tensor([1.0, 3.0] * 8) if self.training else x * torch.tensor(5.0)
        return self.classifier(self.hidden(x).relu())


class Mixer(nn.Module):
    """MLP-Mixer: one linear layer mixes tokens, not channels: its weights stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 2, 2)
        self.tokens = nn.Linear(16, 16)
        self.channels = nn.Linear(16, 32)
        self.classifier = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2)
        x = x + self.tokens(x)
        return self.classifier(self.channels(x.transpose(1, 2)).relu().mean(1))


def build(name: str) -> tuple[nn.Module, ChannelGraph]:
    torch.manual_seed(3)
    model = WORKING[name]().double()
    return model, ChannelGraph(model, SHAPE)


@pytest.mark.parametrize("name", WORKING)
def test_odd_networks_equal_the_zeroed_full_model(name: str) -> None:
    model, graph = build(name)
    for make in CUTS.values():
        assert_equals_zeroed(model, graph, make(graph))
    cut = graph.prefix(0.25)
    kept = sum(torch.Size(cut.shapes[n]).numel() for n in graph.parameter_names)
    assert kept < 0.6 * sum(p.numel() for p in model.parameters()), "hardly anything was cut"


UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "roll": lambda x: x.roll(3, 1),
    "cumsum": lambda x: x.cumsum(1),
    "permuted": lambda x: x[:, torch.tensor([3, 1, 2, 0, *range(4, 16)])],
    "native-shuffle": lambda x: torch.channel_shuffle(x, 4),
    "sort": lambda x: x.sort(1).values,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_strata_does_not_know_stays_whole_and_is_named(name: str) -> None:
    torch.manual_seed(3)
    model = Between(UNKNOWN[name]).double()
    graph = ChannelGraph(model, SHAPE)
    cut = graph.prefix(0.25)
    assert cut.shapes["conv1.weight"][0] == 16 and cut.shapes["conv2.weight"][0] == 3
    assert_equals_zeroed(model, graph, cut)
    assert_equals_zeroed(model, graph, graph.slt(0, 0, 0.25))
    (pinned,) = graph.pinned
    assert "aten" in pinned.op and "test_odd_networks.py:" in pinned.source, pinned
    with pytest.raises(BadInput, match="no rule for aten"):
        ChannelGraph(model, SHAPE, strict=True)


@pytest.mark.parametrize("name", ["roll", "native-shuffle"])
def test_treating_a_permutation_as_elementwise_would_be_caught(name: str) -> None:
    family = {"roll": "roll", "native-shuffle": "channel_shuffle"}[name]
    torch.manual_seed(3)
    model = Between(UNKNOWN[name]).double()
    with registered(Operator((family,), channels=elementwise)):
        graph = ChannelGraph(model, SHAPE)
    with pytest.raises((AssertionError, RuntimeError)):
        assert_equals_zeroed(model, graph, graph.random(0.5, torch.Generator().manual_seed(1)))


def test_projection_shortcut_and_short_branch_belong_to_the_deeper_branch() -> None:
    graph = ChannelGraph(Inception(), SHAPE)
    layers = {name.removesuffix(".weight"): k for name, k in graph.layer_of.items() if name.endswith("weight")}
    assert layers == {
        "stem": 1, "three.0": 2, "three.2": 3, "one": 3, "shortcut": 3, "last": 4, "classifier.1": 5, "classifier.3": 6,
    }  # fmt: skip
    assert graph.depth == 5


def test_layers_can_be_given() -> None:
    graph = ChannelGraph(Inception(), SHAPE, layers=[["stem"], ["one", "three", "shortcut"], ["last", "classifier.1"]])
    assert graph.depth == 3 and graph.layer_names == ("stem", "one", "last")
    assert graph.slt(1, 2, 0.5).frozen == {"stem.weight", "stem.bias"}
    with pytest.raises(BadInput, match="must be in exactly one"):
        ChannelGraph(Inception(), SHAPE, layers=[["stem"], ["one"]])
    with pytest.raises(BadInput, match="order of the computation"):
        ChannelGraph(Inception(), SHAPE, layers=[["one", "three", "shortcut", "last", "classifier"], ["stem"]])
