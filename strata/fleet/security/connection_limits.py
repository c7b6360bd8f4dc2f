"""What a connection may take before anybody knows who is there: a little time, a little memory, one of a few places.

The web server waits for ever for a request's headers, keeps as many bytes of them as come, and has no bound on how many
connections there are; whoever holds them all shuts everybody else out.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

HEADER_SECONDS = 10.0  # from the connection, or the first byte of a further request, to the end of its headers
LARGEST_HEADERS = 64 << 10  # bytes
PER_ADDRESS = 256  # connections: devices behind one router, a few each
SPARE = 128  # descriptors for all else than connections
IN_FLIGHT, IN_FLIGHT_EACH = 256 << 20, 32 << 20  # bytes of requests that are being read or worked on: all, of one


def raise_descriptors() -> int:
    """As many open files as the system lets us have; how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return 1 << 20 if hard == resource.RLIM_INFINITY else hard


@dataclass
class Places:
    """Who has how many connections."""

    total: int
    each: int = PER_ADDRESS
    taken: Counter[str] = field(default_factory=Counter)

    def take(self, address: str) -> bool:
        if self.taken.total() >= self.total or self.taken[address] >= self.each:
            return False
        self.taken[address] += 1
        return True

    def leave(self, address: str) -> None:
        self.taken[address] -= 1
        if not self.taken[address]:
            del self.taken[address]


def limited(base: type, places: Places) -> type:
    """The web server's class of a connection, with these limits. It has a `cycle` from the end of the first request's
    headers on, which says when that request is answered."""

    class LimitedConnection(base):
        place: str | None = None
        patience: asyncio.TimerHandle | None = None
        unread = 0  # bytes of headers that have not ended

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            address = str(self.client[0]) if self.client else ""
            if not places.take(address):
                transport.abort()
                return
            self.place = address
            self._wait_for_headers(0)

        def connection_lost(self, error: Exception | None) -> None:
            if self.place is not None:
                places.leave(self.place)
                self.place = None
            self._stop_waiting()
            super().connection_lost(error)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                self._wait_for_headers(len(data))
            else:
                self._stop_waiting()

        def _wait_for_headers(self, size: int) -> None:
            self.unread += size
            if self.unread > LARGEST_HEADERS:
                self.transport.abort()
            elif self.patience is None:
                self.patience = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

        def _stop_waiting(self) -> None:
            self.unread = 0
            if self.patience is not None:
                self.patience.cancel()
                self.patience = None

    return LimitedConnection


class BytesInFlight:
    """Requests wait for their turn, so that all of them together stay within a bound, and those of one sender too."""

    def __init__(self, total: int = IN_FLIGHT, each: int = IN_FLIGHT_EACH) -> None:
        self.total, self.each = total, each
        self.taken: Counter[Hashable] = Counter()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def room(self, who: Hashable, size: int) -> AsyncIterator[None]:
        """A request that is larger than a bound has it for itself."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._fits(who, size))
            self.taken[who] += size
        try:
            yield
        finally:
            async with self._changed:
                self.taken[who] -= size
                if not self.taken[who]:
                    del self.taken[who]
                self._changed.notify_all()

    def _fits(self, who: Hashable, size: int) -> bool:
        own, all = self.taken[who], self.taken.total()
        return (not own or own + size <= self.each) and (not all or all + size <= self.total)
