"""Text as samples: ids padded to one length, with a mask of what is no padding, and the targets of an objective."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from strata.core.errors import BadInput
from strata.data.objective_names import objective_named
from strata.data.objectives import IGNORED, Objective
from strata.data.reading import Reading
from strata.data.rows import Labels, Row, classes_of, classes_of_numbers, labels_of, parts_of, text_rows, users_of
from strata.data.samples import FederatedData, Samples
from strata.data.tokenizers import Tokenizer, tokenizer_named
from strata.graph.inputs import MASK

IDS = "input_ids"  # as Hugging Face's models name it
LONGEST = 512  # tokens that are taken without being asked for
WINDOW = 64  # tokens of a sample where the next one is to be learnt


def load_text(path: Path, reading: Reading, classes: int | None = None) -> FederatedData:
    """A file of JSON objects, a line each: {"text": …, "label": …}, and `split` (train, test) if they say so."""
    objective = objective_named(reading.objective or "classification")
    rows = text_rows(path, reading, labelled=objective.name != "next-token")
    train, test, notes = parts_of(rows, reading, path.name)
    return text_data(train, test, path.name, objective, reading, classes, notes)


def text_data(
    train: Sequence[Row],
    test: Sequence[Row],
    name: str,
    objective: Objective,
    reading: Reading,
    classes: int | None = None,
    notes: tuple[str, ...] = (),
) -> FederatedData:
    check_texts([*train, *test], objective)
    texts = [row.text if isinstance(row.text, str) else " ".join(row.text) for row in (*train, *test)]
    tokenizer = tokenizer_named(reading.tokenizer or "bytes", texts)
    if objective.name == "next-token":
        return windows_data(train, test, name, tokenizer, reading.length or WINDOW, notes)
    if objective.name == "per-position":
        return _tagged(train, test, name, objective, tokenizer, reading, classes, notes)
    ids = _encoded(tokenizer, texts)
    length, said = _length([len(one) for one in ids], reading.length, name)
    ids = [tokenizer.cut(text, one, length) if len(one) > length else one for text, one in zip(texts, ids, strict=True)]
    labels = labels_of(train, test, objective, classes, f"the field {reading.target!r} of {name}")
    return FederatedData(
        Samples(padded(ids[: len(train)], length, tokenizer.padding), labels.train),
        Samples(padded(ids[len(train) :], length, tokenizer.padding), labels.test),
        name,
        labels.classes,
        users_of([row.user for row in train]),
        class_names=labels.names,
        objective=objective,
        vocabulary=tokenizer.size,
        padding=tokenizer.padding,
        notes=(*notes, *said),
    )


def check_texts(rows: Sequence[Row], objective: Objective) -> None:
    tagged = objective.name == "per-position"
    for row in rows:
        words = row.text if tagged else [row.text]
        if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
            wanted = "a list of words, each with a label" if tagged else "a string"
            raise BadInput(f"{row.where} has the text {row.text!r:.80}; it should be {wanted}")
        if not all(words):
            raise BadInput(f"{row.where} has an empty {'word' if tagged else 'text'}: leave it out, or fill it in")
        if any("\ud800" <= character <= "\udfff" for word in words for character in word):
            raise BadInput(f"{row.where} holds half a character (a lone surrogate), which is no text: mend the file")
        if tagged and (not isinstance(row.label, list) or len(row.label) != len(words)):
            raise BadInput(
                f"{row.where} has {len(words)} words and the labels {row.label!r:.80}: give one for each word"
            )


def _encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    ids = tokenizer.encode(texts)
    empty = next((text for text, one in zip(texts, ids, strict=True) if not one), None)
    if empty is not None:
        raise BadInput(f"the tokenizer makes nothing of the text {empty!r:.80}")
    return ids


def _length(lengths: Sequence[int], asked: int | None, name: str) -> tuple[int, tuple[str, ...]]:
    """Of all samples; and what there is to say of those that are longer."""
    longest = max(lengths)
    if asked is None:
        if longest > LONGEST:
            raise BadInput(
                f"the longest text of {name} has {longest} tokens: say with --length how many a sample has, such as "
                f"--length {LONGEST}; longer texts are then cut"
            )
        return longest, ()
    cut = sum(length > asked for length in lengths)
    if not cut:
        return asked, ()
    return asked, (
        f"{name}: {cut} of {len(lengths)} texts are longer than {asked} tokens and are cut there (--length)",
    )


def padded(ids: Sequence[Sequence[int]], length: int, padding: int) -> dict[str, Tensor]:
    """input_ids int64 [N, length], and attention_mask bool: where there is text."""
    lengths = torch.tensor([len(one) for one in ids])
    mask = torch.arange(length) < lengths.unsqueeze(1)
    found = torch.full((len(ids), length), padding, dtype=torch.int64)
    found[mask] = torch.tensor([number for one in ids for number in one], dtype=torch.int64)
    return {IDS: found, MASK: mask}


def windows_data(
    train: Sequence[Row], test: Sequence[Row], name: str, tokenizer: Tokenizer, length: int, notes: tuple[str, ...] = ()
) -> FederatedData:
    """For the token that follows: each text in windows of `length`, whose targets are the same one token on."""
    parts, users, short = [], [], 0
    for rows in (train, test):
        ids = _encoded(tokenizer, [row.text for row in rows])
        short += sum(len(one) < 2 for one in ids)
        pieces, of_users = windows(ids, rows, length)
        if not pieces:
            raise BadInput(f"{name}: no text to {'train' if rows is train else 'test'} on has two tokens or more")
        parts.append(next_tokens(pieces, length, tokenizer.padding))
        users.append(of_users)
    said = (f"{name}: {short} texts have a single token, which nothing follows: left out",) if short else ()
    return FederatedData(
        parts[0],
        parts[1],
        name,
        tokenizer.size,
        users_of(users[0]),
        objective=objective_named("next-token"),
        vocabulary=tokenizer.size,
        padding=tokenizer.padding,
        notes=(*notes, *said),
    )


def windows(
    ids: Sequence[Sequence[int]], rows: Sequence[Row], length: int
) -> tuple[list[Sequence[int]], list[str | None]]:
    """Pieces of length + 1, each beginning with the last token of the one before, and whose they are."""
    pieces: list[Sequence[int]] = []
    users: list[str | None] = []
    for one, row in zip(ids, rows, strict=True):
        own = [one[start : start + length + 1] for start in range(0, len(one) - 1, length)]
        pieces += own
        users += [row.user] * len(own)
    return pieces, users


def next_tokens(pieces: Sequence[Sequence[int]], length: int, padding: int) -> Samples:
    inputs = padded([piece[:-1] for piece in pieces], length, padding)
    return Samples(inputs, padded([piece[1:] for piece in pieces], length, IGNORED)[IDS])


def _tagged(
    train: Sequence[Row],
    test: Sequence[Row],
    name: str,
    objective: Objective,
    tokenizer: Tokenizer,
    reading: Reading,
    classes: int | None,
    notes: tuple[str, ...],
) -> FederatedData:
    """A class for each word, at its first token; what follows of the word counts for nothing."""
    rows = [*train, *test]
    where = [row.where for row in rows for _ in row.text]
    names, numbers = classes_of([label for row in rows for label in row.label], where, classes)
    encoded = [tokenizer.words(row.text) for row in rows]
    length, _ = _length([len(ids) for ids, _ in encoded], reading.length, name)
    long = next((row for row, (ids, _) in zip(rows, encoded, strict=True) if len(ids) > length), None)
    if long is not None:  # its last labels would be lost
        raise BadInput(
            f"{long.where} has more than {length} tokens, and each word has its label: give a larger --length"
        )
    inputs = padded([ids for ids, _ in encoded], length, tokenizer.padding)
    targets = torch.full((len(rows), length), IGNORED)
    left = iter(numbers)
    for number, (row, (_, begins)) in enumerate(zip(rows, encoded, strict=True)):
        own = [next(left) for _ in row.text]
        places = [(at, own[word]) for at, word in enumerate(begins) if word is not None]
        if len(places) < len(own):
            raise BadInput(f"{row.where} has a word of which the tokenizer makes nothing: its label would be lost")
        targets[number, [at for at, _ in places]] = torch.tensor([label for _, label in places])
    count = len(train)
    return FederatedData(
        Samples({key: one[:count] for key, one in inputs.items()}, targets[:count]),
        Samples({key: one[count:] for key, one in inputs.items()}, targets[count:]),
        name,
        len(names) or classes or classes_of_numbers(torch.tensor(numbers), f"the field {reading.target!r} of {name}"),
        users_of([row.user for row in train]),
        class_names=names,
        objective=objective,
        vocabulary=tokenizer.size,
        padding=tokenizer.padding,
        notes=notes,
    )


__all__ = ["Labels", "load_text", "next_tokens", "padded", "text_data", "windows", "windows_data"]
