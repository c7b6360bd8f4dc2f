"""peak_bytes is a measurement of the task as it runs here."""

from __future__ import annotations

import pytest
import torch

from strata import execution as costs
from strata.data import ImageSet
from strata.execution import Execution
from strata.execution.measured import measure
from strata.methods import FD, FedAvg, FjORD, Method, Small, create
from strata.methods.choice import method_named
from strata.training import LocalTraining, Workspace, memory, peak_bytes
from tests.methods.tiny import CLASSES, INPUT, samples, tiny_graph, tiny_state, train
from tests.workspaces import workspace_of


@pytest.mark.parametrize(("name", "constraints"), [("fedavg", (1.0,)), ("small", (0.5,))])
def test_equals_a_training_step_of_the_submodel_measured_by_itself(name: str, constraints: tuple[float]) -> None:
    method = create(name, tiny_graph(), constraints=constraints)
    (task,) = method.assign(0, [0])
    update = train(method, task, tiny_state())
    module = tiny_graph().submodel(task.cut, task.cut.extract(tiny_state()))
    alone = measure(module, INPUT, Execution(20), CLASSES).peak  # 20 samples, so batches are no larger
    assert update.peak_bytes == pytest.approx(alone, rel=0.01)


def test_smaller_cut_smaller_batch_less_memory() -> None:
    images, labels = samples(0, count=64)

    def peak(method: Method, **settings: float) -> int:
        made = LocalTraining(**settings)  # type: ignore[arg-type]
        return peak_bytes(workspace_of(tiny_graph()), method.assign(0, [0])[0], ImageSet(images, labels), made)

    full, half = peak(FedAvg(tiny_graph())), peak(Small(tiny_graph(), (0.5,)))
    assert half < 0.6 * full
    assert peak(FedAvg(tiny_graph()), batch_size=16) < 0.6 * full
    assert peak(FedAvg(tiny_graph()), micro_batch=16) < 0.6 * full
    parameters = 4 * sum(torch.Size(tiny_graph().state_shapes[name]).numel() for name in tiny_graph().parameter_names)
    assert peak(FedAvg(tiny_graph()), proximal=0.1) == full + parameters, (
        "the received weights are kept beside the new ones"
    )


def test_fjord_needs_what_its_largest_level_needs_and_its_small_weights() -> None:
    images, labels = samples(0, count=32)
    fjord, small = (
        peak_bytes(workspace_of(tiny_graph()), method.assign(0, [0])[0], ImageSet(images, labels), LocalTraining())
        for method in (FjORD(tiny_graph(), (0.5, 0.25)), Small(tiny_graph(), (0.5,)))
    )
    inner = 4 * sum(torch.Size(shape).numel() for shape in tiny_graph().prefix(0.25).shapes.values())
    assert small < fjord <= small + 1.5 * inner


def test_budgets_count_fedprox_and_the_smaller_levels_of_fjord() -> None:
    """By `peak`, within 0.1 % of what the devices then measure."""
    images, labels = samples(0, count=16)
    near = LocalTraining(batch_size=16, proximal=0.1)
    full = costs.memory(tiny_graph(), tiny_graph().full(), Execution(16, proximal=0.1)).total
    assert full == pytest.approx(
        peak_bytes(workspace_of(tiny_graph()), FedAvg(tiny_graph()).assign(0, [0])[0], ImageSet(images, labels), near),
        rel=0.001,
    )
    budgets = [7 * full // 10, 8 * full // 10, full]
    for name, training in (("small", near), ("heterofl", near), ("slt", near), ("fjord", LocalTraining(batch_size=16))):
        method = method_named(name, tiny_graph(), budgets=budgets, rounds=9, execution=training)
        for round in range(9):
            for task in method.assign(round, [0, 1, 2]):
                assert (
                    peak_bytes(workspace_of(tiny_graph()), task, ImageSet(images, labels), training)
                    <= 1.001 * budgets[task.device]
                ), (name, task)


def test_random_cuts_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    method = FD(tiny_graph(), (0.25,), seed=1)
    first = train(method, method.assign(0, [0])[0], tiny_state()).peak_bytes
    monkeypatch.setattr(memory, "measure_step", None)
    for round in range(1, 4):
        assert train(method, method.assign(round, [0])[0], tiny_state()).peak_bytes == first


def test_the_samples_that_a_device_holds_beside_its_batch_do_not_count() -> None:
    (task,) = Small(tiny_graph(), (0.5,)).assign(0, [0])
    images, labels = samples(0, count=64)
    few = peak_bytes(
        Workspace(tiny_graph()), task, ImageSet(images[:16].clone(), labels[:16].clone()), LocalTraining(batch_size=16)
    )
    assert peak_bytes(Workspace(tiny_graph()), task, ImageSet(images, labels), LocalTraining(batch_size=16)) == few
