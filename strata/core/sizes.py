"""What a user may write as a size, a ratio or a shape, and how sizes are printed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from numbers import Real
from typing import Any

from strata.core.errors import BadInput

_UNITS = {
    "": 1,
    "b": 1,
    "byte": 1,
    "bytes": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
INPUT_DTYPES = ("float32", "int64", "int32", "uint8", "bool")  # that networks of float32 take
MOST_BYTES = 2**63 - 1  # no machine has more, and sizes are 64-bit numbers further on
FEWEST_BYTES = 1024  # nothing trains in less: a number below it without a unit was meant otherwise


def parse_bytes(value: str | int) -> int:
    """ "24 MiB", "1.5GB", "24000000" or 24000000 -> bytes."""
    if isinstance(value, int) and not isinstance(value, bool):
        size: float = value
        unit = "b"  # a number that a program gives means what it says: a device may really have next to nothing
    else:
        match = re.fullmatch(r"\s*([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)\s*([A-Za-z]*)\s*", str(value))
        if match is None or match[2].lower() not in _UNITS:
            raise BadInput(f"a budget is a number of bytes such as '24 MiB', '512MB' or '24000000', not {value!r}")
        unit = match[2].lower()
        size = float(match[1]) * _UNITS[unit]
    if 1 <= size < FEWEST_BYTES and unit == "":
        raise BadInput(f"{value} bytes? For a budget of {value} MiB say {value}MiB; for so many bytes, {value}B")
    if size < 1:
        raise BadInput(f"a budget must be at least one byte, not {value!r}")
    if size > MOST_BYTES:
        text = str(value)  # perhaps of hundreds of digits
        raise BadInput(
            f"a budget must be below 2^63 bytes (8 EiB), not {text if len(text) < 40 else text[:40] + '...'}"
        )
    return math.floor(size)


def parse_ratio(value: str | float, what: str = "a constraint") -> float:
    """A ratio in (0, 1]: constraint, scale, head fraction."""
    try:
        ratio = float(value)
    except ValueError:
        raise BadInput(f"{what} is a number above 0 and at most 1, such as 0.25, not {value!r}") from None
    if not 0 < ratio <= 1:  # false for nan too
        raise BadInput(f"{what} must be above 0 and at most 1, not {value}")
    return ratio


def parse_shape(value: str | Iterable[int]) -> tuple[int, ...]:
    """ "3x32x32" or (3, 32, 32), without the batch dimension."""
    parts = value.lower().split("x") if isinstance(value, str) else list(value)
    try:
        shape = tuple(int(part) for part in parts)
    except (TypeError, ValueError):
        shape = ()
    if not shape or min(shape) < 1:
        raise BadInput(f"an input shape is channels x height x width without the batch, such as 3x32x32, not {value!r}")
    return shape


def parse_input(value: str | Iterable[int]) -> tuple[int, ...] | str:
    """A shape, or inputs by name: input_ids:int64:64,attention_mask:bool:64. Those stay text, checked and without
    spaces: what they mean needs torch (graph/inputs.py)."""
    if not isinstance(value, str) or ":" not in value:
        return parse_shape(value)
    parts = ["".join(part.split()) for part in value.split(",")]
    for part in parts:
        fields = part.split(":")
        if len(fields) != 3 or not fields[0].isidentifier() or fields[1] not in INPUT_DTYPES:
            raise BadInput(
                f"an input is NAME:DTYPE:SHAPE, such as input_ids:int64:64, with one of {', '.join(INPUT_DTYPES)}, "
                f"not {part!r}"
            )
        parse_shape(fields[2])
    names = [part.partition(":")[0] for part in parts]
    if len(set(names)) < len(names):
        raise BadInput(f"two inputs have the same name: {', '.join(names)}")
    return ",".join(parts)


def at_least_one(value: object, what: str) -> int:
    try:
        number = int(str(value))
    except ValueError:
        number = 0
    if number < 1:
        raise BadInput(f"{what} must be a whole number of at least 1, not {value}")
    return number


def show_bytes(size: int) -> str:
    """Three or four significant digits in binary units."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024 or unit == "GiB":
            break
        amount /= 1024
    return f"{size} B" if unit == "B" else f"{amount:.2f} {unit}" if abs(amount) < 100 else f"{amount:.1f} {unit}"


def check_sampled(per_round: int, devices: int) -> None:
    if per_round > devices:
        raise BadInput(
            f"{per_round} devices per round cannot be chosen from {devices} devices: lower --per-round or raise "
            "--devices"
        )


def show_exactly(size: int) -> str:
    return f"{show_bytes(size)} ({size:,} bytes)"


def written_bytes(size: int) -> str:
    """As a person would write it, where that means exactly so many: 6.5MiB; else in bytes. parse_bytes reads it."""
    for unit in ("GiB", "MiB", "KiB", "GB", "MB", "kB"):
        scale = _UNITS[unit.lower()]
        for digits in range(3):
            text = f"{size / scale:.{digits}f}{unit}"
            if size >= scale and parse_bytes(text) == size:
                return text
    return f"{size}B"


def several(value: Any) -> tuple[Any, ...]:
    """Nothing is an empty list, one number (numpy's too) or text a list of one."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str | Real) else tuple(value)
