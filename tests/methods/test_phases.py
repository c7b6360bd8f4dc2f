"""A task of several phases: what is sent, what is trained, and in which order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from strata.core.errors import BadInput
from strata.data import ImageSet
from strata.data.objectives import Classification
from strata.methods import Card, FedAvg, Method, Phase, Task
from strata.runs.session import flops_of_tasks
from strata.training import LocalTraining, peak_bytes, train_device
from strata.training.loop import Draws
from tests.methods.tiny import PAPER, same_bits, samples, tiny_graph, tiny_state, train
from tests.workspaces import workspace_of


@dataclass(frozen=True)
class TwoPhases(Method):
    """First the lower layers of a narrow model, then the upper layers of the whole one."""

    card = Card("two-phases")

    def phases_for(self, round: int, device: int) -> tuple[Phase, ...]:
        lower = frozenset(name for name, layer in tiny_graph().layer_of.items() if layer > 2)
        return Phase(tiny_graph().prefix(0.5).with_frozen(lower)), Phase(tiny_graph().freeze(tiny_graph().full(), 2))


@dataclass(frozen=True)
class Doubled(Classification):
    """An objective of the method's own: twice the cross-entropy."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 2 * functional.cross_entropy(outputs, targets, reduction="none")

    def mean_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 2 * functional.cross_entropy(outputs, targets)


def test_what_is_sent_holds_all_phases_and_what_any_of_them_trains_comes_back() -> None:
    method = TwoPhases(tiny_graph())
    (task,) = method.assign(0, [0])
    assert task.cut == method.cut_for(0, 0) == tiny_graph().full(), "each layer is trained in one of the phases"
    assert [len(phase.cut.frozen) > 0 for phase in task.phases] == [True, True]
    update = train(method, task, tiny_state())
    assert set(update.tensors) == set(tiny_graph().parameter_names)
    received = tiny_state()
    narrow = update.tensors["stem.0.weight"]
    assert not torch.equal(narrow[:4], received["stem.0.weight"][:4])
    assert torch.equal(narrow[4:], received["stem.0.weight"][4:]), "outside the first phase's cut nothing moves"


def test_two_phases_are_two_trainings_one_after_the_other_by_hand() -> None:
    """The second phase starts from what the first has left, and draws on from where it stopped."""
    task = TwoPhases(tiny_graph()).assign(3, [1])[0]
    images, labels = samples(1)
    own, space = ImageSet(images, labels), workspace_of(tiny_graph())
    state = tiny_state()
    update = train_device(space, task, task.cut.extract(state), own, PAPER, 0.1, seed=1)

    first, second = (phase.cut for phase in task.phases)
    one = train_device(space, Task(3, 1, first), first.extract(state), own, PAPER, 0.1, seed=1)
    between = {name: tensor.clone() for name, tensor in state.items()}
    first.scatter(between, one.tensors)
    order = torch.randperm(20, generator=Draws.of(1, task).order)
    drawn = Draws.of(1, task)
    assert torch.equal(torch.randperm(20, generator=drawn.order), order)
    again = torch.randperm(20, generator=drawn.order)  # the order of the second phase: without augmentation, all of it
    module = tiny_graph().submodel(second, second.extract(between)).train()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.1, 0.9, weight_decay=1e-5)
    (floats,) = PAPER.prepared((images,))
    functional.cross_entropy(module(floats[again]), labels[again]).backward()
    optimizer.step()
    by_hand = dict(module.named_parameters())
    for name in second.trained:
        torch.testing.assert_close(update.tensors[name], by_hand[name].detach(), rtol=1e-4, atol=1e-6)
    for name in first.trained:
        part = first.extract_one(name, update.tensors[name])
        assert torch.equal(part, one.tensors[name])


def test_costs_of_phases() -> None:
    """FLOPs add up, the largest peak counts, and the bytes that travel are those of all phases together."""
    task = TwoPhases(tiny_graph()).assign(0, [0])[0]
    own, space = ImageSet(*samples(0)), workspace_of(tiny_graph())
    flops = flops_of_tasks(FedAvg(tiny_graph()))
    alone = [Task(0, 0, phase.cut) for phase in task.phases]
    assert flops(task) == sum(map(flops, alone))
    peaks = [peak_bytes(space, one, own, PAPER) for one in alone]
    assert peak_bytes(space, task, own, PAPER) == max(peaks)


def test_a_phase_of_its_own_settings_and_objective() -> None:
    own = ImageSet(*samples(0))
    cut, state = tiny_graph().full(), tiny_state()

    def trained(phase: Phase, settings: LocalTraining, lr: float) -> dict[str, Tensor]:
        task = Task(0, 0, cut, (phase,))
        return train_device(workspace_of(tiny_graph()), task, cut.extract(state), own, settings, lr, seed=1).tensors

    plain = replace(PAPER, weight_decay=0.0)
    assert same_bits(trained(Phase(cut, execution=replace(plain, batch_size=7)), plain, 0.1),
                     trained(Phase(cut), replace(plain, batch_size=7), 0.1))  # fmt: skip
    # the gradient of twice the loss is twice the gradient: half the learning rate undoes it, to the bit
    assert same_bits(trained(Phase(cut, objective=Doubled()), plain, 0.05), trained(Phase(cut), plain, 0.1))


def test_a_phase_within_its_task() -> None:
    with pytest.raises(BadInput, match="channels of .* that the outer cut does not have"):
        Task(0, 0, tiny_graph().prefix(0.25), (Phase(tiny_graph().prefix(0.5)),))
    with pytest.raises(BadInput, match="trains stem.0.weight, which the task's cut does not send back"):
        Task(0, 0, tiny_graph().freeze(tiny_graph().full(), 1), (Phase(tiny_graph().prefix(0.5)),))

    class Neither(Method):
        pass

    with pytest.raises(NotImplementedError, match="Neither says neither cut_for nor phases_for"):
        Neither(tiny_graph()).assign(0, [0])


def test_the_union_of_cuts() -> None:
    small, rolled = tiny_graph().prefix(0.25), tiny_graph().rolling(0.25, 3)
    both = tiny_graph().union([small, rolled])
    assert both.kept["stem.0.weight"][0] == (0, 1, 3, 4) and both.frozen == frozenset()
    assert (
        tiny_graph().union([small, tiny_graph().full()]) == tiny_graph().full() and tiny_graph().union([small]) == small
    )
    frozen = tiny_graph().union([tiny_graph().freeze(small, 3), tiny_graph().freeze(small, 1)])
    assert frozen == tiny_graph().freeze(small, 1)
