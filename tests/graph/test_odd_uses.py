"""Operations that Strata knows, in uses that are less usual: equal to the zeroed full model, or whole and named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strata.core.errors import BadInput
from strata.graph import ChannelGraph, Cut
from strata.ops import Operator, RuleFailed, Unsupported, registered
from tests.graph.reference import assert_equals_zeroed

IMAGE, TOKENS = (3, 8, 8), (9, 5)
CUTS: tuple[Callable[[ChannelGraph], Cut], ...] = (
    lambda g: g.random(0.3, torch.Generator().manual_seed(2)),
    lambda g: g.slt(0, 1, 0.4),
    lambda g: g.slt(1, g.depth // 2 + 1, 0.3),
)


class OnMaps(nn.Module):
    """conv - (something with 16 channels) - conv - pool - classifier."""

    shape = IMAGE

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.middle = middle
        self.conv2 = nn.Conv2d(16, 12, 3, padding=1)
        self.classifier = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(torch.tanh(self.conv1(x)))
        return self.classifier(functional.gelu(self.conv2(x)).mean((2, 3)))


class OnTokens(nn.Module):
    """linear - (something with 9 tokens of 16 channels) - linear - mean - classifier."""

    shape = TOKENS

    def __init__(self, middle: Callable[[Tensor], Tensor], out: int = 16) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 16)
        self.middle = middle
        self.hidden = nn.Linear(out, 12)
        self.classifier = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(torch.tanh(self.embed(x)))
        return self.classifier(torch.tanh(self.hidden(x)).mean(1))


class SqueezeAndExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(16, 8), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.up(functional.relu(self.down(x.mean((2, 3))))).sigmoid()
        return x * gate.view(x.shape[0], 16, 1, 1).expand_as(x)


class HalfUntouched(nn.Module):
    """ShuffleNetV2, CSP: one half of the channels goes through, the other around."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        return torch.cat([a, self.conv(b)], 1)


class Filter(nn.Module):
    """A fixed kernel in a buffer: BlurPool (each channel on its own), or one that mixes channels."""

    kernel: Tensor

    def __init__(self, groups: int = 16, persistent: bool = True, times: int = 1) -> None:
        super().__init__()
        self.groups, self.times = groups, times
        self.register_buffer("kernel", torch.randn(16, 16 // groups, 3, 3), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = functional.conv2d(x, self.kernel, padding=1, groups=self.groups)
        return x


class MergedHeads(nn.Module):
    """Attention as Hugging Face wrote it for long: batch and heads in one dim, the tokens left open."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, _ = x.shape

        def heads(projected: Tensor) -> Tensor:
            return projected.view(n, tokens, 4, 4).transpose(1, 2).contiguous().view(n * 4, -1, 4)

        weights = torch.bmm(heads(self.q(x)), heads(self.k(x)).transpose(1, 2)).softmax(-1)
        mixed = torch.bmm(weights, heads(self.v(x)))
        return mixed.view(n, 4, tokens, 4).transpose(1, 2).reshape(n, tokens, 16)


class NamesOfOurOwn(nn.Module):
    """Parts that are called as something is in SubModel."""

    shape = IMAGE

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 8, 3)
        self.train_graph = nn.Conv2d(8, 8, 3)
        self._forwards = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self._forwards(self.train_graph(self.cut(x)).mean((2, 3)))


class Squeezed(nn.Module):
    """squeeze() without dims, behind a layer of which an SLT head may leave a single channel."""

    shape = IMAGE

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.classifier = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 3, 3), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(functional.adaptive_avg_pool2d(self.conv2(self.conv1(x)), 1).squeeze())


WORKING: dict[str, Callable[[], nn.Module]] = {
    "expand-as": lambda: OnMaps(SqueezeAndExcite()),
    "normalize": lambda: OnMaps(lambda x: functional.normalize(x, dim=1)),
    "half-untouched": lambda: OnMaps(HalfUntouched()),
    "blur": lambda: OnMaps(Filter()),
    "blur-outside-the-state": lambda: OnMaps(Filter(persistent=False)),
    "blur-twice": lambda: OnMaps(Filter(times=2)),
    "merged-heads": lambda: OnTokens(MergedHeads()),
    "squeeze": Squeezed,
    "type-as": lambda: OnMaps(lambda x: x * torch.ones(2, 5, dtype=torch.float32).type_as(x).sum()),
    "to-other": lambda: OnMaps(lambda x: x * torch.full((2, 5), 3.0, dtype=torch.float32).to(x).mean()),
    "variance-kept": lambda: OnTokens(lambda x: x / (x.var(1, unbiased=False, keepdim=True) + 1).sqrt()),
    "variance-dropped": lambda: OnTokens(lambda x: x * x.var(1, True, False).unsqueeze(1)),
    "names-of-our-own": NamesOfOurOwn,
}


def build(model: nn.Module) -> tuple[nn.Module, ChannelGraph]:
    torch.manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double(), ChannelGraph(model.double(), model.shape)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", WORKING)
def test_odd_uses_equal_the_zeroed_full_model(name: str) -> None:
    model, graph = build(WORKING[name]())
    assert not graph.pinned
    for make in CUTS:
        assert_equals_zeroed(model, graph, make(graph))


class SharedKeys(nn.Module):
    """Multi-query attention: one head of keys and values, by broadcasting."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, _ = x.shape
        q = self.q(x).view(n, tokens, 4, 4).transpose(1, 2)
        k, v = self.k(x).unsqueeze(1), self.v(x).unsqueeze(1)
        return ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).reshape(n, tokens, 16)


class KernelPerSample(nn.Module):
    """CondConv: samples as groups, each with a kernel of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = nn.Parameter(torch.randn(2, 16, 16, 3, 3))
        self.router = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        weights = self.router(x.mean((2, 3))).softmax(1) @ self.kernels.view(2, -1)
        x = functional.conv2d(x.reshape(1, n * 16, 8, 8), weights.view(n * 16, 16, 3, 3), padding=1, groups=n)
        return x.view(n, 16, 8, 8)


WHOLE: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "shared-keys": ("aten.matmul", lambda: OnTokens(SharedKeys())),
    "kernel-per-sample": ("aten.conv2d", lambda: OnMaps(KernelPerSample())),
    "fixed-kernel-over-channels": ("aten.conv2d", lambda: OnMaps(Filter(groups=1))),
    "pool-over-channels": ("aten.max_pool2d", lambda: OnTokens(lambda x: functional.max_pool2d(x, 3, 1, 1))),
    "view-as": ("aten.view_as", lambda: OnMaps(lambda x: x.view_as(torch.ones_like(x).flatten(1)).view(-1, 16, 8, 8))),
}


@pytest.mark.parametrize("name", WHOLE)
def test_uses_outside_a_rule_stay_whole_and_are_named(name: str) -> None:
    operation, make = WHOLE[name]
    model, graph = build(make())
    assert any(pinned.op.startswith(operation) for pinned in graph.pinned)
    for cut in CUTS:
        assert_equals_zeroed(model, graph, cut(graph))


def test_a_rule_that_does_not_cover_a_use_leaves_its_operation_whole() -> None:
    def refuses(*_: object) -> Tensor:
        raise Unsupported

    with registered(Operator(("neg",), channels=refuses)):
        model, graph = build(OnMaps(lambda x: -x))
    (pinned,) = graph.pinned
    assert pinned.op == "aten.neg.default" and graph.prefix(0.25).shapes["conv1.weight"][0] == 16
    assert_equals_zeroed(model, graph, graph.prefix(0.25))


def test_a_mistake_in_a_rule_shows() -> None:
    """It must not pass for a rule that is missing."""

    def broken(*_: object) -> Tensor:
        raise IndexError("tuple index out of range")

    with registered(Operator(("neg",), channels=broken)):
        with pytest.raises(RuleFailed, match=r"aten.neg.default .*test_odd_uses.py:\d+.* tuple index") as failed:
            build(OnMaps(lambda x: -x))
    assert isinstance(failed.value.__cause__, IndexError)


class ReachedThroughViews(nn.Module):
    """Parameters that are viewed, indexed or computed with before they meet what the layers make."""

    shape = IMAGE

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.conv3 = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 1)
        self.scale, self.shift = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))
        self.early = nn.Parameter(torch.ones(8))
        self.table = nn.Parameter(torch.randn(5, 8))
        self.query = nn.Parameter(torch.randn(1, 1, 8))
        self.project = nn.Linear(8, 8)
        self.classifier = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv3(self.conv2(self.conv1(x) * self.early.exp().view(1, -1, 1, 1)))
        x = self.scale[:, None, None] * x + self.shift.view(1, -1, 1, 1)
        x = x + self.table[torch.tensor([0, 2])].sum(0).view(8, 1, 1)
        tokens = x.flatten(2).transpose(1, 2)
        weights = (self.project(self.query.expand(x.shape[0], -1, -1)) * tokens).sum(-1, keepdim=True).softmax(1)
        return self.classifier((weights * tokens).sum(1))


def test_parameters_belong_where_their_views_meet_the_data() -> None:
    graph = ChannelGraph(ReachedThroughViews(), IMAGE)
    names = ("early", "scale", "shift", "table", "query", "project.weight", "classifier.weight")
    assert graph.depth == 3
    assert [graph.layer_of[name] for name in names] == [1, 3, 3, 3, 3, 3, 4]
    frozen = graph.slt(1, 2, 1.0).frozen
    assert frozen == {"conv1.weight", "conv1.bias", "early"}
    assert graph.slt(2, 3, 1.0).frozen == frozen | {"conv2.weight", "conv2.bias"}


class PartlyFixed(nn.Module):
    """The user trains neither the second convolution's weight nor a scale."""

    shape = IMAGE

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.classifier = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(8, 1, 1), requires_grad=False)
        self.conv2.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.conv2(self.conv1(x).relu() * self.scale).relu().mean((2, 3)))


def test_what_the_user_has_frozen_is_never_trained() -> None:
    model, graph = build(PartlyFixed())
    fixed = {"conv2.weight", "scale"}
    assert graph.fixed == fixed
    assert set(graph.full().trained) == {
        "conv1.weight",
        "conv1.bias",
        "conv2.bias",
        "classifier.weight",
        "classifier.bias",
    }
    assert graph.slt(1, 2, 0.5).frozen == fixed | {"conv1.weight", "conv1.bias"}
    assert graph.freeze(graph.prefix(0.5), 0).frozen == fixed
    assert Cut.from_json(graph.prefix(0.5).to_json()) == graph.prefix(0.5)
    for make in CUTS:
        assert_equals_zeroed(model, graph, make(graph))
    sized = {op.state_name: op.requires_grad for op in graph.sized(graph.full(), 2)}
    assert not sized["conv2.weight"] and not sized["scale"] and sized["conv2.bias"]
    trained = model.requires_grad_()
    assert ChannelGraph(trained, IMAGE).hash != graph.hash
    with pytest.raises(BadInput, match="nothing to train"):
        ChannelGraph(model.requires_grad_(False), IMAGE)


class Again(nn.Module):
    """The same layer twice, one after the other."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Norms(nn.Module):
    """A weight that is also read by an operator that Strata does not know: it stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / torch.linalg.matrix_norm(self.layer.weight)


class Halves(nn.Module):
    """Two layers with one weight: beside each other, and beside another in a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.own = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.right.weight = self.left.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.left(x)) * self.right(self.own(x))


@pytest.mark.parametrize(
    "make",
    [
        lambda: OnMaps(Again(nn.ConvTranspose2d(16, 16, 3, padding=1))),
        lambda: OnTokens(Again(nn.Linear(16, 16))),
        lambda: OnTokens(Norms()),
        lambda: OnTokens(Halves()),
    ],
)
def test_a_weight_of_several_uses_is_cut_alike_in_all(make: Callable[[], nn.Module]) -> None:
    model, graph = build(make())
    (shared,) = (name for name in graph.state_shapes if name.endswith(("layer.weight", "left.weight")))
    assert shared.replace("left", "right") == shared or shared.replace("left", "right") not in graph.state_shapes
    for cut in CUTS:
        made = cut(graph)
        if not (set(graph.layers_of[shared]) - {graph.layer_of[shared]} and graph.detached(made)):
            assert_equals_zeroed(model, graph, made)
    if "Norms" in str(model):
        assert graph.prefix(0.5).shapes[shared] == (16, 16) and graph.pinned


def test_a_use_in_a_frozen_layer_takes_no_gradient() -> None:
    """layer(norm(layer(x))) in layers 2 and 3; with 1 and 2 frozen the gradient is that of the last use, by hand."""

    class Normed(Again):
        def __init__(self) -> None:
            super().__init__(nn.Linear(16, 16))
            self.norm = nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.norm(self.layer(x)))

    model, graph = build(OnTokens(Normed()))
    name = "middle.layer.weight"
    assert graph.layers_of[name] == (2, 3)
    cut = graph.window(1, 3)
    assert name in cut.trained and graph.detached(cut) == {}, "both uses are in trained layers"
    cut = graph.freeze(graph.full(), 2)
    assert name in cut.trained and [str(node.target) for node in graph.detached(cut)] == ["aten.linear.default"]
    sub = graph.submodel(cut, cut.extract(model.state_dict()))
    x = torch.randn(4, *TOKENS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sub(x).square().sum().backward()
    with torch.no_grad():
        before = model.middle.norm(model.middle.layer(torch.tanh(model.embed(x))))
    after = model.classifier(torch.tanh(model.hidden(model.middle.layer(before))).mean(1))
    after.square().sum().backward()
    torch.testing.assert_close(sub.get_parameter(name).grad, model.middle.layer.weight.grad)


def test_recurrent_layers_stay_whole_and_are_layers_of_their_own() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.GRU(16, 8, batch_first=True), nn.LSTM(8, 16, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x)[0])[0]

    model, graph = build(OnTokens(Recurrent()))
    layers = [graph.layer_of[f"middle.{name}.weight_hh_l0"] for name in ("first", "second")]
    assert layers == [2, 3] and len(graph.pinned) == 2
    for cut in (graph.prefix(0.5), graph.slt(2, 3, 0.5), graph.window(2, 3)):
        assert cut.shapes["middle.second.weight_hh_l0"] == (64, 16)
        assert_equals_zeroed(model, graph, cut)
    assert {name for name in graph.window(2, 3).trained if "middle" in name} == {
        f"middle.second.{kind}_{of}_l0" for kind in ("weight", "bias") for of in ("ih", "hh")
    }


def test_a_model_that_does_not_return_class_scores_is_refused() -> None:
    volumes = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 1), nn.Unflatten(1, (1, 5)))
    with pytest.raises(BadInput, match=r"returns \[batch, 1, 5, 6, 6\]; Strata needs class scores"):
        ChannelGraph(volumes, IMAGE)
