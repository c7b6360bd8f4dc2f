"""Offsets in an arena, by hand and for many drawn lifetimes."""

from __future__ import annotations

import random

from strata.export.planner import Item, first_fit, lower_bound, pack


def overlap(items: list[Item], offsets: list[int]) -> bool:
    for i, (one, at) in enumerate(zip(items, offsets, strict=True)):
        for other, there in list(zip(items, offsets, strict=True))[:i]:
            together = one.start <= other.end and other.start <= one.end
            if together and at < there + other.size and there < at + one.size:
                return True
    return False


def test_by_hand() -> None:
    items = [Item(0, 2, 16), Item(1, 1, 32), Item(2, 3, 32)]
    assert lower_bound(items) == 48
    assert first_fit(items, [0, 1, 2]) == (48, [0, 16, 16])
    assert pack(items)[0] == 48


def test_never_overlapping_and_near_the_bound() -> None:
    draw = random.Random(0)
    for _ in range(20):
        starts = [draw.randrange(50) for _ in range(40)]
        items = [Item(start, start + draw.randrange(12), 16 * draw.randrange(1, 60)) for start in starts]
        top, offsets = pack(items)
        assert not overlap(items, offsets)
        assert top == max(at + item.size for at, item in zip(offsets, items, strict=True))
        assert lower_bound(items) <= top <= 1.3 * lower_bound(items)
        assert pack(items) == (top, offsets)
