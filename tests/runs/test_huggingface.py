"""Runs of models of the transformers library, tiny ones: pictures and text, in Python and by the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import strata
from strata.cli import main
from strata.core.errors import BadInput
from strata.data import FederatedData, wrap
from strata.runs.config import RunConfig
from strata.runs.launch import load_data, make_model

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
QUICK = ["--rounds", "1", "--devices", "2", "--per-round", "1", "--workers", "0", "--quiet"]
TEXTS = ("a fine day", "rain again, and wind", "what a fine game", "rain", "it is fine", "wind and rain")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a file of texts, and a model of bytes."""
    rows = [{"text": text, "label": "bad" if "rain" in text else "good"} for text in TEXTS]
    split = [{**row, "split": "train" if number < 4 else "test"} for number, row in enumerate(rows)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in split))
    monkeypatch.chdir(tmp_path)
    saved(transformers.BertForSequenceClassification(bert()), "bert")
    return tmp_path


def bert(**more: Any) -> Any:
    return transformers.BertConfig(**SMALL, **{"vocab_size": 257, "max_position_embeddings": 24, **more})


def saved(model: Any, folder: str) -> None:
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)


def config(folder: str = "bert", data: str = "text:rows.jsonl", **more: Any) -> RunConfig:
    return RunConfig.of(model=f"hf:{folder}", data=data, devices=2, per_round=1, **more)


def model_for(asked: RunConfig) -> tuple[Any, FederatedData, list[str]]:
    data, notes = load_data(asked), []
    return make_model(asked, data, notes=notes).eval(), data, notes


def pictures() -> FederatedData:
    images, labels = torch.rand(12, 3, 8, 8), torch.arange(12) % 3
    return wrap(TensorDataset(images, labels), TensorDataset(images[:6], labels[:6]))


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one sentence."""
    assert main(["run", *flags, *QUICK, "--out", "refused"]) == 2 and not Path("refused").exists()
    return capsys.readouterr().err.splitlines()[-1]


def test_text_within_a_budget_from_the_command_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the library is for: a saved model, the user's file, and a device's bytes."""
    asked = ["--model", "hf:bert", "--data", "text:rows.jsonl", "--method", "window", "--budget", "200KiB"]
    assert main(["run", *asked, *QUICK, "--batch", "2", "--out", "run", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["rounds"] == 1 and 0 < summary["peak_bytes"] <= 200 * 1024
    model = transformers.BertForSequenceClassification.from_pretrained("bert")
    strata.models.weights.load_weights(model, here / "run")  # it is the plain model's


def test_pictures_go_to_the_first_parameter(tmp_path: Path) -> None:
    """Its forward takes pixel_values and any further names; the data say x."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.ViTForImageClassification(
            transformers.ViTConfig(**SMALL, image_size=8, patch_size=4, num_labels=3)
        )
    result = strata.run(
        model, pictures(), "fedavg", out=tmp_path / "run", rounds=1, devices=2, per_round=1, workers=0, progress=False
    )
    assert result.summary["rounds"] == 1 and result.summary["upload_bytes"] > 0


def test_a_model_of_text_on_images_is_told_so(tmp_path: Path) -> None:
    model = transformers.BertForSequenceClassification(bert())
    with pytest.raises(BadInput, match=r"takes text \(its input_ids\), and this input is of real numbers, 3x8x8: give"):
        strata.run(model, pictures(), "fedavg", out=tmp_path / "run", rounds=1, devices=2, per_round=1, progress=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("tokenizer", ["bytes", "chars"])
def test_a_decoder_reads_the_last_token_whatever_the_length(here: Path, tokenizer: str) -> None:
    small = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 40, "bos_token_id": 0, "eos_token_id": 0}
    saved(transformers.GPT2ForSequenceClassification(transformers.GPT2Config(vocab_size=257, **small)), "gpt2")
    found: list[Tensor] = []
    for length in (20, 33):
        model, data, _ = model_for(config("gpt2", tokenizer=tokenizer, length=length))
        with torch.no_grad():
            found.append(model(**data.train.inputs).logits)
    assert found[0].shape == (4, 2)
    torch.testing.assert_close(found[0], found[1])
    assert not torch.allclose(found[0][0], found[0][1])


def test_ids_beyond_the_table_are_refused_before_the_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(transformers.BertModel(bert(vocab_size=100)), "few")
    said = refused(capsys, "--model", "hf:few", "--data", "text:rows.jsonl", "--method", "fedavg")
    assert "rows.jsonl has input_ids up to 256" in said and "word_embeddings.weight, has 100 rows" in said
    assert "--tokenizer FOLDER" in said and "for 257 ids" in said


def test_text_beyond_the_positions_is_refused_by_its_length(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "--model", "hf:bert", "--data", "text:rows.jsonl", "--length", "30", "--method", "fedavg")
    assert "takes texts of at most 24 tokens, and these have 30: give --length 24" in said


def test_a_classifier_by_the_end_of_texts_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers.T5Config(vocab_size=257, d_model=16, d_kv=4, d_ff=12, num_layers=1, num_heads=4).save_pretrained("t5")
    said = refused(capsys, "--model", "hf:t5", "--data", "text:rows.jsonl", "--method", "fedavg")
    assert "is an encoder with a decoder (t5)" in said and "--objective per-position" in said


def test_a_network_of_images_is_told_that_the_data_is_text(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "--model", "resnet20", "--data", "text:rows.jsonl", "--method", "fedavg")
    assert "resnet20 takes images of 3 channels, such as 3x32x32, and the data is text" in said


def test_what_is_begun_anew_is_said_once_and_only_where_it_is(here: Path) -> None:
    saved(transformers.BertModel(bert()), "bare")
    classifier = "classifier.weight (not there), classifier.bias (not there)"
    anew = f"left out of bare, and begun anew: {classifier}"
    assert model_for(config("bare"))[2] == [anew]
    assert model_for(config("bare", init="bare"))[2] == [anew]
    assert model_for(config("bare", init="bert"))[2] == [], "--init brings it"
    kept = f"left out of bare, and left as the model's own folder has it: {classifier}"
    model, _, notes = model_for(config("bert", init="bare"))
    own = transformers.BertForSequenceClassification.from_pretrained("bert")
    assert notes == [kept] and torch.equal(model.classifier.weight, own.classifier.weight)


WORDS = ["--model", "tests.fleet.nets:words"]
TEXT = ["--classes", "2", "--input", "input_ids:int64:20", "--budget", "200kB"]


def test_plans_of_a_callable_for_a_vocabulary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *WORDS, *TEXT, "--vocabulary", "50", "--json"]) == 0
    assert main(["plan", *WORDS, *TEXT, "--vocabulary", "50", "--method", "window", "--verify"]) == 0
    assert "exact" in capsys.readouterr().out, "its child makes the same model"
    assert main(["plan", *WORDS, *TEXT]) == 2
    assert "makes a model of text, for a vocabulary: run it on data" in capsys.readouterr().err
    assert main(["run", *WORDS, "--data", "digits", "--method", "fedavg", *QUICK, "--out", "run"]) == 2
    assert "run it on data that are text, such as --data text:FILE.jsonl" in capsys.readouterr().err
    assert main(["plan", "--model", "resnet20", "--budget", "24MiB", "--vocabulary", "50"]) == 2
    assert (
        "--vocabulary is for a callable that has a parameter of this name, not for resnet20" in capsys.readouterr().err
    )


def test_a_fit_of_text_prints_commands_for_text(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pasted as it is, none of them runs on the digits."""
    own = ["--data", "text:rows.jsonl", "--budget", "200kB"]
    for asked, wanted in (([*TEXT, "--vocabulary", "50"], "text:FILE.jsonl"), (own, f"text:{here / 'rows.jsonl'}")):
        assert main(["fit", *WORDS, *asked, "--gflops", "2", "--mbit", "5", "--json"]) == 0
        commands = [way["command"] for way in json.loads(capsys.readouterr().out)["ways"] if way["fits"]]
        assert commands and all(one.count("--data") == 1 and f"--data {wanted} " in one for one in commands)
