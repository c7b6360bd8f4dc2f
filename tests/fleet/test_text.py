"""Real devices that hold text, and train the pairs of LoRA: the bits of a simulated one."""

from __future__ import annotations

import json
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")
from strata.core.errors import BadInput
from strata.fleet.device.own_data import load_own_data
from strata.fleet.device.work import PreparedDevice
from strata.fleet.protocol import codec
from strata.fleet.protocol.model_text import model_text, read_model
from strata.fleet.protocol.settings import DeviceSettings, RunSettings
from strata.fleet.server.members import Device
from strata.fleet.server.run import run_on_fleet
from strata.methods.base import Task
from strata.methods.lora import Lora
from strata.training import LocalTraining, Workspace, train_device
from strata.training.loop import TaskSeeds
from tests.fleet import inprocess
from tests.fleet.inprocess import Grid
from tests.fleet.nets import words

pytestmark = pytest.mark.usefixtures("identity")

MODEL = "tests.fleet.nets:words"


def test_a_device_with_text_trains_loras_pairs(tmp_path: Path) -> None:
    rows = [{"text": f"{'good' if i % 2 else 'bad'} {i}", "label": "yes" if i % 2 else "no"} for i in range(30)]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = DeviceSettings(
        "phone", budget=1 << 24, data=f"text:{tmp_path / 'own.jsonl'}", cache=str(tmp_path / "cache"), models=(MODEL,),
        reading=[["length", 8]], hard_limit=False,  # type: ignore[arg-type]  # as JSON has it
    )  # fmt: skip
    made = PreparedDevice.of(model_text(MODEL, "lora", {"rank": 2}), settings)
    hello = codec.decode(made.answer(codec.decode(codec.encode({"what": "hello"})), 1)).meta
    device = Device.of(1, hello)
    assert (device.input, device.classes, device.mean, device.samples) == ((8,), 2, (), len(made.own_data.train))
    cut = Lora(made.graph, rank=2).cut
    assert {name.partition(".")[0] for name in cut.trained} == {"adapters", "model"} and not made.graph.pinned
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in cut.shapes.items()}
    training, seeds = LocalTraining(batch_size=8, update_rule="adamw"), TaskSeeds(1, 2, 3, 4)
    frozen = {name: codec.content_digest(tensors[name]) for name in cut.frozen}
    said = {
        "what": "train", "token": "t", "round": 1, "device": 0, "lr": 0.01, "seeds": list(astuple(seeds)),
        "cut": cut.to_json(), "levels": [], "frozen": frozen, "training": {"batch_size": 8, "update_rule": "adamw"},
    }  # fmt: skip
    answer = codec.decode(made.answer(codec.decode(codec.encode(said, tensors)), 1))
    own = replace(training, objective=made.own_data.objective)
    simulated = train_device(Workspace(made.graph), Task(1, 0, cut), tensors, made.own_data.train, own, 0.01, seeds)
    assert answer.meta["what"] == "update" and answer.meta["peak_bytes"] == simulated.peak_bytes
    sent = answer.tensors()
    assert set(sent) == set(cut.trained) and all(torch.equal(sent[name], simulated.tensors[name]) for name in sent)

    request = {
        "model": MODEL, "method": "lora", "rank": 2, "data": settings.data, "length": 8, "batch": 8, "rounds": 1,
        "per_round": 1, "optimizer": "adamw", "lr": 0.01, "lr_end": 0.01,
    }  # fmt: skip
    whole = RunSettings(request, str(tmp_path / "run"), minimum=1, wait=30.0)
    result = run_on_fleet(Grid({7: inprocess.device(made)}), whole)  # type: ignore[arg-type]
    assert result is not None and result.metrics[0]["dropped"] == []
    assert result.metrics[0]["upload_bytes"] == 4 * sum(torch.Size(cut.shapes[name]).numel() for name in cut.trained)
    words(2, 257).load_state_dict(result.state_dict())


def test_what_a_device_does_not_take() -> None:
    assert read_model("resnet20") == ("resnet20", None, {})
    for text in ('{"model": "resnet20"}', '{"model": 1, "method": "lora", "options": {}}', "{"):
        with pytest.raises(BadInput, match="in a way that this version of Strata does not know"):
            read_model(text)
    with pytest.raises(BadInput, match="which this device does not know"):
        PreparedDevice.of(model_text("resnet20", "os:system"), DeviceSettings("a", partition="iid", devices=60))
    with pytest.raises(BadInput, match="number those of its own text: give --tokenizer bytes"):
        load_own_data(DeviceSettings("a", data="text:own.jsonl", reading=(("tokenizer", "chars"),)))
