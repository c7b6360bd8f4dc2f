"""Exported graphs on disk: read as they were written, for the very same model, and only if nobody else wrote them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache as cache_results
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from strata.core import cache
from strata.graph import ChannelGraph, InputSpec, cached, stored
from strata.graph.export import Exports, export_modes
from tests.networks import NETWORKS

IMAGE = (3, 8, 8)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STRATA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "graphs"


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that went through torch.export."""
    names: list[str] = []

    def export(model: nn.Module, inputs: InputSpec) -> Exports:
        names.append(type(model).__name__)
        return export_modes(model, inputs)

    monkeypatch.setattr(cached, "export_modes", export)
    return names


class Net(nn.Module):
    """With a literal, a fixed table that is not in the state dict, sizes of the batch, and a split."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.conv1, self.norm, self.conv2 = nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.Conv2d(8, 12, 3)
        self.classifier = nn.Linear(12, 5)
        self.register_buffer("table", torch.randn(12), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b = functional.relu_(self.norm(self.conv1(x))).split(8, 1)
        x = self.conv2(a * b).mean((2, 3)) + self.table
        return self.classifier(functional.dropout(x, 0.1, self.training)).view(x.size(0), -1) * torch.tensor([2.0])


def facts(graph: fx.Graph) -> list[Any]:
    def sizes(value: Any) -> Any:
        if isinstance(value, list):
            return [sizes(one) for one in value]
        return None if value is None else (value.shape, value.dtype, value.dim())

    return [
        (
            node.op,
            node.name,
            node.target,
            str(node.args),
            str(node.kwargs),
            {user.name for user in node.users},
            sizes(node.meta.get("val")),
            node.meta.get("nn_module_stack"),
            node.meta.get("stack_trace"),
        )
        for node in graph.nodes
    ]


@pytest.mark.parametrize("name", ["gated", "padded_resnet", "hf_vit"])
def test_what_is_read_is_what_was_exported(name: str) -> None:
    model, shape = NETWORKS[name]()
    fresh = export_modes(model, InputSpec.of(shape, model))
    buffers = dict(model.named_buffers())
    read = stored.from_bytes(stored.to_bytes(fresh, buffers), buffers)
    for mode in ("train", "eval"):
        before, after = fresh.modes[mode], read.modes[mode]
        assert facts(before.graph) == facts(after.graph)
        for field in ("inputs", "outputs"):
            ours, theirs = getattr(before, field), getattr(after, field)
            assert [(n, node.name) for n, node in ours.items()] == [(n, node.name) for n, node in theirs.items()]
    assert {n.name: c for n, c in fresh.leaf_outputs.items()} == {n.name: c for n, c in read.leaf_outputs.items()}
    assert list(fresh.constants) == list(read.constants)
    assert all(torch.equal(fresh.constants[n], read.constants[n]) for n in fresh.constants)


def test_a_graph_from_the_cache_is_the_same_graph(exported: list[str], folder: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    first, second = ChannelGraph(model, IMAGE), ChannelGraph(model, IMAGE)
    assert exported == ["Net"] and len(list(folder.iterdir())) == 1
    assert (first.hash, first.layer_of, first.outputs) == (second.hash, second.layer_of, second.outputs)
    assert first.leaf_outputs.values() and [*first.leaf_outputs.values()] == [*second.leaf_outputs.values()]
    x = torch.randn(4, *IMAGE)
    for cut in (first.full(), first.prefix(0.5), first.slt(1, 2, 0.5)):
        part = cut.extract(model.state_dict())
        assert first.sized(cut, 3) == second.sized(cut, 3)
        for training in (True, False):
            outputs = []
            for graph in (first, second):
                torch.manual_seed(1)
                sub = graph.submodel(cut, {name: t.clone() for name, t in part.items()}).train(training)
                outputs.append(sub(x))
            assert torch.equal(*outputs)


def test_a_table_outside_the_state_dict_is_the_models_own(exported: list[str]) -> None:
    first, second = Net(), Net()
    graphs = [ChannelGraph(model, IMAGE) for model in (first, second)]
    assert exported == ["Net"]
    for model, graph in zip((first, second), graphs, strict=True):
        assert torch.equal(graph.constants["table"], model.table)
    second.table.add_(1)
    assert not torch.equal(graphs[1].constants["table"], second.table)


def test_errors_are_the_same_with_and_without(exported: list[str]) -> None:
    model = Net()
    for _ in range(2):
        with pytest.raises(Exception, match="fails on input 3x2x2"):
            ChannelGraph(model, (3, 2, 2))
    tied = Net()
    untied = ChannelGraph(tied, IMAGE)
    tied.norm.bias = tied.norm.weight
    assert ChannelGraph(tied, IMAGE).hash != untied.hash, "another model, which is not taken for the first"


@pytest.mark.parametrize("value", ["off", "/proc/nowhere"])
def test_without_a_folder_everything_works(exported: list[str], value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_CACHE", value)
    assert ChannelGraph(Net(), IMAGE).hash == ChannelGraph(Net(), IMAGE).hash
    assert exported == ["Net", "Net"]


def spoiled(content: bytes) -> dict[str, Callable[[Path], object]]:
    data, relu = content[65:], b"aten.relu_.default"
    return {
        "a bit": lambda path: path.write_bytes(content[:-1] + bytes([content[-1] ^ 1])),
        "half of it": lambda path: path.write_bytes(content[: len(content) // 2]),
        "nothing": lambda path: path.write_bytes(b""),
        "format": lambda path: cache.write(path, data.replace(b'\\"format\\":1', b'\\"format\\":7')),
        "an operator that is not torch's": lambda path: cache.write(path, data.replace(relu, b"os_x.relu_.default")),
        "no operator at all": lambda path: cache.write(path, data.replace(relu, b"aten.relu_.__init__")),
        "writable for others": lambda path: path.chmod(0o666),
    }


@cache_results
def written() -> tuple[str, bytes, str]:
    """The file for Net: its name, what is in it; and the graph's hash."""
    hash_of_graph = ChannelGraph(Net(), IMAGE).hash
    (path,) = Path(os.environ["STRATA_CACHE"], "graphs").iterdir()
    return path.name, path.read_bytes(), hash_of_graph


@pytest.mark.parametrize("how", spoiled(b"0" * 100))
def test_what_is_damaged_is_made_anew(how: str, exported: list[str], folder: Path) -> None:
    name, content, hash_of_graph = written()
    exported.clear()
    private = cache.private_folder("graphs")
    assert private == folder
    path = folder / name
    path.write_bytes(content)
    path.chmod(0o600)
    assert ChannelGraph(Net(), IMAGE).hash == hash_of_graph and exported == []
    spoiled(content)[how](path)
    assert path.read_bytes() != content or how == "writable for others"
    assert ChannelGraph(Net(), IMAGE).hash == hash_of_graph and exported == ["Net"]
    assert path.read_bytes() == content
    assert ChannelGraph(Net(), IMAGE).hash == hash_of_graph and exported == ["Net"]


def test_a_folder_that_others_can_write_to_is_not_used(exported: list[str], folder: Path) -> None:
    ChannelGraph(Net(), IMAGE)
    folder.chmod(0o777)
    ChannelGraph(Net(), IMAGE)
    assert exported == ["Net", "Net"]


def test_what_has_no_place_in_the_form_is_not_written(folder: Path, exported: list[str]) -> None:
    library = torch.library.Library("strata_test_cache", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    library.impl("twice", lambda x: torch.empty_like(x), "Meta")

    class Custom(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.ops.strata_test_cache.twice(x))

    for _ in range(2):
        ChannelGraph(Custom(), IMAGE)
    assert exported == ["Custom", "Custom"] and not list(folder.iterdir())


PROGRAM = """
import json, sys
from strata.graph import ChannelGraph
from tests.recorded.network import make
graph = ChannelGraph(make(), (3, 32, 32))
compiler = [name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor", "sympy"))]
print(json.dumps([graph.hash, len(compiler) > 0]))
"""


def test_another_process_reads_it_without_torchs_compiler(folder: Path) -> None:
    def start() -> Any:
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    first, second = start(), start()
    assert first[1] and not second[1] and first[0] == second[0]
    assert len(list(folder.iterdir())) == 1
