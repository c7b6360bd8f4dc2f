"""The fleet interface of the server (Flower's SuperLink, flwr 1.41): an HTTP request a question, signed by this device.

One thread, one connection, which is made anew when it was closed. The server sends nothing by itself: a device asks.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from strata_device.addresses import Address
from strata_device.errors import BadInput, Unreachable, one_line
from strata_device.keys import DeviceKeys, Signer
from strata_device.objects import Answer, Metadata, Tree, fetch
from strata_device.wire import field, fields, message, one

HEARTBEAT = 30.0  # seconds; the server takes a device for gone after two of them without a word
BEAT = 20.0  # seconds between two
PATIENCE = 30.0  # seconds for an answer
QUICK = 5.0  # for a heartbeat's
LARGEST = 64 << 20  # bytes of an answer; chunks have 5 MiB
TRIES, PAUSE = 20, 0.25  # for an object that the server is still being sent
PROTOBUF = "application/protobuf"


class NotAdmitted(Exception):
    """The server does not know this device's key, or takes it for another process's."""


class Unfinished(Exception):
    """The server answers, and not what was asked for: the run has ended, most likely."""


class Message(NamedTuple):
    metadata: Metadata
    tree: Tree


class Link:
    """`keys` None: in plain text, with a key of the moment."""

    def __init__(self, server: Address, keys: DeviceKeys | None) -> None:
        self.server, self._keys = server, keys
        self._signer = Signer.of(keys)
        self._context = None if keys is None else _context(keys.authority)
        self._connection: http.client.HTTPConnection | None = None
        self._node = 0
        self._last_beat = 0.0

    # --- being there -------------------------------------------------------------------------------------------

    def activate(self) -> None:
        """NotAdmitted, Unreachable, or what else is wrong in one sentence."""
        public = self._signer.public
        try:
            if self._keys is None:
                self._call("register-node", field(1, public))
            answer = self._call("activate-node", field(1, public) + field(2, HEARTBEAT))
        except Unfinished as error:
            raise NotAdmitted(str(error)) from None
        self._node = one(fields(answer), 1, int, 0)
        self._last_beat = time.monotonic()

    def deactivate(self) -> None:
        """A word of goodbye, where it can be said."""
        if self._node:
            with contextlib.suppress(Exception):
                self._call("deactivate-node", field(1, self._node), QUICK)
                if self._keys is None:
                    self._call("unregister-node", field(1, self._node), QUICK)
        self._node = 0
        self.close()

    def until_beat(self) -> float:
        """Seconds until the server has to hear of this device again."""
        return max(0.0, self._last_beat + BEAT - time.monotonic())

    def beat(self) -> None:
        if self.until_beat() > 0:
            return
        answer = self._call("send-node-heartbeat", self._me() + field(2, HEARTBEAT), QUICK)
        if not one(fields(answer), 1, int, 0):
            raise NotAdmitted("the server no longer knows this device")
        self._last_beat = time.monotonic()

    # --- messages ----------------------------------------------------------------------------------------------

    def next_message(self) -> Message | None:
        found = fields(self._call("pull-messages", self._me()))
        if 2 not in found or 3 not in found:
            return None
        metadata = one(fields(one(found, 2, memoryview, b"")), 1, memoryview, b"")
        return Message(Metadata.read(metadata), Tree.read(one(found, 3, memoryview, b"")))

    def fetch(self, asked: Message, to: Path) -> None:
        """Its bytes into a file."""
        fetch(asked.tree, lambda id: self._object(asked.metadata.run, id), to)

    def confirm(self, asked: Message) -> None:
        self._call("confirm-message-received", self._me() + field(2, asked.metadata.run) + field(3, asked.metadata.id))

    def reply(self, asked: Message, file: Path, seconds: float) -> None:
        """The file as the answer. `seconds`: what the work took."""
        answer = Answer(asked.metadata.reply(time.time()), file)
        said = message(2, [answer.written()]) + message(3, [answer.tree.written()])
        taken = fields(self._call("push-messages", self._me() + said + field(4, seconds)))
        session, run = one(taken, 4, str, ""), asked.metadata.run
        wanted = {str(bytes(id), "utf-8", "replace") for id in taken.get(3, ())}
        for id, content in answer.objects(wanted):
            self.beat()
            head = self._me() + field(2, run) + field(3, id)
            stored = self._call("push-object", head + field(4, content) + field(5, session))
            if not one(fields(stored), 1, int, 0):
                raise Unfinished("the server did not keep the answer")

    def _object(self, run: int, id: str) -> memoryview:
        self.beat()  # a large message takes its time
        for _ in range(TRIES):
            found = fields(self._call("pull-object", self._me() + field(2, run) + field(3, id)))
            if not one(found, 1, int, 0):
                raise Unfinished("a part of the message is not there")
            if one(found, 2, int, 0):
                part: memoryview = one(found, 3, memoryview, memoryview(b""))
                return part
            time.sleep(PAUSE)
        raise Unfinished("a part of the message did not come")

    def _me(self) -> bytes:
        return message(1, [field(1, self._node)])

    # --- requests ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _call(self, what: str, body: bytes, seconds: float = PATIENCE) -> bytes:
        """Once more on a new connection: the server closes those that were idle for a while."""
        headers = {"content-type": PROTOBUF, "accept": PROTOBUF, **self._signer.headers()}
        fresh = self._connection is None
        while True:
            try:
                with self._said():
                    return self._ask(f"/v1/fleet/{what}", body, headers, seconds)
            except Unreachable:
                if fresh:
                    raise
                fresh = True

    def _ask(self, path: str, body: bytes, headers: dict[str, str], seconds: float) -> bytes:
        if self._connection is None:
            self._connection = self._connect()
        connection = self._connection
        if connection.sock is not None:
            connection.sock.settimeout(seconds)
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        length = answer.getheader("content-length", "")
        if length.isdigit() and int(length) > LARGEST:
            raise BadInput(f"{self.server} answers with {length} bytes: is it another program's port?")
        data = answer.read(LARGEST)
        if answer.status == 200:
            return data
        self.close()  # what is left of it is not read
        words = _words(data, answer.status)
        if answer.status == 401:
            raise NotAdmitted(words)
        if answer.status >= 500 and answer.status != 500:
            raise Unreachable(_nobody(self.server, words))
        raise Unfinished(words)

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self.server
        if self._context is None:
            return http.client.HTTPConnection(host, port, timeout=PATIENCE)
        return http.client.HTTPSConnection(host, port, timeout=PATIENCE, context=self._context)

    @contextlib.contextmanager
    def _said(self) -> Iterator[None]:
        """What goes wrong with a connection, each in one sentence."""
        try:
            yield
        except ssl.SSLCertVerificationError as error:
            raise BadInput(self._certificate(error.verify_message)) from None
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            self.close()
            raise Unreachable(_nobody(self.server, "the connection was closed")) from None
        except ssl.SSLError:
            raise BadInput(
                f"{self.server} does not speak TLS: is it another program's port, or a server with --insecure?"
            ) from None
        except socket.gaierror:
            host = self.server.host
            raise Unreachable(f"there is no machine called {host}: check the name, or use its address") from None
        except http.client.BadStatusLine as error:
            self.close()
            if isinstance(error, http.client.RemoteDisconnected) or self._context is not None:
                raise Unreachable(_nobody(self.server, "the connection was closed")) from None
            raise BadInput(
                f"{self.server} gives no answer in plain text: if it speaks TLS, leave --insecure out and give --keys"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            self.close()
            why = (getattr(error, "strerror", None) or str(error) or "timed out").lower()
            raise Unreachable(_nobody(self.server, why)) from None

    def _certificate(self, said: str) -> str:
        host = self.server.host
        if "IP address mismatch" in said or "ostname mismatch" in said:
            return (
                f"the server's certificate is not for {host}: use a name that it is for, or make another with "
                f"`strata fleet keys KEYS --renew --host {host}`"
            )
        authority = self._keys.authority if self._keys is not None else ""
        return (
            f"the server at {self.server} is not the one of {authority} ({said}): copy the ca.pem of the server's own "
            "key folder"
        )


def _context(authority: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(authority)
    except (ssl.SSLError, OSError, ValueError):
        raise BadInput(f"{authority} is not a certificate: copy ca.pem from the server's key folder") from None
    return context


def _nobody(address: Address, why: str) -> str:
    return f"no server answers at {address} ({why}): is `strata fleet server` running there, and the port open?"


def _words(data: bytes, status: int) -> str:
    try:
        said = json.loads(data)
        return one_line(said.get("detail") or said.get("message") or f"HTTP {status}", 200)
    except (ValueError, AttributeError, RecursionError):
        return f"HTTP {status}"
