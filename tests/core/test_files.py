"""Files of one process at a time, and files that nobody else can read."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from strata.core.errors import BadInput
from strata.core.files import (
    Lock,
    is_leftover,
    locked,
    open_to_append,
    own_folder,
    remove_leftovers,
    take_lock,
    write_atomic,
    write_new,
)


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


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"mine")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in (".lock", "metrics.jsonl", "config.json", "config.json.tmp"):
        (folder / name).symlink_to(precious)
    with pytest.raises(BadInput, match=r"\.lock is a link or no ordinary file"):
        Lock(folder)
    with pytest.raises(BadInput, match="is a link or no ordinary file"), locked(folder / ".lock"):
        pass
    with pytest.raises(BadInput, match="metrics.jsonl is a link or no ordinary file"):
        open_to_append(folder / "metrics.jsonl")
    os.mkfifo(folder / "pipe")
    with pytest.raises(BadInput, match="pipe is a link or no ordinary file"):
        open_to_append(folder / "pipe")
    write_atomic(folder / "config.json", b"{}")  # takes the link's place
    assert precious.read_bytes() == b"mine" and not (folder / "config.json").is_symlink()


def test_temporary_names_are_new_and_known_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(os, "replace", lambda old, new: seen.append(Path(old).name))
    for _ in range(2):
        write_atomic(tmp_path / "a.json", b"1")
    assert len(set(seen)) == 2 and all(map(is_leftover, seen)) and not is_leftover("thesis.tmp")
    (tmp_path / "thesis.tmp").touch()
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tmp"]


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folder(tmp_path / "a" / "b")
    own_folder(tmp_path / "a" / "b")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    own_folder(tmp_path / "link", linked=True)
    with pytest.raises(BadInput, match="is not a folder, or a link to one"):
        own_folder(tmp_path / "link")
    monkeypatch.setattr(os, "geteuid", lambda: 12345678)
    with pytest.raises(BadInput, match=r"belongs to another user \(\w+\): choose a folder of your own"):
        own_folder(tmp_path / "a")
    own_folder(tmp_path / "new")  # made here, whoever the file system says it belongs to
