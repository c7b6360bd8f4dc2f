"""Activation checkpointing: the same bits, fewer bytes, FLOPs as counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from strata.core.errors import BadInput
from strata.data import ImageSet
from strata.execution import Execution, flops
from strata.execution.measured import measure
from strata.execution.placement import place
from strata.execution.segments import Placement, Segmented
from strata.graph import ChannelGraph, Cut
from strata.methods import FedAvg, FjORD, Method, Phase, Small, Task
from strata.models import resnet20
from strata.runs.folder import describe_training
from strata.training import LocalTraining, peak_bytes
from strata.training.cohorts import cohorts
from strata.training.trainer import Trainer
from tests.methods.tiny import hand_plan, same_bits, tiny_graph, tiny_state, train
from tests.networks import NETWORKS, Logits, graph_of
from tests.workspaces import workspace_of

PLAIN = LocalTraining(batch_size=8)
AUTO = replace(PLAIN, activation_checkpointing="auto")


def vit_with_dropout() -> tuple[nn.Module, tuple[int, ...]]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=32, patch_size=8, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64,
        num_labels=10, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    return Logits(ViTForImageClassification(config)), (3, 32, 32)


@cache
def network(name: str) -> tuple[ChannelGraph, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, shape = vit_with_dropout() if name == "vit" else NETWORKS[name]()
    graph = ChannelGraph(model, shape) if name == "vit" else graph_of(name)
    return graph, {k: v.clone() for k, v in model.state_dict().items()}


def settings_for(name: str) -> tuple[LocalTraining, LocalTraining]:
    """Without and with; small batches where they are enough for activations to outweigh parameters."""
    batch = {"densenet": 2, "vgg": 32}.get(name, 8)
    return replace(PLAIN, batch_size=batch), replace(AUTO, batch_size=batch)


def two_steps(name: str, cut: Cut, settings: LocalTraining) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and the whole state after: parameters, running statistics, counts of batches."""
    graph, state = network(name)
    small = workspace_of(graph).submodel(cut)
    small.load(cut.extract(state))
    trainer = Trainer(workspace_of(graph), Phase(cut), settings, lr=0.1)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)  # dropout
    losses = []
    for _ in range(2):
        x = torch.randn(settings.batch_size, *graph.input_shape, generator=generator)
        losses.append(trainer.step((x,), torch.randint(10, (settings.batch_size,), generator=generator)))
    return losses, {key: tensor.detach().clone() for key, tensor in small.state.items()}


def zeros(graph: ChannelGraph) -> ImageSet:
    return ImageSet(torch.zeros(32, *graph.input_shape, dtype=torch.uint8), torch.zeros(32, dtype=torch.long))


def placement_of(graph: ChannelGraph, cut: Cut, settings: LocalTraining) -> Placement:
    found = workspace_of(graph).placement(cut, settings)
    assert found is not None
    return found


# vgg writes in place, vit draws random numbers, the others have running statistics
@pytest.mark.parametrize("name", ["resnet20", "densenet", "vit", "vgg"])
def test_same_bits_and_less_memory(name: str) -> None:
    graph, state = network(name)
    cut = graph.full()
    without, auto = settings_for(name)
    losses, after = two_steps(name, cut, without)
    for settings in (auto, replace(without, activation_checkpointing=2)):
        assert placement_of(graph, cut, settings).cuts
        other_losses, other_after = two_steps(name, cut, settings)
        assert losses == other_losses and same_bits(after, other_after)
    counts = [tensor.item() for key, tensor in after.items() if key.endswith("num_batches_tracked")]
    assert counts == [2] * len(counts) and (counts or name in ("vit", "vgg")), "a recomputed batch is not another one"
    plain, low = (
        peak_bytes(workspace_of(graph), Task(0, 0, cut), zeros(graph), settings) for settings in (without, auto)
    )
    assert low < {"resnet20": 0.55, "densenet": 0.55, "vit": 0.7, "vgg": 0.9}[name] * plain
    if name == "vit":
        assert any(placement_of(graph, cut, auto).random), "dropout should be in a segment that is recomputed"


def test_dropout_is_the_same_in_the_second_run() -> None:
    """With other random numbers in it the gradient would be another one: so the equality above means something."""
    graph, state = network("vit")
    cut = graph.full()
    placement = placement_of(graph, cut, AUTO)
    forgetful = Segmented(
        workspace_of(graph).submodel(cut).module.train_graph,  # type: ignore[arg-type]
        replace(placement, random=(False,) * len(placement.random)),
    )
    small = workspace_of(graph).submodel(cut)
    x, y = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))

    def gradient(forward: Callable[[Tensor], Tensor]) -> Tensor:
        small.load(cut.extract(state))
        torch.manual_seed(0)
        functional.cross_entropy(forward(x), y).backward()
        found = next(p.grad for name, p in small.parameters.items() if "layers.0" in name and name.endswith("weight"))
        assert found is not None
        return found.clone()

    small.module.train()
    right = gradient(small.module)
    assert torch.equal(right, gradient(workspace_of(graph).forward(cut, AUTO)))
    assert not torch.equal(right, gradient(lambda x: forgetful(small.module, x)))


@pytest.mark.parametrize("name", ["resnet20", "hf_vit"])
@pytest.mark.parametrize("segments", [3, "auto"])
def test_flops_of_recomputation_are_those_that_torch_counts(name: str, segments: int | str) -> None:
    graph, _ = network(name)
    cut = graph.full()
    module = workspace_of(graph).submodel(cut).module.train()
    settings = replace(PLAIN, activation_checkpointing=segments)
    x, y = torch.randn(4, *graph.input_shape), torch.randint(10, (4,))
    segmented = workspace_of(graph).forward(cut, settings)

    def counted(forward: Callable[[Tensor], Tensor], also: dict[Any, Any] | None = None) -> int:
        with FlopCounterMode(display=False, custom_mapping=also) as counter:
            functional.cross_entropy(forward(x), y).backward()
        return int(counter.get_total_flops()) // 4

    recomputed = placement_of(graph, cut, settings).recomputed_flops
    assert counted(module) == flops(graph, cut).train
    # torch has no formula for the fused attention of the CPU: its own for the GPU's
    attention = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v)
    }
    assert recomputed == counted(segmented, attention) - counted(module, attention)
    assert 0 < recomputed < flops(graph, cut).real_forward, "the last segment is not recomputed"


# --- a chain that can be followed by hand ----------------------------------------------------------------------------

WIDTH, BATCH, DEPTH = 8, 4096, 16
ACTIVATION = 4 * WIDTH * BATCH


class Chain(nn.Module):
    """Equal layers. Of each, autograd keeps the result of tanh: it is tanh's own and the next layer's input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class InSegments(nn.Module):
    def __init__(self, module: nn.Module, segmented: Segmented) -> None:
        super().__init__()
        self.module, self.segmented = module, segmented

    def forward(self, x: Tensor) -> Tensor:
        return self.segmented(self.module, x)


def activations_at_peak(module: nn.Module, placement: Placement | None) -> float:
    """In units of one layer's result."""
    train_graph = module.train_graph
    run = module if placement is None else InSegments(module, Segmented(train_graph, placement))  # type: ignore[arg-type]
    found = measure(run, (WIDTH,), Execution(BATCH), classes=2)
    return (found.peak - found.standing) / ACTIVATION


def test_bytes_of_a_chain_by_hand() -> None:
    graph = ChannelGraph(Chain(), input_shape=(WIDTH,))
    cut = graph.full()
    module = graph.submodel(cut, zeros=True)
    rest = 0.6  # logits (1/4) and what comes of them; gradients of parameters (1/512 each)
    # 16 results, the gradient that arrives at the last tanh and the one that leaves it
    assert 18 <= activations_at_peak(module, None) < 18 + rest
    # four segments of four layers: highest in the last one, with 3 boundaries, 4 results, 2 gradients
    equal = Placement(tuple(range(2 * DEPTH + 1)), 0, (8, 16, 24), (False,) * 3, 0)
    assert 9 <= activations_at_peak(module, equal) < 9 + rest
    # best: 6 + 5 + 4 + 1 layers. Every segment then has at most 6 results and boundaries, and 5 + 4 + 3 + 2 + 1 < 16
    best = place(graph, cut, "auto", BATCH)
    assert 8 <= activations_at_peak(module, best) < 8 + rest and len(best.cuts) == 3
    assert place(graph, cut, 4, BATCH).cuts == best.cuts == place(graph, cut, 9, BATCH).cuts
    # two segments, 8 + 8 or 9 + 7 layers: 9 boundaries and results at most; 8 if what crosses needs not be kept
    two = place(graph, cut, 2, BATCH)
    assert 10 <= activations_at_peak(module, two) < 11 + rest and len(two.cuts) == 1
    layer = 2 * WIDTH * WIDTH
    assert place(graph, cut, 2, BATCH).recomputed_flops in (8 * layer, 9 * layer)


# --- with the rest of training ---------------------------------------------------------------------------------------


def test_frozen_layers_run_once_and_the_rest_in_segments() -> None:
    graph, state = network("resnet20")
    plan = hand_plan(graph, (0, 0, 0.5, 1), (3, 4, 0.5, 9))
    cut = plan.cut(1)
    placement = placement_of(graph, cut, AUTO)
    trained = [op.requires_grad for op in graph.sized(cut, 2) if op.kind in ("op", "cut")]
    early = placement.order[: placement.begin]
    # frozen layers, and the cut of the last one's result, which the residual connection takes only later
    assert max(early) > trained.index(True) > 0 and not any(trained[index] for index in early) and placement.cuts
    losses, after = two_steps("resnet20", cut, PLAIN)
    other_losses, other_after = two_steps("resnet20", cut, AUTO)
    assert losses == other_losses and same_bits(after, other_after)
    plain, low = (
        peak_bytes(workspace_of(graph), Task(0, 0, cut), zeros(graph), settings) for settings in (PLAIN, AUTO)
    )
    assert low < 0.8 * plain


@pytest.mark.parametrize("name", ["fedavg", "fjord"])
@pytest.mark.parametrize("more", [{}, {"micro_batch": 3, "proximal": 0.1}], ids=["plain", "micro-batches"])
def test_updates_of_levels_micro_batches_and_the_proximal_term(name: str, more: dict[str, float]) -> None:
    method: Method = FedAvg(tiny_graph()) if name == "fedavg" else FjORD(tiny_graph(), (0.5, 0.25))
    (task,) = method.assign(0, [0])
    plain = LocalTraining(batch_size=8, **more)  # type: ignore[arg-type]
    checkpointed = replace(plain, activation_checkpointing="auto")
    one, other = (train(method, task, tiny_state(), settings) for settings in (plain, checkpointed))
    assert one.loss == other.loss and same_bits(one.tensors, other.tensors)
    assert other.peak_bytes < one.peak_bytes


def test_devices_are_on_their_own() -> None:
    graph = tiny_graph()
    tasks = Small(graph, (0.5,)).assign(0, [0, 1, 2])
    assert cohorts(workspace_of(graph), tasks, [8] * 3, PLAIN) == [[0, 1, 2]]
    assert cohorts(workspace_of(graph), tasks, [8] * 3, AUTO) == [[0], [1], [2]]


def test_settings() -> None:
    assert "activation_checkpointing" not in describe_training(PLAIN), "older folders must stay resumable"
    assert describe_training(AUTO)["activation_checkpointing"] == "auto"
    for wrong in (0, 1, -2, True, "some"):
        with pytest.raises(BadInput, match="auto or a number of segments from 2"):
            LocalTraining(activation_checkpointing=wrong)


class Counting(nn.Module):
    """Reads a buffer that it changes: a second run would see another value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 3)
        self.register_buffer("count", torch.ones(()))
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        self.count.add_(1)
        return self.head(torch.tanh(torch.tanh(self.second(x) / self.count)))


def test_a_buffer_that_is_read_and_changed_is_refused() -> None:
    graph = ChannelGraph(Counting(), input_shape=(4,))
    settings = LocalTraining(batch_size=64, activation_checkpointing="auto")
    with pytest.raises(BadInput, match="count.*cannot be recomputed"):
        workspace_of(graph).forward(graph.full(), settings)


def test_places_are_the_same_whatever_ran_before() -> None:
    fresh, (used, _) = ChannelGraph(resnet20(), (3, 32, 32)), network("resnet20")
    two_steps("resnet20", used.full(), AUTO)
    assert place(fresh, fresh.full(), "auto", 8) == place(used, used.full(), "auto", 8)
