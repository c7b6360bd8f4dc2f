"""An error of anybody's in one line."""

from __future__ import annotations

from strata.core.errors import one_line


def test_on_one_line() -> None:
    error = ValueError("size  mismatch:\n\t[3, 4]\n")
    assert one_line(error) == "size mismatch: [3, 4]"
    assert one_line(error, kind=True) == "ValueError: size mismatch: [3, 4]"
    assert one_line(error, 4) == "size" and one_line(error, 12, kind=True) == "ValueError: "
    assert one_line("what\na program said") == "what a program said"


def test_without_words_the_kind_is_all_there_is() -> None:
    assert one_line(KeyError()) == one_line(KeyError(), kind=True) == "KeyError"
    assert one_line(RuntimeError(" \n")) == "RuntimeError"
