"""Ways of keeping less, in closed form against real training: as the measuring process runs it and as a device does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from strata.execution import Execution, measure_cut, memory
from strata.graph import ChannelGraph, Cut
from strata.models.loading import load_model
from strata.planning import plan
from strata.planning.verify import verify
from strata.training import LocalTraining
from strata.training.memory import measured_bytes
from tests.networks import graph_of
from tests.workspaces import workspace_of

torch.set_num_threads(1)

WAYS = {
    "micro-batches": Execution(10, 4),
    "micro-batches, recomputed": Execution(10, 4, "auto"),
    "frozen layers in chunks": Execution(12, frozen_chunk=3),
    "frozen layers in chunks, recomputed": Execution(12, None, "auto", frozen_chunk=5),
    "frozen layers in chunks, micro-batches": Execution(12, 8, frozen_chunk=2),
    "released": Execution(4, release_gradients=True),
    "released, recomputed": Execution(4, activation_checkpointing="auto", release_gradients=True),
    "released, micro-batches": Execution(10, 4, release_gradients=True),
    "released, micro-batches, recomputed": Execution(10, 4, "auto", release_gradients=True),
    "momentum in bfloat16": Execution(2, momentum_dtype="bfloat16"),
    "released, momentum in bfloat16": Execution(2, momentum_dtype="bfloat16", release_gradients=True),
    "released, no momentum": Execution(2, momentum=0.0, release_gradients=True),
}


def some_cuts(graph: ChannelGraph) -> dict[str, Cut]:
    third = graph.depth // 3
    return {"full": graph.full(), "prefix": graph.prefix(0.5), "one third": graph.slt(third, third + 1, 0.4)}


def assert_bytes(graph: ChannelGraph, cut: Cut, execution: Execution, what: str) -> None:
    predicted = memory(graph, cut, execution)
    measured = measure_cut(graph, cut, execution).peak
    device = measured_bytes(workspace_of(graph), cut, LocalTraining(**vars(execution)))
    assert 0.99 * measured <= predicted.total <= 1.03 * measured, what
    assert 0.99 * device <= predicted.total <= 1.03 * device, f"{what}, a device"
    assert predicted.total == predicted.weights + predicted.gradients + predicted.activations


NETWORKS = {
    "vgg": tuple(WAYS),
    "mobilenet": ("micro-batches", "frozen layers in chunks"),
    "hf_vit": ("released", "frozen layers in chunks"),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_against_real_training(name: str) -> None:
    graph = graph_of(name)
    for kind, cut in some_cuts(graph).items():
        for way in NETWORKS[name]:
            assert_bytes(graph, cut, WAYS[way], f"{name}, {kind}, {way}")


class Heavy(nn.Module):
    """All weights and hardly any activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)), nn.Linear(256, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_what_weights_take_by_hand() -> None:
    graph = ChannelGraph(Heavy(), (256,))
    one = 4 * 256 * 256  # a layer's weights

    def layers(execution: Execution) -> float:
        found = memory(graph, graph.full(), execution)
        assert found.total == pytest.approx(measure_cut(graph, graph.full(), execution).peak, rel=0.001)
        return found.total / one

    # four layers' weights, momentum and gradients; weight decay makes no copy
    assert layers(Execution(1)) == pytest.approx(12, abs=0.2)
    assert layers(Execution(1, weight_decay=0.0)) == pytest.approx(12, abs=0.2)
    # one gradient at a time
    assert layers(Execution(1, release_gradients=True)) == pytest.approx(9, abs=0.2)
    assert layers(Execution(1, release_gradients=True, momentum=0.0)) == pytest.approx(5, abs=0.2)
    assert layers(Execution(4, 2, release_gradients=True)) == pytest.approx(9, abs=0.2)
    # of a batch in parts all wait, and the newest is beside them
    assert layers(Execution(4, 2)) == pytest.approx(13, abs=0.2)
    # half the momentum, and as floats of one layer
    assert layers(Execution(1, momentum_dtype="bfloat16")) == pytest.approx(11, abs=0.2)
    assert layers(Execution(1, momentum_dtype="bfloat16", release_gradients=True)) == pytest.approx(8, abs=0.2)


class Shared(nn.Module):
    """A large parameter that is used twice, with a layer between."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.between, self.last = nn.Parameter(torch.ones(2048)), nn.Linear(2048, 2048), nn.Linear(2048, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(x * self.twice).tanh() * self.twice)


@pytest.mark.parametrize("release", [False, True])
def test_a_parameter_that_is_used_twice_has_one_gradient(release: bool) -> None:
    graph = ChannelGraph(Shared(), (2048,))
    execution = Execution(2, release_gradients=release)
    predicted, measured = memory(graph, graph.full(), execution).total, measure_cut(graph, graph.full(), execution).peak
    assert predicted == pytest.approx(measured, rel=0.001)


def test_waiting_samples_take_what_the_data_holds() -> None:
    graph = graph_of("mobilenet")
    pixels = 3 * 32 * 32

    def bytes_of(batch: int, settings: Execution | None = None) -> int:
        return memory(graph, graph.full(), settings or Execution(batch, 4)).total

    assert bytes_of(20) - bytes_of(12) == 8 * (pixels + 8)
    # a function of the user's gets the batch whole, so it waits as floats
    own = [LocalTraining(batch, 4, transform=as_floats, preparation=as_floats) for batch in (12, 20)]
    assert bytes_of(20, own[1]) - bytes_of(12, own[0]) == 8 * (4 * pixels + 8)
    # one part: nothing waits
    assert bytes_of(4) == bytes_of(4, Execution(4))


def as_floats(images: Tensor, generator: torch.Generator | None = None) -> Tensor:
    return images.float()


# --- frozen weights in a mapped file ----------------------------------------------------------------------------------

NETS = """
from torch import nn

def heavy():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 700), *(nn.Linear(700, 700) for _ in range(5)), nn.Linear(700, 10))
"""


@pytest.mark.parametrize("name", ["vgg", "mobilenet"])
def test_mapped_weights_are_counted_apart(name: str) -> None:
    graph = graph_of(name)
    third = graph.depth // 3
    cut = graph.slt(third, third + 1, 0.4)
    plain, mapped = (memory(graph, cut, Execution(4, frozen_weights=where)) for where in ("memory", "mapped"))
    frozen = sum(4 * torch.Size(cut.shapes[one]).numel() for one in graph.parameter_names if one in cut.frozen)
    assert mapped.mapped == frozen > 0 == plain.mapped
    assert mapped.total == plain.total - frozen and mapped.weights == plain.weights - frozen
    assert_bytes(graph, cut, Execution(4, frozen_weights="mapped"), name)


def test_mapped_weights_need_not_be_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a kernel limit that leaves no room for them."""
    (tmp_path / "strata_heavy_nets.py").write_text(NETS)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "strata_heavy_nets:heavy"
    graph = ChannelGraph(load_model(name), (1, 8, 8))
    step = (graph.depth - 1, graph.depth, 1.0)
    found = {
        where: memory(graph, graph.slt(*step), Execution(4, frozen_weights=where)) for where in ("memory", "mapped")
    }
    assert found["mapped"].mapped == found["memory"].total - found["mapped"].total > 7 * 2**20
    whole = plan(graph, budget="1 GB", batch_size=4)
    lived = {}
    for where in ("memory", "mapped"):
        tried = replace(
            whole,
            execution=Execution(4, frozen_weights=where),
            budget_bytes=found["mapped"].total,
            full_bytes=20 * 2**20,  # a margin of 2 MiB
            steps=(replace(whole.steps[0], k_frozen=step[0], k_trained=step[1]),),
        )
        (trial,) = verify(tried, name, None, hard_cap=True)
        assert trial.predicted_bytes == found[where].total and trial.difference == pytest.approx(0, abs=0.01)
        lived[where] = trial.lived
    assert lived == {"memory": False, "mapped": True}
