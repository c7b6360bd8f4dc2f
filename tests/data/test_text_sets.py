"""Text sets by name: the copies in ../shared/data, and the published forms, rows written out by hand."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from strata.cli import main
from strata.core.errors import BadInput
from strata.data import CATALOGUE, NextToken, Reading, get, load
from tests.data.real import SHARED
from tests.data.server import Site, serving

ROLES = [
    {"play": "Hamlet", "role": "GHOST", "speeches": ["Mark me.", "Swear."]},
    {"play": "Hamlet", "role": "ALL", "speeches": ["O!"]},
]


def test_shakespeare_by_role(tmp_path: Path) -> None:
    with lzma.open(tmp_path / "shakespeare_by_role.jsonl.xz", "wt") as file:
        file.writelines(json.dumps(role) + "\n" for role in ROLES)
    data = load("shakespeare", tmp_path, Reading(length=3))
    # "Mark me.\nSwear.": 15 characters, 14 with a follower: windows of 3, 3, 3, 3 and 2, of which a fifth is tested on
    alphabet = sorted(set("Mark me.\nSwear.O!"))
    text = [
        "".join(alphabet[one] if one < len(alphabet) else "_" for one in row) for row in data.train.inputs["input_ids"]
    ]
    assert text == ["Mar", "k m", "e.\n", "Swe", "O__"] and len(data.test) == 1
    assert data.train.targets[0].tolist() == [alphabet.index(one) for one in "ark"]
    assert data.users is not None and [user.tolist() for user in data.users] == [[4], [0, 1, 2, 3]]  # ALL, GHOST
    assert data.objective == NextToken() and data.vocabulary == data.classes == len(alphabet) + 1
    with pytest.raises(BadInput, match="shakespeare has no labels"):
        load("shakespeare", tmp_path, Reading(objective="classification"))


PUBLISHED: dict[str, dict[str, str]] = {
    "banking77": {
        "train.csv": 'text,category\n"Where, is it?",card\nHow?,fee\n',
        "test.csv": "text,category\nWhy?,fee\n",
    },
    "clinc150": {
        "data_full.json": json.dumps(
            {
                "train": [["hi", "card"], ["yo", "fee"]],
                "val": [["x", "fee"]],
                "test": [["why", "fee"]],
                "oos_test": [["z", "oos"]],
            }
        )
    },
    "trec": {
        "train_5500.label": "CARD:abb What is it ?\nFEE:exp How come ?\n",
        "TREC_10.label": "FEE:other Why ?\n",
    },
    "SST-2": {"train.tsv": "sentence\tlabel\nbad \t0\ngood \t1\n", "dev.tsv": "sentence\tlabel\nfine \t1\n"},
}


@pytest.mark.parametrize(
    ("name", "folder", "first", "classes"),
    [
        ("banking77", "banking77", "Where, is it?", ("card", "fee")),
        ("clinc150", "clinc150", "hi", ("card", "fee")),
        ("trec", "trec", "What is it ?", ("CARD", "FEE")),
        ("trec50", "trec", "What is it ?", ("CARD:abb", "FEE:exp", "FEE:other")),
        ("sst2", "SST-2", "bad", ("negative", "positive")),
    ],
)
def test_published_forms(name: str, folder: str, first: str, classes: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / folder).mkdir()
    for file, text in PUBLISHED[folder].items():
        (tmp_path / folder / file).write_text(text)
    data = load(name, tmp_path)
    ids, mask = (data.train.inputs[key][0] for key in ("input_ids", "attention_mask"))
    assert bytes(ids[mask].tolist()).decode() == first and data.class_names == classes
    assert (len(data.train), len(data.test)) == (2, 1) and data.train.targets.tolist() == [0, 1]
    assert CATALOGUE[name].find(tmp_path / folder) is not None  # told the folder itself


def test_newsgroups_as_published(tmp_path: Path) -> None:
    for split, group, number, text in [
        ("train", "a.b", "1", b"caf\xe9"),
        ("train", "c.d", "2", b"x"),
        ("test", "c.d", "3", b"y"),
    ]:
        path = tmp_path / "20newsgroups" / f"20news-bydate-{split}" / group / number
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    data = load("20newsgroups", tmp_path)
    assert data.class_names == ("a.b", "c.d") and data.train.inputs["input_ids"][0].tolist() == list("café".encode())


def test_getting_single_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: text.encode() for name, text in PUBLISHED["trec"].items()}
    with serving(Site(files)) as site:
        assert get("trec", tmp_path, site.url) == tmp_path / "trec"
    assert len(load("trec", tmp_path).train) == 2
    assert (tmp_path / "trec" / "TREC_10.label.sha256").is_file()  # nobody publishes a checksum: the first one is kept
    assert main(["data", "get", "shakespeare", "--dir", str(tmp_path)]) == 2
    assert "cannot simply be downloaded: put shakespeare_by_role.jsonl.xz" in capsys.readouterr().err


def test_damaged_files_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "trec.jsonl").write_text('{"text": "Why?", "label": "A:b"}\n')
    with pytest.raises(BadInput, match="line 1 of .*trec.jsonl should have text, label and split"):
        load("trec", tmp_path)
    (tmp_path / "clinc150").mkdir()
    (tmp_path / "clinc150" / "data_full.json").write_text("[1]")
    with pytest.raises(BadInput, match="is not CLINC150"):
        load("clinc150", tmp_path)


def test_the_real_copies() -> None:
    if not (SHARED / "text" / "trec.jsonl.xz").is_file():
        pytest.skip(f"needs the real data {SHARED / 'text'}")
    trec, banking = load("trec", SHARED), load("banking77", SHARED, Reading(length=64))
    assert (len(trec.train), len(trec.test)) == (5452, 500)
    assert trec.class_names == ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")
    assert trec.train.targets.bincount().tolist() == [86, 1162, 1250, 1223, 835, 896]  # as published
    assert (len(banking.train), len(banking.test), banking.classes) == (10003, 3080, 77)
    assert banking.notes[0].endswith("texts are longer than 64 tokens and are cut there (--length)")
