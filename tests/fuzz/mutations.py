"""Files that are nearly right: bytes changed, or values exchanged within their JSON."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

INTERESTING = [b"", b"\0", b"\xff", b"\n", b"[", b"{", b'"', b"-", b"NaN", b"1e999", b"\xff\xff\xff\xff", b"\0\0\0\x80"]
# no colon: `package.module:thing` would be imported
NAMES = st.text(alphabet=st.characters(blacklist_characters=":", codec="utf-8"), max_size=8)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 1.5, -0.0, 1e308]),
    NAMES,
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=5
)


@st.composite
def changed_bytes(draw: st.DrawFn, good: bytes) -> bytes:
    """Up to four changes: a flipped bit, a piece left out, put in, exchanged or repeated, or all that follows lost."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        length = draw(st.sampled_from([0, 1, 2, 4, 8, 64]))
        kind = draw(st.integers(0, 4))
        piece = draw(st.sampled_from(INTERESTING) | st.binary(max_size=8))
        if kind == 0 and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == 1:
            del data[at : at + length]
        elif kind == 2:
            data[at : at + (len(piece) if draw(st.booleans()) else 0)] = piece
        elif kind == 3:
            data[at:at] = data[at : at + length]
        else:
            del data[at:]
    return bytes(data)


@st.composite
def changed_json(draw: st.DrawFn, good: Any) -> Any:
    """One value somewhere in it is another, or missing, or has a neighbour."""
    if not isinstance(good, dict | list) or not good or draw(st.integers(0, 5)) == 0:
        return draw(VALUES)
    if isinstance(good, list):
        at = draw(st.integers(0, len(good) - 1))
        return [*good[:at], *draw(st.just([]) | changed_json(good[at]).map(lambda one: [one])), *good[at + 1 :]]
    key = draw(st.sampled_from(sorted(good)))
    kind = draw(st.integers(0, 4))
    if kind == 0:
        return {name: value for name, value in good.items() if name != key}
    if kind == 1:
        return {**good, draw(NAMES): draw(VALUES)}
    return {**good, key: draw(changed_json(good[key]))}


def changed_text(good: Any) -> st.SearchStrategy[bytes]:
    """A JSON file: other values, other bytes, or far too deep."""
    return st.one_of(
        changed_json(good).map(lambda value: json.dumps(value).encode(errors="replace")),
        changed_bytes(json.dumps(good).encode()),
        st.sampled_from([b"[" * 100_000, b'{"a":' * 50_000, b""]),
    )
