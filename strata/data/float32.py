"""float32, in which networks train: whether numbers of the user's stay what they are in it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strata.core.errors import BadInput

NO_FRACTIONS = float(1 << 23)  # from here on float32 has whole numbers only, and from twice that not all of these
SHARE = 1e-3  # of a column's spread by which its numbers may move: 293.15 K among 280 to 300 moves by a millionth
CHANCE = 1 << 18  # of n numbers with all digits of a float64, about n^2 / 2^25 fall together in float32


def check_float32_holds(values: np.ndarray, names: Sequence[str], instead: str) -> None:
    """Refuses float64 [N, columns] where float32 would lose what tells a column's numbers apart. `names`: of the
    columns, for the sentence; `instead`: what would do.

    That a number such as 0.1 moves by its last digit is what float32 is, and nothing is said of it."""
    for name, column in zip(names, values.T, strict=True):
        place = _lost(column)
        if place is not None:
            held = _single(column[place])[()]
            raise BadInput(
                f"{name} has {_shown(column[place])}, which float32 cannot hold beside its other numbers (it "
                f"becomes {_shown(float(held))}): {instead}"
            )


def check_float64_holds(number: int | float, where: str) -> None:
    """Of whole numbers: from 2^53 on float64 holds not all."""
    try:
        held = float(number) == number or not isinstance(number, int)
    except OverflowError:
        held = False
    if not held:
        raise BadInput(
            f"{where} has {number!r:.40}, which no floating point number holds: subtract an offset, or scale it"
        )


def _lost(column: np.ndarray) -> int | None:
    """Where a number is that becomes another one."""
    single = _single(column)
    moved = np.abs(single - column)
    large = (moved > 0) & ((np.abs(column) >= NO_FRACTIONS) | (column == np.rint(column)))
    if large.any():
        return int(np.argmax(large))
    if moved.max() > SHARE * np.ptp(column):
        return int(np.argmax(moved)) if np.ptp(column) > 0 else None
    order = np.argsort(column)
    together = (np.diff(column[order]) > 0) & (np.diff(single[order]) == 0)
    if together.sum() > len(column) ** 2 / CHANCE:
        return int(order[1:][together][0])
    return None


def _single(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        rounded: np.ndarray = values.astype(np.float32).astype(np.float64)
    return rounded


def _shown(value: float) -> str:
    return f"{value:.0f}" if abs(value) < 1e15 and value == round(value) else repr(float(value))
