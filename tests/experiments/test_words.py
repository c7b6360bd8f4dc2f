"""table-words: text and pretrained networks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from strata.execution import Execution, memory
from strata.experiments import Asked, Results, experiment
from strata.experiments.words import MIB, SHARES, TEXTS, Text
from strata.graph import ChannelGraph, Input, InputSpec
from strata.methods.heads import prepared_model
from strata.methods.lora import Lora


def test_cells_and_a_table_before_any_run(tmp_path: Path) -> None:
    made = experiment("table-words", Asked(seeds=1, data_dir=str(tmp_path)))
    names = [run.name for run in made.runs]
    assert names[0] == "banking77/minilm-l6/dirichlet-0.1/348MiB/fedavg/rounds-30/seed-0" and len(set(names)) == 34
    assert "banking77/minilm-l6/dirichlet-0.1/63.1MiB/top/rounds-30/seed-0" in names
    assert "cifar100/resnet20/iid/14MiB/slt-of-cifar10/rounds-50/seed-0" in [
        run.name for run in experiment("table-words", Asked(0.02, 1, str(tmp_path))).runs
    ]
    for run in made.runs:
        execution, method = run.request.execution, run.request.approach.method
        keeps = method in ("top", "window") and run.cell.level not in ("236.6MiB", "242.2MiB")
        assert execution.caches == (run.cell.model == "minilm-l6" and keeps)
        if run.cell.model == "minilm-l6":
            assert run.request.problem.model == f"hf:{tmp_path / 'minilm-l6'}" and execution.update_rule == "adamw"
            assert run.request.lr == (0.01 if method == "lora" else 0.001)
        if run.cell.model == "resnet20":  # of these weights' own shape and names
            assert run.request.problem.model == "strata.models.resnet:padded_resnet20"
    files = made.render(Results(tmp_path / "none"), tmp_path)
    assert {file.name for file in files} >= {"table.md", "table.csv"}
    assert "| 0.2 | top layers | 63.1MiB | – |" in (tmp_path / "table.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.data)
def test_what_the_whole_model_and_lora_take(text: Text) -> None:
    """In closed form, of MiniLM by its configuration."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, num_labels={"banking77": 77, "20newsgroups": 20}[text.data],
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    names = (("input_ids", torch.int64), ("attention_mask", torch.bool))
    spec = InputSpec(tuple(Input(name, (text.length,), dtype) for name, dtype in names))
    plain = Execution(16, update_rule="adamw")
    lean = Execution(16, update_rule="adamw", activation_checkpointing="auto", release_gradients=True)
    graph = ChannelGraph(model, spec)
    for most, way in ((text.whole, plain), (text.leanest, lean)):
        assert 0.99 * most <= memory(graph, graph.full(), way).total / MIB <= most
    adapted = ChannelGraph(prepared_model(Lora, model, spec, 0, {"rank": 8}), spec)
    lora = memory(adapted, Lora(adapted, rank=8).cut, plain).total / MIB
    assert 0.99 * text.lora <= lora <= text.lora
    # the goal of issue 18 is asked at 0.4 of LoRA's peak: one of the shares is no more than that
    assert any(share * text.leanest <= 0.4 * lora for share in SHARES)
