"""The files of a run folder: read, or refused in a sentence; and what is left of good ones is never thrown away."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from strata.core.errors import BadInput
from strata.federation.state import FederationState
from strata.results.reading import read_metrics as read_for_results
from strata.results.reading import read_run
from strata.runs.checkpoints import Checkpoints
from strata.runs.config import RunConfig
from strata.runs.folder import RunFolder, read_summary
from strata.runs.metrics import METRIC_KEYS, readable
from tests.fuzz.budget import fuzzed
from tests.fuzz.mutations import changed_bytes, changed_json, changed_text

REQUEST = RunConfig.of(method="fedavg", rounds=4).to_json()
SETTINGS = {"rounds": 4, "method": {"name": "fedavg"}, "data": {"name": "digits"}}
CONFIG = {"format": 2, "settings": SETTINGS, "request": REQUEST, "versions": {"torch": "2"}, "machine": {"cpu": "x"}}
SUMMARY = {
    "method": "fedavg", "seed": 0, "rounds": 4, "accuracy": 0.5, "loss": 1.0, "bn": None, "upload_bytes": 1,
    "download_bytes": 1, "train_flops": 1, "peak_bytes": 1, "dropped": 0, "seconds": 1.0,
}  # fmt: skip
PLAN = {"name": "fedavg", "steps": [{"step": 0, "memory_bytes": 5}]}


def record(round: int) -> dict[str, Any]:
    return {**dict.fromkeys(METRIC_KEYS, 0), "round": round, "accuracy": 0.5, "devices": [round], "dropped": []}


LINES = [json.dumps(record(round)).encode() + b"\n" for round in range(12)]


def silent(text: str) -> None:
    pass


@fuzzed(changed_text(CONFIG), examples=40)
def test_config(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "config.json").write_bytes(content)
        try:
            RunConfig.of_folder(folder, {})
        except BadInput:
            pass
        try:
            RunFolder(folder, CONFIG, resume=True, say=silent).close()
        except BadInput:
            pass


@fuzzed(changed_bytes(b"".join(LINES)), examples=40)
def test_metrics(content: bytes) -> None:
    """As many lines are left as were not touched, at least: these ascend."""
    lines, damaged = readable(content)
    rounds = [line.round for line in lines]
    assert rounds == sorted(set(rounds)) and damaged >= 0
    whole = content.split(b"\n")
    assert len(rounds) >= sum(line[:-1] in whole for line in LINES)
    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder(Path(place) / "run", CONFIG, resume=False, say=silent)
        (folder.path / "metrics.jsonl").write_bytes(content)
        folder.truncate_metrics(12)
        folder.append(record(12))
        folder.close()
        after, left = readable((folder.path / "metrics.jsonl").read_bytes())
        assert left == 0 and [line.round for line in after] == [number for number in rounds if number < 12] + [12]
        kept = [path.read_bytes() for path in folder.path.glob("metrics.damaged-*")]
        assert kept == ([content] if damaged else [])


@fuzzed(st.tuples(changed_text(PLAN), changed_text(SUMMARY), changed_bytes(b"".join(LINES))), examples=40)
def test_what_reports_read(contents: tuple[bytes, bytes, bytes]) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        for name, content in zip(("plan.json", "summary.json", "metrics.jsonl"), contents, strict=True):
            (folder / name).write_bytes(content)
        run = read_run(folder)
        assert run.method == "fedavg" and run.status in ("finished", "unfinished")
        for read in (read_for_results, read_summary):
            try:
                read(folder)
            except BadInput:
                pass


def state_of(round: int) -> FederationState:
    return FederationState(round, {"w": torch.full((2, 3), float(round))}, method={"best": 0.5})


with tempfile.TemporaryDirectory() as _place:
    Checkpoints(Path(_place), "ours").save(state_of(2))
    GOOD = {path.name: path.read_bytes() for path in Path(_place).iterdir()}
BODY = json.loads(json.loads(GOOD["round-00000002.json"])["checkpoint"])


def forged(values: Any) -> bytes:
    """Its JSON written by hand, checksum and all."""
    body = json.dumps(values)
    return json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "checkpoint": body}).encode()


def load(name: str, content: bytes) -> None:
    """The newest is good, or gives way to the one before."""
    with tempfile.TemporaryDirectory() as place:
        store = Checkpoints(Path(place), "ours")
        store.save(state_of(1))
        for each, good in {**GOOD, name: content}.items():
            (store.folder / each).write_bytes(good)
        found = store.load(silent)
        assert found.round in (1, 2)
        if found.round == 1:
            assert torch.equal(found.tensors["w"], state_of(1).tensors["w"])


@fuzzed(changed_bytes(GOOD["round-00000002.safetensors"]), examples=40)
def test_tensors_of_checkpoints(content: bytes) -> None:
    load("round-00000002.safetensors", content)


@fuzzed(changed_json(BODY).map(forged) | changed_bytes(GOOD["round-00000002.json"]), examples=40)
def test_values_of_checkpoints(content: bytes) -> None:
    load("round-00000002.json", content)
