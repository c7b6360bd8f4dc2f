"""A method that trains an auxiliary head: what the head's output does not need is not sent, trained nor counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import strata
from strata.core.errors import BadInput
from strata.data import FederatedData, ImageSet
from strata.execution import Execution, flops, measure_cut, memory, state_bytes
from strata.graph import ChannelGraph, Cut, InputSpec
from strata.methods import Card, Method, WithHeads, with_classifiers
from strata.methods.heads import is_prepared, plain_names, prepared_model
from strata.training import LocalTraining
from tests.methods.tiny import CLASSES, INPUT, PAPER, samples, tiny_net, train

INPUTS = InputSpec.of(INPUT)
STEP = Execution(batch_size=32)
PLACES = ("stem", "bn2")  # after layer 1; after layer 3, before the add and the relu


@dataclass(frozen=True)
class BlockByBlock(Method):
    """The stem with a classifier on it, then the block with another, then the rest with the model's own."""

    card = Card("block-by-block")
    rounds: int = 6

    @classmethod
    def prepare(cls, model: nn.Module, inputs: InputSpec) -> nn.Module:
        return with_classifiers(model, inputs, PLACES)

    def step(self, round: int) -> int:
        return min(2, 3 * round // self.rounds)

    def cut_for(self, round: int, device: int) -> Cut:
        return self.graph.freeze(self.evaluation_cut(round), (0, 1, 3)[self.step(round)])

    def evaluation_cut(self, round: int) -> Cut:
        output = ("head1", "head2", "output")[self.step(round)]
        return self.graph.for_output(self.graph.full(), output)


def whole_net(seed: int = 0) -> nn.Module:
    return prepared_model(BlockByBlock, tiny_net(seed), INPUTS, seed)


@cache
def graph() -> ChannelGraph:
    return ChannelGraph(whole_net(), INPUT)


@cache
def method() -> BlockByBlock:
    return BlockByBlock(graph())


def state() -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in whole_net().state_dict().items()}


def test_outputs_and_layers() -> None:
    assert list(graph().outputs) == ["output", "head1", "head2"] and graph().depth == 4
    assert graph().layer_of["heads.head1.2.weight"] == graph().layer_of["model.classifier.weight"] == 5


def test_a_cut_for_an_output_holds_what_that_needs_and_no_more() -> None:
    early, late, main = (graph().for_output(graph().full(), name) for name in ("head1", "head2", "output"))
    assert {name.split(".")[1] for name in early.shapes} == {"stem", "head1"}
    assert {name.split(".")[1] for name in late.shapes} == {"stem", "conv1", "bn1", "conv2", "bn2", "head2"}
    assert set(main.shapes) == {f"model.{name}" for name in tiny_net().state_dict()}
    assert early.trained == tuple(name for name in early.shapes if name in graph().parameter_names)
    assert graph().freeze(late, 1).frozen == {"model.stem.0.weight", "model.stem.1.weight", "model.stem.1.bias"}
    assert Cut.from_json(json.loads(json.dumps(early.to_json()))) == early and "output" not in graph().full().to_json()
    assert graph().union([early, late, main]) == graph().full()
    for cut in (early, late):
        assert cut.within(graph().full()) == cut
    with pytest.raises(BadInput, match=r"keeps heads.head1.2.weight, which the outer cut does not have"):
        early.within(main)
    with pytest.raises(BadInput, match="already for the output head1"):
        graph().for_output(early, "head2")
    with pytest.raises(BadInput, match="returns no head3; it returns output, head1, head2"):
        graph().for_output(graph().full(), "head3")


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("name", ["output", "head1", "head2"])
def test_the_submodel_computes_that_output(name: str, scale: float) -> None:
    """In float64, as the whole network does with dropped channels zeroed: here the narrow network, built by hand."""
    cut = graph().for_output(graph().prefix(scale), name)
    own = cut.extract(state())
    x = torch.randn(4, *INPUT, generator=torch.Generator().manual_seed(1))
    module = graph().submodel(cut, own)
    assert dict(module.state_dict()).keys() == own.keys()
    whole = whole_net()
    everything = {key: torch.zeros_like(tensor) for key, tensor in whole.state_dict().items()}
    graph().prefix(scale).scatter(everything, graph().prefix(scale).extract(state()))
    whole.load_state_dict(everything)
    for training in (False, True):
        expected = whole.train(training)(x)[name]
        torch.testing.assert_close(module.train(training)(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("frozen", [0, 1])
def test_bytes_and_work_are_those_of_what_runs(frozen: int) -> None:
    early, late, main = (graph().freeze(graph().for_output(graph().full(), name), frozen) for name in
                         ("head1", "head2", "output"))  # fmt: skip
    for cut in (early, late, main):
        measured = measure_cut(graph(), cut, STEP).peak
        assert -0.01 <= memory(graph(), cut, STEP).total / measured - 1 <= 0.03
    stem, head = 3 * 8 * 9 + 4 * 8 + 2, 8 * CLASSES + CLASSES  # the counter of batches has twice the bytes
    assert state_bytes(graph(), early) == 4 * (stem + head)
    plain = ChannelGraph(tiny_net(), INPUT)
    assert memory(graph(), main, STEP) == memory(plain, plain.freeze(plain.full(), frozen), STEP), (
        "heads cost nothing there"
    )
    assert flops(graph(), main) == flops(plain, plain.freeze(plain.full(), frozen))
    assert memory(graph(), early, STEP).total < memory(graph(), late, STEP).total


def test_a_device_trains_and_sends_back_the_head() -> None:
    task = method().assign(0, [0])[0]
    update = train(method(), task, state())
    assert set(update.tensors) == {"model.stem.0.weight", "model.stem.1.weight", "model.stem.1.bias",
                                   "heads.head1.2.weight", "heads.head1.2.bias"}  # fmt: skip
    received = task.cut.extract(state())
    images, labels = samples(0)
    module = graph().submodel(task.cut, received).train()
    optimizer = torch.optim.SGD(module.parameters(), 0.1, 0.9, weight_decay=1e-5)
    (floats,) = PAPER.prepared((images,))
    functional.cross_entropy(module(floats), labels).backward()  # 20 samples: one batch, in whatever order
    optimizer.step()
    for name, tensor in module.named_parameters():
        torch.testing.assert_close(update.tensors[name], tensor.detach(), rtol=1e-4, atol=1e-6)


def test_preparing() -> None:
    assert is_prepared(BlockByBlock) and not is_prepared(strata.FedAvg)
    model = tiny_net()
    assert prepared_model(strata.FedAvg, model, INPUTS, 0) is model
    assert plain_names(model, model)["bn1.bias"] == "bn1.bias"
    one, same, other = (prepared_model(BlockByBlock, model, INPUTS, seed).state_dict() for seed in (3, 3, 4))
    head = "heads.head1.2.weight"
    assert torch.equal(one[head], same[head]) and not torch.equal(one[head], other[head]), "from the seed alone"
    with pytest.raises(BadInput, match="TinyNet has no part named 'stern' to put a head on"):
        with_classifiers(model, INPUTS, ("stern",))
    with pytest.raises(BadInput, match="without dots other than 'output'"):
        WithHeads(model, INPUTS, {"output": nn.Identity()}, {"output": "stem"})
    with pytest.raises(BadInput, match="Linear must hold the TinyNet that it was prepared from"):
        plain_names(nn.Linear(1, 1), model)


# --- runs --------------------------------------------------------------------------------------------------------


def data() -> FederatedData:
    parts = [samples(number, 60) for number in range(9)]
    images, labels = (torch.cat([part[kind] for part in parts]) for kind in (0, 1))
    mean, std = (0.35,) * 3, (0.2,) * 3
    return FederatedData(
        ImageSet(images[:480], labels[:480], mean, std),
        ImageSet(images[480:], labels[480:], mean, std),
        "tiny",
        CLASSES,
    )


def run(out: Path, **options: object) -> strata.runs.Result:
    given = {"rounds": 6, "devices": 6, "per_round": 2, "workers": 0, "progress": False, "seed": 2, **options}
    training = LocalTraining(batch_size=16, epochs=2)
    return strata.run(tiny_net(), data(), BlockByBlock, out=out, training=training, **given)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[strata.runs.Result]:
    yield run(tmp_path_factory.mktemp("heads") / "a")


def test_it_learns_by_heads_and_the_plain_model_loads_the_result(finished: strata.runs.Result) -> None:
    records = finished.metrics
    assert [record["step"] for record in records] == [0, 0, 1, 1, 2, 2]
    assert records[1]["train_loss"] < records[0]["train_loss"] and finished.accuracy > 0.6
    model = tiny_net()
    model.load_state_dict(finished.state_dict())  # strictly: no head in it
    held = data().test
    (floats,) = LocalTraining(mean=held.mean, std=held.std).prepared((held.images,))
    accuracy = (model.eval()(floats).argmax(1) == held.labels).float().mean().item()
    assert accuracy == pytest.approx(finished.accuracy, abs=0.02)


def test_only_what_the_output_needs_is_sent(finished: strata.runs.Result) -> None:
    sizes = [method().cut_for(round, 0) for round in (0, 2, 4)]
    uploads = [2 * 4 * sum(torch.Size(cut.shapes[name]).numel() for name in cut.trained) for cut in sizes]
    assert [record["upload_bytes"] for record in finished.metrics][::2] == uploads
    peaks = [record["peak_bytes"] for record in finished.metrics]
    assert peaks[0] == peaks[1] < peaks[2]


def test_it_resumes_to_the_same_bits(finished: strata.runs.Result, tmp_path: Path) -> None:
    out = tmp_path / "b"
    run(out, workers=2, checkpoint_every=3)
    whole = (finished.out / "model.safetensors").read_bytes()
    assert (out / "model.safetensors").read_bytes() == whole, "other workers, the same bits"
    for gone in ("model.safetensors", "summary.json", "checkpoint/round-00000006.json"):  # as after three rounds
        (out / gone).unlink()
    run(out, resume=True, checkpoint_every=3)
    assert (out / "model.safetensors").read_bytes() == whole
    assert [{**one, "seconds": 0} for one in strata.runs.read_metrics(out)] == [
        {**one, "seconds": 0} for one in finished.metrics
    ]


def test_the_final_model_is_judged_by_its_own_output(tmp_path: Path) -> None:
    class Early(BlockByBlock):
        def step(self, round: int) -> int:
            return 0

    with pytest.raises(BadInput, match="Early evaluates head1 after the last round"):
        strata.run(tiny_net(), data(), Early, out=tmp_path / "a", rounds=2, devices=6, per_round=2, workers=0)
    assert not (tmp_path / "a").exists()
