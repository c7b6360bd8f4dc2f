"""Exported steps trained by the native device, against torch; and what it says to damaged ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn
from torch.nn import functional

from strata.cli import main
from strata.core.errors import BadInput
from strata.data.augmentation import augment
from strata.data.digits import load_digits
from strata.execution import Execution
from strata.export.folder import export_folder, stored
from strata.export.lowering import refuse_unknown
from strata.export.manifest import StepProgram, read_manifest
from strata.export.native import (
    BUFFERS,
    FROZEN,
    GRADIENTS,
    MOMENTUM,
    TOTAL,
    TRAINED,
    NativeStep,
    NativeTraining,
)
from strata.export.step import export_step
from strata.export.verify import Reference, draws
from strata.graph import ChannelGraph, Cut
from strata.runs.config import RunConfig
from strata.training import LocalTraining, Workspace, reestimated
from strata.training.loop import TaskSeeds
from tests.export import networks

SIDE, BATCH = 16, 6
PLAIN = NativeTraining(lr=1.0, momentum=0, weight_decay=0)  # one step of it is minus the gradient


def of(step: StepProgram) -> NativeStep:
    made = NativeStep.of(step.manifest_bytes(), step.program)
    for which, kind in ((TRAINED, "trained"), (FROZEN, "frozen"), (BUFFERS, "buffers")):
        made.write(which, row(step, kind))
    return made


def row(step: StepProgram, kind: str) -> np.ndarray:
    parts = [step.tensors[name].flatten().numpy() for name in step.names[kind]]
    return np.concatenate([np.zeros(0, np.float32), *parts])


def gradient(step: NativeStep, x: Tensor, y: Tensor, training: NativeTraining = PLAIN) -> tuple[np.ndarray, float]:
    begun = step.read(TRAINED)
    order = NativeTraining(**{**vars(training), "order": np.arange(len(y)), "batch": training.batch or len(y)})
    loss = step.train(x.numpy(), y.numpy(), order)
    found = begun.astype(np.float64) - step.read(TRAINED)
    step.write(TRAINED, begun)
    return found, loss


def expected(
    graph: ChannelGraph, cut: Cut, names: list[str], state: dict[str, Tensor], x: Tensor, y: Tensor, part: int
):
    """In double precision; a batch in parts of so many."""
    sub = graph.submodel(cut, cut.extract(state)).train().double()
    total = 0.0
    for inputs, targets in zip(x.double().split(part), y.split(part), strict=True):
        loss = functional.cross_entropy(sub(inputs), targets) * (len(targets) / len(y))
        loss.backward()
        total += loss.item()
    own = dict(sub.named_parameters())
    return np.concatenate([own[name].grad.flatten().numpy() for name in names]), total  # type: ignore[union-attr]


def full(graph: ChannelGraph) -> Cut:
    return graph.full()


def prefix(graph: ChannelGraph) -> Cut:
    return graph.prefix(0.5)


def slt(graph: ChannelGraph) -> Cut:
    return graph.slt(1, 2, 0.5)


@pytest.mark.parametrize(
    ("build", "cuts", "side", "most"),
    [
        (networks.small_resnet, slt, 32, 1.03),
        (networks.SmallDense, full, SIDE, 1.03),
        (networks.SmallMobile, prefix, SIDE, 1.03),
        (networks.SmallGated, slt, SIDE, 1.03),
        (networks.SmallViT, full, SIDE, 1.03),
        (networks.OddRows, full, SIDE, 1.03),
        (networks.Odd, full, SIDE, 1.03),
    ],
)
def test_loss_and_gradients(
    native: Path, build: Callable[[], nn.Module], cuts: Callable[[ChannelGraph], Cut], side: int, most: float
) -> None:
    torch.manual_seed(0)
    model = build()
    graph = ChannelGraph(model, (3, side, side))
    cut = cuts(graph)
    step = export_step(graph, cut, model.state_dict(), Execution(batch_size=BATCH), evaluates=False)
    x, y = torch.randn(BATCH, 3, side, side), torch.randint(10, (BATCH,))
    size = step.manifest["bytes"]
    assert size["total"] <= most * size["peak"]
    with of(step) as made:
        assert made.bytes(TOTAL) == size["total"]
        for count in (BATCH, BATCH - 2):  # the last batch of an epoch may be short
            found, loss = gradient(made, x[:count], y[:count])
            wanted, total = expected(graph, cut, step.names["trained"], model.state_dict(), x[:count], y[:count], count)
            assert loss == pytest.approx(total, rel=1e-6)
            assert np.linalg.norm(found - wanted) <= 1e-4 * np.linalg.norm(wanted)


def test_dropout_draws_from_its_seed(native: Path) -> None:
    torch.manual_seed(0)
    model = networks.dropping()
    graph = ChannelGraph(model, (3, SIDE, SIDE))
    step = export_step(graph, graph.full(), model.state_dict(), Execution(batch_size=BATCH), evaluates=False)
    x, y = torch.randn(BATCH, 3, SIDE, SIDE), torch.randint(10, (BATCH,))
    with of(step) as made:
        losses = [gradient(made, x, y, NativeTraining(lr=0.0, seeds=(0, 0, seed)))[1] for seed in [*range(40), 0]]
    assert losses[0] == losses[40]
    assert len(set(losses)) == 40
    sub = graph.submodel(graph.full(), graph.full().extract(model.state_dict())).train()
    torchs = [functional.cross_entropy(sub(x), y).item() for _ in range(200)]
    assert np.mean(losses) == pytest.approx(np.mean(torchs), abs=4 * np.std(torchs) / 40**0.5)


# --- one folder, as the command line writes it, for all that follows ------------------------------------------------


@pytest.fixture(scope="module")
def folder(native: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "pocket"
    command = "export --model tests.export.networks:small_resnet --data digits --method fedavg --lr 0.02 --batch 16"
    code = main([*command.split(), "--micro-batch", "8", "--samples", "320", "--verify", "--out", str(out)])
    assert code == 0
    return out


def test_twenty_batches_follow_the_curve_of_double_precision(native: Path, tmp_path: Path) -> None:
    """Each by itself, a network without ReLUs, where rounding does not grow (tests/training/test_rounding.py)."""
    config = RunConfig.of(
        model="tests.export.networks:SmallGated",
        data="digits",
        method="fedavg",
        lr=0.05,
        batch=16,
        augmentation="cifar",
    )
    (exported,) = export_folder(config, tmp_path, None, None, 320, None)
    execution, seeds = exported.execution, TaskSeeds(order=1, augmentation=2, levels=3, dropout=4)
    losses: list[float] = []
    with NativeStep.open(exported.folder) as step:
        weights = step.read(TRAINED).astype(np.float64)
        asked = NativeTraining(
            lr=exported.lr, batch=16, momentum=execution.momentum, weight_decay=execution.weight_decay,
            seeds=(1, 2, 4), augmentation="cifar", mean=exported.training.mean, std=exported.training.std,
        )  # fmt: skip
        labels = exported.samples.targets.numpy()
        step.train(stored(exported.samples).numpy(), labels, asked, lambda _, __, loss: bool(losses.append(loss)))
        trained = step.read(TRAINED)
    settings = replace(exported.training, batch_size=16, kernels=False)
    reference = Reference(exported, settings, weights)
    velocity, curve = np.zeros_like(weights), []
    for parts in draws(exported, settings, seeds, exported.samples):
        loss, update = reference.update(weights, parts)
        velocity = execution.momentum * velocity + update
        weights = weights - exported.lr * velocity
        curve.append(loss)
    assert len(curve) == 20 and max(curve) > min(curve) + 0.05  # what is compared is no flat line
    np.testing.assert_allclose(losses, curve, atol=1e-4)
    assert np.linalg.norm(trained - weights) <= 1e-3 * np.linalg.norm(weights - reference.begun)


def test_the_program_trains_it_in_little_memory(folder: Path) -> None:
    said = subprocess.run([folder / "pocket", "--json", "--epochs", "3"], capture_output=True, text=True, check=True)
    found = json.loads(said.stdout)
    assert said.stderr == ""
    assert found["vm_hwm_kib"] < 40 * 1024
    assert found["accuracy"] > 0.5
    assert found["step_bytes"] == read_manifest(folder / "step-0")["bytes"]["total"]
    trained = load_file(folder / "step-0" / "trained.safetensors")
    before = load_file(folder / "step-0" / "weights.safetensors")
    assert set(trained) <= set(before)
    assert all(trained[name].shape == before[name].shape for name in trained)
    assert any(np.abs(trained[name] - before[name]).max() > 1e-3 for name in trained)


@pytest.mark.slow
def test_on_another_processor(folder: Path, tmp_path: Path) -> None:
    """What `make native-arm64` has built, under qemu: the same training, up to rounding."""
    built = Path(__file__).parents[2] / "native" / "build-arm64"
    qemu = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    root = Path(os.environ.get("QEMU_LD_PREFIX", "/usr/aarch64-linux-gnu"))
    if qemu is None or not (built / "pocket").exists() or not root.exists():
        pytest.skip("there is no qemu-user, no aarch64 libraries or no build of make native-arm64")
    found = []
    for command in ([folder / "pocket"], [qemu, "-L", root, built / "pocket"]):
        out = tmp_path / f"{len(found)}.safetensors"
        said = subprocess.run(
            [*command, folder, "--json", "--out", out], capture_output=True, text=True, check=True, timeout=300
        )
        found.append(json.loads(said.stdout))
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=0.1)
    assert found[0]["step_bytes"] == found[1]["step_bytes"]


def test_draws_are_those_of_torch(folder: Path) -> None:
    data = load_digits()
    images, labels = data.train.images[:40, :1], data.train.targets[:40]
    with NativeStep.open(folder / "step-0") as step:
        begun = step.read(TRAINED)
        order = torch.randperm(40, generator=torch.Generator().manual_seed(5))
        crops = torch.Generator().manual_seed(6)
        common = {"lr": 0.05, "mean": data.train.mean, "std": data.train.std}
        losses: list[float] = []
        drawn = NativeTraining(**common, seeds=(5, 6, 0), augmentation="cifar-vflip", batch=16)
        step.train(images.numpy(), labels.numpy(), drawn, lambda batch, batches, loss: bool(losses.append(loss)))
        found = step.read(TRAINED)
        step.write(TRAINED, begun)
        whole = images.expand(-1, 3, -1, -1)
        batches = [augment(whole[i], "cifar-vflip", crops, data.train.mean, data.train.std) for i in order.split(16)]
        given: list[float] = []
        step.train(
            torch.cat(batches).numpy(),
            labels[order].numpy(),
            NativeTraining(lr=0.05, order=np.arange(40), batch=16),
            lambda batch, batches, loss: bool(given.append(loss)),
        )
        assert losses == given
        assert np.array_equal(found, step.read(TRAINED))
        assert step.bytes(MOMENTUM) == step.bytes(GRADIENTS) == 4 * len(found)


def test_sgd_with_all_its_terms(folder: Path) -> None:
    """Two batches in parts, with momentum, decay, the proximal term and clipping."""
    model = networks.small_resnet()
    graph = ChannelGraph(model, (3, 32, 32))
    cut = graph.full()
    manifest = read_manifest(folder / "step-0")
    names = [one["name"] for one in manifest["trained"]]
    torch.manual_seed(1)
    x, y = torch.randn(24, 3, 32, 32), torch.randint(10, (24,))
    with NativeStep.open(folder / "step-0") as step:
        weights = load_file(folder / "step-0" / "weights.safetensors")
        state = {**model.state_dict(), **{name: torch.from_numpy(value) for name, value in weights.items()}}
        asked = NativeTraining(
            lr=0.1, momentum=0.5, weight_decay=0.01, proximal=0.3, clip=0.7, order=np.arange(24), batch=16
        )
        step.train(x.numpy(), y.numpy(), asked)
        found = step.read(TRAINED)
    start = np.concatenate([weights[name].flatten() for name in names]).astype(np.float64)
    w, v = start.copy(), np.zeros_like(start)
    for inputs, targets in ((x[:16], y[:16]), (x[16:], y[16:])):
        rows = dict(zip(names, np.split(w, np.cumsum([weights[name].size for name in names])[:-1]), strict=True))
        now = {**state, **{n: torch.from_numpy(r).view(weights[n].shape).float() for n, r in rows.items()}}
        g, _ = expected(graph, cut, names, now, inputs, targets, 8)
        g = g + 0.3 * (w - start)
        g *= min(1, 0.7 / (np.linalg.norm(g) + 1e-6))
        v = 0.5 * v + g + 0.01 * w
        w = w - 0.1 * v
    # without any one of the terms it is 3 % off or more; rounding makes 5e-6, but may flip a ReLU
    assert np.linalg.norm(found - w) <= 1e-2 * np.linalg.norm(w - start)


def test_evaluation_and_statistics(folder: Path) -> None:
    data = load_digits()
    model = networks.small_resnet()
    graph = ChannelGraph(model, data.inputs)
    cut = graph.full()
    weights = {
        name: torch.from_numpy(one) for name, one in load_file(folder / "step-0" / "weights.safetensors").items()
    }
    state = {**model.state_dict(), **weights}
    settings = LocalTraining(mean=data.train.mean, std=data.train.std, kernels=False)
    chosen = data.train.subset(range(8))
    made = reestimated(Workspace(graph), cut, cut.extract(state), chosen, settings)
    buffers = [one["name"] for one in read_manifest(folder / "step-0")["buffers"]]
    wanted = np.concatenate([made[name].flatten().numpy() for name in buffers])
    common = (data.train.mean, data.train.std)
    with NativeStep.open(folder / "step-0") as step:
        found = step.statistics(chosen.tensors[0][:, :1].numpy(), chosen.targets.numpy(), *common)
        np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=1e-5)
        step.write(BUFFERS, wanted)
        loss, accuracy, scores = step.evaluate(
            data.test.images[:30, :1].numpy(), data.test.targets[:30].numpy(), *common, classes=10
        )
    sub = graph.submodel(cut, made).eval()
    with torch.no_grad():
        outputs = sub(*settings.prepared((data.test.images[:30],)))
    np.testing.assert_allclose(scores, outputs.numpy(), atol=1e-4)
    assert loss == pytest.approx(functional.cross_entropy(outputs, data.test.targets[:30]).item(), rel=1e-4)
    assert accuracy == (outputs.argmax(1) == data.test.targets[:30]).double().mean().item()


def test_what_does_not_fit_is_a_sentence(folder: Path) -> None:
    with NativeStep.open(folder / "step-0") as step:
        image, label = np.zeros((1, 3, 32, 32), np.float32), np.zeros(1, np.int64)
        for inputs, labels, training, words in (
            (image, label + 10, PLAIN, "label of sample 0 is 10"),
            (image, label, NativeTraining(lr=1.0, micro_batch=9, batch=16), "at most 8 samples"),
            (image, label, NativeTraining(lr=float("nan")), "numbers from 0"),
            (image, label, NativeTraining(lr=1.0, order=np.array([7])), "sample 7 of 1"),
            (image.astype(np.uint8), label, NativeTraining(lr=1.0, augmentation="femnist"), "femnist is not known"),
        ):
            with pytest.raises(BadInput, match=words):
                step.train(inputs, labels, training)
        with pytest.raises(BadInput, match="numbers, not 3"):
            step.write(TRAINED, np.zeros(3))


def inner_paths(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Of a JSON value: everything below its entries; of a list, its first two and its last."""
    if isinstance(value, dict):
        inner: list[tuple[str | int, object]] = list(value.items())
    elif isinstance(value, list):
        inner = [(number, value[number]) for number in sorted({0, 1, len(value) - 1}) if 0 <= number < len(value)]
    else:
        inner = []
    found = [(*path, key) for key, _ in inner] if path else []
    return found + [deeper for key, one in inner for deeper in inner_paths(one, (*path, key))]


def replaced(value: object, path: tuple[str | int, ...], new: object) -> object:
    changed = json.loads(json.dumps(value))
    *above, last = path
    inside = changed
    for key in above:
        inside = inside[key]
    inside[last] = new
    return changed


def test_damaged_steps_are_refused(folder: Path, tmp_path: Path) -> None:
    whole = folder / "step-0"
    names = ("manifest.json", "step.pte", "weights.safetensors")
    contents = {name: (whole / name).read_bytes() for name in names}
    manifest = json.loads(contents["manifest.json"])
    damaged: list[tuple[str, bytes]] = []
    for name, content in contents.items():
        damaged += [(name, content[: len(content) * part // 7]) for part in range(7)]
        damaged += [(name, content + b"\0")] if name != "manifest.json" else []
    draw = np.random.default_rng(0)
    for name in ("step.pte", "weights.safetensors"):
        for at in draw.integers(len(contents[name]), size=20):
            damaged.append((name, contents[name][:at] + bytes([contents[name][at] ^ 8]) + contents[name][at + 1 :]))
    for key in manifest:
        for value in (None, -1, 1e300, "x", [], {}, [[[]]], [{"name": "a", "shape": [1 << 39, 1 << 39]}]):
            damaged.append(("manifest.json", json.dumps({**manifest, key: value}).encode()))
    for path in inner_paths(manifest):
        for value in (None, -1, 0, 1 << 40, "x", []):
            damaged.append(("manifest.json", json.dumps(replaced(manifest, path, value)).encode()))
    damaged += [("manifest.json", text) for text in (b"[" * 100_000, b'{"a":' * 50, b'"\\u12', b"\xff\xfe{}", b"{}")]
    step = tmp_path / "step-0"
    step.mkdir()
    for name, content in contents.items():
        (step / name).write_bytes(content)
    refused = 0
    for name, content in damaged:
        (step / name).write_bytes(content)
        try:
            with NativeStep.open(step) as made:
                made.train(np.zeros((1, 3, 32, 32), np.float32), np.zeros(1, np.int64), PLAIN)
        except (BadInput, RuntimeError) as error:
            refused += 1
            assert str(error) and "\n" not in str(error)
        (step / name).write_bytes(contents[name])
    assert refused > 80
    shutil.copytree(folder / "data", tmp_path / "data")
    (step / "step.pte").write_bytes(contents["step.pte"][:1000])
    said = subprocess.run([folder / "pocket", str(tmp_path)], capture_output=True, text=True)
    assert (said.returncode, said.stderr.count("\n")) == (2, 1)
    assert "cut short" in said.stderr


@pytest.mark.slow
def test_steps_of_a_run_and_levels(native: Path, tmp_path: Path) -> None:
    """--run, --step all and --level, of a network whose plans have several steps."""
    base = "--model tests.device.nets:even --data digits --method slt --batch 32 --rounds 3"
    run, out = tmp_path / "run", tmp_path / "out"
    assert main(["run", *base.split(), *f"--budget 1800KiB --devices 60 --per-round 1 --out {run}".split()]) == 0
    steps = json.loads((run / "plan.json").read_text())["steps"]
    assert len(steps) > 1
    assert main(["export", *f"--run {run} --step all --samples 64 --out {out}".split()]) == 0
    found = load_file(run / "model.safetensors")
    for number in range(len(steps)):
        manifest = read_manifest(out / f"step-{number}")
        assert (manifest["step"], manifest["steps"]) == (number, len(steps))
        assert manifest["bytes"]["total"] <= 1.03 * 1800 * 1024
        for name, one in load_file(out / f"step-{number}" / "weights.safetensors").items():
            kept = tuple(slice(size) for size in one.shape)
            np.testing.assert_array_equal(one, found[name][kept])
    frozen = [len(read_manifest(out / f"step-{number}")["frozen"]) for number in range(len(steps))]
    assert frozen == sorted(frozen) and frozen[-1] > 0
    levels = f"--budget 1800KiB,6MiB --step 0 --level 1 --samples 64 --out {tmp_path / 'level'}"
    assert main(["export", *base.split(), *levels.split()]) == 0
    manifest = read_manifest(tmp_path / "level" / "step-0")
    assert manifest["level"] == 1
    assert manifest["bytes"]["total"] <= 1.03 * (6 << 20)


def test_refusals_of_the_command_line(native: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base = "export --model tests.export.networks:small_resnet --data digits --out"
    for further, words in (
        ("--method fedavg --activation-checkpointing auto", "computes nothing anew"),
        ("--method fedavg --step 3", "no step 3"),
        ("--method fedavg --step x", "--step is a whole number"),
        ("--run nowhere --method fedavg", "with --run give none"),
    ):
        assert main([*base.split(), str(tmp_path / "out"), *further.split()]) == 2
        assert words in capsys.readouterr().err
    with pytest.raises(BadInput, match=r"no kernel for aten::fancy \(nets.py:3\)"):
        refuse_unknown(["aten::fancy.out", "aten::add.out"], {"aten::fancy": "nets.py:3"})
