"""A device's part in a secure sum, between its messages: its secrets are in a file that only its user can read, for as
long as the sum takes."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from strata.core.errors import BadInput
from strata.core.files import write_new
from strata.fleet.protocol.secure_sum import FEWEST, Masked, Member, quantised, step_of
from strata.graph import Cut
from strata.training import Update

LARGEST_LOSS = 64.0  # that is summed: a larger one counts as this


class SecureWork:
    """`fewest`: devices in a sum, or this one takes no part in it."""

    def __init__(self, folder: Path, fewest: int | None) -> None:
        self._file, self._fewest = folder / "secure_sum.json", fewest or FEWEST

    def answer(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """To a message of the stages around training."""
        stage, sum, number = meta.get("stage"), str(meta.get("sum")), meta.get("device")
        if stage == "keys" and type(number) is int:
            member = Member.begin(number, self._fewest)
            said = member.keys()
        elif stage == "shares":
            member = self._member(sum)
            said = member.share(meta)
        elif stage == "reveal":
            member = self._member(sum)
            said = member.reveal(meta)
        else:
            raise BadInput(f"the server asks for {stage!r} of a sum: is it of another version of Strata?")
        self._keep(sum, member)
        return {"what": "secure", **said}

    def receive(self, meta: Mapping[str, Any]) -> tuple[Member, list[int]]:
        """Before training: with whom the update will be masked, and whose shares are none."""
        member = self._member(str(meta.get("sum")))
        return member, member.receive(meta)

    def masked(
        self, meta: Mapping[str, Any], member: Member, cut: Cut, received: Mapping[str, Tensor], update: Update
    ) -> Tensor:
        """The update's change, and its loss, as the server may see them."""
        values = change_of(cut, received, update.tensors)
        clip, norm = float(meta["clip"]), meta.get("norm")
        if not 0 < clip < math.inf:
            raise BadInput(f"the server's clip for secure sums is {clip}")
        if norm is not None:
            values = scaled(values, float(norm), clip)
        if meta.get("loss"):
            loss = min(max(update.loss, -LARGEST_LOSS), LARGEST_LOSS)
            values = np.append(values, loss / LARGEST_LOSS * clip)
        if not np.isfinite(values).all():
            raise BadInput("training has gone to pieces here: its values are not finite, and are not summed")
        made = member.mask(quantised(values, clip, int(meta["seed"])))
        self._keep(str(meta.get("sum")), member)
        return as_tensor(made)

    def _member(self, sum: str) -> Member:
        try:
            found = json.loads(self._file.read_bytes())
            if found["sum"] != sum:
                raise ValueError
            return Member.from_json(found["member"])
        except (OSError, ValueError, KeyError, TypeError):
            raise BadInput(
                "the server speaks of a sum that this device is not in, or was before it restarted"
            ) from None

    def _keep(self, sum: str, member: Member) -> None:
        """Until the next message; nothing where there is none to come."""
        with contextlib.suppress(FileNotFoundError):
            self._file.unlink()
        if member.stage != "done":
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_new(self._file, json.dumps({"sum": sum, "member": member.to_json()}).encode())


def change_of(cut: Cut, received: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> np.ndarray:
    """All trained values' changes in one row, in the cut's order, in double precision."""
    parts = [(sent[name].double() - received[name].double()).reshape(-1) for name in cut.trained]
    return torch.cat(parts).numpy() if parts else np.zeros(0)


def scaled(values: np.ndarray, norm: float, clip: float) -> np.ndarray:
    """Down to an L2 norm that rounding does not bring above `norm`: differential privacy counts on it."""
    most = norm - step_of(clip) * math.sqrt(len(values))
    if not 0 < most < math.inf:
        raise BadInput(f"the server's clip for differential privacy is {norm}, too small for its steps")
    length = float(np.sqrt(np.square(values).sum()))
    return values if length <= most else values * (most / length)


def as_tensor(values: Masked) -> Tensor:
    """int32 of the same bits: there is no wider support for unsigned ones."""
    return torch.from_numpy(values.view(np.int32).copy())
