"""Text by name: as published, or as one file NAME.jsonl.xz of rows {"split", "label", "text"}.

Of shakespeare the one file has rows {"play", "role", "speeches"}: a role is a user, the first four fifths of whose
windows are trained on and the rest, where there is one, tested on (as in LEAF).
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from strata.core.errors import BadInput
from strata.data.files import read_bytes
from strata.data.objective_names import objective_named
from strata.data.reading import Reading
from strata.data.rows import Row, objects, users_of
from strata.data.samples import FederatedData
from strata.data.text import next_tokens, text_data, windows
from strata.data.tokenizers import tokenizer_named

ROLES = "shakespeare_by_role.jsonl.xz"
SPEECH = 80  # characters of a sample of shakespeare, as in LEAF
Rows = Iterator[Row]


@dataclass(frozen=True)
class TextSet:
    """Where the files of a set are, and how its published form is read."""

    name: str
    one_file: str
    published: tuple[str, ...] = ()  # relative to the set's own folder; all of them are needed
    rows: Callable[[Path], Rows] | None = None
    folder: str = ""  # of the published files, where it is not the set's name
    left_out: tuple[str, ...] = ()  # splits of rows that are no part of the benchmark
    label: Callable[[str], str] = str

    def find(self, root: Path) -> Path | None:
        """The one file, or the folder of the published ones."""
        folder = self.folder or self.name
        for place in (root, root / "text", root / folder):
            for name in (self.one_file, self.one_file.removesuffix(".xz")):
                if (place / name).is_file():
                    return place / name
        for place in (root / folder, *([root] if root.name == folder else [])):
            if self.published and all((place / name).exists() for name in self.published):
                return place
        return None

    def read(self, place: Path, reading: Reading) -> FederatedData:
        objective = objective_named(reading.objective or "classification")
        if objective.name not in ("classification", "next-token"):
            raise BadInput(f"{self.name} is for --objective classification or next-token, not {objective.name}")
        if place.is_dir():
            assert self.rows is not None
            rows = list(self.rows(place))
        else:
            rows = [_row(one, where) for where, one in objects(place)]
        rows = [replace(row, label=self.label(row.label)) for row in rows if row.split not in self.left_out]
        parts = [[row for row in rows if row.split == part] for part in ("train", "test")]
        if not parts[1]:  # of sst2 as GLUE has it, whose test rows have no labels
            parts[1] = [row for row in rows if row.split == "dev"]
        if not all(parts):
            raise BadInput(f"{place} has {len(parts[0])} rows to train and {len(parts[1])} to test on; fetch it again")
        return text_data(parts[0], parts[1], self.name, objective, reading)


def _row(one: dict[str, object], where: str) -> Row:
    found = [one.get(key) for key in ("text", "label", "split")]
    if not all(isinstance(value, str) for value in found):
        raise BadInput(f"{where} should have text, label and split; fetch the data set again")
    text, label, split = map(str, found)
    return Row(text, label, where, split)


def _newsgroups(folder: Path) -> Rows:
    """20news-bydate-train/GROUP/NUMBER and the same of test; in Latin-1."""
    for split in ("train", "test"):
        for path in sorted((folder / f"20news-bydate-{split}").glob("*/*")):
            yield Row(read_bytes(path).decode("latin-1"), path.parent.name, str(path), split)


def _banking(folder: Path) -> Rows:
    for split in ("train", "test"):
        path = folder / f"{split}.csv"
        reader = csv.DictReader(io.StringIO(_utf8(path), newline=""))
        for one in reader:
            if not one.get("text") or not one.get("category"):
                raise BadInput(f"line {reader.line_num} of {path} has no text and category; fetch the data set again")
            yield Row(one["text"], one["category"], f"line {reader.line_num} of {path}", split)


def _clinc(folder: Path) -> Rows:
    path = folder / "data_full.json"
    try:
        for split, rows in json.loads(_utf8(path)).items():
            for text, label in rows:
                yield Row(text, label, f"{split} of {path}", split)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(f"{path} is not CLINC150, splits with lists of texts and labels; fetch it again") from error


def _sst2(folder: Path) -> Rows:
    """As in GLUE, whose test rows have no labels: dev is tested on."""
    for split in ("train", "dev"):
        for number, line in enumerate(_utf8(folder / f"{split}.tsv").splitlines()[1:], start=2):
            text, _, label = line.rpartition("\t")
            where = f"line {number} of {folder / split}.tsv"
            if label not in ("0", "1") or not text.strip():
                raise BadInput(f"{where} is not a sentence and 0 or 1; fetch the data set again")
            yield Row(text.strip(), ("negative", "positive")[int(label)], where, split)


def _trec(folder: Path) -> Rows:
    for split, name in (("train", "train_5500.label"), ("test", "TREC_10.label")):
        for number, line in enumerate(read_bytes(folder / name).decode("latin-1").splitlines(), start=1):
            label, space, text = line.partition(" ")
            if ":" not in label or not space or not text.strip():
                raise BadInput(f"line {number} of {folder / name} is not a class and a question; fetch it again")
            yield Row(text.strip(), label, f"line {number} of {folder / name}", split)


def _utf8(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not UTF-8 text; fetch the data set again") from None


def find_shakespeare(root: Path) -> Path | None:
    return TextSet("shakespeare", ROLES).find(root)


def read_shakespeare(path: Path, reading: Reading) -> FederatedData:
    """A role's speeches, one after another, in windows of characters; a role of one window has none to test on."""
    if reading.objective not in (None, "next-token"):
        raise BadInput("shakespeare has no labels: it is for --objective next-token")
    rows = []
    for where, one in objects(path):
        speeches, owner = one.get("speeches"), (one.get("play"), one.get("role"))
        texts = isinstance(speeches, list) and all(isinstance(speech, str) for speech in speeches)
        if not texts or not all(isinstance(name, str) for name in owner):
            raise BadInput(f"{where} should have play, role and speeches; fetch the data set again")
        rows.append(Row("\n".join(speeches or ()), None, where, user=" / ".join(map(str, owner))))
    tokenizer = tokenizer_named(reading.tokenizer or "chars", [row.text for row in rows])
    length = reading.length or SPEECH
    ids = tokenizer.encode([row.text for row in rows])
    train: list[Sequence[int]] = []
    test: list[Sequence[int]] = []
    users: list[str | None] = []
    for own, row in zip(ids, rows, strict=True):
        pieces, _ = windows([own], [row], length)
        kept = len(pieces) - len(pieces) // 5
        train += pieces[:kept]
        test += pieces[kept:]
        users += [row.user] * kept
    if not train or not test:
        raise BadInput(f"{path} has {len(train)} windows to train and {len(test)} to test on; fetch the data set again")
    return FederatedData(
        next_tokens(train, length, tokenizer.padding),
        next_tokens(test, length, tokenizer.padding),
        "shakespeare",
        tokenizer.size,
        users_of(users),
        objective=objective_named("next-token"),
        vocabulary=tokenizer.size,
        padding=tokenizer.padding,
    )


def _coarse(label: str) -> str:
    return label.partition(":")[0]


TEXT_SETS = {
    one.name: one
    for one in (
        TextSet(
            "20newsgroups",
            "20newsgroups_bydate.jsonl.xz",
            ("20news-bydate-train", "20news-bydate-test"),
            _newsgroups,
        ),
        TextSet("banking77", "banking77.jsonl.xz", ("train.csv", "test.csv"), _banking),
        TextSet(
            "clinc150",
            "clinc150.jsonl.xz",
            ("data_full.json",),
            _clinc,
            left_out=("val", "oos_train", "oos_val", "oos_test"),
        ),
        TextSet("sst2", "sst2.jsonl.xz", ("train.tsv", "dev.tsv"), _sst2, "SST-2"),
        TextSet("trec", "trec.jsonl.xz", ("train_5500.label", "TREC_10.label"), _trec, label=_coarse),
        TextSet("trec50", "trec.jsonl.xz", ("train_5500.label", "TREC_10.label"), _trec, "trec"),
    )
}
