"""What the server makes of a device without torch before any round."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from strata.fleet.protocol import codec
from strata.fleet.server.members import Device
from strata.fleet.server.native_devices import EXECUTED, StepProgram, StepPrograms, objection
from strata.graph import ChannelGraph
from strata.training import LocalTraining
from tests.device.nets import even

GREETING: dict[str, Any] = {
    "name": "bee", "budget": 1 << 20, "baseline": 1, "samples": 5, "held": 0, "classes": 10, "input": [3, 32, 32],
    "mean": [0.5] * 3, "std": [0.5] * 3, "augmentation": "none", "structure": "", "labels": "", "holds": [],
    "versions": {"strata-device": "0.1.0"}, "native": {"format": 1, "abi": 1}, "programs": ["a" * 64, 7],
}  # fmt: skip


def test_a_greeting_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device.of(1, GREETING)
    assert (device.native, device.programs) == (1, frozenset({"a" * 64}))
    assert device.runtime == "no torch (strata-device 0.1.0)"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "install strata-fl[export] on the server" in str(objection(device))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert objection(device) is None
    assert "secure aggregation needs torch" in str(objection(device, masked=True))
    assert "format 2" in str(objection(Device.of(1, {**GREETING, "native": {"format": 2}})))
    with_torch = {key: value for key, value in GREETING.items() if key != "native"}
    assert objection(Device.of(1, with_torch), masked=True) is None
    for wrong in ({"native": 1}, {"native": {"format": "1"}}, {"native": {}}, {"programs": "all"}):
        with pytest.raises(codec.Malformed):
            Device.of(1, {**GREETING, **wrong})


def test_a_program_is_exported_once_and_one_that_cannot_be_is_a_sentence(tmp_path: Path) -> None:
    graph = ChannelGraph(even(), (3, 32, 32))
    training = {name: getattr(LocalTraining(), name) for name in EXECUTED}
    calls: list[Any] = []

    def export(cut: Any, taken: Any) -> tuple[bytes, bytes]:
        calls.append(cut)
        if cut.frozen:
            raise RuntimeError("an operator\nthat nobody knows")
        return b"{}", b"code"

    programs = StepPrograms(export, tmp_path)
    whole, part = graph.full(), graph.freeze(graph.full(), 1)
    assert programs.of(whole, training) == programs.of(whole, {**training, "lr": 3}) == StepProgram(b"{}", b"code")
    assert StepPrograms(export, tmp_path).of(whole, training) == StepProgram(b"{}", b"code")  # a run that is resumed
    assert len(calls) == 1
    assert programs.of(part, training) == programs.of(part, training) == "RuntimeError: an operator that nobody knows"
    assert len(calls) == 2
    next(tmp_path.glob("*/step.pte")).write_bytes(b"damaged")
    assert StepPrograms(export, tmp_path).of(whole, training) == StepProgram(b"{}", b"code") and len(calls) == 3
