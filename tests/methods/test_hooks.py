"""Hooks that a method may override: how updates are aggregated, and what a device keeps between its rounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import strata
from strata.core.errors import BadInput
from strata.federation.device_store import DeviceStore
from strata.graph import Cut
from strata.methods import Aggregate, DeviceState, FedAvg, PersonalLayers
from strata.training import LocalTraining
from tests.methods.test_heads import data
from tests.methods.tiny import same_bits, tiny_net

OWN = ("classifier.weight", "classifier.bias")


class Largest:
    """Of each coordinate the update of the largest absolute value."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.best: dict[str, Tensor] = {}
        self.tensors = tensors
        self.updates = 0

    @property
    def changed(self) -> Iterable[str]:
        return self.best

    def add(self, cut: Cut, update: Mapping[str, Tensor], weight: float = 1.0) -> None:
        for name, tensor in update.items():
            known = self.best.get(name, torch.zeros_like(tensor))
            self.best[name] = torch.where(tensor.abs() > known.abs(), tensor, known)
        self.updates += 1

    def means(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        for name, tensor in self.best.items():
            yield name, tensor, torch.ones_like(tensor, dtype=torch.bool)


@dataclass(frozen=True)
class ByLargest(FedAvg):
    def aggregation(self, round: int, tensors: Mapping[str, Tensor]) -> Aggregate:
        return Largest(tensors)


@dataclass(frozen=True)
class Personal(FedAvg):
    """Each device has a classifier of its own."""

    @property
    def device_state(self) -> DeviceState:
        return PersonalLayers(OWN)


def run(out: Path, method: type[FedAvg], **options: object) -> strata.runs.Result:
    given = {"rounds": 4, "devices": 3, "per_round": 2, "workers": 0, "progress": False, "seed": 2, **options}
    return strata.run(tiny_net(), data(), method, out=out, training=LocalTraining(batch_size=32), **given)  # type: ignore[arg-type]


def last_state(out: Path) -> dict[str, Tensor]:
    newest = max((out / "checkpoint").glob("*.safetensors"))
    return {name[6:]: tensor for name, tensor in load_file(newest).items() if name.startswith("state/")}


def test_an_aggregation_of_its_own_by_hand() -> None:
    tensors = {"w": torch.tensor([1.0, 1.0])}
    largest = ByLargest.__new__(ByLargest).aggregation(0, tensors)
    cut = strata.ChannelGraph(tiny_net(), (3, 8, 8)).full()
    for update in ([3.0, -1.0], [-2.0, -4.0]):
        largest.add(cut, {"w": torch.tensor(update)})
    ((name, value, touched),) = largest.means()
    assert (name, value.tolist(), touched.all(), largest.updates) == ("w", [3.0, -4.0], True, 2)


def test_a_run_uses_it_and_refuses_what_would_replace_it(tmp_path: Path) -> None:
    own, plain = (run(tmp_path / method.name, method, rounds=1, per_round=3) for method in (ByLargest, FedAvg))
    assert own.metrics[0]["train_loss"] == plain.metrics[0]["train_loss"], "devices do the same"
    a, b = last_state(own.out), last_state(plain.out)
    for name in ("conv1.weight", "classifier.weight"):
        assert a[name].abs().sum() > b[name].abs().sum()
    for options in ({"aggregation": "median", "per_round": 3}, {"weighted": True}):
        with pytest.raises(BadInput, match="ByLargest aggregates in its own way"):
            run(tmp_path / "c", ByLargest, **options)


@pytest.fixture(scope="module")
def personal(tmp_path_factory: pytest.TempPathFactory) -> strata.runs.Result:
    return run(tmp_path_factory.mktemp("personal") / "a", Personal, per_round=3)


def test_what_a_device_keeps_is_its_own(personal: strata.runs.Result) -> None:
    before, after = tiny_net().state_dict(), last_state(personal.out)
    for name in OWN:
        assert torch.equal(after[name], before[name]), "the server's is as it was"
    assert not torch.equal(after["conv1.weight"], before["conv1.weight"])
    kept = [load_file(personal.out / "devices" / str(device) / "round-00000003.safetensors") for device in range(3)]
    assert all(set(one) == set(OWN) and not torch.equal(one[OWN[0]], before[OWN[0]]) for one in kept)
    assert not torch.equal(kept[0][OWN[0]], kept[1][OWN[0]])
    losses = [record["train_loss"] for record in personal.metrics]
    assert losses[-1] < losses[0]


def test_it_resumes_to_the_same_bits_in_processes_too(personal: strata.runs.Result, tmp_path: Path) -> None:
    out = tmp_path / "b"
    run(out, Personal, per_round=3, workers=2, checkpoint_every=2)
    assert same_bits(last_state(out), last_state(personal.out))
    for gone in ("model.safetensors", "summary.json", "checkpoint/round-00000004.json"):  # as after two rounds
        (out / gone).unlink()
    (out / "devices" / "0" / "round-00000003.safetensors").write_bytes(b"of a round that is run again")
    run(out, Personal, per_round=3, resume=True, checkpoint_every=2)
    assert same_bits(last_state(out), last_state(personal.out))
    for device in "012":
        name = f"devices/{device}/round-00000003.safetensors"
        assert same_bits(load_file(out / name), load_file(personal.out / name))


def test_the_store_keeps_what_a_checkpoint_may_need(tmp_path: Path) -> None:
    oldest = 0
    store = DeviceStore(tmp_path / "devices", lambda: oldest)
    assert store.read(7, 0) == {}
    for round in range(6):
        oldest = max(0, round - 1)
        store.write(7, round, {"w": torch.tensor([float(round)])})
    files = sorted(path.name for path in (tmp_path / "devices" / "7").iterdir())
    assert files == [f"round-0000000{number}.safetensors" for number in (3, 4, 5)], (
        "the oldest checkpoint is of round 4"
    )
    assert store.read(7, 6)["w"].tolist() == [5.0] and store.read(7, 4)["w"].tolist() == [3.0]
    assert len(list((tmp_path / "devices" / "7").iterdir())) == 1, "newer ones are of rounds that are run again"
    (tmp_path / "devices" / "7" / "round-00000003.safetensors").write_bytes(b"torn")
    with pytest.raises(BadInput, match="what device 7 kept"):
        store.read(7, 4)
