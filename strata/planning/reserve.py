"""A budget that has to hold library scratch too: tensors get what the scratch of the very steps chosen leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from strata.core.errors import BadInput, Infeasible
from strata.core.sizes import show_bytes

Made = TypeVar("Made")
RESERVES = ("scratch",)
ATTEMPTS = 12


def check_reserve(reserve: str | None, sizes: Sequence[float], accounting: str | None) -> None:
    if reserve is None:
        return
    if reserve not in RESERVES:
        raise BadInput(f"a budget can reserve {' or '.join(RESERVES)}, not {reserve!r}")
    if not sizes or accounting == "paper":
        raise BadInput(
            "--reserve scratch counts true bytes: give a --budget, such as 24MiB, by peak accounting; a constraint or "
            "the paper's count has no room for it"
        )


def reserving(
    sizes: Sequence[int], make: Callable[[tuple[int, ...]], Made], totals: Callable[[Made], Sequence[int]]
) -> Made:
    """What `make` makes for so many bytes of tensors on each level that its totals, with scratch, are within `sizes`.

    Scratch is known of a choice only once it is made, so the choice is made again within less, by what was too much.
    """
    allowed = tuple(sizes)
    for _ in range(ATTEMPTS):
        made = make(allowed)
        found = list(totals(made))
        if len(found) != len(allowed):  # every device takes the same
            found = [max(found)] * len(allowed)
        over = [max(0, total - size) for total, size in zip(found, sizes, strict=True)]
        if not any(over):
            return made
        allowed = tuple(size - more for size, more in zip(allowed, over, strict=True))
        if min(allowed) < 1:
            break
    worst = max(range(len(sizes)), key=lambda level: over[level])
    raise Infeasible(
        f"library scratch leaves too little of {show_bytes(sizes[worst])} for a step: with it the last one tried takes "
        f"{show_bytes(found[worst])}. Raise the budget, lower the batch or the micro-batch, or leave out --reserve"
    )
