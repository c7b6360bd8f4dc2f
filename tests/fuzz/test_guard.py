"""The door of the server's port: whatever a request says of itself, it is answered once or closed, no more of it is
read than it may have, what was read is counted back, and nobody gets to a call that is not for him."""

from __future__ import annotations

import asyncio
import datetime
from base64 import b64encode
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st

from strata.fleet.security import connection_guard
from strata.fleet.security.connection_guard import LARGEST, LARGEST_GREETING, LARGEST_OF_DEVICES, ConnectionGuard
from strata.fleet.security.connection_limits import LARGEST_HEADERS, Places, limited
from strata.fleet.security.signatures import GREETINGS, signer
from strata.fleet.security.tokens import CALLS, ROLES, SERVER, Operator
from tests.fuzz.budget import fuzzed
from tests.fuzz.mutations import changed_bytes

pytest.importorskip("flwr")
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes, sign_message
from uvicorn.config import Config
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.server import ServerState

OWN, OTHER = generate_key_pairs(), generate_key_pairs()
OPERATORS = {role: Operator(role, role) for role in (*ROLES, SERVER)}
REGISTERED = public_key_to_bytes(OWN[1])


class Links:
    """Flower's app, as far as the guard looks at it: it knows one key."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(linkstate_factory=SimpleNamespace(state=lambda: self))

    def get_node_id_by_public_key(self, key: bytes) -> int | None:
        return 7 if key == REGISTERED else None


def signed(key: Any, seconds: float) -> list[tuple[bytes, bytes]]:
    time = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)).isoformat()
    return [
        (b"flwr-public-key", b64encode(public_key_to_bytes(key[1]))),
        (b"flwr-signature", b64encode(sign_message(key[0], time.encode()))),
        (b"flwr-timestamp", time.encode()),
    ]


CONTROLS = [f"/v1/control/{call}" for calls in CALLS.values() for call in calls]
FLEET = ["/v1/fleet/push-object", "/v1/fleet/pull-messages", *sorted(GREETINGS)]
PATHS = [*CONTROLS, *FLEET, "/v1/runtime/acquire-task", "/health", "/", "/v1/fleet", "//v1/control/start-run"]
CLIENTS = [("127.0.0.1", 5), ("192.168.1.66", 5), ("::ffff:127.0.0.1", 5), ("evil", 5), ("", 0), None]
TOKENS = [*(f"Bearer {name}".encode() for name in OPERATORS), b"Bearer ", b"bearer run", b"run", b"\xff\xfe", b""]
NAMES = [b"authorization", b"content-length", b"flwr-public-key", b"flwr-signature", b"flwr-timestamp", b"x"]
LENGTHS = [b"0", b"5", b"-1", b"+5", b" 5", b"1e9", b"0x10", b"9" * 5000, b"\xb2", str(LARGEST + 1).encode(), b""]
SIGNED = signed(OWN, 0)  # to be changed; in a request they are signed anew
KEYS = [lambda: [], lambda: signed(OWN, 0), lambda: signed(OWN, -9999), lambda: signed(OTHER, 0)]
MORE = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from([*TOKENS, *LENGTHS]) | st.binary(max_size=20)), max_size=3
)
SIZES = st.sampled_from([0, 1, 5, LARGEST_GREETING, LARGEST_GREETING + 1, 300_000, LARGEST_OF_DEVICES + 1])


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    changed = draw(st.integers(0, 3 * len(SIGNED)))  # one of these headers, sometimes
    path = draw(st.sampled_from(PATHS))
    if draw(st.integers(0, 5)) == 0:
        path = draw(changed_bytes(path.encode())).decode("latin-1")
    return {
        "path": path,
        "signed": draw(st.sampled_from(KEYS)),
        "changed": [(SIGNED[changed][0], draw(changed_bytes(SIGNED[changed][1])))] if changed < len(SIGNED) else [],
        "headers": draw(MORE),
        "client": draw(st.sampled_from(CLIENTS)),
        "server": draw(st.sampled_from([("192.168.1.10", 8477), None])),
        "parts": draw(st.lists(SIZES, max_size=3)),
        "gone": draw(st.booleans()),
        "late": draw(st.integers(0, 9)) == 0,
    }


def may_pass(asked: dict[str, Any]) -> bool:
    """By a rule of its own: by whom this call may be made at all, whatever else the request says."""
    path, headers = asked["path"], asked["headers"]
    if path == "/health":
        return True
    if path.startswith("/v1/fleet/"):
        keys = {value for name, value in headers if name == b"flwr-public-key"}
        return path in GREETINGS or b64encode(REGISTERED) in keys
    if path.startswith("/v1/control/"):
        shown = [value for name, value in headers if name == b"authorization"]
        role = shown[0].removeprefix(b"Bearer ").decode("latin-1") if len(shown) == 1 else ""
        here = asked["client"] in (CLIENTS[0], CLIENTS[2])
        return path.rpartition("/")[2] in CALLS.get(role, ()) and (role != SERVER or here)
    return path.startswith("/v1/runtime/") and asked["client"] in (CLIENTS[0], CLIENTS[2])


@fuzzed(requests(), examples=150)
def test_requests(asked: dict[str, Any]) -> None:
    other = {name for name, _ in asked["changed"]}
    headers = [one for one in asked["signed"]() if one[0] not in other]
    asked = {**asked, "headers": [*headers, *asked["changed"], *asked["headers"]]}
    passed: list[int] = []
    read: list[int] = []
    answers: list[dict[str, Any]] = []
    left = [{"type": "http.request", "body": bytes(size), "more_body": True} for size in asked["parts"]]
    left.append(
        {"type": "http.disconnect"} if asked["gone"] else {"type": "http.request", "body": b"", "more_body": False}
    )

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        assert not message["more_body"]
        passed.append(len(message["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def receive() -> Any:
        if asked["late"] or not left:
            await asyncio.sleep(3600)
        message = left.pop(0)
        read.append(len(message.get("body", b"")))
        return message

    async def send(message: Any) -> None:
        answers.append(message)

    async def answered() -> ConnectionGuard:
        guard = ConnectionGuard(app, OPERATORS.get, signer)
        scope = {"type": "http", "app": Links(), **{key: asked[key] for key in ("path", "headers", "client", "server")}}
        await guard(scope, receive, send)
        return guard

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection_guard, "BODY_SECONDS", 0.01)
        guard = asyncio.run(answered())
    statuses = [answer["status"] for answer in answers if answer["type"] == "http.response.start"]
    assert not guard.in_flight.taken, "what was read is counted back"
    assert len(statuses) <= 1 and (statuses or asked["gone"])
    assert bool(passed) == (statuses == [200])
    most = (
        LARGEST_GREETING
        if asked["path"] in GREETINGS
        else LARGEST_OF_DEVICES
        if "/fleet/" in asked["path"]
        else LARGEST
    )
    if statuses in ([401], [403]):
        assert not read, "nothing is read of a request that is refused"
    assert sum(passed) <= most and sum(read[:-1]) <= most
    assert not passed or may_pass(asked), asked


class Wire(asyncio.Transport):
    """What a connection is to the web server's class of it."""

    def __init__(self) -> None:
        super().__init__({"peername": ("10.0.0.9", 5), "sockname": ("10.0.0.1", 8477)})
        self.closed = False
        self.written = b""

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0


HEAD = b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nX: y\r\n\r\nabc"
LONG = [b"GET " + b"/" * 70_000, HEAD[:30] + b"a: b\r\n" * 20_000, b"\r\n" * 40_000, HEAD[:-5] * 9]
BYTES = changed_bytes(HEAD) | changed_bytes(HEAD * 3) | st.sampled_from([b"\x16\x03\x01\x02\x00", *LONG])


@fuzzed(st.lists(BYTES, min_size=1, max_size=3), examples=60)
def test_bytes_of_a_connection(pieces: list[bytes]) -> None:
    """Its place is free again afterwards, however it ends; and no more headers are kept than the bound."""
    places = Places(4)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def talk() -> None:
        config = Config(app, log_level="critical", lifespan="off")
        config.load()
        made = limited(AutoHTTPProtocol, places)
        connection: Any = made(config=config, server_state=ServerState(), app_state={})
        wire = Wire()
        connection.connection_made(wire)
        assert places.taken.total() == 1
        for piece in pieces:
            for at in range(0, len(piece), 16_384):
                if not wire.closed:
                    connection.data_received(piece[at : at + 16_384])
                    assert connection.unread <= LARGEST_HEADERS or wire.closed
                    await asyncio.sleep(0)
        connection.connection_lost(None)
        assert connection.patience is None
        await asyncio.sleep(0)

    asyncio.run(talk())
    assert not places.taken
