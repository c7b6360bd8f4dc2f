"""The frozen layers a device already has, on its disk: named by their content, so a wrong or old one is never used.

They are those of the last program it trained, one after another in the order that the program takes them: the native
library reads them from the mapped file, where they cost no memory that the kernel could not take back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strata_device.codec import PREFIX, Tensor, content_digest, decode, header, pieces
from strata_device.errors import Refused
from strata_device.files import mapped, write_whole
from strata_device.programs import Program

ALIGNED = 64  # bytes: where the first of them begins


class FrozenLayers:
    def __init__(self, folder: Path) -> None:
        self._path = folder / "frozen.bin"
        self._held: dict[str, Tensor] | None = None

    def digests(self) -> list[str]:
        return sorted(self._by_digest())

    def missing(self, program: Program, received: dict[str, Tensor], wanted: Any) -> list[str]:
        """The frozen parameters that neither came nor are here."""
        names = {entry.name for entry in program.frozen}
        if not isinstance(wanted, dict) or not all(isinstance(digest, str) for digest in wanted.values()):
            raise Refused("the server's message does not say which frozen parameters there are")
        if not names <= set(wanted):
            raise Refused("the server's message does not say which frozen parameters there are")
        absent = [name for name in names if name not in received]
        held = self._by_digest()
        return [name for name in absent if wanted[name] not in held]

    def row(self, program: Program, received: dict[str, Tensor], wanted: dict[str, str]) -> memoryview:
        """All of them, one after another, from the file that now holds these and no others."""
        if not program.frozen:
            self._forget()
            return memoryview(b"")
        held = self._by_digest()
        if list(self._names()) != self._named(program, wanted):
            made = {}
            for name, entry in zip(self._named(program, wanted), program.frozen, strict=True):
                tensor = received[entry.name] if entry.name in received else held[wanted[entry.name]]
                same = tensor.dtype == "float32" and tensor.shape == entry.shape
                if not same or content_digest(tensor) != wanted[entry.name]:
                    raise Refused(f"the server names {entry.name} by a digest that is not its own")
                made[name] = tensor
            write_whole(self._path, pieces(_padded(made), made))
            self._held = None
        views = list(self._read().values())
        return _joined(views)

    def _named(self, program: Program, wanted: dict[str, str]) -> list[str]:
        """Two layers may be the same; a message's tensors have names of their own."""
        return [f"{number}.{wanted[entry.name]}" for number, entry in enumerate(program.frozen)]

    def _names(self) -> list[str]:
        return list(self._read())

    def _by_digest(self) -> dict[str, Tensor]:
        return {name.partition(".")[2]: tensor for name, tensor in self._read().items()}

    def _read(self) -> dict[str, Tensor]:
        if self._held is None:
            try:
                self._held = decode(mapped(self._path)).tensors
            except (OSError, Refused):  # not there, or damaged: then the server sends them again
                self._held = {}
        return self._held

    def _forget(self) -> None:
        self._path.unlink(missing_ok=True)
        self._held = {}


def _padded(tensors: dict[str, Tensor]) -> dict[str, str]:
    """A header of such a length that the tensors begin where the processor likes it."""
    plain = {"pad": "", "what": "frozen"}
    return {**plain, "pad": " " * (-(PREFIX + len(header(plain, tensors))) % ALIGNED)}


def _joined(tensors: list[Tensor]) -> memoryview:
    """Neighbours in one file as one view."""
    whole = tensors[0].data.obj  # the mapped file
    start = PREFIX + int.from_bytes(memoryview(whole)[PREFIX - 4 : PREFIX], "little")
    return memoryview(whole)[start : start + sum(tensor.data.nbytes for tensor in tensors)]
