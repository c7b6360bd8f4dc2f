"""Our own 3x3 convolutions of wide networks against torch's, and the devices, cohorts and evaluations that use them."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from strata.data import ImageSet
from strata.graph import ChannelGraph
from strata.methods import Task
from strata.models import resnet20
from strata.training import LocalTraining, evaluate, train_device
from strata.training.cohorts import train_cohort
from strata.training.kernels import conv2d, own_convolutions, winograd
from strata.training.kernels.winograd import Winograd
from tests.workspaces import workspace_of

pytestmark = pytest.mark.usefixtures("compiler")


def random(*shape: int, seed: int = 1, wide: bool = True) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.contiguous(memory_format=torch.channels_last) if wide else made


def is_ours(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what our own code convolves from now on."""
    seen: list[tuple[int, ...]] = []
    real = winograd._convolved

    def watched(x: Tensor, weights: Tensor, out: int, flipped: bool) -> Tensor:
        seen.append(tuple(x.shape))
        return real(x, weights, out, flipped)

    monkeypatch.setattr(winograd, "_convolved", watched)
    return seen


def compare(batch: int, into: int, out: int, height: int, width: int) -> None:
    x, w = random(batch, into, height, width).requires_grad_(), random(out, into, 3, 3, seed=2).requires_grad_()
    result = Winograd.apply(x, w)
    exact_x, exact_w = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    expected = functional.conv2d(exact_x, exact_w, padding=1)
    above = random(*expected.shape, seed=3)
    result.backward(above)
    expected.backward(above.double())
    for found, wanted in ((result, expected), (x.grad, exact_x.grad), (w.grad, exact_w.grad)):
        assert found is not None and wanted is not None and found.shape == wanted.shape
        scale = float(wanted.detach().abs().max())
        torch.testing.assert_close(found.detach().double() / scale, wanted.detach() / scale, rtol=0, atol=2e-5)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 5), into=st.integers(16, 70), out=st.integers(16, 70), height=st.integers(3, 13),
    width=st.integers(3, 13),
)  # fmt: skip
def test_any_wide_convolution_equals_torchs(batch: int, into: int, out: int, height: int, width: int) -> None:
    compare(batch, into, out, height, width)


@pytest.mark.parametrize(("channels", "side"), [(16, 32), (32, 16), (64, 8), (100, 8), (128, 4)])
def test_the_usual_layers(channels: int, side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(7, channels, channels, side, side)
    seen = is_ours(monkeypatch)
    conv2d(random(32, channels, side, side), random(channels, channels, 3, 3), None, [1, 1], [1, 1])
    assert seen == [(32, channels, side, side)]


def test_the_three_transforms_are_a_convolution_in_exact_arithmetic() -> None:
    """The matrices of winograd.c, by their definition: A^T [(G g) * (B^T d)] is the correlation of d with g."""
    f = Fraction
    b = [[4, 0, -5, 0, 1, 0], [0, -4, -4, 1, 1, 0], [0, 4, -4, -1, 1, 0], [0, -2, -1, 2, 1, 0], [0, 2, -1, -2, 1, 0],
         [0, 4, 0, -5, 0, 1]]  # fmt: skip
    g = [[f(1, 4), 0, 0], [f(-1, 6)] * 3, [f(-1, 6), f(1, 6), f(-1, 6)], [f(1, 24), f(1, 12), f(1, 6)],
         [f(1, 24), f(-1, 12), f(1, 6)], [0, 0, 1]]  # fmt: skip
    a = [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]]
    for position in range(6):
        for tap in range(3):
            products = [b[k][position] * g[k][tap] for k in range(6)]
            for result in range(4):
                met = sum(a[result][k] * products[k] for k in range(6))
                assert met == (1 if position == result + tap else 0)
    # and the C code has these matrices: a single 1 through a single tap, away from rounding
    for position in range(6):
        x = torch.zeros(1, 16, 6, 6).contiguous(memory_format=torch.channels_last)
        x[0, 3, position, 5 - position] = 1
        w = torch.zeros(16, 16, 3, 3).contiguous(memory_format=torch.channels_last)
        w[9, 3] = torch.arange(1.0, 10).view(3, 3)
        torch.testing.assert_close(Winograd.apply(x, w), functional.conv2d(x, w, padding=1), rtol=0, atol=1e-5)


def test_the_same_bits_again_and_alone() -> None:
    x, w = random(9, 20, 11, 7), random(33, 20, 3, 3, seed=2)
    first = Winograd.apply(x, w)
    Winograd.apply(random(2, 64, 8, 8), random(64, 64, 3, 3))  # other numbers in the room between stages
    assert torch.equal(first, Winograd.apply(x, w))
    one = Winograd.apply(x[4:5].contiguous(memory_format=torch.channels_last), w)
    assert torch.equal(first[4:5], one), "a sample's result does not depend on its neighbours"


def test_second_derivatives_are_refused_and_not_zero() -> None:
    x = random(4, 16, 8, 8).requires_grad_()
    result = Winograd.apply(x, random(16, 16, 3, 3))
    (first,) = torch.autograd.grad(result.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.square().sum().backward()


@pytest.mark.parametrize(
    ("x", "w", "more"),
    [
        (random(4, 16, 8, 8), random(16, 16, 3, 3), (None, [2, 2], [1, 1])),
        (random(4, 16, 8, 8), random(16, 16, 3, 3), (None, [1, 1], [0, 0])),
        (random(4, 16, 8, 8), random(16, 16, 3, 3), (None, [1, 1], [1, 1], [2, 2])),
        (random(4, 16, 8, 8), random(16, 8, 3, 3), (None, [1, 1], [1, 1], [1, 1], 2)),
        (random(4, 16, 8, 8), random(16, 16, 3, 3), (torch.ones(16), [1, 1], [1, 1])),
        (random(4, 16, 8, 8), random(16, 16, 5, 5), (None, [1, 1], [1, 1])),
        (random(4, 15, 8, 8), random(16, 15, 3, 3), (None, [1, 1], [1, 1])),
        (random(4, 16, 8, 8), random(15, 16, 3, 3), (None, [1, 1], [1, 1])),
        (random(8, 16, 5, 5), random(16, 16, 3, 3), (None, [1, 1], [1, 1])),
        (random(4, 16, 8, 8, wide=False), random(16, 16, 3, 3), (None, [1, 1], [1, 1])),
        (random(4, 16, 8, 8).double(), random(16, 16, 3, 3).double(), (None, [1, 1], [1, 1])),
        (random(2, 16, 8, 8), random(16, 16, 3, 3), (None, [1, 1], [1, 1])),
        (random(10, 128, 4, 4), random(128, 128, 3, 3), (None, [1, 1], [1, 1])),
        (random(40, 530, 8, 8), random(530, 530, 3, 3), (None, [1, 1], [1, 1])),
        (random(1, 16, 8, 8)[:0], random(16, 16, 3, 3), (None, [1, 1], [1, 1])),
        (random(16, 8, 8, wide=False), random(16, 16, 3, 3), (None, [1, 1], [1, 1])),
    ],
)  # fmt: skip
def test_all_others_are_torchs(x: Tensor, w: Tensor, more: tuple[object, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = is_ours(monkeypatch)
    assert torch.equal(conv2d(x, w, *more), torch.ops.aten.conv2d.default(x, w, *more))  # type: ignore[arg-type]
    assert not seen


def test_only_within_and_only_if_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = is_ours(monkeypatch)
    x, w = random(4, 16, 8, 8), random(16, 16, 3, 3)

    def layer(x: Tensor) -> Tensor:  # as a submodel has it
        result: Tensor = torch.ops.aten.conv2d.default(x, w, None, [1, 1], [1, 1])
        return result

    plain = layer(x)
    with own_convolutions(None), own_convolutions(False):
        assert torch.equal(layer(x), plain)
    assert not seen
    with own_convolutions(True):
        torch.testing.assert_close(layer(x), plain, rtol=1e-4, atol=1e-4)
    assert seen == [(4, 16, 8, 8)]
    layer(x)
    assert len(seen) == 1


def data(count: int) -> ImageSet:
    generator = torch.Generator().manual_seed(4)
    images = torch.randint(0, 256, (count, 3, 16, 16), generator=generator, dtype=torch.uint8)
    return ImageSet(images, torch.randint(0, 10, (count,), generator=generator))


@pytest.mark.parametrize("segments", [None, 3])
def test_a_device_agrees_with_torchs_convolutions(segments: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = resnet20(10, 16)
    graph = ChannelGraph(model, (3, 16, 16))
    cut = graph.slt(9, 10, 0.5)
    task = Task(0, 0, cut)
    part = cut.extract(model.state_dict())
    training = LocalTraining(batch_size=16, kernels=False, activation_checkpointing=segments)
    seen = is_ours(monkeypatch)
    plain = train_device(workspace_of(graph), task, part, data(24), training, 0.01, 9)
    assert not seen
    quick, again = (
        train_device(workspace_of(graph), task, part, data(24), replace(training, kernels=True), 0.01, 9)
        for _ in range(2)
    )
    assert seen
    assert quick.loss == pytest.approx(plain.loss, rel=1e-4)
    assert quick.peak_bytes == plain.peak_bytes, "the bytes of a real device, which has torch's"
    for name, tensor in plain.tensors.items():
        torch.testing.assert_close(quick.tensors[name], tensor, rtol=1e-3, atol=2e-4)
        assert torch.equal(quick.tensors[name], again.tensors[name])


def test_recomputed_activations_have_the_same_bits() -> None:
    torch.manual_seed(0)
    model = resnet20(10, 16)
    graph = ChannelGraph(model, (3, 16, 16))
    task, part = Task(0, 0, graph.full()), model.state_dict()
    kept = LocalTraining(batch_size=16, kernels=True)
    plain = train_device(workspace_of(graph), task, part, data(24), kept, 0.01, 9)
    anew = train_device(workspace_of(graph), task, part, data(24), replace(kept, activation_checkpointing=4), 0.01, 9)
    assert anew.peak_bytes < plain.peak_bytes
    assert all(torch.equal(anew.tensors[name], tensor) for name, tensor in plain.tensors.items())


def test_what_is_wrong_is_torchs_to_say_and_the_default_dtype_is_nobodys_business() -> None:
    x = torch.randn(4, 16, 8, 8).contiguous(memory_format=torch.channels_last)
    weights = torch.randn(16, 16, 3, 3)
    with pytest.raises(RuntimeError, match="channels"):
        conv2d(torch.cat([x, x], 1).contiguous(memory_format=torch.channels_last), weights, padding=(1, 1))
    found = conv2d(x, weights, padding=(1, 1))
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(conv2d(x, weights, padding=(1, 1)), found)
    finally:
        torch.set_default_dtype(torch.float32)


def test_frozen_layers_of_a_cohort_and_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = resnet20(10, 16)
    graph = ChannelGraph(model, (3, 16, 16))
    cut = graph.slt(5, 6, 0.125)
    part = cut.extract(model.state_dict())
    tasks = [Task(0, device, cut) for device in range(2)]
    training = LocalTraining(batch_size=16, kernels=False)
    seen = is_ours(monkeypatch)
    plain, quick = (
        train_cohort(workspace_of(graph), tasks, [part] * 2, [data(24)] * 2, replace(training, kernels=wanted), 0.01, 9)
        for wanted in (False, True)
    )
    assert plain is not None and quick is not None and seen
    for one, other in zip(plain, quick, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
    for bn in ("batch", "re-estimated"):
        seen.clear()
        own, workspace = data(200), workspace_of(graph)
        slow, fast = (
            evaluate(workspace, graph.full(), model.state_dict(), own, replace(training, kernels=wanted), bn, own)
            for wanted in (False, True)
        )
        assert seen
        assert slow.loss == pytest.approx(fast.loss, rel=1e-4)
