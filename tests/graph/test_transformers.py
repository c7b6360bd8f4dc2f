"""Transformers of the transformers library, unmodified, from small configs: the proven properties, and their bytes."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strata.core.errors import BadInput
from strata.execution import Execution, measure_cut, memory
from strata.graph import ChannelGraph, Cut, InputSpec
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
    "ViT": ("ViTForImageClassification", PICTURE),
    "DeiT": ("DeiTForImageClassification", PICTURE),
}


def network(name: str) -> nn.Module:
    kind, settings = NETWORKS[name]
    without_chance = {} if name == "DistilBert" else {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if name == "DistilBert":
        without_chance = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
    config = getattr(transformers, f"{name}Config")(**settings, **without_chance)
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
        if type(part).__name__.endswith("RMSNorm"):
            part.kept = cut.kept[f"{name}.weight"][0]  # type: ignore[assignment]
            part.forward = MethodType(forward, part)
    return model


def logits(returned: Any) -> Tensor:
    return returned.logits


@pytest.mark.parametrize("name", NETWORKS)
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
        # RMSNorm of transformers is in float32, whatever the weights are in
        assert_equals_zeroed(own, graph, cut, logits, close=1e-5 if name in ("Llama", "Qwen3") else 1e-9)
    assert cuts[0] != full and cuts[1] != full


@pytest.mark.parametrize("name", NETWORKS)
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
    assert (queries, keys) == (16, 8), "rotary positions: heads stay, for want of a rule, and are said in graph.pinned"
    assert any("self_attn" in str(pinned) for pinned in llama.pinned)
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
