"""Text and tables of the user's own: what becomes of each row, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from strata.core.errors import BadInput
from strata.data import IGNORED, FederatedData, MultiLabel, NextToken, PerPosition, Reading, Regression, load
from strata.graph.inputs import InputSpec
from strata.runs.config import RunConfig
from strata.runs.launch import reading_of, with_inputs
from tests.data.real import SHARED

I = IGNORED  # noqa: E741


def written(folder: Path, *rows: object) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def loaded(path: Path, classes: int | None = None, **asked: object) -> FederatedData:
    return load(f"text:{path}", reading=Reading(**asked), classes=classes)  # type: ignore[arg-type]


TWO = (
    {"text": "ab", "label": "yes", "split": "train", "who": "eve"},
    {"text": "é", "label": "no", "split": "train", "who": "bob"},
    {"text": "b", "label": "yes", "split": "test", "who": "eve"},
)


def test_bytes_with_padding_and_a_mask(tmp_path: Path) -> None:
    data = loaded(written(tmp_path, *TWO), length=3)
    assert data.train.inputs["input_ids"].tolist() == [[97, 98, 256], [0xC3, 0xA9, 256]]
    assert data.train.inputs["attention_mask"].tolist() == [[True, True, False]] * 2
    assert data.test.inputs["input_ids"].tolist() == [[98, 256, 256]]
    assert data.class_names == ("no", "yes") and data.classes == 2 and data.train.targets.tolist() == [1, 0]
    assert data.vocabulary == 257 and data.users is None and data.notes == ()
    assert repr(data) == ("<rows.jsonl: 2 training and 1 test samples of input_ids 3, attention_mask 3, 2 classes>")


def test_characters_and_users_and_other_field_names(tmp_path: Path) -> None:
    rows = [{"said": row["text"], "mood": row["label"], "split": row["split"], "who": row["who"]} for row in TWO]
    data = loaded(written(tmp_path, *rows), tokenizer="chars", text_field="said", target="mood", user_field="who")
    assert data.train.inputs["input_ids"].tolist() == [[0, 1], [2, 3]] and data.vocabulary == 4  # a, b, é and padding
    assert data.users is not None and [user.tolist() for user in data.users] == [[1], [0]]  # bob, eve


def test_what_is_cut_is_said_and_only_where_it_was_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path, *TWO, {"text": "x" * 513, "label": "no", "split": "test"})
    with pytest.raises(BadInput, match="the longest text of rows.jsonl has 513 tokens: say with --length"):
        loaded(path)
    data = loaded(path, length=2)
    assert data.notes == ("rows.jsonl: 1 of 4 texts are longer than 2 tokens and are cut there (--length)",)
    assert data.test.inputs["input_ids"].tolist()[1] == [120, 120]


def test_next_tokens_in_windows_that_lose_nothing(tmp_path: Path) -> None:
    rows = [{"text": "abcdefg", "split": "train"}, {"text": "hi", "split": "test"}, {"text": "z", "split": "test"}]
    data = loaded(written(tmp_path, *rows), objective="next-token", tokenizer="chars", length=3)
    ids, targets = data.train.inputs["input_ids"].tolist(), data.train.targets.tolist()
    assert ids == [[0, 1, 2], [3, 4, 5]] and targets == [[1, 2, 3], [4, 5, 6]]
    assert data.test.inputs["input_ids"].tolist() == [[7, 10, 10]] and data.test.targets.tolist() == [[8, I, I]]
    assert data.objective == NextToken() and data.classes == data.vocabulary == 11
    assert data.notes == ("rows.jsonl: 1 texts have a single token, which nothing follows: left out",)


def test_numbers_several_labels_and_tags(tmp_path: Path) -> None:
    numbers = written(
        tmp_path, {"text": "a", "label": 1.5, "split": "train"}, {"text": "b", "label": 2, "split": "test"}
    )
    data = loaded(numbers, objective="regression")
    assert data.objective == Regression() and data.train.targets.tolist() == [1.5] and data.classes == 1
    several = written(
        tmp_path, {"text": "a", "label": ["y", "x"], "split": "train"}, {"text": "b", "label": [], "split": "test"}
    )
    data = loaded(several, objective="multi-label")
    assert data.objective == MultiLabel() and data.class_names == ("x", "y")
    assert data.train.targets.tolist() == [[True, True]] and data.test.targets.tolist() == [[False, False]]
    tags = [
        {"text": ["Ann", "is"], "label": ["NAME", "O"], "split": "train"},
        {"text": ["he"], "label": ["O"], "split": "test"},
    ]
    data = loaded(written(tmp_path, *tags), objective="per-position")
    assert data.train.inputs["input_ids"].tolist() == [list(b"Ann is")] and data.objective == PerPosition()
    assert data.train.targets.tolist() == [[0, I, I, I, 1, I]] and data.test.targets.tolist() == [[1, I, I, I, I, I]]


def test_whole_numbers_are_classes_as_they_are(tmp_path: Path) -> None:
    path = written(tmp_path, {"text": "a", "label": 0, "split": "train"}, {"text": "b", "label": 2, "split": "test"})
    assert loaded(path).classes == 3 and loaded(path).test.targets.tolist() == [2]  # no class moves up
    assert loaded(path, classes=5).classes == 5
    with pytest.raises(BadInput, match="line 2 of .* has the label 2; .* within 0 to 1"):
        loaded(path, classes=2)


def test_inputs_that_the_data_has_not_are_named(tmp_path: Path) -> None:
    data = loaded(written(tmp_path, *TWO))
    here = "rows.jsonl has input_ids:int64:2,attention_mask:bool:2"
    for asked in ("nosuch:int64:2", "input_ids:float32:2"):
        with pytest.raises(BadInput, match=f"^--input is {asked} and {here}: give the same or none$"):
            with_inputs(data, InputSpec.of(asked))


def test_ids_are_not_taken_for_classes(tmp_path: Path) -> None:
    ids = [{"text": "a", "label": label, "split": split} for label, split in ((59_090_387, "train"), (7, "test"))]
    path = written(tmp_path, *ids)
    with pytest.raises(
        BadInput, match="the field 'label' of rows.jsonl: .* makes 59090388 classes, and 2 .* --classes 59"
    ):
        loaded(path)
    tags = [{**row, "text": ["a"], "label": [row["label"]]} for row in ids]
    with pytest.raises(BadInput, match="makes 59090388 classes"):
        loaded(written(tmp_path, *tags), objective="per-position")
    few = [{"text": "a", "label": label, "split": split} for label, split in ((3, "train"), (70, "test"))]
    data = loaded(written(tmp_path, *few))
    assert "71 classes (69 without a sample)>" in repr(data)
    assert data.notes == ("rows.jsonl: 69 of 71 classes have no sample",)
    asked = loaded(written(tmp_path, *few), classes=2000)  # said is said
    assert asked.classes == 2000 and asked.notes == ()


def test_a_mark_of_the_byte_order_is_no_part_of_the_text(tmp_path: Path) -> None:
    path = written(tmp_path, *TWO)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert len(loaded(path).train) == 2


def test_a_share_is_held_out_the_same_every_time(tmp_path: Path) -> None:
    rows = [{"text": str(number), "label": number % 2} for number in range(20)]
    path = written(tmp_path, *rows)
    first, again = loaded(path, test_share=0.25), loaded(path, test_share=0.25)
    assert len(first.test) == 5 and torch.equal(first.test.inputs["input_ids"], again.test.inputs["input_ids"])
    assert len(loaded(path).test) == 2
    with pytest.raises(BadInput, match="has 20 rows, and a test share of 0.01 takes 0"):
        loaded(path, test_share=0.01)


@pytest.mark.parametrize(
    ("row", "asked", "said"),
    [
        ({"text": 5, "label": "a"}, {}, "line 2 of .* has the text 5; it should be a string"),
        ({"text": "", "label": "a"}, {}, "has an empty text"),
        ({"text": "\ud800", "label": "a"}, {}, "half a character"),
        ({"text": "x"}, {}, "line 2 of .* has no field 'label'; it has 'split', 'text'"),
        ({"text": "x", "label": 1}, {}, "has the label 1 and line 1 of .* 'yes': give names to all classes"),
        ({"text": "x", "label": 1.5}, {}, "has the label 1.5"),
        ({"text": "x", "label": "a"}, {"objective": "regression"}, "has the label 'yes'; regression needs a number"),
        ({"text": "x", "label": "a"}, {"objective": "multi-label"}, "several labels are a list of names"),
        ({"text": "x", "label": "a"}, {"objective": "per-position"}, "should be a list of words"),
        ({"text": "x", "label": "a", "split": "exam"}, {}, "has the split 'exam'; it should be train, test"),
        ({"text": "x", "label": "a"}, {"tokenizer": "nowhere"}, "there is no folder nowhere with a tokenizer"),
        ({"text": "x", "label": "a"}, {"columns": ("a",)}, "--columns is not for the data text:"),
        ({"text": "x", "label": "a"}, {"objective": "guess"}, "there is no objective 'guess'"),
        ([1], {}, "line 2 of .* is not an object"),
    ],
)
def test_what_text_is_refused(tmp_path: Path, row: object, asked: dict[str, object], said: str) -> None:
    second = {"split": "test", **row} if isinstance(row, dict) else row
    with pytest.raises(BadInput, match=said):
        loaded(written(tmp_path, {"text": "ab", "label": "yes", "split": "train"}, second), **asked)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no file .*none.jsonl"):
        loaded(tmp_path / "none.jsonl")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\xff"}')
    with pytest.raises(BadInput, match="is not UTF-8"):
        loaded(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text("{text}\n")
    with pytest.raises(BadInput, match="line 1 of .*b.jsonl is not JSON"):
        loaded(tmp_path / "b.jsonl")


def test_a_hugging_face_tokenizer(tmp_path: Path) -> None:
    folder = SHARED / "weights" / "stories260K-llama"
    if not folder.is_dir():
        pytest.skip(f"needs the real tokenizer {folder}")
    transformers = pytest.importorskip("transformers")
    own = transformers.AutoTokenizer.from_pretrained(folder)
    text = "Once upon a time"
    rows = [{"text": text, "label": 0, "split": "train"}, {"text": "Once", "label": 1, "split": "test"}]
    data = loaded(written(tmp_path, *rows), tokenizer=str(folder))
    assert data.train.inputs["input_ids"].tolist() == [own(text)["input_ids"]] and data.vocabulary == len(own) == 512
    assert data.test.inputs["attention_mask"].sum().item() == len(own("Once")["input_ids"])


def test_a_hugging_face_model_brings_its_tokenizer(tmp_path: Path) -> None:
    model = f"hf:{tmp_path}"
    assert reading_of(RunConfig.of(model=model, data="text:a.jsonl")).tokenizer is None  # there is none
    (tmp_path / "tokenizer.json").write_text("{}")
    for data in ("text:a.jsonl", "trec"):
        assert reading_of(RunConfig.of(model=model, data=data)).tokenizer == str(tmp_path)
        assert reading_of(RunConfig.of(model=model, data=data, tokenizer="bytes")).tokenizer == "bytes"
    assert reading_of(RunConfig.of(model=model, data="digits")).tokenizer is None


# --- tables ------------------------------------------------------------------------------------------------------

TABLE = "a,b,kind,who,split\n1,0.5,x,u1,train\n3,1.5,y,u2,train\n5,2.5,x,u1,train\n7,3.5,y,u3,test\n"


def table(folder: Path, text: str = TABLE, **asked: object) -> FederatedData:
    path = folder / "table.csv"
    path.write_text(text)
    return load(f"table:{path}", reading=Reading(**{"target": "kind", "user_field": "who", **asked}))  # type: ignore[arg-type]


def test_a_table_of_classes(tmp_path: Path) -> None:
    data = table(tmp_path, objective="classification")
    assert data.train.inputs["x"].tolist() == [[1, 0.5], [3, 1.5], [5, 2.5]] and data.test.inputs["x"].tolist() == [
        [7, 3.5]
    ]
    assert data.class_names == ("x", "y") and data.train.targets.tolist() == [0, 1, 0]
    assert data.users is not None and [user.tolist() for user in data.users] == [[0, 2], [1]]
    scaled = table(tmp_path, objective="classification", standardise=True, columns=("b",))
    # of 0.5, 1.5, 2.5: mean 1.5, deviation sqrt(2/3); test rows by the same
    assert scaled.train.inputs["x"].flatten().tolist() == pytest.approx([-np.sqrt(1.5), 0, np.sqrt(1.5)])
    assert scaled.test.inputs["x"].item() == pytest.approx(2 * np.sqrt(1.5))


def test_a_table_of_numbers_to_predict(tmp_path: Path) -> None:
    data = table(tmp_path, objective="regression", target="b", columns=("a",))
    assert data.objective == Regression() and data.train.targets.tolist() == [0.5, 1.5, 2.5] and data.classes == 1


@pytest.mark.parametrize(
    ("text", "asked", "said"),
    [
        (TABLE, {}, "say what to do with the column 'kind' of table.csv: --objective classification, or regression"),
        (TABLE, {"objective": "next-token"}, "one column to predict"),
        (TABLE, {"objective": "regression"}, "has 'x' in the column 'kind', and columns are numbers"),
        (
            TABLE,
            {"objective": "classification", "target": "b", "columns": ("a",)},
            "line 2 .* has 0.5 in .*whole number",
        ),
        (TABLE, {"objective": "classification", "target": "c"}, "has no column 'c'; it has a, b, kind, who, split"),
        (TABLE, {"objective": "classification", "columns": ("kind",)}, "not 'kind', which is to predict"),
        (TABLE, {"objective": "classification", "tokenizer": "bytes"}, "--tokenizer is not for the data table:"),
        (TABLE.replace("1.5", ""), {"objective": "classification"}, "line 3 .* has nothing in the column 'b'"),
        (TABLE.replace("1.5", "nan"), {"objective": "classification"}, "line 3 .* has 'nan' in the column 'b'"),
        (TABLE.replace("1.5", "16777217"), {"objective": "classification"}, "has 16777217, which float32 cannot hold"),
        (TABLE.replace("1.5,", ""), {"objective": "classification"}, "line 3 .* has 4 cells, and there are 5 columns"),
        ("a,a\n1,2\n", {"objective": "classification"}, "column names, each another"),
        ("a,kind,who\n", {"objective": "classification"}, "no rows below"),
    ],
)
def test_what_tables_are_refused(tmp_path: Path, text: str, asked: dict[str, object], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        table(tmp_path, text, **asked)


def test_names_of_digits_are_no_numbers(tmp_path: Path) -> None:
    rows = [("01", "train"), ("1", "train"), ("10", "test")]
    text = "a,kind,who,split\n" + "".join(f"1,{kind},u,{split}\n" for kind, split in rows)
    assert table(tmp_path, text, objective="classification").class_names == ("01", "1", "10")
    grouped = text.replace("01", "2_0").replace(",1,", ",1_0,").replace(",10,", ",x,")
    assert table(tmp_path, grouped, objective="classification").class_names == ("1_0", "2_0", "x")
    with pytest.raises(BadInput, match="give names to all classes, or whole numbers"):
        table(tmp_path, text.replace("01", "1_0"), objective="classification")
    with pytest.raises(BadInput, match="line 2 .* has '1_0' in the column 'a', and columns are numbers"):
        table(tmp_path, text.replace("\n1,01", "\n1_0,01"), objective="classification")


def test_classes_of_a_table_that_are_ids(tmp_path: Path) -> None:
    text = "a,kind,who,split\n" + "".join(f"{n},{n * 985_000},u,{'train' if n else 'test'}\n" for n in range(60))
    with pytest.raises(BadInput, match="the column 'kind' of table.csv: labels are whole numbers up to .* --classes"):
        table(tmp_path, text, objective="classification")


def numbers(folder: Path, values: object, **asked: object) -> FederatedData:
    """A table whose column a is the values; b is to predict unless asked otherwise."""
    rows = "".join(f"{value},{n % 7},u\n" for n, value in enumerate(values))  # type: ignore[arg-type, var-annotated]
    return table(folder, "a,b,who\n" + rows, **{"objective": "regression", "target": "b", **asked})


LOST = {
    "times": [1_700_000_000.5 + n for n in range(60)],
    "ids": [16_777_217 + 2 * n for n in range(60)],
    "a half": [1, 2, 3, 16_777_216.5, *range(20)],
    "a narrow band": [1000 + n * 1e-5 for n in range(60)],
    "close ones beside a far one": [0.0] * 30 + [1 + n * 1e-9 for n in range(30)],
    "too large": [*range(20), 1e39],
    "more than float64 holds": [0, 2**53 + 1, *range(20)],
}


@pytest.mark.parametrize("name", LOST)
def test_numbers_that_float32_would_make_alike_are_refused(tmp_path: Path, name: str) -> None:
    values = LOST[name]
    with pytest.raises(BadInput, match="column 'a'.* has .*: subtract an offset, or scale it|give --standardise"):
        numbers(tmp_path, values)
    with pytest.raises(BadInput, match="subtract an offset, or scale it$"):
        numbers(tmp_path, values, target="a", columns=("b",))
    rows = [{"text": "a", "label": value} for value in values]
    with pytest.raises(BadInput, match="(label|the field 'label' of rows.jsonl) has .*: subtract an offset, or scale"):
        loaded(written(tmp_path, *rows), objective="regression")
    if name != "more than float64 holds":
        assert len(numbers(tmp_path, values, standardise=True).train)


def test_numbers_that_float32_rounds_by_their_last_digit_are_taken(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for values in (random.random(3000), 280 + 20 * random.random(300), np.exp(3 * random.normal(size=300)), [0.1] * 20):
        data = numbers(tmp_path, values)
        assert len(data.train) + len(data.test) == len(values)


def test_several_numbers_to_predict_are_looked_at_each(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": [n, 1.7e9 + n]} for n in range(20)]
    with pytest.raises(BadInput, match="number 2 of the field 'label' of rows.jsonl has 17000000.., which float32"):
        loaded(written(tmp_path, *rows), objective="regression")


def test_a_data_set_that_hugging_face_has_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for the package: parts are splits, and numbers of classes have names."""

    class Rows(list[dict[str, Any]]):
        features: ClassVar[Any] = {
            "text": object(), "label": SimpleNamespace(int2str=lambda number: ("no", "yes")[number])
        }  # fmt: skip

    parts = {
        "train": Rows({"text": f"t {n}", "label": n % 2} for n in range(6)),
        "test": Rows([{"text": "u", "label": 1}]),
    }
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_from_disk=lambda folder: parts))
    data = load(f"text:{tmp_path}")
    assert data.class_names == ("no", "yes") and data.train.targets.tolist() == [0, 1] * 3
    assert data.test.targets.tolist() == [1]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadInput, match="is a folder: .* install the package datasets"):
        load(f"text:{tmp_path}")
