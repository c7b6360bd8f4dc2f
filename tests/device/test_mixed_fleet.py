"""A fleet of one device with torch and two without, as real processes behind TLS; then what a native device computed.

Needs ExecuTorch and the native library (conftest.py); skipped where either cannot be had.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
from strata_device import codec as thin
from strata_device.data import prepare
from strata_device.errors import CannotRun, Refused
from strata_device.programs import Program, check_signature
from strata_device.settings import Settings
from strata_device.work import Work
from torch import Tensor
from torch.nn import functional

from strata.data import ImageSet, load
from strata.fleet.protocol import codec
from strata.fleet.security.keys import make_keys
from strata.fleet.server.native_devices import ProgramSigner
from strata.graph import ChannelGraph, Cut
from strata.methods.base import Task
from strata.models.loading import load_model
from strata.runs.config import RunConfig
from strata.runs.launch import make_method
from strata.training import LocalTraining, Workspace, reestimated
from strata.training.loop import TaskSeeds
from tests.fleet.processes import Commands, alive, free_port, memory_of, thin_device

MIB = 1 << 20
MODEL = "tests.device.nets:even"
PARTS, SEED, BATCH = 6, 3, 250  # of digits: a device's part is one batch
SMALL, SAID, REAL = 14 * MIB, 40 * MIB, 3 * MIB  # the first step takes 13 MiB
# says that it has more memory than it has
BOASTING = f"said = device.Device._hello; device.Device._hello = lambda self: {{**said(self), 'budget': {SAID}}}; "
TOLERANCE = 1e-3  # of a step, in relation to it: float32 against float64, whose zeros of a ReLU may be others


@pytest.fixture(scope="module")
def fleet(native: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run that has finished."""
    folder = tmp_path_factory.mktemp("mixed")
    make_keys(folder / "keys", ["127.0.0.1"], ["ant", "bee", "cat"])
    place, out = f"127.0.0.1:{free_port()}", folder / "run"
    host, port = place.split(":")
    with Commands(folder / "output") as started:
        started("fleet", "server", "--keys", str(folder / "keys"), "--host", host, "--port", port).wait_for(
            "serving", seconds=600
        )

        def common(name: str, index: int) -> list[str]:
            cache = str(folder / name)
            return ["--server", place, "--keys", str(folder / "keys" / "devices" / name), "--cache", cache, "--part",
                    f"{index}/{PARTS}", "--split-seed", str(SEED)]  # fmt: skip

        started("fleet", "device", *common("ant", 0), "--budget", str(SMALL), "--model", MODEL)
        native = [
            started(*common(name, index), "--budget", str(budget), program=thin_device(more))
            for name, index, budget, more in (("bee", 1, SMALL, ""), ("cat", 2, REAL, BOASTING))
        ]
        run = started(
            "fleet", "run", "--server", place, "--keys", str(folder / "keys"), "--model", MODEL, "--method", "slt",
            "--rounds", "2", "--per-round", "3", "--batch", str(BATCH), "--seed", str(SEED), "--wait-for", "3",
            "--deadline", "90", "--out", str(out), "--eval-every", "2",
        )  # fmt: skip
        for device in native:
            device.wait_for("is connected", seconds=600)
        run.wait_for("round 1", seconds=1200)
        sizes(folder, [device.process.pid for device in native])
        native[0].stop(signal.SIGKILL)
        assert run.wait(1200) == 0, run.text()
        (folder / "run.txt").write_text(run.text())
        assert native[1].stop() == 0 and not alive(native[1].process.pid)
    yield folder


def sizes(folder: Path, pids: list[int]) -> None:
    """Of the lasting processes of devices without torch, and that torch is not there."""
    found = []
    for pid in pids:
        found.append(memory_of(pid))
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
    (folder / "sizes.json").write_text(json.dumps(found))


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_one_with_torch_and_two_without(fleet: Path) -> None:
    out = fleet / "run"
    said = json.loads((out / "fleet.json").read_text())
    assert said["names"] == ["ant", "bee", "cat"]
    assert said["runtimes"]["ant"].startswith("torch 2.13")
    assert all(said["runtimes"][name].startswith("no torch (strata-device ") for name in ("bee", "cat"))
    first, *later = [{said["names"][one["id"]]: one["reason"] for one in line["dropped"]} for line in records(out)]
    assert set(first) == {"cat"}, (fleet / "run.txt").read_text()  # the one that says it has more than it has
    assert "out of memory" in first["cat"] and first["cat"].endswith(f"moved to the level of {SMALL} bytes")
    assert len(later) == 1 and "ant" not in later[0] and "bee" in later[0]  # it was killed
    assert later[0]["cat"].endswith("there is no smaller level for it")
    assert math.isfinite(records(out)[-1]["train_loss"])
    assert max(json.loads((fleet / "sizes.json").read_text())) < 48 * MIB  # bytecode of loaded machines aside: 34


def test_a_program_is_exported_once(fleet: Path) -> None:
    """For a cut; devices of a level share it."""
    cuts = [json.loads((path / "manifest.json").read_text())["cut"] for path in (fleet / "run" / "programs").iterdir()]
    assert len(set(cuts)) == len(cuts) >= 2


# --- what a native device computed, with a program of that run ---------------------------------------------------


class Bench:
    """A device with a part of the digits, and the step program of a cut of the run."""

    def __init__(self, fleet: Path, folder: Path) -> None:
        self.settings = Settings("bee", str(folder), part=1, parts=PARTS, seed=SEED, hold_out=0.2)
        prepare(self.settings)
        data = load("digits")
        self.model = load_model(MODEL, 10, (3, 32, 32))
        self.graph = ChannelGraph(self.model, data.inputs)
        self.train = data.train
        self.offers = {}
        signer = ProgramSigner(make_keys(folder / "keys", [], ["bee"]).folder)
        self.authority = signer.folder.authority
        for path in (fleet / "run" / "programs").iterdir():
            manifest, code = (path / "manifest.json").read_bytes(), (path / "step.pte").read_bytes()
            id = (path / "id").read_text()
            meta = {"what": "program", "program": id, "manifest": manifest.decode(), **signer.sign(id)}
            self.offers[json.loads(manifest)["cut"]] = (meta, code)

    def work(self, budget: int | None = 32 * MIB) -> Work:
        return Work(self.settings, self.authority, budget)

    def images(self, name: str) -> tuple[Tensor, Tensor]:
        folder = Path(self.settings.folder)
        grey = torch.frombuffer(bytearray((folder / f"{name}.bin").read_bytes()), dtype=torch.uint8)
        labels = torch.frombuffer(bytearray((folder / f"{name}.labels").read_bytes()), dtype=torch.int64)
        return grey.view(-1, 1, 32, 32).expand(-1, 3, -1, -1), labels


def message(meta: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> thin.Packet:
    return thin.decode(codec.encode(meta, tensors))


def offered(offer: tuple[dict[str, Any], bytes], **more: Any) -> thin.Packet:
    meta, code = offer
    return message({**meta, **more}, {"step.pte": torch.tensor(list(code), dtype=torch.uint8)})


def values(tensor: thin.Tensor) -> Tensor:
    return torch.frombuffer(bytearray(tensor.data), dtype=torch.float32).view(tensor.shape)


def test_the_update_is_torch_s_and_frozen_layers_are_kept(fleet: Path, tmp_path: Path) -> None:
    bench = Bench(fleet, tmp_path)
    cut = next(one for one in cuts_of(bench.graph) if one.hash in bench.offers and one.frozen)
    work = bench.work()
    assert work.answer(offered(bench.offers[cut.hash]))[0]["what"] == "program"
    tensors = {name: tensor.clone() for name, tensor in cut.extract(bench.model.state_dict()).items()}
    training = LocalTraining(batch_size=BATCH, mean=bench.train.mean, std=bench.train.std)
    images, labels = bench.images("train")
    meta = task(cut, tensors, training, bench.offers[cut.hash][0]["program"], len(labels))
    said, update = work.answer(message(meta, tensors))
    assert (said["what"], said["cut"], said["samples"]) == ("update", cut.hash, len(labels))

    # the same step in float64: all samples are one batch
    network = bench.graph.submodel(cut, tensors).double().train()
    loss = functional.cross_entropy(network(bench.train.normalise(images).double()), labels)
    loss.backward()
    gradients = {name: p.grad for name, p in network.named_parameters() if name in cut.trained}
    assert said["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert set(update) == set(cut.trained)
    wrong = right = 0.0
    for name, gradient in gradients.items():
        assert gradient is not None
        step = -meta["lr"] * (gradient + training.weight_decay * tensors[name].double())
        wrong += float((values(update[name]).double() - tensors[name].double() - step).square().sum())
        right += float(step.square().sum())
    assert math.sqrt(wrong / right) < TOLERANCE

    # what it has need not be sent again, and what it has lost it says
    without = {name: tensor for name, tensor in tensors.items() if name not in cut.frozen}
    again, same = work.answer(message(meta, without))
    assert again["what"] == "update" and all(same[name].data == update[name].data for name in update)
    (tmp_path / "frozen.bin").write_bytes(b"damaged")
    assert bench.work().answer(message(meta, without))[0] == {"what": "lacks", "holds": [], "token": "t"}
    with pytest.raises(Refused, match="digest"):
        work.answer(message({**meta, "frozen": dict.fromkeys(meta["frozen"], "0" * 32)}, tensors))
    with pytest.raises(Refused, match="secure"):
        work.answer(message({**meta, "secure": {}}, tensors))


def test_native_evaluation_is_torch_s(fleet: Path, tmp_path: Path) -> None:
    bench = Bench(fleet, tmp_path)
    cut = next(one for one in cuts_of(bench.graph) if one.hash in bench.offers)
    work = bench.work()
    work.answer(offered(bench.offers[cut.hash]))
    tensors = cut.extract(bench.model.state_dict())
    training = {"mean": list(bench.train.mean), "std": list(bench.train.std)}  # all that it is asked of
    common = {"token": "t", "training": training, "fixed": [], "program": bench.offers[cut.hash][0]["program"]}
    said, found = work.answer(message({**common, "what": "statistics", "seed": 5}, tensors))
    images, labels = bench.images("train")
    assert said["images"] == len(labels)
    reference = reestimated(
        Workspace(bench.graph), cut, tensors, ImageSet(images.contiguous(), labels), LocalTraining(**training)
    )
    buffers = {name: values(one) for name, one in found.items() if one.dtype == "float32"}
    assert set(found) == set(bench.graph.buffer_names)
    for name, one in buffers.items():  # all samples are one batch
        torch.testing.assert_close(one, reference[name], rtol=1e-3, atol=1e-5)
    measured = tensors | buffers
    network = bench.graph.submodel(cut, {name: one.clone() for name, one in measured.items()}).eval()
    held, targets = bench.images("held")
    with torch.inference_mode():
        outputs = network(bench.train.normalise(held))
    said, _ = work.answer(message({**common, "what": "evaluate", "bn": "re-estimated"}, measured))
    loss = functional.cross_entropy(outputs, targets, reduction="sum").item()
    assert said["loss_sum"] == pytest.approx(loss, rel=1e-4)
    counts = torch.bincount(targets, minlength=10).tolist()
    assert said["sums"]["counts"] == counts and sum(said["sums"]["predicted"]) == len(targets)
    right = int((outputs.argmax(1) == targets).sum())
    assert abs(sum(said["sums"]["correct"]) - right) <= 1


def test_what_is_not_the_server_s_program_is_refused(fleet: Path, tmp_path: Path) -> None:
    bench = Bench(fleet, tmp_path)
    offer = next(iter(bench.offers.values()))
    meta, code = offer
    work = bench.work()
    other = make_keys(tmp_path / "other", [], ["bee"]).folder
    for wrong, words in (
        ({"signature": ""}, "not signed"),
        ({"certificate": other.certificate.read_text()}, "not signed"),
        ({**ProgramSigner(other).sign(meta["program"])}, "not signed"),
        ({"program": "0" * 64}, "hash"),
        ({"manifest": meta["manifest"] + " "}, "hash"),
        ({"manifest": None}, "offers no program"),
    ):
        with pytest.raises(Refused, match=words):
            work.answer(offered(offer, **wrong))
    with pytest.raises(Refused, match="not signed"):
        check_signature("1" * 64, meta["signature"], meta["certificate"], bench.authority)
    open_work = Work(bench.settings, None, 32 * MIB)  # of a plain-text server: only the program itself can be wrong
    for broken in (code[: len(code) // 2], b"", os.urandom(1000)):
        made = Program.of(meta["manifest"].encode(), memoryview(broken))
        with pytest.raises(CannotRun) as error:
            open_work.answer(offered((meta, broken), program=made.id))
        assert "\n" not in str(error.value)
    changed = json.dumps({**json.loads(meta["manifest"]), "format": 99})
    with pytest.raises(CannotRun, match="format 99"):
        open_work.answer(offered((meta, code), manifest=changed, program=id_of(changed, code)))


def id_of(manifest: str, code: bytes) -> str:
    from strata_device.programs import program_id

    return program_id(manifest.encode(), code)


def cuts_of(graph: ChannelGraph) -> list[Cut]:
    """What devices trained in that run, the last step first: there layers are frozen."""
    config = RunConfig.of(
        model=MODEL, method="slt", rounds=2, per_round=3, batch=BATCH, seed=SEED, budgets=(SMALL, SAID), exact=True
    )
    method = make_method(config, graph)
    return [method.cut_for(round, device) for round in (1, 0) for device in (0, 1)]


def task(cut: Cut, tensors: dict[str, Tensor], training: LocalTraining, program: str, count: int) -> dict[str, Any]:
    from strata.fleet.device.work import PLAIN

    seeds = TaskSeeds.of(7, Task(2, 1, cut))
    settings = {name: getattr(training, name) for name in PLAIN}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    return {
        "what": "train", "model": MODEL, "token": "t", "round": 2, "device": 1, "lr": 0.5,
        "seeds": list(astuple(seeds)), "training": plain, "cut": cut.hash, "levels": [], "deadline": None,
        "frozen": {name: codec.content_digest(tensors[name]) for name in sorted(cut.frozen)}, "program": program,
    }  # fmt: skip
