"""What of Protocol Buffers the server's interface needs: numbers, doubles, and fields with a length.

    field(3, "text") + field(1, 7) + field(2, 30.0)        a message of these fields
    fields(data)                                           {number: [values]}, of whatever came

Unknown fields are kept and nobody asks for them; what is not well formed is refused in one sentence.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

from strata_device.errors import Refused

LONGEST_VARINT = 10  # bytes
DEEPEST = 8  # messages within messages, of what is read here


class NotProtobuf(Refused):
    """These bytes are not a message of the server's interface."""


def varint(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)


def field(number: int, value: int | float | str | bytes | None, always: bool = False) -> bytes:
    """Empty for a value that is the type's default, as proto3 has it; `always`: an optional field that is set."""
    if value is None or (not value and not always):
        return b""
    if isinstance(value, float):
        return varint(number << 3 | 1) + struct.pack("<d", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def message(number: int, parts: Iterable[bytes] = ()) -> bytes:
    """A field that is a message, there even where it is empty."""
    return field(number, b"".join(parts), always=True)


def fields(data: bytes | memoryview) -> dict[int, list[Any]]:
    """Numbers as int, doubles as float, all that has a length as memoryview."""
    view, at = memoryview(data), 0
    found: dict[int, list[Any]] = {}
    while at < len(view):
        key, at = _varint(view, at)
        number, kind = key >> 3, key & 7
        value: Any
        if kind == 0:
            value, at = _varint(view, at)
        elif kind == 1:
            value, at = struct.unpack("<d", _part(view, at, 8))[0], at + 8
        elif kind == 2:
            size, at = _varint(view, at)
            value, at = _part(view, at, size), at + size
        elif kind == 5:
            value, at = struct.unpack("<f", _part(view, at, 4))[0], at + 4
        else:
            raise NotProtobuf("the server's answer is not of its interface: is another program there?")
        found.setdefault(number, []).append(value)
    return found


def one(found: dict[int, list[Any]], number: int, kind: type, default: Any) -> Any:
    """The last value of a field, as text, bytes, a number or a message (memoryview); the default where it is absent."""
    if number not in found:
        return default
    value = found[number][-1]
    try:
        if kind is str:
            return str(bytes(value), "utf-8")
        if kind is float or kind is int:
            return kind(value)
        return bytes(value) if kind is bytes else memoryview(value)
    except (TypeError, ValueError):
        raise NotProtobuf("the server's answer is not of its interface: is another program there?") from None


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for place, byte in enumerate(view[at : at + LONGEST_VARINT]):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value & (1 << 64) - 1, at + place + 1
    raise NotProtobuf("the server's answer ends in the middle of a number")


def _part(view: memoryview, at: int, size: int) -> memoryview:
    if size > len(view) - at:
        raise NotProtobuf("the server's answer is shorter than it says")
    return view[at : at + size]
