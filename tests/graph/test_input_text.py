"""Inputs as the command line names them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import strata
from strata.cli import main
from strata.core.errors import BadInput
from strata.core.sizes import parse_input
from strata.graph import ChannelGraph
from strata.graph.inputs import InputSpec, taken_by
from strata.planning import Plan
from strata.runs.config import RunConfig

TEXT = "input_ids:int64:6,attention_mask:bool:6"


class Masked(nn.Module):
    """The mean of what is no padding."""

    def __init__(self, num_classes: int = 3, vocabulary: int = 257) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, 8)
        self.hidden, self.deeper, self.scores = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, num_classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask.unsqueeze(-1)
        x = (self.table(input_ids) * mask).sum(1) / mask.sum(1).clamp(min=1)
        return self.scores(torch.relu(self.deeper(torch.relu(self.hidden(x)))))


def test_names_shapes_and_dtypes() -> None:
    spec = InputSpec.of(TEXT)
    assert spec == InputSpec.of({"input_ids": ((6,), torch.int64), "attention_mask": ((6,), torch.bool)})
    assert parse_input(" ids : int64 : 64 ,x:float32:3x8x8") == "ids:int64:64,x:float32:3x8x8"
    assert parse_input("3x32x32") == (3, 32, 32)
    assert InputSpec.of((3, 8, 8)).plain == (3, 8, 8) and InputSpec.of("ids:int64:4").plain == InputSpec.of(
        "ids:int64:4"
    )
    for wrong in ("ids:int64", "ids:float16:4", "ids:float64:4", "1d:int64:4", "ids:int64:", ":int64:4", "a:bool:4,,"):
        with pytest.raises(BadInput):
            parse_input(wrong)
    with pytest.raises(BadInput, match="two inputs have the same name: a, a"):
        parse_input("a:bool:4,a:bool:4")


def test_a_plan_of_several_inputs_to_json_and_back(capsys: pytest.CaptureFixture[str]) -> None:
    model = Masked()
    plan = strata.plan(model, TEXT, batch_size=4, constraint=0.95, rounds=5)
    written = plan.to_json()
    assert written["input"] == [
        {"name": "input_ids", "shape": [6], "dtype": "int64"},
        {"name": "attention_mask", "shape": [6], "dtype": "bool"},
    ]
    assert "input input_ids 6, attention_mask 6" in str(plan)
    again = Plan.from_json(json.loads(json.dumps(written)), plan.graph)
    assert again.hash == plan.hash
    with pytest.raises(BadInput, match="the graph was made for inputs of input_ids 6, attention_mask 6, not 6"):
        strata.plan(plan.graph, "6", constraint=0.8)
    name = f"{__name__}:Masked"
    asked = ["--model", name, "--input", TEXT, "--constraint", "0.95", "--rounds", "5", "--batch", "4", "--json"]
    assert main(["plan", *asked]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == written["steps"]


def test_a_mask_is_for_models_that_take_one() -> None:
    class Ids(Masked):
        def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(ids, ids < 256)

    both = InputSpec.of(TEXT).names
    assert taken_by(Masked(), both) == both and taken_by(Ids(), both) == ("input_ids",)
    assert ChannelGraph(Ids(), InputSpec.of("input_ids:int64:6")).classes == 3


def test_the_command_line_learns_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        {"text": "good" if number % 2 else "awful!!", "label": number % 2, "who": number % 4} for number in range(40)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = [
        "--data",
        "text:rows.jsonl",
        "--model",
        f"{__name__}:Masked",
        "--method",
        "fedavg",
        "--user-field",
    ]
    asked += ["who", "--partition", "user", "--devices", "4", "--per-round", "4", "--rounds", "4", "--workers", "0"]
    out = tmp_path / "run"
    assert main(["run", *asked, "--length", "4", "--out", str(out), "--lr", "0.5"]) == 0
    said = capsys.readouterr().err
    assert "rows.jsonl: 20 of 40 texts are longer than 4 tokens and are cut there (--length)" in said
    summary = json.loads((out / "summary.json").read_text())
    assert summary["accuracy"] == 1 and summary["metrics"]["f1"] == 1
    monkeypatch.chdir("/")
    assert main(["run", "--resume", str(out)]) == 0
    assert "finished: nothing to do" in capsys.readouterr().err
    assert RunConfig.of_folder(out, {}).data == f"text:{tmp_path}/rows.jsonl"
    monkeypatch.chdir(tmp_path)
    for wrong, sentence in [
        (["--input", "input_ids:int64:9"], "rows.jsonl has input_ids:int64:7,attention_mask:bool:7"),
        (["--objective", "regression", "--target", "text"], "regression needs a number"),
        (["--tokenizer", "words"], "words with a tokenizer: give bytes, chars"),
        (["--sizes", "lognormal:1"], "sizes are for the partitions iid"),
    ]:
        assert main(["run", *asked, *wrong, "--out", str(tmp_path / "other")]) == 2
        error = capsys.readouterr().err
        assert sentence in error and error.count("\n") == 1 and not (tmp_path / "other").exists()
