"""All that Strata changes inside Flower (1.41): what stands there instead, and why Flower's own will not do.

    patch_server   for the process of the SuperLink (server/superlink.py)
    patch_app      for the process of the server app (server/server_app.py)
    patch_device   for the process of the SuperNode (device/supernode.py)

Nowhere else is Flower changed. tests/fleet/test_flower_patches.py holds each of these names, with all that the patches
rely on, against the installed version: where Flower has changed one, it says which, and what to look at.
Flower is imported in functions only: this file is read on devices, whose memory is for training.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from strata.fleet.app_bundle import bundle
from strata.fleet.device.available_memory import memory_limit
from strata.fleet.protocol.settings import asked_of
from strata.fleet.security.audit import AuditLog
from strata.fleet.security.connection_guard import ConnectionGuard
from strata.fleet.security.connection_limits import SPARE, Places, limited, raise_descriptors
from strata.fleet.security.door_record import note
from strata.fleet.security.handshakes import loop_of_handshakes
from strata.fleet.security.signatures import signer
from strata.fleet.security.stored_bytes import StoredBytes
from strata.fleet.security.tokens import Known

MOST_OBJECTS = 1024  # of a device's answer, each at most connection_guard.LARGEST_OF_DEVICES
CONNECTED = "strata: connected"  # the device's launcher waits for this line
REFUSED = "this device runs Strata's own app and no other"


@dataclass(frozen=True)
class Patch:
    """`module`.`name` becomes `made`(what it was)."""

    module: str
    name: str
    made: Callable[[Any], Any]

    def apply(self) -> None:
        module = importlib.import_module(self.module)
        if not hasattr(module, self.name):
            raise RuntimeError(f"this Flower has no {self.module}.{self.name}: Strata is made for flwr 1.41")
        setattr(module, self.name, self.made(getattr(module, self.name)))


Told = Callable[[], None]  # called when there is an app to start
Began = Callable[[int, Any], None]  # called with a new run's id and Flower's record of runs


def patch_server(known: Known | None, told: Told, audit: AuditLog | None, began: Began) -> None:
    """`known`: whose token is shown; None on a plain-text server."""
    for patch in server_patches(known, told, audit, began):
        patch.apply()


def patch_app() -> None:
    for patch in app_patches():
        patch.apply()


def patch_device(poll: float, told: Told) -> None:
    """`poll`: seconds between two questions for work."""
    for patch in device_patches(poll, told):
        patch.apply()


def server_patches(known: Known | None, told: Told, audit: AuditLog | None, began: Began) -> tuple[Patch, ...]:
    starts = functools.partial(only_strata_starts, told=told, began=began)
    return (
        Patch("flwr.superlink.servicer.control.control_handlers", "start_run", starts),
        Patch("flwr.superlink.servicer.control.control_handlers", "stop_run", noted_stop),
        Patch("flwr.superlink.servicer.fleet.fleet_handlers", "push_messages", within_bounds),
        Patch("flwr.superlink.servicer.fleet.fleet_handlers", "push_object", within_room),
        Patch("flwr.superlink.servicer.fleet.fleet_handlers", "get_run", without_config),
        Patch("flwr.superlink.servicer.runtime.runtime_handlers", "get_nodes", with_shut_out),
        Patch("flwr.superlink.extensions", "get_middleware", functools.partial(guarded, known=known, audit=audit)),
        Patch("uvicorn", "run", limited_server),
    )


def app_patches() -> tuple[Patch, ...]:
    """Flower's fetching and putting together of answers. Why: it takes whatever they become (server/answer_size.py)."""
    from strata.fleet.server import answer_size

    return (
        Patch("flwr.superlink.grid.http_grid", "pull_objects", answer_size.counted),
        Patch("flwr.superlink.grid.http_grid", "inflate_object_from_contents", answer_size.bounded),
    )


def device_patches(poll: float, told: Told) -> tuple[Patch, ...]:
    comes = functools.partial(only_strata_comes, told=told)
    return (
        Patch("flwr.supernode.start_client_internal", "time", lambda _: ShortSleep(poll)),
        Patch("flwr.supernode.start_client_internal", "_pull_and_store_message", comes),
    )


# --- the server ------------------------------------------------------------------------------------------------------


def only_strata_starts(start_run: Callable[..., Any], told: Told, began: Began) -> Callable[..., Any]:
    """Flower's handler of the control interface that begins a run.

    Why: it takes any app bundle and would run its code here. The operator's token is no right to send code. And who
    starts the apps is told that there is one, so that it need not ask all the time. The audit log gets its run.
    """
    from flwr.supercore.error import ApiErrorCode, FlowerError

    def start_strata(request: Any, account: Any, state: Any, *arguments: Any, **named: Any) -> Any:
        if request.app_spec or request.fab.content != bundle():
            raise FlowerError(ApiErrorCode.INVALID_APP_SPEC, "This server runs Strata's own app and no other.")
        started = start_run(request, account, state, *arguments, **named)
        note(run=str(started.run_id), out=asked_of(request.override_config)[1])
        began(started.run_id, state)
        told()
        return started

    return start_strata


def noted_stop(stop_run: Callable[..., Any]) -> Callable[..., Any]:
    """Flower's handler of the control interface that ends a run. Why: the audit log says which one."""

    def stop_noted(request: Any, *arguments: Any) -> Any:
        note(run=str(request.run_id))
        return stop_run(request, *arguments)

    return stop_noted


def within_bounds(push_messages: Callable[..., Any]) -> Callable[..., Any]:
    """Flower's handler of devices' answers.

    Why: whatever an answer announces is going to be kept, so it has to end somewhere; Flower sets no bound.
    """
    from flwr.supercore.error import ApiErrorCode, FlowerError
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

    def push_bounded(request: Any, state: Any) -> Any:
        announced = itertools.chain.from_iterable(map(iterate_object_tree, request.message_object_trees))
        if next(itertools.islice(announced, MOST_OBJECTS, None), None) is not None:
            raise FlowerError(ApiErrorCode.FORBIDDEN_ACTION, f"An answer has at most {MOST_OBJECTS} objects.")
        return push_messages(request=request, state=state)

    return push_bounded


def within_room(push_object: Callable[..., Any]) -> Callable[..., Any]:
    """Flower's handler of the pieces of devices' answers.

    Why: it keeps them until the app has fetched them, however many there are (security/stored_bytes.py).
    """
    from flwr.supercore.error import ApiErrorCode, FlowerError

    stored = StoredBytes.within(memory_limit())

    def push_within(request: Any, state: Any) -> Any:
        name, size = request.object_id, len(request.object_content)
        counted = stored.take(request.node.node_id, name, size, state.object_store)
        if counted is None:
            raise FlowerError(ApiErrorCode.FORBIDDEN_ACTION, "There is no room for more answers of this device now.")
        kept = False
        try:
            answer = push_object(request=request, state=state)
            kept = answer.stored
        finally:
            if counted:
                stored.settle(name, kept)
        return answer

    return push_within


def without_config(get_run: Callable[..., Any]) -> Callable[..., Any]:
    """Flower's handler that tells a device of its run.

    Why: it tells all that the run was asked for, with the server's folders, the bounds on updates and the seed. What a
    device needs is in the message of its task.
    """

    def get_bare_run(request: Any, state: Any) -> Any:
        answer = get_run(request=request, state=state)
        answer.run.ClearField("override_config")
        return answer

    return get_bare_run


def with_shut_out(get_nodes: Callable[..., Any]) -> Callable[..., Any]:
    """Flower's handler that tells the server app who is connected.

    Why: a device that is away may come back, and one whose key was shut out never does: its run need not wait for it.
    So these are named too, unless another key has their name now; their status tells them apart.
    """
    from flwr.supercore.constant import NodeStatus

    def get_nodes_and_shut_out(request: Any, state: Any, task: Any) -> Any:
        answer = get_nodes(request, state, task)
        gone = state.get_node_info(statuses=[NodeStatus.UNREGISTERED])
        if gone:
            registered = state.get_node_info(statuses=[NodeStatus.REGISTERED, NodeStatus.ONLINE, NodeStatus.OFFLINE])
            named = {node.name for node in registered}
            answer.nodes.extend(node for node in gone if node.name and node.name not in named)
        return answer

    return get_nodes_and_shut_out


def guarded(
    get_middleware: Callable[[], tuple[Any, ...]], known: Known | None, audit: AuditLog | None
) -> Callable[[], tuple[Any, ...]]:
    """Flower's own hook for what comes first at the door; it is filled by an extension package of Flower's only.

    Why: Flower asks for proof on one of the three interfaces behind its port (see security/connection_guard.py).
    """
    from starlette.middleware import Middleware

    def with_guard() -> tuple[Any, ...]:
        signed_by = None if known is None else signer
        return (Middleware(ConnectionGuard, known=known, signer=signed_by, audit=audit), *get_middleware())

    return with_guard


def limited_server(run: Callable[..., None]) -> Callable[..., None]:
    """The web server's start, which Flower calls with settings that it lets nobody change.

    Why: devices ask for work every few seconds, and each question would be a line in the log; whom a request comes
    from, which the guard asks, is to be believed of a proxy on this machine only; and a connection may do nothing for
    ever (security/connection_limits.py).
    """
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    def run_limited(**settings: Any) -> None:
        places = Places(max(SPARE, raise_descriptors() - SPARE))
        ours = {
            "access_log": False,
            "forwarded_allow_ips": "127.0.0.1",
            "http": limited(AutoHTTPProtocol, places),
            "loop": f"{loop_of_handshakes.__module__}:{loop_of_handshakes.__name__}",
        }
        run(**{**settings, **ours})

    return run_limited


# --- a device --------------------------------------------------------------------------------------------------------


class ShortSleep:
    """In place of the module `time`, of which Flower's device loop uses `sleep` alone.

    Why: it sleeps three seconds between two questions for work, and no option says otherwise.
    """

    def __init__(self, longest: float) -> None:
        self.longest = longest

    def sleep(self, seconds: float) -> None:
        time.sleep(min(seconds, self.longest))


class ForeignApp(Exception):
    pass


def only_strata_comes(pull: Callable[..., int | None], told: Told) -> Callable[..., int | None]:
    """Flower's step that takes a message from the server and keeps it for the app.

    Why: Flower sends a device the code it is to run. Strata's bundle holds none, so any other bundle is refused here,
    before a process is started for it, and the server is told. Two faults of Flower 1.41 are mended on the way (see
    _as_failure and _run_of_waiting_reply). And the first call says that the device is connected, which Flower does not;
    and who starts the apps is told of a message.
    """
    from flwr.app import Error, Message
    from flwr.common.constant import ErrorCode
    from flwr.supernode.start_client_internal import _insert_message

    said = False

    def pull_checked(*, receive: Any, get_fab: Any, **rest: Any) -> int | None:
        nonlocal said
        messages: list[Any] = []

        def remembering() -> Any:
            received = receive()
            if received is not None:
                messages.append(received[0])
            return received

        def checked(*arguments: Any) -> Any:
            fab = get_fab(*arguments)
            if fab.content != bundle():
                raise ForeignApp
            return fab

        if not said:
            said = True
            print(CONNECTED, flush=True)
        for call in ("pull_object", "confirm_message_received"):
            rest[call] = _as_failure(rest[call])
        try:
            taken = pull(receive=remembering, get_fab=checked, **rest)
            if taken is not None:
                told()
            return _run_of_waiting_reply(rest["state"]) if taken is None else taken
        except ForeignApp:
            message = messages[-1]
            print(f"strata: refused a foreign app of run {message.metadata.run_id}", flush=True)
            reply = Message(Error(ErrorCode.INVALID_FAB, REFUSED), reply_to=message)
            _insert_message(reply, rest["state"], rest["object_store"])
            return int(message.metadata.run_id)

    return pull_checked


def _as_failure(call: Callable[..., Any]) -> Callable[..., Any]:
    """A run that ends while its message is being fetched: Flower (1.41) forgets to drop the message then, and works on
    it later in place of the next run's. It tidies up after failures of any other kind, so it gets one."""
    from flwr.supercore.run import RunNotRunningException

    def checked(*arguments: Any) -> Any:
        try:
            return call(*arguments)
        except RunNotRunningException:
            raise RuntimeError("the run has ended") from None

    return checked


def _run_of_waiting_reply(state: Any) -> int | None:
    """The run of a reply that nobody has sent: Flower (1.41) sends one for each message it takes, and waits for the
    next message before it looks again."""
    with state.lock_msg_store:
        for entry in state.msg_store.values():
            if not entry.is_retrieved and entry.message.metadata.reply_to_message_id:
                return int(entry.message.metadata.run_id)
    return None
