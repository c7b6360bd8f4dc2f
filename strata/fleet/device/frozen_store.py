"""The frozen layers a device already has, on its disk: named by their content, so a wrong or old one is never used.

As federation/held_layers.py counts it, a device keeps the frozen layers of the last cut it was given, and no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from strata.core.errors import BadInput
from strata.core.files import write_atomic
from strata.fleet.protocol import codec

if TYPE_CHECKING:
    from strata.graph import Cut


class FrozenLayers:
    def __init__(self, folder: Path) -> None:
        self._path = folder / "frozen.bin"
        self._read: codec.Packet | None = None

    def digests(self) -> list[str]:
        packet = self._packet()
        return [] if packet is None else sorted(entry.name for entry in packet.entries)

    def completed(self, cut: Cut, received: dict[str, Tensor], wanted: Any) -> tuple[dict[str, Tensor], list[str]]:
        """`received` with what the device has of the frozen parameters in `wanted` (name -> digest), in the cut's
        order; and what it lacks."""
        if not isinstance(wanted, dict) or not all(name in cut.frozen for name in wanted):
            raise BadInput("the server's message speaks of frozen parameters that its cut does not freeze")
        missing = [name for name in cut.shapes if name not in received]
        unknown = [name for name in missing if name not in wanted]
        if unknown:
            raise BadInput(f"the server's message lacks {unknown[0]}")
        held = {}
        if missing and (packet := self._packet()) is not None:
            held = packet.tensors()
        lacking = [name for name in missing if wanted[name] not in held]
        if lacking:
            return {}, lacking
        return {name: received[name] if name in received else held[wanted[name]] for name in cut.shapes}, []

    def keep(self, cut: Cut, tensors: Mapping[str, Tensor], wanted: Mapping[str, str]) -> None:
        """The frozen parameters of this cut, in place of the last one's."""
        made = {digest: tensors[name] for name, digest in wanted.items()}
        if sorted(made) == self.digests():
            return
        for name, digest in wanted.items():
            if codec.content_digest(tensors[name]) != digest:
                raise BadInput(f"the server names {name} by a digest that is not its own")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self._path, codec.encode({"what": "frozen"}, made))
        self._read = None

    def _packet(self) -> codec.Packet | None:
        if self._read is None:
            try:
                self._read = codec.decode(self._path.read_bytes())
            except (OSError, codec.Malformed):  # not there, or damaged: then the server sends them again
                return None
        return self._read
