"""Which step programs a thin device takes: those that its fleet's server has signed, whole. No ExecuTorch needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from strata_device.codec import Packet, Tensor
from strata_device.errors import CannotRun, Refused
from strata_device.programs import CODE, Programs

from strata.fleet.security.keys import make_keys
from strata.fleet.server.native_devices import ProgramSigner, StepProgram

MANIFEST = {
    "format": 1, "trained": [{"name": "w", "shape": [2]}], "frozen": [], "buffers": [], "classes": 2, "cut": "c",
    "input": {"dtype": "float32", "stored": "uint8", "shape": [3, 4, 4]}, "micro_batch": 2,
}  # fmt: skip


def offer(program: StepProgram, /, **more: Any) -> Packet:
    code = Tensor.of("uint8", [len(program.code)], program.code)
    return Packet({"program": program.id, "manifest": program.manifest.decode(), **more}, {CODE: code})


def test_only_what_the_server_of_this_fleet_has_signed(tmp_path: Path) -> None:
    own = make_keys(tmp_path / "own", ["127.0.0.1"], ["ant"]).folder
    other = make_keys(tmp_path / "other", ["127.0.0.1"], ["ant"]).folder
    program = StepProgram(json.dumps(MANIFEST).encode(), b"code")
    changed = StepProgram(program.manifest, b"c0de")
    signed = ProgramSigner(own).sign(program.id)
    programs = Programs(tmp_path / "device", own.authority)
    taken = programs.take(offer(program, **signed))
    assert taken.id == program.id
    for wrong, words in (
        (offer(program), "not signed"),
        (offer(program, **ProgramSigner(other).sign(program.id)), "not signed"),
        (offer(program, **{**signed, "certificate": other.certificate.read_text()}), "not signed"),
        (offer(program, **{**signed, "certificate": own.authority.read_text()}), "not signed"),
        (offer(changed, **signed), "not signed"),
        (offer(changed, **{**signed, "program": program.id}), "a hash that is not its own"),
    ):
        with pytest.raises(Refused, match=words):
            programs.take(wrong)
    programs.keep(taken)
    kept = programs.get(program.id)
    assert kept is not None and bytes(kept.code) == b"code"
    (tmp_path / "device" / "programs" / program.id / CODE).write_bytes(b"c0de")
    assert programs.get(program.id) is None  # and the server is asked for it again
    assert programs.ids() == []


@pytest.mark.parametrize("key", MANIFEST)
def test_a_manifest_that_is_none_costs_one_sentence(key: str, tmp_path: Path) -> None:
    programs = Programs(tmp_path, None)
    for value in (None, -1, 1 << 50, "x", [], [None], {"shape": [-1]}, [{"name": "a", "shape": "x"}]):
        program = StepProgram(json.dumps({**MANIFEST, key: value}).encode(), b"code")
        try:
            programs.take(offer(program))
        except CannotRun as error:
            assert str(error) and "\n" not in str(error)
