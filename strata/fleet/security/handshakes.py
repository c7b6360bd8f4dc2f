"""TLS handshakes, bounded by address: the web server hears of a connection only once its handshake is done, and until
then nobody would count it. So connections are accepted here, and take one of their address's places while they shake.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any

from strata.fleet.security.connection_limits import SPARE, Places

HANDSHAKE_SECONDS = 10.0
PER_ADDRESS = 64  # handshakes at a time: of devices behind one router that all come back at once, some try again
OWN = ("127.0.0.1", "::1", "::ffff:127.0.0.1")  # not counted: the server's own app comes from here
PAUSE = 0.5  # seconds, where the system accepts nothing now: it may be short of descriptors


class HandshakeServer:
    """What an event loop's server is to the web server: `sockets`, `close`, `wait_closed`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        bound: Any,
        backlog: int,
        made: Callable[[], Any],
        context: ssl.SSLContext,
        places: Places,
    ) -> None:
        self._loop, self._bound = loop, bound
        self._made, self._context, self._places = made, context, places
        self._listeners = [_listening(one, backlog) for one in bound.sockets]
        self._tasks = {loop.create_task(self._accept(one)) for one in self._listeners}

    @property
    def sockets(self) -> Sequence[Any]:
        return tuple(self._listeners)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, peer = await self._loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(PAUSE)
                continue
            address = None if peer and peer[0] in OWN else str(peer[0])
            if address is not None and not self._places.take(address):
                connection.close()
                continue
            task = self._loop.create_task(self._shake(connection, address))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _shake(self, connection: socket.socket, address: str | None) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._made, connection, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
        except (OSError, EOFError):  # no TLS, too slow, or gone
            connection.close()
        finally:
            if address is not None:
                self._places.leave(address)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for listener in self._listeners:
            listener.close()
        self._bound.close()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._bound.wait_closed()


def _listening(bound: Any, backlog: int) -> socket.socket:
    """A socket of our own for the port that the event loop has bound."""
    listener = socket.socket(fileno=os.dup(bound.fileno()))
    listener.setblocking(False)
    listener.listen(backlog)
    return listener


def loop_of_handshakes() -> asyncio.AbstractEventLoop:
    """An event loop whose servers let so many handshakes be under way, each for so long."""
    try:
        from uvloop import Loop
    except ImportError:
        from asyncio import SelectorEventLoop as Loop  # type: ignore[assignment]

    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    places = Places(max(SPARE, descriptors - SPARE), PER_ADDRESS)

    class CountingLoop(Loop):
        async def create_server(self, protocol_factory: Any, *arguments: Any, **settings: Any) -> Any:
            context = settings.pop("ssl", None)
            if context is None:
                return await super().create_server(protocol_factory, *arguments, **settings)
            bound = await super().create_server(protocol_factory, *arguments, **settings, start_serving=False)
            return HandshakeServer(self, bound, settings.get("backlog", 100), protocol_factory, context, places)

    return CountingLoop()
