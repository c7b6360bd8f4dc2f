"""Files of one process at a time, and files that nobody else can read."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from strata.core.errors import BadInput
from strata.core.files import locked, take_lock, write_new


def test_a_lock_goes_with_its_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("w") as first, path.open("w") as second:
        assert take_lock(first.fileno()) and not take_lock(second.fileno())
        assert take_lock(first.fileno())  # its own is no obstacle
        first.close()
        assert take_lock(second.fileno())


def test_the_next_is_refused(tmp_path: Path) -> None:
    with locked(tmp_path / "lock", "somebody is here"):
        with pytest.raises(BadInput, match="somebody is here"), locked(tmp_path / "lock", "somebody is here"):
            pytest.fail("two at a time")
    with locked(tmp_path / "lock", "somebody is here"):
        pass
    with pytest.raises(BadInput, match="cannot write to"), locked(tmp_path / "nowhere" / "lock", ""):
        pass


def test_the_next_waits(tmp_path: Path) -> None:
    inside: list[str] = []

    def second() -> None:
        with locked(tmp_path / "lock"):
            inside.append("second")

    with locked(tmp_path / "lock"):
        waiting = threading.Thread(target=second)
        waiting.start()
        waiting.join(0.2)
        inside.append("first")
    waiting.join(30)
    assert inside == ["first", "second"]


def test_a_new_file_is_never_over_another_and_has_its_mode_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_new(tmp_path / "secret", b"1")
        write_new(tmp_path / "public", b"2", 0o644)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"secret": 0o600, "public": 0o644}
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "secret", b"3")
    assert (tmp_path / "secret").read_bytes() == b"1"
