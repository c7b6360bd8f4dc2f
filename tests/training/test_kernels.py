"""Our own convolutions of narrow networks against torch's, and the cohorts that use them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from strata.core.errors import BadInput
from strata.data import ImageSet
from strata.federation.jobs import DeviceProgram
from strata.graph import ChannelGraph
from strata.methods import Task
from strata.models import resnet20
from strata.runs.running import complete
from strata.training import LocalTraining, kernels, train_device
from strata.training.cohorts import train_cohort
from strata.training.kernels import convolution
from strata.training.vectorised import width
from tests.federation import tiny
from tests.networks import SmallDenseNet
from tests.workspaces import workspace_of

needs_compiler = pytest.mark.usefixtures("compiler")


def compare(networks: int, into: int, out: int, size: tuple[int, int], kernel: tuple[int, int], stride: int,
            padding: int, batch: int) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(networks, into, *size, batch, generator=generator)
    w = torch.randn(networks, out, into, *kernel, generator=generator)
    ours = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    result = convolution(ours[0], ours[1], stride, padding)
    side_by_side = x.permute(4, 0, 1, 2, 3).flatten(1, 2).double().requires_grad_()
    weights = w.flatten(0, 1).double().requires_grad_()
    expected = functional.conv2d(side_by_side, weights, stride=stride, padding=padding, groups=networks)
    above = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    expected.backward(above)
    shape = (networks, out, *expected.shape[2:], batch)
    result.backward(above.float().permute(1, 2, 3, 0).reshape(shape))
    close = {"rtol": 1e-4, "atol": 1e-4 * into * kernel[0] * kernel[1]}
    torch.testing.assert_close(result.double(), expected.permute(1, 2, 3, 0).reshape(shape), **close)
    assert side_by_side.grad is not None and weights.grad is not None
    assert ours[0].grad is not None and ours[1].grad is not None
    torch.testing.assert_close(ours[0].grad.double(), side_by_side.grad.permute(1, 2, 3, 0).reshape(x.shape), **close)
    scale = float(weights.grad.abs().max()) or 1.0
    torch.testing.assert_close(ours[1].grad.double() / scale, weights.grad.view(w.shape) / scale, rtol=0, atol=1e-5)


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(
    networks=st.integers(1, 3), into=st.integers(1, 9), out=st.integers(1, 9), height=st.integers(1, 9),
    width=st.integers(1, 9), kernel_h=st.integers(1, 5), kernel_w=st.integers(1, 5), stride=st.integers(1, 3),
    padding=st.integers(0, 3), batch=st.sampled_from([16, 32, 48]),
)  # fmt: skip
def test_any_convolution_equals_torchs(networks: int, into: int, out: int, height: int, width: int, kernel_h: int,
                                       kernel_w: int, stride: int, padding: int, batch: int) -> None:  # fmt: skip
    if height + 2 * padding < kernel_h or width + 2 * padding < kernel_w:
        return
    compare(networks, into, out, (height, width), (kernel_h, kernel_w), stride, padding, batch)


@needs_compiler
@pytest.mark.parametrize("width", [31, 32, 33, 70])
def test_rows_longer_than_a_part(width: int) -> None:
    compare(2, 3, 5, (4, width), (3, 3), 1, 1, 16)
    compare(2, 3, 5, (4, width), (3, 3), 2, 1, 16)


@needs_compiler
def test_by_hand_and_the_same_bits_again() -> None:
    # one sample: 1 2 3 in a row, kernel 1 10 100, padding 1 -> 0*1+1*10+2*100, 1+20+300, 2+30
    x = torch.zeros(1, 1, 1, 3, 16)
    x[0, 0, 0, :, 5] = torch.tensor([1.0, 2.0, 3.0])
    w = torch.zeros(1, 1, 3, 3).unsqueeze(0)
    w[0, 0, 0, 1] = torch.tensor([1.0, 10.0, 100.0])
    found = convolution(x, w, 1, 1)
    assert found[0, 0, 0, :, 5].tolist() == [210.0, 321.0, 32.0]
    assert found.sum() == 563
    y = torch.randn(2, 3, 8, 8, 32)
    v = torch.randn(2, 4, 3, 3, 3)
    assert torch.equal(convolution(y, v, 1, 1), convolution(y, v, 1, 1))


@needs_compiler
def test_what_c_would_misread_is_refused() -> None:
    x, w = torch.ones(2, 3, 4, 4, 16), torch.ones(2, 5, 3, 3, 3)
    for wrong in (x.to(torch.uint8), x.double(), x.bfloat16()):
        with pytest.raises(TypeError, match="float32"):
            convolution(wrong, w, 1, 1)
    for wrong in (x[:, :2], x[:1]):
        with pytest.raises(ValueError, match="networks or channels differ"):
            convolution(wrong, w, 1, 1)


@needs_compiler
@pytest.mark.parametrize("kind", ["prefix", "slt", "dense"])
def test_a_cohort_agrees_with_devices_on_their_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(width, "WIDEST_FOR_KERNELS", 8.0)
    torch.manual_seed(0)
    model, size = (SmallDenseNet(), 32) if kind == "dense" else (resnet20(10, 16), 16)
    graph = ChannelGraph(model, (3, size, size))
    cut = graph.slt(0, 1, 0.125) if kind == "slt" else graph.prefix(0.125)
    tasks = [Task(0, device, cut) for device in range(3)]
    generator = torch.Generator().manual_seed(4)
    data = [
        ImageSet(
            torch.randint(0, 256, (40, 3, size, size), generator=generator, dtype=torch.uint8),
            torch.randint(0, 10, (40,), generator=generator),
        )
        for _ in tasks
    ]
    parts = [cut.extract(model.state_dict())] * 3
    training = LocalTraining(batch_size=16, kernels=True)  # 16, 16 and 8: the last batch does not fill registers
    network = workspace_of(graph).network(cut, 3, training)
    assert network is not None and network._quick is not None
    behind_frozen = workspace_of(graph).network(graph.slt(2, 3, 0.125), 3, training)
    assert behind_frozen is None if kind == "dense" else behind_frozen is not None and behind_frozen._quick is None
    updates = train_cohort(workspace_of(graph), tasks, parts, data, training, 0.01, 9)
    again = train_cohort(workspace_of(graph), tasks, parts, data, training, 0.01, 9)
    assert updates is not None and again is not None
    for task, part, own, update, repeated in zip(tasks, parts, data, updates, again, strict=True):
        alone = train_device(workspace_of(graph), task, part, own, replace(training, kernels=False), 0.01, 9)
        assert update.loss == pytest.approx(alone.loss, rel=1e-3)
        for name, tensor in alone.tensors.items():
            torch.testing.assert_close(update.tensors[name], tensor, rtol=1e-2, atol=2e-3)
            assert torch.equal(update.tensors[name], repeated.tensors[name])


def test_without_a_compiler_there_are_none_and_it_is_said(tmp_path: Path) -> None:
    script = (
        "from strata.training import kernels\n"
        "from strata.core.errors import BadInput\n"
        "assert not kernels.available()\n"
        "try: kernels.require()\n"
        "except BadInput as error: print(error)\n"
    )
    environment = {
        "PATH": str(tmp_path),
        "STRATA_CACHE": str(tmp_path),
        "PYTHONPATH": ":".join(filter(None, sys.path)),
    }
    answer = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert answer.returncode == 0, answer.stderr
    assert "no C compiler" in answer.stdout and "--kernels off" in answer.stdout


@needs_compiler
def test_without_a_cache_they_are_built_for_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("STRATA_CACHE", "off")
    monkeypatch.setattr(kernels.library, "FLAGS", ("-O0", *kernels.library.FLAGS[1:]))  # sooner
    kernels.library.library.cache_clear()
    try:
        assert kernels.available() and not list(temporary.iterdir())
    finally:
        kernels.library.library.cache_clear()


@needs_compiler
def test_batches_that_leave_a_register_half_full_are_refused() -> None:
    weights = torch.zeros(1, 2, 1, 3, 3)
    lanes = kernels.library.loaded().narrow_lanes()
    assert lanes in (8, 16) and kernels.LANES % lanes == 0
    assert convolution(torch.zeros(1, 1, 4, 4, lanes), weights, 1, 1).shape == (1, 2, 4, 4, lanes)
    for batch in (1, lanes - 1, lanes + 4):
        with pytest.raises(ValueError, match=f"a batch of {batch} samples: it has to be a multiple of {lanes}"):
            convolution(torch.zeros(1, 1, 4, 4, batch), weights, 1, 1)
    for stride, padding in ((0, 1), (1, -1)):
        with pytest.raises(ValueError, match="no convolution of"):
            convolution(torch.zeros(1, 1, 4, 4, 16), weights, stride, padding)
    with pytest.raises(ValueError, match="no convolution of"):
        convolution(torch.zeros(1, 1, 2, 2, 16), weights, 1, 0)


@needs_compiler
def test_a_damaged_or_planted_library_is_built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading half of one would end this process with SIGBUS."""
    monkeypatch.setattr(kernels.library, "FLAGS", ("-O0", *kernels.library.FLAGS[1:]))  # sooner
    monkeypatch.setenv("STRATA_CACHE", str(tmp_path / "cache"))

    def content() -> bytes:
        kernels.library.library.cache_clear()
        assert kernels.available()
        (path,) = (tmp_path / "cache" / "kernels").iterdir()
        return path.read_bytes()

    try:
        whole = content()
        (path,) = (tmp_path / "cache" / "kernels").iterdir()
        for damaged in (whole[: len(whole) // 2], whole[:5000] + b"?" + whole[5001:], whole[:-32], b""):
            path.unlink()  # it is mapped here
            path.write_bytes(damaged)
            assert not kernels.library._is_whole(path)
        assert content() == whole
        path.chmod(0o777)  # others may write
        assert not kernels.library._is_whole(path)
    finally:
        kernels.library.library.cache_clear()


def test_who_is_told_to_use_them_says_why_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.library, "library", lambda: "a reason")
    training = LocalTraining(kernels=True)
    with pytest.raises(BadInput, match="a reason"):
        complete(training, tiny.data())
    program = DeviceProgram(tiny.model(), (3, 8, 8), tiny.data().train, {}, training)
    with pytest.raises(BadInput, match="a reason"):
        program.ready()


def test_a_compiler_that_fails_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "gcc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("STRATA_CACHE", str(tmp_path / "cache"))
    kernels.library.library.cache_clear()
    try:
        assert not kernels.available()
        with pytest.raises(BadInput, match="gcc does not build them"):
            kernels.require()
        assert not list((tmp_path / "cache" / "kernels").iterdir()), "nothing half-made stays"
    finally:
        kernels.library.library.cache_clear()
