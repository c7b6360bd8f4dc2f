"""What simulated devices keep between rounds, on disk: memory does not grow with the fleet.

devices/ID/round-N.safetensors is what device ID kept in round N. A round reads what was kept before it and drops what
is newer, which is of rounds that are run again after a resume. Older files stay as long as a checkpoint may need them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors.torch import load, save
from torch import Tensor

from strata.core.errors import BadInput, one_line
from strata.core.files import own_folder, write_atomic

_NAME = re.compile(r"round-(\d{8})\.safetensors")


class DeviceStore:
    def __init__(self, folder: Path, oldest: Callable[[], int]) -> None:
        """`oldest`: the round of the oldest checkpoint that the run may go back to."""
        self._folder, self._oldest = folder, oldest

    def read(self, device: int, round: int) -> dict[str, Tensor]:
        """What the device kept before this round."""
        kept = self._rounds(device)
        for later in (number for number in kept if number >= round):
            self._file(device, later).unlink()
        before = [number for number in kept if number < round]
        if not before:
            return {}
        file = self._file(device, before[-1])
        try:
            return load(file.read_bytes())
        except Exception as error:
            raise BadInput(f"cannot read {file}, what device {device} kept: {one_line(error)}") from error

    def write(self, device: int, round: int, tensors: Mapping[str, Tensor]) -> None:
        file = self._file(device, round)
        own_folder(self._folder)
        own_folder(file.parent)
        write_atomic(file, save({name: tensor.contiguous() for name, tensor in tensors.items()}))
        needed = [number for number in self._rounds(device) if number < self._oldest()]
        for number in needed[:-1]:
            with contextlib.suppress(OSError):
                self._file(device, number).unlink()

    def _rounds(self, device: int) -> list[int]:
        folder = self._folder / str(device)
        if not folder.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def _file(self, device: int, round: int) -> Path:
        return self._folder / str(device) / f"round-{round:08d}.safetensors"
