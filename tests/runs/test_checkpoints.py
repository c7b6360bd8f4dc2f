from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from strata.core import files
from strata.core.errors import BadInput
from strata.core.files import Lock, StorageFailed, write_atomic
from strata.federation.held_layers import Holdings
from strata.federation.state import FederationState
from strata.runs.checkpoints import Checkpoints


def state_of(round: int) -> FederationState:
    generator = torch.Generator().manual_seed(round)
    return FederationState(
        round=round,
        tensors={
            "z.weight": torch.randn(3, 4, generator=generator),
            "a.running": torch.tensor([1e-40, float("inf")]),
            "count": torch.tensor(round),
        },
        slots={"first/z.weight": torch.randn(3, 4, generator=generator)},
        method={"best": 0.5, "starts": [0, round]},
        holdings=Holdings(
            np.array([3, 10**12]),
            np.array([0, 1], np.int32),
            np.array([0, 0], np.int16),
            ({"z.weight": "ab"},),
            {"z": 1},
        ),
        norms={"a.running": {"round": round, "network": "ab"}} if round else {},
    )


def same(a: FederationState, b: FederationState) -> bool:
    return (
        a.round == b.round
        and list(a.tensors) == list(b.tensors)
        and all(torch.equal(a.tensors[n], b.tensors[n]) and a.tensors[n].dtype == b.tensors[n].dtype for n in a.tensors)
        and all(torch.equal(a.slots[n], b.slots[n]) for n in {*a.slots, *b.slots})
        and a.method == b.method
        and a.norms == b.norms
        and a.holdings.to_json() == b.holdings.to_json()
        and all(np.array_equal(x, b.holdings.arrays()[n]) for n, x in a.holdings.arrays().items())
    )


def test_older_checkpoints_are_kept_and_gone_back_to(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path / "checkpoint")
    kept.every = 3
    for round in range(9):
        kept.save(replace(state_of(round), seen=(0.5, float(round))))
    assert kept.rounds() == [8, 7, 6, 3, 0]
    again = Checkpoints(tmp_path / "checkpoint")
    with pytest.raises(BadInput, match="no checkpoint after 4 rounds in .*: there are those of 0, 3, 6, 7, 8"):
        again.load(silent, wanted=4)
    state = again.load(silent, wanted=3)
    assert same(state, state_of(3)) and state.seen == (0.5, 3.0)
    assert again.rounds() == [3, 0] and len(list(again.folder.iterdir())) == 4  # what was poisoned does not come back
    (again.folder / "round-00000000.safetensors").write_bytes(b"")
    with pytest.raises(BadInput, match="the checkpoint of round 0 is damaged .*: choose another"):
        again.load(silent, wanted=0)
    assert again.rounds() == [3, 0]


def silent(text: str) -> None:
    raise AssertionError(text)


def test_a_state_comes_back_to_the_bit_and_two_are_kept(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "checkpoint")
    for round in range(4):
        store.save(state_of(round))
        assert same(store.load(silent), state_of(round))
    assert store.rounds() == [3, 2]
    assert len(list(store.folder.iterdir())) == 4


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[:-7],
    "empty": lambda data: b"",
    "one bit": flip,
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_found_out_and_the_previous_one_used(tmp_path: Path, suffix: str, damage: str) -> None:
    store = Checkpoints(tmp_path)
    store.save(state_of(1))
    store.save(state_of(2))
    path = tmp_path / f"round-00000002{suffix}"
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    said: list[str] = []
    assert same(store.load(said.append), state_of(1))
    assert len(said) == 1 and "round 2 is damaged" in said[0] and "using the previous one" in said[0]


def forged(path: Path, change: Callable[[dict], object]) -> None:
    """Somebody wrote this checkpoint's JSON by hand, checksums and all."""
    values = json.loads(json.loads(path.read_bytes())["checkpoint"])
    body = change(values)
    text = body if isinstance(body, str) else json.dumps(body)
    path.write_text(json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "checkpoint": text}))


FORGED: dict[str, Callable[[dict], object]] = {
    "too deep": lambda values: "[" * 100_000,
    "a list": lambda values: [],
    "a number": lambda values: 5,
    "an order that is none": lambda values: {**values, "order": 7},
    "holdings that are none": lambda values: {**values, "holdings": [1, "a"]},
    "no method": lambda values: {key: value for key, value in values.items() if key != "method"},
    "a format of another type": lambda values: {**values, "format": {}},
    "bytes that are text": lambda values: {**values, "bytes": "many"},
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_checkpoint_made_by_hand_gives_way_to_the_previous_one(tmp_path: Path, kind: str) -> None:
    store = Checkpoints(tmp_path)
    store.save(state_of(1))
    store.save(state_of(2))
    forged(tmp_path / "round-00000002.json", FORGED[kind])
    said: list[str] = []
    assert same(store.load(said.append), state_of(1)) and len(said) == 1


@pytest.mark.parametrize("content", [b"[" * 100_000, b"5", b'{"checkpoint": 5, "sha256": 5}', b"[]"])
def test_any_json_in_its_place_gives_way(tmp_path: Path, content: bytes) -> None:
    store = Checkpoints(tmp_path)
    store.save(state_of(1))
    store.save(state_of(2))
    (tmp_path / "round-00000002.json").write_bytes(content)
    said: list[str] = []
    assert same(store.load(said.append), state_of(1)) and len(said) == 1


def test_a_checkpoint_of_another_run_is_not_taken(tmp_path: Path) -> None:
    ours, theirs = Checkpoints(tmp_path / "a", "ours"), Checkpoints(tmp_path / "b", "theirs")
    ours.save(state_of(1))
    theirs.save(state_of(2))
    for path in theirs.folder.iterdir():
        path.rename(ours.folder / path.name)
    said: list[str] = []
    assert same(ours.load(said.append), state_of(1))
    assert "round 2 is damaged (it is of another run): using the previous one" in said[0]
    (ours.folder / "round-00000001.json").unlink()
    with pytest.raises(BadInput, match="no whole checkpoint"):
        ours.load(said.append)


def test_what_fits_nothing_here_gives_way(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    store.save(state_of(1))
    store.save(state_of(2))

    def check(state: FederationState) -> None:
        if state.round == 2:
            raise AttributeError("no such step")

    said: list[str] = []
    assert store.load(said.append, check).round == 1 and "no such step" in said[0]


def test_half_a_pair_is_no_checkpoint(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    store.save(state_of(1))
    store.save(state_of(2))
    (tmp_path / "round-00000002.json").unlink()
    assert same(store.load(silent), state_of(1))
    (tmp_path / "round-00000001.safetensors").unlink()
    with pytest.raises(BadInput, match="no whole checkpoint"):
        store.load(lambda text: None)
    with pytest.raises(BadInput, match="no checkpoint"):
        Checkpoints(tmp_path / "nothing").load(silent)


def test_killed_between_any_two_system_calls_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is ended at each fsync and rename of a save in turn: what is left always loads."""
    points = 0
    while True:
        folder = tmp_path / str(points)
        store = Checkpoints(folder)
        store.save(state_of(1))
        pid = os.fork()
        if pid == 0:
            left = points

            def count(call):
                def counted(*arguments):
                    nonlocal left
                    if left == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    left -= 1
                    return call(*arguments)

                return counted

            os.fsync, os.replace = count(os.fsync), count(os.replace)
            try:
                store.save(state_of(2))
            finally:
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        loaded = store.load(silent)
        assert same(loaded, state_of(loaded.round))
        if os.WIFEXITED(status):
            assert loaded.round == 2
            break
        store.save(state_of(3))
        assert not list(folder.glob("*.tmp")) and same(store.load(silent), state_of(3))
        points += 1
    assert points == 6  # file, rename, folder: twice


def test_a_full_disk_leaves_the_last_checkpoint_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Checkpoints(tmp_path)
    store.save(state_of(1))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(StorageFailed, match="no space left .* last checkpoint is intact"):
        store.save(state_of(2))
    monkeypatch.undo()
    assert same(store.load(silent), state_of(1)) and not list(tmp_path.glob("*.tmp"))


def test_a_real_file_size_limit(tmp_path: Path) -> None:
    """A write that the system really refuses (RLIMIT_FSIZE), in a child of its own."""
    store = Checkpoints(tmp_path)
    store.save(state_of(1))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
            store.save(state_of(2))
        except StorageFailed as error:
            code = 0 if "last checkpoint is intact" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert same(store.load(silent), state_of(1))


def test_unwritable_places(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(BadInput, match="cannot write"):
        write_atomic(tmp_path / "file" / "x.json", b"")
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(BadInput, match="cannot write"):
        write_atomic(Path("/proc/strata/x.json"), b"")


def test_the_lock_is_held_once_and_dies_with_its_process(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    with pytest.raises(BadInput, match=f"in use by another run .process {os.getpid()}"):
        Lock(tmp_path)
    lock.release()
    Lock(tmp_path).release()
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        Lock(tmp_path)
        os.write(told, b"x")
        signal.pause()
    os.read(ready, 1)
    with pytest.raises(BadInput, match=f"process {pid}"):
        Lock(tmp_path)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    Lock(tmp_path).release()
    os.close(ready)
    os.close(told)
