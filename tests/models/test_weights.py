"""Weights from elsewhere: which entries go where, what is left out and said, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from strata.core.errors import BadInput
from strata.models.huggingface import load_onto
from strata.models.loading import load_model
from strata.models.resnet import padded_resnet20
from strata.models.weights import load_weights, read_weights
from tests.data.real import SHARED


class Net(nn.Module):
    def __init__(self, classes: int = 3, width: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.Linear(width, width))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def written(path: Path, state: dict[str, Tensor]) -> Path:
    if path.suffix == ".safetensors":
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    else:
        torch.save(state, path)
    return path


def same(model: nn.Module, other: nn.Module, names: list[str] | None = None) -> bool:
    mine, theirs = model.state_dict(), other.state_dict()
    return all(torch.equal(mine[name], theirs[name]) for name in names or mine)


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_files(tmp_path: Path, name: str) -> None:
    source, model = Net(), Net()
    assert load_weights(model, written(tmp_path / name, source.state_dict())) == [] and same(model, source)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.backbone."])
def test_a_prefix_too_many(tmp_path: Path, prefix: str) -> None:
    source, model = Net(), Net()
    state = {prefix + name: tensor for name, tensor in source.state_dict().items()}
    assert load_weights(model, written(tmp_path / "w.safetensors", state)) == [] and same(model, source)
    torch.save({"epoch": 3, "state_dict": state, "best": 0.9}, tmp_path / "w.pt")  # as training scripts save it
    other = Net()
    assert load_weights(other, tmp_path / "w.pt") == [] and same(other, source)


def test_a_prefix_too_few(tmp_path: Path) -> None:
    """A backbone's file in a model with a head beside it."""
    source, model = Net(), Net()
    head = model.head.weight.clone()
    path = written(tmp_path / "w.safetensors", source.body.state_dict())
    (note,) = load_weights(model, path)
    assert note == f"left out of {path}, and begun anew: head.weight (not there), head.bias (not there)"
    assert same(model.body, source.body) and torch.equal(model.head.weight, head)


def test_a_head_of_another_size_is_left_out_by_name(tmp_path: Path) -> None:
    source, model = Net(10), Net(3)
    path = written(tmp_path / "w.pt", source.state_dict())
    (note,) = load_weights(model, path)
    wanted = "head.weight (10x4 there, 3x4 here), head.bias (10 there, 3 here)"
    assert note == f"left out of {path}, and begun anew: {wanted}" and same(model.body, source.body)


def test_folders(tmp_path: Path) -> None:
    source, model = Net(), Net()
    written(tmp_path / "model.safetensors", source.state_dict())  # of a run, or of Hugging Face
    assert load_weights(model, tmp_path) == [] and same(model, source)
    parts = tmp_path / "parts"
    parts.mkdir()
    state = source.state_dict()
    names = list(state)
    files = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(names)}
    for file in set(files.values()):
        written(parts / file, {name: state[name] for name in names if files[name] == file})
    (parts / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert read_weights(parts).keys() == state.keys()
    (tmp_path / "run" / "checkpoint").mkdir(parents=True)
    with pytest.raises(BadInput, match="is not finished, so it has no model.safetensors"):
        read_weights(tmp_path / "run")
    with pytest.raises(BadInput, match="neither model.safetensors nor pytorch_model.bin"):
        read_weights(tmp_path / "run" / "checkpoint")


def test_what_fits_nothing_is_refused_in_one_sentence(tmp_path: Path) -> None:
    wide = written(tmp_path / "wide.pt", Net(width=8).state_dict())
    with pytest.raises(BadInput, match=r"does not hold weights for this model: 2 of 11 .*body.0.weight is 8x5 there"):
        load_weights(Net(), wide)
    other = written(tmp_path / "other.safetensors", {"a.b": torch.zeros(2)})
    with pytest.raises(BadInput, match=r"0 of 11 entries .*its first is called a.b and the model's body.0.weight"):
        load_weights(Net(), other)
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(BadInput, match="it holds list, not a state dict of tensors"):
        load_weights(Net(), tmp_path / "list.pt")
    with pytest.raises(BadInput, match="there is no file nowhere.pt to start from"):
        load_weights(Net(), Path("nowhere.pt"))


def test_a_weight_with_two_names_may_be_there_under_one(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.scores = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
            self.scores.weight = self.words.weight

    source, model = Tied(), Tied()
    path = written(tmp_path / "w.safetensors", {"words.weight": source.words.weight.detach()})
    assert load_weights(model, path) == [] and torch.equal(model.scores.weight, source.words.weight)


# --- Hugging Face ------------------------------------------------------------------------------------------------


def test_a_model_of_a_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=12,
    )  # fmt: skip
    base = transformers.BertModel(config)  # without a head, as sentence encoders come
    base.save_pretrained(tmp_path / "bert")
    notes: list[str] = []
    model = load_model(f"hf:{tmp_path / 'bert'}", 5, task="classification", notes=notes)
    assert type(model).__name__ == "BertForSequenceClassification" and model.classifier.out_features == 5  # type: ignore[union-attr]
    assert len(notes) == 1 and "classifier.weight (not there), classifier.bias (not there)" in notes[0]
    ids = torch.randint(30, (2, 7))
    model.eval(), base.eval()
    torch.testing.assert_close(model.bert(ids).pooler_output, base(ids).pooler_output)  # type: ignore[operator]
    with pytest.raises(BadInput, match="is no folder of a Hugging Face model: it has no config.json"):
        load_model(f"hf:{tmp_path}")
    vit = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4
    )
    vit.save_pretrained(tmp_path / "vit")
    notes.clear()
    assert type(load_model(f"hf:{tmp_path / 'vit'}", 4, notes=notes)).__name__ == "ViTForImageClassification"
    assert notes == [f"{tmp_path / 'vit'} has no weights: the model begins from random ones"]


PICTURES = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 8, "patch_size": 4}
RENAMED = {
    "ViT": {"hidden_size": 16, **PICTURES},
    "Swin": {"image_size": 16, "patch_size": 4, "embed_dim": 16, "depths": [1], "num_heads": [2], "window_size": 2},
}


@pytest.mark.parametrize("name", RENAMED)
def test_entries_that_are_saved_under_other_names(tmp_path: Path, name: str) -> None:
    """transformers renames them as it saves and loads: the model is the one that was saved, to the bit."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**RENAMED[name], num_labels=3)
    source = getattr(transformers, f"{name}ForImageClassification")(config).eval()
    transformers.utils.logging.disable_progress_bar()
    source.save_pretrained(tmp_path / "saved")
    assert read_weights(tmp_path / "saved").keys() != source.state_dict().keys()
    notes: list[str] = []
    model = load_model(f"hf:{tmp_path / 'saved'}", 3, notes=notes).eval()
    x = torch.randn(2, 3, config.image_size, config.image_size)
    assert notes == [] and torch.equal(model(x).logits, source(x).logits)
    other = load_model(f"hf:{tmp_path / 'saved'}", 5, notes=notes)
    assert notes[0].endswith("begun anew: classifier.weight (3x16 there, 5x16 here), classifier.bias (3 there, 5 here)")
    assert load_onto(other, tmp_path / "saved") == notes, "--init takes the folder too"


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.ViTConfig(hidden_size=16, **PICTURES).save_pretrained(tmp_path)
    written(tmp_path / "model.safetensors", Net().state_dict())
    with pytest.raises(BadInput, match=r"does not hold weights for this model: 0 of 24 entries of ViTFor"):
        load_model(f"hf:{tmp_path}", 3)


def real(name: str) -> Path:
    path = SHARED / "weights" / name
    if not path.exists():
        pytest.skip(f"needs the real weights {path}")
    return path


def test_a_real_language_model() -> None:
    """It tells stories: after a familiar beginning it knows how they go on."""
    pytest.importorskip("transformers")
    folder = real("stories260K-llama")
    notes: list[str] = []
    model = load_model(f"hf:{folder}", task="next-token", notes=notes).eval()
    assert notes == [] and not model.config.use_cache  # type: ignore[union-attr]
    from tokenizers import Tokenizer

    text = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    ids = torch.tensor([Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids])
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:])
    assert loss < 2.0  # a uniform guess among 512 has 6.2


def test_a_real_network_of_images_for_other_classes() -> None:
    """All but the head is taken, under the names that it was published with."""
    path = real("resnet20-12fca82f.th")
    model = padded_resnet20(100)
    (note,) = load_weights(model, path)
    assert "linear.weight (10x64 there, 100x64 here), linear.bias (10 there, 100 here)" in note
    published = torch.load(path, weights_only=True, map_location="cpu")["state_dict"]
    own = {f"module.{name}": value for name, value in model.state_dict().items()}
    assert set(published) <= set(own) and len(published) > 90
    assert all(torch.equal(own[name], value) for name, value in published.items() if "linear" not in name)


def test_weights_of_another_type_are_said_or_refused(tmp_path: Path) -> None:
    source, path = Net(), tmp_path / "w.pt"
    for kind, said in (
        (torch.bfloat16, "bfloat16, which become float32 exactly"),
        (torch.float16, "float16, which become float32 exactly"),
        (torch.float64, "float64, which are rounded to float32"),
    ):
        state = {name: one.to(kind) if one.is_floating_point() else one for name, one in source.state_dict().items()}
        state["head.bias"] = state["head.bias"] + 1 / 3
        model = Net()
        assert load_weights(model, written(path, state)) == [f"{path} has weights in {said}"]
        assert torch.equal(model.head.bias, state["head.bias"].float())
    for name, given, said in (
        ("head.bias", torch.tensor([0.0, float("nan"), 1.0]), "has NaN in head.bias"),
        ("head.bias", torch.tensor([1, 2, 3]), "has int64 in head.bias, and the model has float32 there"),
        ("head.bias", torch.tensor([1, 2, 3]).bool(), "has bool in head.bias"),
        ("head.bias", torch.full((3,), 1e40, dtype=torch.float64), "values in head.bias that float32 cannot hold"),
        ("body.1.num_batches_tracked", torch.tensor(0.5), "has float32 in body.1.num_batches_tracked"),
    ):
        model, before = Net(), Net()
        before.load_state_dict(model.state_dict())
        with pytest.raises(BadInput, match=said):
            load_weights(model, written(path, {**source.state_dict(), name: given}))
        assert same(model, before)


def test_a_state_dict_under_any_name(tmp_path: Path) -> None:
    source, model = Net(), Net()
    torch.save({"epoch": 3, "net": source.state_dict(), "optimizer": {"state": {}}}, tmp_path / "w.pt")
    assert load_weights(model, tmp_path / "w.pt") == [] and same(model, source)
    torch.save({"net": source.state_dict(), "ema": source.state_dict()}, tmp_path / "two.pt")
    with pytest.raises(BadInput, match="it holds dict, not a state dict"):
        load_weights(model, tmp_path / "two.pt")


def test_what_is_no_state_dict_is_one_sentence(tmp_path: Path) -> None:
    torch.save(Net(), tmp_path / "module.pt")
    (tmp_path / "junk.pt").write_bytes(b"hello")
    whole = written(tmp_path / "whole.pt", Net().state_dict()).read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    for name, said in (
        ("module.pt", "a whole module, .* save model.state_dict"),
        ("junk.pt", "no state dict"),
        ("cut.pt", "cut short"),
    ):
        with pytest.raises(BadInput, match=f"{name} does not hold weights for this model: .*{said}") as refused:
            read_weights(tmp_path / name)
        assert len(str(refused.value)) < 400 and "\x1b" not in str(refused.value)
