"""The state on disk: checkpoint/ROUND.safetensors and checkpoint/ROUND.json, which names the former's checksum.

The JSON is written last and counts: without it, or with a wrong checksum anywhere, the checkpoint does not exist and
the previous one is used. The newest two are kept, and where that was asked for every Nth. No pickle.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as dump_tensors

from strata.core.errors import BadInput, one_line
from strata.core.files import is_leftover, own_folder, said_plainly, write_atomic
from strata.federation.held_layers import Holdings
from strata.federation.state import FederationState

FORMAT = 1
KEPT = 2
_NAME = re.compile(r"round-(\d{8})\.json")


class Checkpoints:
    def __init__(self, folder: Path, run: str | None = None) -> None:
        """`run`: the digest of the run's settings, which its checkpoints have too. Older versions have none."""
        self.folder, self.run = folder, run
        self.every: int | None = None  # of so many rounds they are kept, beside the newest

    def save(self, state: FederationState) -> None:
        own_folder(self.folder)
        tensors = {f"state/{name}": tensor.contiguous() for name, tensor in state.tensors.items()}
        tensors |= {f"slot/{name}": tensor.contiguous() for name, tensor in state.slots.items()}
        tensors |= {f"held/{name}": torch.from_numpy(array.copy()) for name, array in state.holdings.arrays().items()}
        data = dump_tensors(tensors)
        values = {
            "format": FORMAT,
            "round": state.round,
            "order": list(state.tensors),  # safetensors sorts; state_dict order is part of the state
            "method": state.method,
            "holdings": state.holdings.to_json(),
            **({"norms": state.norms} if state.norms else {}),
            **({"run": self.run} if self.run else {}),
            **({"seen": list(state.seen)} if state.seen else {}),
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        stem = f"round-{state.round:08d}"
        write_atomic(self.folder / f"{stem}.safetensors", data)
        body = json.dumps(values, indent=1)
        checked = {"sha256": hashlib.sha256(body.encode()).hexdigest(), "checkpoint": body}
        write_atomic(self.folder / f"{stem}.json", json.dumps(checked).encode())
        self._tidy()

    def rounds(self) -> list[int]:
        """Rounds with a checkpoint, newest first; says nothing about its being whole."""
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def load(
        self,
        say: Callable[[str], None],
        check: Callable[[FederationState], None] = lambda state: None,
        wanted: int | None = None,
    ) -> FederationState:
        """The newest whole checkpoint that passes the `check`, which may raise anything; `say` hears of the others.
        `wanted`: that of this round and no other; later ones are removed."""
        if wanted is not None:
            return self._go_back(wanted, check)
        rounds = self.rounds()
        for round in rounds:
            try:
                state = self._read(round)
                check(state)
                return state
            except Exception as error:  # of any kind, where a file was made by hand
                say(f"the checkpoint of round {round} is damaged ({one_line(error)}): using the previous one")
        what = "no whole checkpoint" if rounds else "no checkpoint"
        raise BadInput(f"there is {what} in {self.folder}: the run cannot be resumed; start it again in another folder")

    def _go_back(self, round: int, check: Callable[[FederationState], None]) -> FederationState:
        there = self.rounds()
        if round not in there:
            known = ", ".join(map(str, sorted(there)))
            raise BadInput(f"there is no checkpoint after {round} rounds in {self.folder}: there are those of {known}")
        try:
            state = self._read(round)
            check(state)
        except Exception as error:  # of any kind, where a file was made by hand
            raise BadInput(f"the checkpoint of round {round} is damaged ({one_line(error)}): choose another") from error
        for later in (number for number in there if number > round):
            for suffix in (".json", ".safetensors"):  # the one that counts first
                with said_plainly(self.folder):
                    (self.folder / f"round-{later:08d}{suffix}").unlink(missing_ok=True)
        return state

    def _read(self, round: int) -> FederationState:
        stem = self.folder / f"round-{round:08d}"
        checked = json.loads(stem.with_suffix(".json").read_bytes())
        body = checked["checkpoint"]
        if hashlib.sha256(body.encode()).hexdigest() != checked["sha256"]:
            raise ValueError(f"wrong checksum of {stem.name}.json")
        values = json.loads(body)
        if values["format"] != FORMAT or values["round"] != round:
            raise ValueError(f"{stem.name}.json is of format {values['format']} and round {values['round']}")
        if values.get("run") != self.run:
            raise ValueError("it is of another run")
        data = stem.with_suffix(".safetensors").read_bytes()
        if len(data) != values["bytes"]:
            raise ValueError(f"{stem.name}.safetensors has {len(data)} of {values['bytes']} bytes")
        if hashlib.sha256(data).hexdigest() != values["sha256"]:
            raise ValueError(f"wrong checksum of {stem.name}.safetensors")
        tensors = parse_tensors(data)
        arrays: dict[str, np.ndarray] = {
            name.removeprefix("held/"): tensor.numpy() for name, tensor in tensors.items() if name.startswith("held/")
        }
        return FederationState(
            round=round,
            tensors={name: tensors[f"state/{name}"] for name in values["order"]},
            slots={name.removeprefix("slot/"): t for name, t in tensors.items() if name.startswith("slot/")},
            method=values["method"],
            holdings=Holdings.load(arrays, values["holdings"]),
            norms=values.get("norms", {}),
            seen=tuple(map(float, values.get("seen", ()))),
        )

    def _tidy(self) -> None:
        """Removes all but the checkpoints to keep, and what a killed process left half-written."""
        rounds = self.rounds()
        kept = [round for round in rounds if self.every is not None and round % self.every == 0]
        keep = {f"round-{round:08d}" for round in [*rounds[:KEPT], *kept]}
        for path in self.folder.iterdir():
            if path.name.startswith("round-") and (is_leftover(path.name) or path.stem not in keep):
                with contextlib.suppress(OSError):
                    path.unlink()
