"""--cache-prefix: what frozen layers put out, kept on the device's disk."""

from __future__ import annotations

import json
import os
import stat
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strata.core.errors import BadInput
from strata.execution import Execution, flops, measure_cut, memory
from strata.execution import kept_outputs as files
from strata.execution.kept_outputs import KeptOutputs
from strata.execution.placement import placement_for
from strata.federation.kept_prefixes import FOLDER
from strata.graph import ChannelGraph
from strata.methods import SLT, Phase, Task
from strata.methods.cycle import Cycle
from strata.methods.top import Top
from strata.methods.window import Window
from strata.training import LocalTraining, train_device
from tests.federation import tiny
from tests.federation.tiny import bits, tiny_run, training
from tests.workspaces import workspace_of

torch.set_num_threads(1)  # as devices train

ROOM = 2**20
FIXED = replace(training(), norm_statistics="frozen")
KEPT = replace(FIXED, cache_prefix=ROOM)
BY_ONE = replace(FIXED, frozen_chunk=1)


def top(frozen: int = 2) -> Top:
    return Top(tiny.graph(), (frozen,))


# --- the same model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "exact"), [("top", False), ("window", True), ("slt", True)])
def test_the_bits_of_a_run_that_keeps_nothing(tmp_path: Path, method: str, exact: bool) -> None:
    made: Any = {
        "top": top(),
        "window": Window(tiny.graph(), (((1, 2), (2, 3)),), rounds=5),
        "slt": tiny.method("slt", rounds=5),
    }[method]
    options = {"method": made, "rounds": 5, "exact": True}
    tiny_run(tmp_path / "by one", training=BY_ONE, **options)
    result = tiny_run(tmp_path / "kept", training=KEPT, **{**options, "exact": exact})
    (lines, weights), (own_lines, own_weights) = bits(tmp_path / "by one"), bits(tmp_path / "kept")
    if exact:
        assert own_weights == weights
    plain, kept = ([json.loads(line + "}") for line in some] for some in (lines, own_lines))
    for before, after in zip(plain, kept, strict=True):
        assert after["train_loss"] == pytest.approx(before["train_loss"], rel=1e-5)
        assert after["peak_bytes"] == before["peak_bytes"], "of the first round, in which frozen layers run"
        assert after["train_flops"] <= before["train_flops"]
    assert sum(one["train_flops"] for one in kept) < sum(one["train_flops"] for one in plain)
    assert result.summary["disk_bytes"] == max(one["disk_bytes"] for one in kept) > 0
    assert not (tmp_path / "kept" / FOLDER).exists() and "on the devices' disks" in said(tmp_path / "kept")


def said(folder: Path) -> str:
    return (folder / "run.log").read_text()


def test_worker_processes_and_parts_of_a_batch(tmp_path: Path) -> None:
    settings = replace(KEPT, micro_batch=3, activation_checkpointing="auto", frozen_weights="mapped")
    for workers in (0, 2):
        tiny_run(tmp_path / str(workers), method=top(), rounds=3, workers=workers, training=settings)
    assert bits(tmp_path / "0") == bits(tmp_path / "2")
    tiny_run(tmp_path / "by one", method=top(), rounds=3, exact=True, training=replace(BY_ONE, micro_batch=3))
    tiny_run(tmp_path / "exact", method=top(), rounds=3, exact=True, training=settings)
    assert bits(tmp_path / "by one")[1] == bits(tmp_path / "exact")[1]


def test_frozen_layers_run_once_for_each_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted where their outputs are written; a file that was cut short or changed is made again."""
    made: list[str] = []
    write = KeptOutputs.write
    monkeypatch.setattr(KeptOutputs, "write", lambda self, key, *rest: (made.append(key), write(self, key, *rest)))
    method, workspace = top(), workspace_of(tiny.graph())
    (task,) = method.assign(0, [0])
    own = tiny.data().train.subset(torch.arange(10))
    state = {name: tensor.clone() for name, tensor in tiny.model().state_dict().items()}

    def update(disk: Path | None, seed: int = 0, settings: LocalTraining = KEPT, one: Task = task) -> dict[str, Tensor]:
        received = one.cut.extract(state)
        return train_device(workspace, one, received, own, settings, 0.1, seed, disk).tensors

    plain = update(None)
    assert not made and same(update(tmp_path), plain) and len(set(made)) == 10
    assert same(update(tmp_path), plain) and len(made) == 10
    update(tmp_path, seed=1)  # another order: other neighbours
    update(tmp_path, settings=replace(KEPT, epochs=2, micro_batch=4))
    assert len(made) == 10
    (folder,) = tmp_path.iterdir()
    one, other, *_ = sorted(path for path in folder.iterdir() if path.name != files.LAYOUT)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (one, other)} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    one.write_bytes(one.read_bytes()[:-9])
    changed = bytearray(other.read_bytes())
    changed[5] ^= 1
    other.write_bytes(changed)
    (folder / "0123.aabbccdd.tmp").write_bytes(b"half")
    assert same(update(tmp_path), plain) and made[10:] and sorted(made[10:]) == [one.name, other.name]
    assert not list(folder.glob("*.tmp"))
    size, content = one.stat().st_size, one.read_bytes()
    assert zlib.crc32(content[:-4]).to_bytes(4, "big") == content[-4:]
    state["conv1.weight"] += 0.01  # frozen, but another one
    assert not same(update(tmp_path), plain) and len(made) == 22
    (later,) = tmp_path.iterdir()
    assert later != folder, "what no longer holds is gone"
    update(tmp_path, settings=replace(KEPT, cache_prefix=1000))  # is there: it is read, and nothing new written
    assert len(made) == 22
    few = tmp_path / "few"
    each = placement_for(tiny.graph(), task.cut, KEPT)
    assert each is not None and each.cached_bytes == 8 * 4 * 4 * 4 and size == each.cached_bytes + 4
    limit = 3 * size + 400
    assert same(update(few, settings=replace(KEPT, cache_prefix=limit)), update(None))
    assert sum(path.stat().st_size for path in few.rglob("*") if path.is_file()) <= limit


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


# --- text -------------------------------------------------------------------------------------------------------------


class Attended(nn.Module):
    """Two inputs, attention, and a mask that upper layers need too."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.table, self.dropout = nn.Embedding(50, 8), nn.Dropout(dropout)
        self.query, self.value, self.middle = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.scores = nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = (attention_mask.unsqueeze(1) & attention_mask.unsqueeze(2)).unsqueeze(1)
        x = self.dropout(self.table(input_ids))
        for layer in (self.query, self.value):
            y = layer(x).unsqueeze(1)  # a single head
            x = x + nn.functional.scaled_dot_product_attention(y, y, y, mask).squeeze(1)
        return self.scores(torch.relu(self.middle(x)).mean(1))


def attended(dropout: float = 0.0) -> ChannelGraph:
    from strata.graph import Input, InputSpec

    spec = InputSpec((Input("input_ids", (6,), torch.int64), Input("attention_mask", (6,), torch.bool)))
    torch.manual_seed(0)
    return ChannelGraph(Attended(dropout), spec)


def test_several_inputs_and_outputs(tmp_path: Path) -> None:
    from strata.data.samples import Samples

    graph = attended()
    generator = torch.Generator().manual_seed(0)
    ids, mask = torch.randint(0, 50, (9, 6), generator=generator), torch.ones(9, 6, dtype=torch.bool)
    mask[3:, 4:] = False
    own = Samples({"input_ids": ids, "attention_mask": mask}, torch.arange(9) % 3)
    torch.manual_seed(0)
    state = Attended().state_dict()
    cut = graph.window(2, graph.depth)
    settings = LocalTraining(batch_size=4, cache_prefix=ROOM)
    task = Task(0, 0, cut, (Phase(cut),))
    found = [
        train_device(workspace_of(graph), task, cut.extract(state), own, settings, 0.1, 0, disk).tensors
        for disk in (None, tmp_path, tmp_path)
    ]
    assert same(found[1], found[0]) and same(found[2], found[0])
    assert len(list(tmp_path.rglob("*"))) == 1 + 9 + 1
    placement = placement_for(graph, cut, settings)
    assert placement is not None and placement.cached_flops > 0
    assert placement.cached_bytes == 6 * 8 * 4 + 6 * 6, "the vectors and the mask"


# --- what it takes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 8])
def test_bytes_are_those_of_one_frozen_sample_at_a_time(batch: int) -> None:
    cut = top().cut_for(0, 0)
    execution = Execution(batch, norm_statistics="frozen")
    ways = [replace(execution, cache_prefix=ROOM), replace(execution, frozen_chunk=1)]
    kept, by_one = (memory(tiny.graph(), cut, way) for way in ways)
    assert kept.total == by_one.total if batch > 1 else kept.total <= by_one.total
    assert (kept.kept, by_one.kept) == (8 * 4 * 4 * 4, 0)
    assert kept.total == measure_cut(tiny.graph(), cut, ways[0]).peak
    if batch > 1:
        assert kept.total <= memory(tiny.graph(), cut, execution).total


def test_flops_are_counted_once_for_each_device(tmp_path: Path) -> None:
    """Every device of four is asked in every round, with 60 samples each and two epochs."""
    method, more = top(), {"rounds": 2, "devices": 4, "per_round": 4}
    training = replace(KEPT, epochs=2)
    result = tiny_run(tmp_path / "kept", method=method, training=training, **more)
    cut = method.cut_for(0, 0)
    placement = placement_for(tiny.graph(), cut, training)
    assert placement is not None
    whole, frozen = flops(tiny.graph(), cut).real_train, placement.cached_flops
    assert frozen == 2 * 8 * 8 * 27 * 4 + 2 * 4 * 4 * 36 * 8  # conv1 and conv2
    assert [one["train_flops"] for one in result.metrics] == [
        240 * (whole + whole - frozen),
        240 * 2 * (whole - frozen),
    ]
    assert [one["disk_bytes"] for one in result.metrics] == [60 * (512 + 4)] * 2


# --- where it is refused ----------------------------------------------------------------------------------------------


def test_what_is_not_the_same_every_time_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="with augmentation cifar a sample is another one every time"):
        replace(KEPT, augmentation="cifar")
    with pytest.raises(BadInput, match="with a transform of your own"):
        replace(KEPT, transform=len, preparation=len)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="leave out either frozen_chunk or cache_prefix"):
        replace(KEPT, frozen_chunk=2)
    with pytest.raises(BadInput, match="by whose statistics their batch norms go: give --norm-statistics frozen"):
        tiny_run(tmp_path / "a", method=top(), training=replace(KEPT, norm_statistics="batch"))
    with pytest.raises(BadInput, match="top runs no frozen layers twice on the same weights in this run"):
        tiny_run(tmp_path / "b", method=top(), rounds=1, training=KEPT)
    with pytest.raises(BadInput, match="cycle runs no frozen layers twice"):
        tiny_run(tmp_path / "c", method=Cycle(tiny.graph()), training=KEPT)
    assert not os.listdir(tmp_path)
    graph = attended(0.1)
    with pytest.raises(BadInput, match=r"frozen layers draw random numbers \(dropout\)"):
        memory(graph, graph.window(2, graph.depth), Execution(4, cache_prefix=ROOM))
    one = Cycle(tiny.graph(), (((2, 3),),))  # a single block: what is below stays
    assert tiny_run(tmp_path / "d", method=one, rounds=2, training=KEPT).summary["disk_bytes"]


def test_statistics_that_are_fixed_later(tmp_path: Path) -> None:
    """Until then frozen layers depend on the batch, and nothing is kept."""
    settings = replace(KEPT, norm_statistics="fixed", fixed_after=2)
    result = tiny_run(tmp_path / "run", method=top(), rounds=4, training=settings)
    assert [one["disk_bytes"] > 0 for one in result.metrics] == [False, False, True, True]


def test_slt_is_planned_with_it() -> None:
    from strata.planning import Plan, plan

    made = plan(
        tiny.graph(), constraint=0.8, rounds=6, accounting="peak",
        execution=Execution(8, norm_statistics="frozen", cache_prefix=ROOM),
    )  # fmt: skip
    kept = [step.kept_bytes_per_sample for step in made.steps]
    assert kept[0] == 0 and max(kept) > 0 and "On a device's disk" in str(made)
    assert Plan.from_json(made.to_json(), tiny.graph()) == made
    assert SLT(made).plan.execution.cache_prefix == ROOM
