"""Recomputation in closed form against real training: of every network, whole and in micro-batches, as the measuring
process runs it and as a device does."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strata.core.errors import BadInput
from strata.execution import Execution, flops, measure, measure_cut, memory
from strata.execution.placement import observe, place
from strata.execution.segments import Boundary, Placement, Segmented, boundaries
from strata.execution.simulated import peak
from strata.graph import ChannelGraph, Cut
from strata.ops.bytes import NoRule
from strata.planning import Plan, plan
from strata.training import LocalTraining
from strata.training.memory import measured_bytes
from tests.networks import NAMES, NETWORKS, graph_of
from tests.workspaces import workspace_of

torch.set_num_threads(1)

WAYS = {
    "auto": Execution(16, activation_checkpointing="auto"),
    "two segments": Execution(12, activation_checkpointing=2),
    # parts of 6, 6 and 4 samples
    "auto in micro-batches": Execution(16, 6, "auto"),
    "micro-batches": Execution(16, 6),
}


def some_cuts(graph: ChannelGraph) -> dict[str, Cut]:
    third = graph.depth // 3
    return {"full": graph.full(), "prefix": graph.prefix(0.3), "one third": graph.slt(third, third + 1, 0.4)}


def ways() -> list[Any]:
    """Every network in one way, each of which meets two networks or more; `make slow` has all in every way."""
    usual = set(zip(NAMES, cycle(WAYS), strict=False))
    pairs = [(name, way) for name in NAMES for way in WAYS]
    return [pytest.param(*pair, marks=() if pair in usual else pytest.mark.slow) for pair in pairs]


@pytest.mark.parametrize(("name", "way"), ways())
def test_networks_against_real_training(name: str, way: str) -> None:
    """The work asks for -1 % to +3 %. Within a thousandth, but for a transformer's cut (+0.5 %) and `gated`, of which
    up to 0.15 % is missing since images are channels last (why is not known)."""
    graph, execution = graph_of(name), WAYS[way]
    for kind, cut in some_cuts(graph).items():
        predicted = memory(graph, cut, execution).total
        measured = measure_cut(graph, cut, execution).peak
        assert (0.998 if name == "gated" else 0.999) * measured <= predicted <= 1.01 * measured, f"{name}, {kind}"
        assert_device(graph, cut, execution, predicted, f"{name}, {kind}")


def assert_device(graph: ChannelGraph, cut: Cut, execution: Execution, predicted: int, what: str) -> None:
    on_a_device = measured_bytes(workspace_of(graph), cut, LocalTraining(**vars(execution)))
    assert 0.99 * on_a_device <= predicted <= 1.03 * on_a_device, what


def test_recomputation_is_less_and_costs_flops() -> None:
    graph = graph_of("resnet20")
    cut, auto = graph.full(), Execution(activation_checkpointing="auto")
    found, plain = memory(graph, cut, auto), memory(graph, cut, Execution())
    assert found.total < 0.5 * plain.total
    assert found.total == found.weights + found.gradients + found.activations
    assert memory(graph, cut, auto, "paper") == memory(graph, cut, Execution(), "paper")
    more = flops(graph, cut, auto)
    assert more.recomputed == place(graph, cut, "auto", 32).recomputed_flops > 0
    assert more == replace(flops(graph, cut), recomputed=more.recomputed)
    assert more.real_train == flops(graph, cut, Execution()).real_train + more.recomputed


# --- by hand ---------------------------------------------------------------------------------------------------------

WIDTH, BATCH = 8, 512
ONE = 4 * WIDTH * BATCH  # one layer's result


class Chain(nn.Module):
    """Four equal layers; of each, autograd keeps the result of tanh: its own and the next layer's input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_a_chain_by_hand() -> None:
    graph = ChannelGraph(Chain(), (WIDTH,))
    cut, weight = graph.full(), 4 * WIDTH * WIDTH
    ops, execution = graph.sized(cut, BATCH), Execution(BATCH)
    standing = 8 * weight + BATCH * (4 * WIDTH + 8)  # weights, momentum, the batch
    scalars = 8  # the loss and its gradient

    def found(cuts: tuple[int, ...]) -> int:
        placement = Placement(tuple(range(8)), 0, cuts, (False,) * len(cuts), 0)
        predicted = peak(ops, 4 * weight, [weight] * 4, execution, placement).total
        module = graph.submodel(cut, zeros=True)
        forward = Segmented(module.train_graph, placement) if cuts else None  # type: ignore[arg-type]
        assert abs(predicted - measure(module, (WIDTH,), execution, WIDTH, forward).peak) <= 4  # a scalar of the loss
        return predicted - standing

    # The loss keeps the probabilities and, going backward, two more of that size: beside the results of all layers
    # while nothing is recomputed, and beside the first segment's result and two more with a cut in the middle.
    assert found(()) == 4 * ONE + 3 * ONE + scalars + 4
    assert found((4,)) == 3 * ONE + 3 * ONE + scalars + 4
    # Cut after three layers, one result less is there at the loss. The three layers' own are computed again, with the
    # gradient of the third's result: its tanh makes another. The last layer's gradient is there.
    assert found((6,)) == max(2 * ONE + 3 * ONE + scalars + 4, 3 * ONE + 2 * ONE + scalars + weight)


def test_boundaries_by_hand() -> None:
    parts = [[("a", ["x"]), ("b", ["a"])], [("c", ["b", "a"]), ("d", ["c"])], [("e", ["d", "b"])]]
    assert boundaries(parts, "e") == [
        Boundary(("x",), ("a", "b"), ("x",)),
        Boundary(("b", "a"), ("d",), ("a",)),
        Boundary(("d", "b"), ("e",), ("d", "b")),
    ]


# --- what is written in place ----------------------------------------------------------------------------------------


def test_no_segment_begins_with_what_is_written_in_place_later() -> None:
    """Frozen layers with in-place activations: they ran first but for those, and could not be computed again."""
    for name in ("mobilenet", "vgg"):
        graph = graph_of(name)
        ops = graph.sized(graph.slt(2, 3, 0.4), 8)
        found = place(graph, graph.slt(2, 3, 0.4), "auto", 8)
        observed = observe(ops, found.order)
        for place_ in (found.begin, *found.cuts):
            late = {one for call in observed.calls[place_:] for one in call.changed} - observed.weights
            assert all(observed.born[one] >= place_ for one in late)


class Overwritten(nn.Module):
    """Changes the batch itself, and has an operator that neither has a rule nor can be learned."""

    def __init__(self, unknown: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 if i == 0 else 16, 16, 3, padding=1) for i in range(5))
        self.head, self.unknown = nn.Linear(16, 4), unknown

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.unknown else x.relu_()
        for layer in self.layers:
            x = functional.gelu(layer(x))
            x = x.cumsum_(2) if self.unknown else x
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("unknown", [False, True], ids=["batch changed in place", "no rule"])
def test_what_the_closed_form_does_not_know_is_traced(unknown: bool) -> None:
    graph = ChannelGraph(Overwritten(unknown), (3, 12, 12))
    cut = graph.full()
    for execution in (Execution(16, activation_checkpointing="auto"), Execution(16, 6, "auto")):
        placement = place(graph, cut, "auto", execution.at_once)
        assert placement.cuts
        if unknown:
            with pytest.raises(NoRule):
                peak(graph.sized(cut, 8), 0, [], execution, placement)
        measured = measure_cut(graph, cut, execution).peak
        assert 0.99 * measured <= memory(graph, cut, execution).total <= 1.03 * measured
        assert measured < 0.9 * measure_cut(graph, cut, Execution(16, execution.micro_batch)).peak


# --- plans -----------------------------------------------------------------------------------------------------------


def test_a_plan_counts_recomputation() -> None:
    graph = graph_of("resnet20")
    budget = memory(graph, graph.full(), Execution(activation_checkpointing="auto")).total
    whole = plan(graph, budget=budget, activation_checkpointing="auto")
    assert len(whole.steps) == 1 and whole.steps[0].scale == 1 and whole.full_bytes == budget
    assert len(plan(graph, budget=budget).steps) > 1
    data = whole.to_json()
    assert (
        data["activation_checkpointing"] == "auto"
        and "activation_checkpointing" not in plan(graph, constraint=1.0).to_json()
    )
    again = Plan.from_json(data, graph)
    assert again == whole and again.hash == whole.hash
    recomputed = flops(graph, graph.full(), whole.execution)
    assert whole.steps[0].train_flops_per_sample == recomputed.real_train > flops(graph, graph.full()).real_train
    given = plan(graph, budget=budget, execution=LocalTraining(activation_checkpointing="auto"))
    assert given == whole and type(given.execution) is Execution
    with pytest.raises(BadInput, match="auto or a number of segments from 2, not 1"):
        plan(graph, budget=budget, activation_checkpointing=1)


def test_slots_of_an_optimizer_of_the_user() -> None:
    graph = graph_of("vgg")
    trained = sum(p.numel() * 4 for p in NETWORKS["vgg"]()[0].parameters())

    def bytes_of(settings: LocalTraining) -> int:
        return memory(graph, graph.full(), settings).total

    plain = LocalTraining(batch_size=4, momentum=0.0)
    assert bytes_of(replace(plain, momentum=0.9)) - bytes_of(plain) == pytest.approx(trained, abs=100)
    adam = replace(plain, optimizer=torch_adam)
    assert adam.slots == 2 and replace(plain, optimizer=torch_sgd).slots == 0
    assert bytes_of(adam) - bytes_of(plain) == pytest.approx(2 * trained, abs=100)


def torch_adam(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr)


def torch_sgd(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr)
