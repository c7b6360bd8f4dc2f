"""Channel identities: which elements of which tensors exist together.

Every element of every tensor of a network carries an id. Id 0 is always there. A *leaf* is an output channel of some
weight, which a cut may keep or drop. Where two tensors of different origin meet (a residual add), an element of the
result exists only if both do: its id is the *meet* of their leaves. Leaves can be *tied*: kept or dropped together
(a head, a group).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

Ids = np.ndarray  # int64

ALWAYS = 0


class Channels:
    def __init__(self) -> None:
        self._parent: list[int] = [ALWAYS]
        self._leaves: dict[int, tuple[int, ...]] = {}  # meet -> its leaves, sorted
        self._meets: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._parent)

    def fresh(self, count: int) -> Ids:
        first = len(self._parent)
        self._parent.extend(range(first, first + count))
        return np.arange(first, first + count, dtype=np.int64)

    def find(self, identity: int) -> int:
        """The one id that stands for all that are tied to this one."""
        root = self._root(identity)
        return self._meet_of(self._leaves[root]) if root in self._leaves else root

    def leaves(self, identity: int) -> tuple[int, ...]:
        found = self.find(identity)
        return self._leaves.get(found, (found,) if found != ALWAYS else ())

    def meet(self, a: int, b: int) -> int:
        a, b = self.find(a), self.find(b)
        if a == b:
            return a
        return self._meet_of((a, b))

    def tie(self, identities: Iterable[int]) -> None:
        """Whatever cut comes, these are kept or dropped together."""
        found = sorted({self.find(i) for i in identities})
        if len(found) < 2:
            return
        if found[0] == ALWAYS:
            for identity in found[1:]:
                for leaf in self.leaves(identity):
                    self._union(leaf, ALWAYS)
            return
        families = [self.leaves(i) for i in found]
        if len({len(family) for family in families}) == 1:
            # Meets of the same number of origins, e.g. channels of a residual stream: tie origin by origin, so that
            # the origins stay free of each other.
            slots: Sequence[Sequence[int]] = list(zip(*families, strict=True))
        else:
            slots = [[leaf for family in families for leaf in family]]
        for slot in slots:
            for leaf in slot[1:]:
                self._union(slot[0], leaf)

    def pin(self, identities: Iterable[int]) -> None:
        self.tie([ALWAYS, *identities])

    def follow(self, follower: int, leader: int) -> None:
        """A fresh leaf that has no choice of its own: it exists exactly where the leader does."""
        follower, leader = self.find(follower), self.find(leader)
        if follower == leader:
            return
        if follower in self._leaves or follower == ALWAYS:
            self.tie([follower, leader])
        else:
            self._parent[follower] = leader

    def canonical(self, ids: Ids) -> Ids:
        unique, inverse = np.unique(ids, return_inverse=True)
        return np.array([self.find(int(i)) for i in unique], dtype=np.int64)[inverse].reshape(ids.shape)

    def pairwise(self, a: Ids, b: Ids, combine: Callable[[int, int], int]) -> Ids:
        """combine(), element by element, once for each distinct pair."""
        size = np.int64(len(self._parent) + 1)
        codes, inverse = np.unique(a * size + b, return_inverse=True)
        values = [combine(int(code // size), int(code % size)) for code in codes]
        return np.array(values, dtype=np.int64)[inverse].reshape(a.shape)

    def _meet_of(self, identities: Iterable[int]) -> int:
        key = tuple(sorted(self._leaf_roots(identities)))
        if not key:
            return ALWAYS
        if len(key) == 1:
            return key[0]
        if key not in self._meets:
            identity = int(self.fresh(1)[0])
            self._meets[key] = identity
            self._leaves[identity] = key
        return self._meets[key]

    def _leaf_roots(self, identities: Iterable[int]) -> set[int]:
        """All free leaves behind these ids; a leaf may have become the follower of a meet meanwhile."""
        found: set[int] = set()
        for identity in identities:
            root = self._root(identity)
            found |= self._leaf_roots(self._leaves[root]) if root in self._leaves else {root}
        return found - {ALWAYS}

    def _root(self, leaf: int) -> int:
        while self._parent[leaf] != leaf:
            self._parent[leaf] = self._parent[self._parent[leaf]]
            leaf = self._parent[leaf]
        return leaf

    def _union(self, a: int, b: int) -> None:
        low, high = sorted((self._root(a), self._root(b)))
        self._parent[high] = low  # ALWAYS is the lowest of all
