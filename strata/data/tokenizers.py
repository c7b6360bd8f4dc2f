"""From text to ids: by bytes, by characters, or by a Hugging Face tokenizer in a folder."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from strata.core.errors import BadInput, one_line
from strata.core.paths import expanded
from strata.data.reading import Reading


class Tokenizer(Protocol):
    @property
    def size(self) -> int:
        """Ids run from 0 to below it."""

    @property
    def padding(self) -> int: ...
    def encode(self, texts: Sequence[str]) -> list[list[int]]: ...
    def cut(self, text: str, ids: list[int], length: int) -> list[int]:
        """The first `length` of the ids of a text that has more; special tokens at its end stay."""

    def words(self, words: Sequence[str]) -> tuple[list[int], list[int | None]]:
        """Ids of a text that comes in words, and which word begins at each; None: none does."""


@dataclass(frozen=True)
class Bytes:
    """UTF-8: ids 0 to 255, and 256 for padding. Any text, no vocabulary to agree on."""

    size: int = 257
    padding: int = 256

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode("utf-8")) for text in texts]

    def cut(self, text: str, ids: list[int], length: int) -> list[int]:
        return ids[:length]

    def words(self, words: Sequence[str]) -> tuple[list[int], list[int | None]]:
        return spaced(self, words)


@dataclass(frozen=True)
class Characters:
    """An id for each character of an alphabet, in its order, and one for padding after them."""

    alphabet: str
    _ids: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ids", {character: number for number, character in enumerate(self.alphabet)})

    @classmethod
    def of(cls, texts: Iterable[str]) -> Characters:
        """All that occur, sorted."""
        return cls("".join(sorted(set().union(*map(set, texts)))))

    @property
    def size(self) -> int:
        return len(self.alphabet) + 1

    @property
    def padding(self) -> int:
        return len(self.alphabet)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            return [[self._ids[character] for character in text] for text in texts]
        except KeyError as error:
            raise BadInput(f"the character {error.args[0]!r} is not in the alphabet of this data") from None

    def cut(self, text: str, ids: list[int], length: int) -> list[int]:
        return ids[:length]

    def words(self, words: Sequence[str]) -> tuple[list[int], list[int | None]]:
        return spaced(self, words)


def spaced(tokenizer: Bytes | Characters, words: Sequence[str]) -> tuple[list[int], list[int | None]]:
    """Words with a space between them; a word begins at its first id."""
    ids: list[int] = []
    begins: list[int | None] = []
    for number, word in enumerate(words):
        own = tokenizer.encode([word if number == len(words) - 1 else f"{word} "])[0]
        ids += own
        begins += [number, *[None] * (len(own) - 1)] if own else []
    return ids, begins


class Folder:
    """A tokenizer as `save_pretrained` of Hugging Face's transformers writes it, with its special tokens."""

    def __init__(self, place: str) -> None:
        folder = expanded(place)
        if not folder.is_dir():
            raise BadInput(f"there is no folder {folder} with a tokenizer: give bytes, chars or a folder that is there")
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise BadInput(
                "a Hugging Face tokenizer needs the package transformers: install it, or give bytes or chars"
            ) from None
        try:
            self._own: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:
            raise BadInput(f"{folder} holds no tokenizer that transformers can read: {one_line(error, 200)}") from error
        self.size = len(self._own)
        kinds = (self._own.pad_token_id, self._own.eos_token_id, 0)  # what it is does not matter: the mask hides it
        self.padding = int(next(one for one in kinds if one is not None))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        logger = logging.getLogger(
            "transformers.tokenization_utils_base"
        )  # it warns of long texts; we say it ourselves
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            return [list(ids) for ids in self._own(list(texts))["input_ids"]]
        finally:
            logger.setLevel(level)

    def cut(self, text: str, ids: list[int], length: int) -> list[int]:
        return list(self._own(text, truncation=True, max_length=length)["input_ids"])

    def words(self, words: Sequence[str]) -> tuple[list[int], list[int | None]]:
        if not self._own.is_fast:
            raise BadInput(
                "this tokenizer cannot say which token belongs to which word: give bytes, chars or a fast one"
            )
        encoded = self._own(list(words), is_split_into_words=True)
        of_words = encoded.word_ids()
        before = [None, *of_words[:-1]]
        begins = [word if word != last else None for word, last in zip(of_words, before, strict=True)]
        return list(encoded["input_ids"]), begins


def tokenizer_named(name: str, texts: Iterable[str]) -> Tokenizer:
    """bytes, chars (those of `texts`) or a folder."""
    if name == "bytes":
        return Bytes()
    return Characters.of(texts) if name == "chars" else Folder(name)


def reading_for(reading: Reading, data: str, model: str) -> Reading:
    """With the tokenizer of a Hugging Face model's own folder, where text is asked for by nothing else."""
    kind, _, folder = model.partition(":")
    if reading.tokenizer is not None or kind != "hf" or not has_tokenizer(expanded(folder)):
        return reading
    from strata.data.catalogue import CATALOGUE

    of_text = data.startswith("text:") or getattr(CATALOGUE.get(data), "read", None)
    return replace(reading, tokenizer=str(expanded(folder).absolute())) if of_text else reading


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"))
