"""The user's cache: what is written comes back, and what others could have written is not believed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from strata.core import cache


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("STRATA_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def folder_of(name: str) -> Path:
    folder = cache.private_folder(name)
    assert folder is not None
    return folder


def test_the_folder_is_the_users_alone(home: Path) -> None:
    before = os.umask(0)
    try:
        folder = folder_of("lessons")
        cache.write(folder / "a", b"x")
    finally:
        os.umask(before)
    assert folder == home / "cache" / "strata" / "lessons"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "a").stat().st_mode) == 0o600
    assert folder_of("lessons") == folder


def test_without_xdg_it_is_below_the_home_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(home))
    assert folder_of("graphs") == home / ".cache" / "strata" / "graphs"


@pytest.mark.parametrize("data", [b"", b"some\ncontent", bytes(range(256)) * 100])
def test_what_is_written_is_read(data: bytes) -> None:
    path = folder_of("lessons") / "a.json"
    assert cache.read(path) is None
    cache.write(path, b"older")
    cache.write(path, data)
    assert cache.read(path) == data
    assert [one.name for one in path.parent.iterdir()] == ["a.json"]


def test_the_checksum_by_hand() -> None:
    path = folder_of("lessons") / "a"
    cache.write(path, b"abc")
    assert path.read_bytes() == b"ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad\nabc"


@pytest.mark.parametrize("damage", [lambda c: c[:-1], lambda c: c[:-1] + b"!", lambda c: b"", lambda c: c + b"!"])
def test_a_damaged_file_counts_as_none(damage) -> None:
    path = folder_of("lessons") / "a"
    cache.write(path, b"content")
    path.write_bytes(damage(path.read_bytes()))
    assert cache.read(path) is None


def test_a_file_that_others_may_write_is_not_believed() -> None:
    path = folder_of("lessons") / "a"
    cache.write(path, b"content")
    path.chmod(0o666)
    assert cache.read(path) is None


def test_a_folder_that_another_user_could_exchange_is_not_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    above = home / "shared"
    above.mkdir()
    monkeypatch.setenv("STRATA_CACHE", str(above))
    above.chmod(0o777)
    assert cache.private_folder("kernels") is None
    above.chmod(0o1777)  # as /tmp: nobody can rename what is another's
    assert cache.private_folder("kernels") == above / "kernels"


def test_links_are_not_followed(home: Path) -> None:
    folder = folder_of("lessons")
    cache.write(folder / "a", b"content")
    (folder / "b").symlink_to(folder / "a")
    assert cache.read(folder / "b") is None
    (home / "cache" / "strata" / "elsewhere").symlink_to(folder)
    assert cache.private_folder("elsewhere") is None


def test_a_pipe_in_place_of_the_file_does_not_block() -> None:
    path = folder_of("lessons") / "a"
    os.mkfifo(path)
    assert cache.read(path) is None


def test_a_folder_that_others_may_write_is_refused(home: Path) -> None:
    folder = home / "cache" / "strata" / "lessons"
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    assert cache.private_folder("lessons") == folder and stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o770)
    assert cache.private_folder("lessons") is None


def test_a_folder_of_someone_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder_of("lessons") / "a"
    cache.write(path, b"content")
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert cache.private_folder("lessons") is None
    assert cache.read(path) is None


def test_where_nothing_can_be_written_there_is_no_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "file"))
    assert cache.private_folder("lessons") is None
    cache.write(home / "no" / "such" / "folder" / "a", b"content")


def test_the_user_may_choose_the_folder_or_none(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_CACHE", str(home / "here"))
    assert folder_of("graphs") == home / "here" / "graphs"
    monkeypatch.setenv("STRATA_CACHE", "off")
    assert cache.private_folder("graphs") is None


def test_what_was_of_use_longest_ago_goes_first() -> None:
    folder = folder_of("graphs")
    for age, name in enumerate("abcd"):
        cache.write(folder / name, bytes(1000))
        os.utime(folder / name, (1000 - age, 1000 - age))  # d is the oldest
    cache.touch(folder / "d")
    cache.prune(folder, 5000)
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b", "c", "d"]
    cache.prune(folder, 2500)
    assert sorted(path.name for path in folder.iterdir()) == ["a", "d"]
