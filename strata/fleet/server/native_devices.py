"""Devices without torch (`strata-device`): they build no model, so they are given programs of a step.

A program is exported once for a cut and a way to take steps, and kept in the run's folder. It is offered to a device
before its first task with it, signed with the key of the server's certificate: a device that cannot run it (an operator
that it lacks, pictures of another size) says so then, before a round waits for it.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from strata.core.errors import BadInput, one_line
from strata.core.files import write_atomic
from strata.core.settings import settings_of
from strata.execution.execution import Execution
from strata.fleet.protocol import codec
from strata.fleet.protocol.failures import sentence
from strata.fleet.security.keys import KEY_FOLDER, KeyFolder
from strata.fleet.server.messages import Answer, plain

if TYPE_CHECKING:
    from torch import nn

    from strata.federation.jobs import TrainJob
    from strata.fleet.server.engine import FlowerEngine
    from strata.fleet.server.members import Device
    from strata.graph import ChannelGraph, Cut
    from strata.methods.base import Phase

FORMAT = 1  # of the manifest that devices have to know
CODE, MANIFEST = "step.pte", "manifest.json"
SIGNED = b"strata program "
EXECUTED = tuple(settings_of(Execution))

Export = Callable[["Cut", Mapping[str, Any]], tuple[bytes, bytes]]  # a cut, settings of its training -> manifest, code


def objection(device: Device, masked: bool = False) -> str | None:
    """Why this device cannot take part. `masked`: in a run with secure aggregation; else in any run of this server."""
    if device.native is None:
        return None
    if masked:
        return (
            f"{device.name} is a device without torch, which does not mask its updates: secure aggregation needs torch"
        )
    if device.native != FORMAT:
        return (
            f"{device.name} runs step programs of format {device.native} and this server makes those of {FORMAT}: "
            "install a strata-device of the server's version there"
        )
    if importlib.util.find_spec("executorch") is None:
        return (
            f"{device.name} is a device without torch, for which this server would have to export programs: install "
            "strata-fl[export] on the server"
        )
    return None


def exporter(graph: ChannelGraph, model: nn.Module, name: str) -> Export:
    """Exports steps of this model. ExecuTorch is loaded with the first."""

    def export(cut: Cut, training: Mapping[str, Any]) -> tuple[bytes, bytes]:
        from strata.export.step import export_step

        if training["norm_statistics"] == "fixed":
            raise BadInput("devices without torch take no --norm-statistics fixed, whose statistics change by rounds")
        execution = Execution(**{key: training[key] for key in EXECUTED})
        made = export_step(graph, cut, model.state_dict(), execution, {"model": name})
        return made.manifest_bytes(), made.program

    return export


@dataclass(frozen=True)
class StepProgram:
    manifest: bytes
    code: bytes

    @property
    def id(self) -> str:
        parts = hashlib.sha256(self.manifest).digest() + hashlib.sha256(self.code).digest()
        return hashlib.sha256(b"strata program\n" + parts).hexdigest()


@dataclass
class StepPrograms:
    """`folder`: the run's. Programs there are of this run alone; a damaged one is made again."""

    export: Export
    folder: Path
    made: dict[str, StepProgram | str] = field(default_factory=dict)  # or why there is none

    def of(self, cut: Cut, training: Mapping[str, Any]) -> StepProgram | str:
        """The program, or why it cannot be made."""
        taken = {name: training[name] for name in EXECUTED}  # what else there is to say comes with each task
        key = hashlib.sha256(json.dumps([cut.to_json(), taken], sort_keys=True).encode()).hexdigest()[:32]
        if key not in self.made:
            self.made[key] = self._kept(key) or self._exported(key, cut, training)
        return self.made[key]

    def _kept(self, key: str) -> StepProgram | None:
        place = self.folder / key
        try:
            program = StepProgram((place / MANIFEST).read_bytes(), (place / CODE).read_bytes())
            return program if (place / "id").read_text() == program.id else None
        except OSError:
            return None

    def _exported(self, key: str, cut: Cut, training: Mapping[str, Any]) -> StepProgram | str:
        try:
            program = StepProgram(*self.export(cut, training))
        except Exception as error:  # a network that cannot be exported costs its native devices, never the run
            return one_line(error, 300, kind=not isinstance(error, BadInput))
        place = self.folder / key
        place.mkdir(parents=True, exist_ok=True)
        for name, content in ((MANIFEST, program.manifest), (CODE, program.code), ("id", program.id.encode())):
            write_atomic(place / name, content)
        return program


@dataclass(frozen=True)
class ProgramSigner:
    """With the key of the server's certificate, which devices know by the fleet's authority."""

    folder: KeyFolder

    @classmethod
    def of_environment(cls) -> ProgramSigner | None:
        """None on a plain-text server: nobody has keys there."""
        folder = os.environ.get(KEY_FOLDER)
        return None if folder is None else cls(KeyFolder(Path(folder)))

    def sign(self, id: str) -> dict[str, str]:
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = serialization.load_pem_private_key(self.folder.key.read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        signature = key.sign(SIGNED + id.encode("ascii"), ec.ECDSA(hashes.SHA256()))
        return {
            "signature": base64.b64encode(signature).decode("ascii"),
            "certificate": self.folder.certificate.read_text(),
        }


@dataclass(frozen=True)
class Wanted:
    """A device that is to have the program of a step, for a job or for an evaluation."""

    device: Device
    cut: Cut
    training: Mapping[str, Any]
    job: TrainJob | None = None


@dataclass
class NativeDevices:
    """What the engine does otherwise with them."""

    engine: FlowerEngine
    programs: StepPrograms
    signer: ProgramSigner | None
    unable: dict[tuple[str, str], str] = field(default_factory=dict)  # device and program, or device alone -> why

    def offer_for(self, jobs: Iterable[TrainJob]) -> None:
        """Those of these jobs' devices that need a program which they do not have get it, and say what they make of
        it."""
        wanted = []
        for job in jobs:
            device = self.engine.connected.devices.get(self.engine.names[job.task.device])
            if device is not None and device.native is not None and len(job.task.phases) == 1:
                phase = job.task.phases[0]
                wanted.append(Wanted(device, phase.cut, self.engine.training_of(phase), job))
        self.offer(wanted)

    def offer(self, wanted: Iterable[Wanted]) -> None:
        """Waits for their answers, no longer than a round would."""
        asked: dict[str, tuple[Wanted, StepProgram, str]] = {}
        for one in wanted:
            program = self.programs.of(one.cut, one.training)
            device = one.device
            if isinstance(program, str):
                self._cannot(device, "", f"its step cannot be exported: {program}")
            elif program.id not in device.programs and (device.name, program.id) not in self.unable:
                token = secrets.token_hex(16)
                id = self._send(device, program, token)
                if id is not None:
                    asked[id] = (one, program, token)
        until = self.engine.until()  # from now on: exporting is the server's own time
        while asked and time.monotonic() < until:
            for answer in self.engine.hear():
                if answer.id in asked:
                    self._judge(answer, *asked.pop(answer.id))
            asked = {id: one for id, one in asked.items() if id in self.engine.messenger.open}
            if asked:
                self.engine.messenger.pause()

    def _send(self, device: Device, program: StepProgram, token: str) -> str | None:
        meta = {
            "what": "program",
            "model": self.engine.model,
            "token": token,
            "program": program.id,
            "manifest": program.manifest.decode(),
            **({} if self.signer is None else self.signer.sign(program.id)),
        }
        code = torch.frombuffer(bytearray(program.code), dtype=torch.uint8)
        left = None if self.engine.deadline is None else self.engine.deadline
        return self.engine.messenger.send(device.node, "program", codec.encode(meta, {CODE: code}), 0, left)

    def _judge(self, answer: Answer, wanted: Wanted, program: StepProgram, token: str) -> None:
        meta = {} if answer.packet is None else answer.packet.meta
        device = wanted.device
        if meta.get("what") == "program" and (meta.get("token"), meta.get("program")) == (token, program.id):
            self.engine.connected.note_program(device.name, program.id)
            return
        reason = answer.error or "it did not say whether it can run its step program"
        if meta.get("what") == "failure":
            reason = sentence(meta.get("kind"))
            if meta.get("kind") == "memory" and wanted.job is not None:
                reason = f"{reason}; {self.engine.move_down(wanted.job)}"
        self._cannot(device, program.id, reason)

    def _cannot(self, device: Device, program: str, reason: str) -> None:
        said = plain(reason)
        if self.unable.get((device.name, program)) != said:
            self.engine.say(f"{device.name} trains nothing of this step: {said}")
        self.unable[device.name, program] = said

    def task(self, device: Device, phase: Phase) -> dict[str, Any] | str:
        """What a task says to a native device in place of its cut; or why it gets none."""
        if phase.levels:
            return "a device without torch trains one cut a round: this method's levels need torch"
        return self.named(device, phase.cut, self.engine.training_of(phase))

    def named(self, device: Device, cut: Cut, training: Mapping[str, Any]) -> dict[str, Any] | str:
        program = self.programs.of(cut, training)
        if isinstance(program, str):
            return f"its step cannot be exported: {program}"
        now = self.engine.connected.devices.get(device.name, device)
        if program.id not in now.programs:
            return self.unable.get((device.name, program.id), "it has not taken its step program")
        return {"program": program.id, "cut": cut.hash, "levels": []}
