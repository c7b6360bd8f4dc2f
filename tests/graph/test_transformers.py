"""Transformers of the transformers library, unmodified, from small configs: the proven properties, and their bytes."""

from __future__ import annotations

from math import prod
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strata.core.errors import BadInput
from strata.execution import Execution, measure_cut, memory
from strata.graph import ChannelGraph, Cut, InputSpec
from strata.models.loading import load_model
from tests.graph.reference import assert_equals_zeroed, random_inputs

transformers = pytest.importorskip("transformers")

LENGTH, STEP = 6, Execution(batch_size=4)
USUAL: dict[str, Any] = {
    "vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 12,
    "max_position_embeddings": 12, "num_labels": 4,
}  # fmt: skip
DECODER = {**USUAL, "num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0}
PICTURE = {**{key: USUAL[key] for key in list(USUAL)[1:5]}, "image_size": 8, "patch_size": 4, "num_labels": 4}
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("BertForSequenceClassification", USUAL),
    "DistilBert": (
        "DistilBertForSequenceClassification",
        {"vocab_size": 20, "dim": 16, "n_layers": 1, "n_heads": 4, "hidden_dim": 12, "num_labels": 4},
    ),
    "Roberta": ("RobertaForSequenceClassification", USUAL),
    "Llama": ("LlamaForSequenceClassification", DECODER),
    "Qwen3": ("Qwen3ForSequenceClassification", {**DECODER, "head_dim": 4}),
    "GPT2": (
        "GPT2LMHeadModel",
        {
            "vocab_size": 20,
            "n_embd": 16,
            "n_layer": 1,
            "n_head": 4,
            "n_inner": 12,
            "n_positions": 12,
            "use_cache": False,
        },
    ),
    "T5": (
        "T5ForTokenClassification",
        {"vocab_size": 20, "d_model": 16, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 4, "num_labels": 4},
    ),
    "Llama LM": ("LlamaForCausalLM", {**DECODER, "tie_word_embeddings": True}),
    "ViT": ("ViTForImageClassification", PICTURE),
    "DeiT": ("DeiTForImageClassification", PICTURE),
}


# these are close to one of the others (Bert, Qwen3, ViT): by `make slow`
LIKE_OTHERS = ("DistilBert", "Roberta", "Llama", "DeiT")
EACH = [pytest.param(name, marks=pytest.mark.slow if name in LIKE_OTHERS else ()) for name in NETWORKS]
CHANCES = {
    "DistilBert": ("dropout", "attention_dropout", "seq_classif_dropout"),
    "GPT2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "T5": ("dropout_rate", "classifier_dropout"),
}
ROUNDED = ("Llama", "Llama LM", "Qwen3", "T5")  # their RMSNorm is in float32, whatever the weights are in
STORIES = Path(__file__).parents[3] / "shared/data/weights/stories260K-llama"


def network(name: str) -> nn.Module:
    kind, settings = NETWORKS[name]
    chances = CHANCES.get(name, ("hidden_dropout_prob", "attention_probs_dropout_prob"))
    config = getattr(transformers, f"{name.split()[0]}Config")(**settings, **dict.fromkeys(chances, 0.0))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, kind)(config)
        for parameter in model.parameters():  # biases and tokens that begin as zero would hide mistakes
            nn.init.normal_(parameter, std=0.3)
    return model


def inputs_of(name: str) -> Any:
    ids = InputSpec.of({"input_ids": ((LENGTH,), torch.int64)})
    return (3, 8, 8) if name in ("ViT", "DeiT") else ids


def with_rms_over_kept(model: nn.Module, cut: Cut) -> nn.Module:
    """RMSNorm takes its mean over the kept channels, as a submodel's does."""

    def forward(self: Any, x: Tensor) -> Tensor:
        mean = (x if self.kept is None else x[..., list(self.kept)]).pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(mean + self.variance_epsilon))

    for name, part in model.named_modules():
        if type(part).__name__.endswith(("RMSNorm", "T5LayerNorm")):
            part.kept = cut.kept[f"{name}.weight"][0]  # type: ignore[assignment]
            part.forward = MethodType(forward, part)
    return model


def logits(returned: Any) -> Tensor:
    return returned.logits


@pytest.mark.parametrize("name", EACH)
def test_submodels_equal_the_zeroed_network(name: str) -> None:
    model = network(name).double()
    graph = ChannelGraph(model, inputs_of(name))
    full = graph.full()
    x = random_inputs(graph)
    whole = graph.submodel(full, full.extract(model.state_dict()))
    model.eval()
    whole.eval()
    assert torch.equal(whole(*x), model(*x).logits), "width 1 is the network itself"
    cuts = [graph.prefix(0.5), graph.slt(1, graph.depth - 2, 0.5), graph.window(1, 2)]
    for cut in cuts:
        own = with_rms_over_kept(network(name).double(), cut)
        assert_equals_zeroed(own, graph, cut, logits, close=1e-5 if name in ROUNDED else 1e-9)
    assert cuts[0] != full and cuts[1] != full


@pytest.mark.parametrize("name", EACH)
def test_peak(name: str) -> None:
    graph = ChannelGraph(network(name), inputs_of(name))
    for cut in (graph.full(), graph.prefix(0.5), graph.window(2, 3)):
        assert -0.01 <= memory(graph, cut, STEP).total / measure_cut(graph, cut, STEP).peak - 1 <= 0.03


def test_attention_is_cut_by_whole_heads() -> None:
    bert = ChannelGraph(network("Bert"), inputs_of("Bert"))
    query = bert.prefix(0.5).kept["bert.encoder.layer.0.attention.self.query.weight"]
    assert query[0] == tuple(range(8)), "2 of 4 heads of 4"
    llama = ChannelGraph(network("Llama"), inputs_of("Llama"))
    half = llama.prefix(0.5).shapes
    queries, keys = (half[f"model.layers.0.self_attn.{one}_proj.weight"][0] for one in ("q", "k"))
    assert (queries, keys) == (8, 4), "one of two heads of keys, with its two of queries"
    qwen = ChannelGraph(network("Qwen3"), inputs_of("Qwen3")).prefix(0.5).shapes
    assert qwen["model.layers.0.self_attn.q_proj.weight"][0] == 8, "with a norm within each head too"
    gate, up, down = (half[f"model.layers.0.mlp.{one}_proj.weight"] for one in ("gate", "up", "down"))
    assert gate == up == (6, 8) and down == (8, 6), "SwiGLU keeps the same units in both"


def test_a_region_that_casts_or_hides_weights_is_refused() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y = self.first(x).tanh()
            return self.second(y)

    with pytest.raises(BadInput, match="under torch.no_grad: freeze them instead"):
        ChannelGraph(Hidden(), (4,))


def test_a_tied_weight_is_one_parameter() -> None:
    model = network("GPT2")
    graph = ChannelGraph(model, inputs_of("GPT2"))
    table, head = "transformer.wte.weight", "lm_head.weight"
    assert table in graph.state_shapes and head not in graph.state_shapes and head in model.state_dict()
    assert sum(prod(shape) for shape in graph.full().shapes.values()) == sum(p.numel() for p in model.parameters())
    assert graph.layers_of[table] == (1, graph.depth + 1) and graph.layer_of[table] == graph.depth + 1
    assert table in graph.window(1, 2).trained, "as the classifier"
    assert table in graph.slt(1, 1, 0.5).trained and graph.slt(1, 1, 0.5).shapes[table] == (20, 16), "whole, as layer 1"
    assert graph.prefix(0.5).shapes[table] == (20, 8), "the same channels in both uses"
    top, state = graph.window(2, 2), model.state_dict()
    module = graph.submodel(top, top.extract(state))
    kept = [op for op in graph.sized(top, 4) if op.kind == "op" and op.requires_grad]
    assert not any("embedding" in str(op.target) for op in kept), "frozen layers take no gradient"
    module(torch.ones(2, LENGTH, dtype=torch.int64)).sum().backward()
    assert module.get_parameter(table).grad is not None


@pytest.mark.skipif(not STORIES.is_dir(), reason=f"there is no trained Llama in {STORIES}")
def test_a_trained_llama_with_tied_embeddings() -> None:
    notes: list[str] = []
    model = load_model(f"hf:{STORIES}", task="next-token", notes=notes)
    graph = ChannelGraph(model, InputSpec.of({"input_ids": ((8,), torch.int64)}))
    assert not notes and sum(prod(shape) for shape in graph.full().shapes.values()) == 260_032
    full, x = graph.full(), torch.arange(1, 17).view(2, 8)
    whole = graph.submodel(full, full.extract(model.state_dict()))
    assert torch.equal(whole.eval()(x), model.eval()(input_ids=x).logits)
    for cut in (full, graph.window(5, 8), graph.prefix(0.5)):
        assert -0.01 <= memory(graph, cut, STEP).total / measure_cut(graph, cut, STEP).peak - 1 <= 0.03
