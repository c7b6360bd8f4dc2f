"""Models that take ids, or several inputs, and return more than one tensor."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strata.core.errors import BadInput
from strata.execution import Execution, measure, memory, trace
from strata.graph import ChannelGraph, Cut, Input, InputSpec
from tests.graph.reference import assert_equals_zeroed, random_inputs

CUTS: dict[str, Callable[[ChannelGraph], Cut]] = {
    "prefix": lambda g: g.prefix(0.25),
    "rolling": lambda g: g.rolling(0.5, 5),
    "random": lambda g: g.random(0.3, torch.Generator().manual_seed(2)),
    "slt": lambda g: g.slt(0, 1, 0.4),
}


class Words(nn.Module):
    """Ids to an embedding with positions, a block of attention, the mean over positions, classes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(11, 16), nn.Embedding(6, 16)
        self.qkv, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)
        self.hidden, self.classifier = nn.Linear(16, 24), nn.Linear(24, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.positions(torch.arange(6))
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norm(x + self.out(mixed))
        return self.classifier(functional.gelu(self.hidden(x)).mean(1))


class WordsAndNumbers(nn.Module):
    """Two named inputs, the second behind a parameter with a default; a mask as the third."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.read = nn.Embedding(7, 12), nn.Linear(3, 8)
        self.hidden, self.classifier = nn.Linear(20, 16), nn.Linear(16, 4)

    def forward(self, ids: Tensor, scale: float = 1.0, *, numbers: Tensor, mask: Tensor) -> Tensor:
        words = self.words(ids)
        words = words * mask.unsqueeze(-1).to(words.dtype)
        both = torch.cat([words.mean(1) * scale, torch.tanh(self.read(numbers))], 1)
        return self.classifier(functional.relu(self.hidden(both)))


class Pair(NamedTuple):
    scores: Tensor
    features: Tensor


class Returning(nn.Module):
    """Two classifiers, the first of them early, in whatever form `form` gives to (early, features, late)."""

    def __init__(self, form: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 24, 3)
        self.early_norm, self.norm = nn.BatchNorm2d(16), nn.BatchNorm2d(24)
        self.early, self.late = nn.Linear(16, 4), nn.Linear(24, 4)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        first = functional.relu(self.conv1(x))
        early = self.early(self.early_norm(first).mean((2, 3)))
        features = functional.relu_(self.norm(self.conv2(first))).mean((2, 3))
        return self.form(early, features, self.late(features))


FORMS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Any], list[str], Callable[[Any], Tensor]]] = {
    "tuple": (lambda e, f, s: (s, f), ["0", "1"], lambda r: r[0]),
    "nested": (lambda e, f, s: [s, {"f": f, "more": (e,)}], ["0", "1.f", "1.more.0"], lambda r: r[0]),
    "dict": (lambda e, f, s: {"features": f, "logits": s}, ["logits", "features"], lambda r: r["logits"]),
    "object": (lambda e, f, s: Pair(s, f), ["scores", "features"], lambda r: r.scores),
    "ids first": (lambda e, f, s: (s.argmax(1), s), ["1", "0"], lambda r: r[1]),
    "with nothing": (lambda e, f, s: OrderedDict(loss=None, scores=s), ["scores"], lambda r: r["scores"]),
}


def words_spec(dtype: torch.dtype = torch.int64) -> InputSpec:
    return InputSpec.of({"ids": ((6,), dtype)})


def mixed_spec(dtype: torch.dtype) -> InputSpec:  # not in the order of forward's parameters
    return InputSpec.of({"mask": ((5,), torch.bool), "numbers": ((3,), dtype), "ids": ((5,), torch.int64)})


@cache
def built(name: str, double: bool = True) -> tuple[nn.Module, ChannelGraph]:
    torch.manual_seed(0)
    dtype = torch.float64 if double else torch.float32
    model, spec = (Words(), words_spec()) if name == "words" else (WordsAndNumbers(), mixed_spec(dtype))
    model = model.to(dtype)
    return model, ChannelGraph(model, spec)


def call(model: nn.Module, graph: ChannelGraph, inputs: tuple[Tensor, ...]) -> Any:
    return model(**dict(zip(graph.inputs.names, inputs, strict=True)))


@pytest.mark.parametrize("kind", CUTS)
@pytest.mark.parametrize("name", ["words", "mixed"])
def test_cuts_equal_the_zeroed_model(name: str, kind: str) -> None:
    model, graph = built(name)
    assert graph.pinned == () and graph.classes == 4
    cut = CUTS[kind](graph)
    assert sum(map(torch.Size.numel, map(torch.Size, cut.shapes.values()))) < sum(p.numel() for p in model.parameters())
    assert_equals_zeroed(model, graph, cut)


@pytest.mark.parametrize("name", ["words", "mixed"])
def test_scale_one_is_the_original_bit_for_bit(name: str) -> None:
    model, graph = built(name, double=False)
    cut = graph.full()
    sub = graph.submodel(cut, cut.extract(model.state_dict()))
    inputs, labels = random_inputs(graph, torch.float32), torch.tensor([3, 1, 0, 2])
    for training in (False, True):
        sub.train(training)
        model.train(training)
        got, wanted = sub(*inputs), call(model, graph, inputs)
        assert torch.equal(got, wanted)
    for scores in (got, wanted):
        functional.cross_entropy(scores, labels).backward()
    for (n, a), (m, b) in zip(sub.named_parameters(), model.named_parameters(), strict=True):
        assert n == m and torch.equal(a.grad, b.grad), n
    model.zero_grad()


@pytest.mark.parametrize("kind", [*CUTS, "full"])
@pytest.mark.parametrize("name", ["words", "mixed"])
def test_predicted_bytes_are_those_measured(name: str, kind: str) -> None:
    _, graph = built(name, double=False)
    cut = graph.full() if kind == "full" else CUTS[kind](graph)
    module = graph.submodel(cut, zeros=True)
    for batch in (4, 16):
        measured = measure(module, graph.inputs, Execution(batch), graph.classes).peak
        assert memory(graph, cut, Execution(batch)).total == pytest.approx(measured, rel=0.01)
        assert trace(module, graph.inputs, Execution(batch), graph.classes) == pytest.approx(measured, rel=0.02)
    parts = measure(module, graph.inputs, Execution(16, 4), graph.classes).peak
    assert memory(graph, cut, Execution(16, 4)).total == pytest.approx(parts, rel=0.01)


def test_ids_of_four_bytes_count_as_such() -> None:
    graphs = [ChannelGraph(Words(), words_spec(dtype)) for dtype in (torch.int64, torch.int32)]
    long, short = (graph.sized(graph.full(), 8) for graph in graphs)
    (wide,), (narrow,) = ([op for op in ops if op.kind == "input"] for ops in (long, short))
    assert (wide.shape, wide.dtype, narrow.dtype) == ((8, 6), torch.int64, torch.int32)
    assert [graph.inputs.sample_bytes for graph in graphs] == [48, 24]


@pytest.mark.parametrize("form", FORMS)
def test_a_model_may_return_more_than_scores(form: str) -> None:
    returning, names, scores = FORMS[form]
    torch.manual_seed(0)
    model = Returning(returning).double()
    graph = ChannelGraph(model, (3, 8, 8))
    assert list(graph.outputs) == names and graph.output_shape == (4,) and graph.classes == 4
    for make in CUTS.values():
        assert_equals_zeroed(model, graph, make(graph), scores, output=names[0])


def test_another_output_can_be_learned_from_and_runs_only_what_it_needs() -> None:
    torch.manual_seed(0)
    model = Returning(lambda e, f, s: {"early": e, "features": f, "logits": s}).double()
    graph = ChannelGraph(model, (3, 8, 8))
    assert graph.outputs == {"logits": (4,), "early": (4,), "features": (24,)}
    for make in CUTS.values():
        assert_equals_zeroed(model, graph, make(graph), lambda r: r["early"], output="early")
    cut = graph.prefix(0.5)  # both classifiers stay whole, features do not
    assert cut.shapes["early.weight"] == (4, 8) and cut.shapes["late.weight"] == (4, 12)
    whole, early = (graph.sized(cut, 4, output=name) for name in ("logits", "early"))
    assert {op.state_name for op in early} & {"conv2.weight", "norm.weight", "late.weight"} == set()
    assert not any(op.state_name == "early.weight" for op in whole)
    sub = graph.submodel(cut, cut.extract(model.state_dict()), "early")
    assert sub(random_inputs(graph)[0]).shape == (4, 4)
    assert graph.submodel(cut, cut.extract(model.state_dict()), "features")(random_inputs(graph)[0]).shape == (4, 12)
    with pytest.raises(BadInput, match="returns no middle; it returns logits, early, features"):
        graph.submodel(cut, output="middle")


def test_a_change_in_place_is_needed_by_whoever_reads_the_value() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Linear(5, 8), nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.first(x)
            view = hidden.view(-1, 8)
            view.relu_()
            late = self.third(hidden.clone().mul_(2))
            return self.second(hidden), late

    model = InPlace().double()
    graph = ChannelGraph(model, (5,))
    for output, pick in (("0", 0), ("1", 1)):
        assert_equals_zeroed(model, graph, graph.prefix(0.5), lambda r, pick=pick: r[pick], output)
    targets = [str(op.target) for op in graph.sized(graph.full(), 2, output="0")]
    assert "aten.relu_.default" in targets and "aten.mul_.Tensor" not in targets


def test_scores_for_each_position() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.hidden, self.tags = nn.Embedding(9, 16), nn.Linear(16, 12), nn.Linear(12, 5)

        def forward(self, ids: Tensor) -> Tensor:
            return self.tags(torch.relu(self.hidden(self.words(ids))))

    model = Tagger()
    graph = ChannelGraph(model, words_spec())
    assert (graph.output_shape, graph.classes) == ((6, 5), 5)
    cut = graph.prefix(0.5)
    assert cut.shapes["tags.weight"] == (5, 6)
    assert graph.submodel(cut, zeros=True)(*graph.inputs.example(3)).shape == (3, 6, 5)


def test_huggingface_models_need_no_wrapper() -> None:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=16, num_labels=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    spec = InputSpec.of({"input_ids": ((8,), torch.int64), "attention_mask": ((8,), torch.int64)})
    graph = ChannelGraph(model, spec)
    assert list(graph.outputs)[0] == "logits" and graph.inputs.names == ("input_ids", "attention_mask")
    ids, mask = torch.randint(20, (3, 8)), torch.ones(3, 8, dtype=torch.int64)
    sub = graph.submodel(graph.full(), graph.full().extract(model.state_dict()))
    model.eval(), sub.eval()
    torch.testing.assert_close(sub(ids, mask), model(input_ids=ids, attention_mask=mask).logits)
    small = graph.prefix(0.25)
    assert graph.submodel(small, zeros=True)(ids, mask).shape == (3, 4)
    assert sum(torch.Size(small.shapes[n]).numel() for n in graph.parameter_names) < 0.35 * sum(
        p.numel() for p in model.parameters()
    )


def test_a_spec_is_made_of_a_shape_a_dict_or_itself() -> None:
    assert InputSpec.of((3, 8, 8)) == InputSpec((Input("x", (3, 8, 8), torch.float32),))
    assert InputSpec.of([5], nn.Linear(5, 2).double()) == InputSpec((Input("input", (5,), torch.float64),))
    spec = mixed_spec(torch.float32)
    assert InputSpec.of(spec) is spec and not spec.single and words_spec().single
    assert InputSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert str(spec) == "mask 5, numbers 3, ids 5" and str(InputSpec.of((3, 8, 8))) == "3x8x8"
    assert [tuple(t.shape) for t in spec.example(2)] == [(2, 5), (2, 3), (2, 5)]
    assert spec.sample_bytes == 5 + 3 * 4 + 5 * 8


def test_what_cannot_work_is_refused_in_a_sentence() -> None:
    with pytest.raises(BadInput, match="sizes must be whole and above 0"):
        InputSpec.of((3, 0))
    with pytest.raises(BadInput, match="same name"):
        InputSpec((Input("a", (1,)), Input("a", (2,))))
    with pytest.raises(BadInput, match="at least one input"):
        InputSpec(())
    with pytest.raises(BadInput, match="'floaty' is not a dtype"):
        InputSpec.from_json([{"name": "a", "shape": [1], "dtype": "floaty"}])
    with pytest.raises(BadInput, match="WordsAndNumbers.forward has no parameter named figures; it has ids, mask"):
        ChannelGraph(WordsAndNumbers(), InputSpec.of({"ids": ((5,), torch.int64), "figures": ((3,), torch.float32)}))
    with pytest.raises(BadInput, match="WordsAndNumbers.forward cannot take ids, mask: missing a required"):
        ChannelGraph(WordsAndNumbers(), InputSpec.of({"ids": ((5,), torch.int64), "mask": ((5,), torch.bool)}))
    with pytest.raises(BadInput, match="takes 3 inputs"):
        _ = built("mixed")[1].input_shape
    with pytest.raises(BadInput, match="returns no tensor of scores"):
        ChannelGraph(Returning(lambda e, f, s: {"classes": s.argmax(1)}), (3, 8, 8))
    with pytest.raises(BadInput, match=r"returns \[batch\]; Strata needs class scores"):
        ChannelGraph(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1), nn.Flatten(0)), (5,))


class WithFurther(nn.Module):
    """Takes any further names, as the models of transformers do."""

    def __init__(self, most: int = 6) -> None:
        super().__init__()
        self.words, self.places, self.scores = nn.Embedding(9, 8), nn.Embedding(most, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor | None = None, mask: Tensor | None = None, **further: Any) -> Tensor:
        assert ids is not None
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        return self.scores(x.mean(1) if mask is None else (x * mask.unsqueeze(-1)).mean(1))


def test_a_single_input_of_another_name_goes_to_the_first_parameter() -> None:
    graph = ChannelGraph(WithFurther(), InputSpec.of({"x": ((5,), torch.int64)}))
    assert graph.inputs.names == ("x",) and graph.classes == 3


def test_of_several_inputs_each_has_to_be_known() -> None:
    spec = InputSpec.of({"ids": ((5,), torch.int64), "masks": ((5,), torch.bool)})
    with pytest.raises(BadInput, match="WithFurther.forward has no parameter named masks; it has ids, mask"):
        ChannelGraph(WithFurther(), spec)


def test_text_that_is_too_long_names_the_longest_length() -> None:
    spec = InputSpec.of({"ids": ((23,), torch.int64), "mask": ((23,), torch.bool)})
    with pytest.raises(
        BadInput, match="WithFurther takes texts of at most 6 tokens, and these have 23: give --length 6"
    ):
        ChannelGraph(WithFurther(), spec)
