"""The device's process: `python -m strata.fleet.device.supernode ...` is flower-supernode that runs nothing but Strata.

Flower sends a device the code it is to run. Strata's bundle holds none, so any other bundle is refused here, before
a process is started for it, and the server is told. Two faults of Flower's device program are mended on the way.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strata.core.children import end_with_launcher
from strata.fleet.environment import be_quiet
from strata.fleet.server.app_bundle import bundle
from strata.fleet.server.app_processes import Executor

POLL = "STRATA_POLL_SECONDS"
CONNECTED = "strata: connected"  # the launcher waits for this line
REFUSED = "this device runs Strata's own app and no other"


class Eager:
    """Flower's device sleeps three seconds between two questions for work; ours as long as it is told."""

    def __init__(self, longest: float) -> None:
        self.longest = longest

    def sleep(self, seconds: float) -> None:
        time.sleep(min(seconds, self.longest))


class ForeignApp(Exception):
    pass


def main() -> None:
    end_with_launcher()
    be_quiet()
    from flwr.supernode import start_client_internal as client
    from flwr.supernode.cli.flower_supernode import flower_supernode

    read = argparse.ArgumentParser()
    for name in ("--host", "--port", "--superexec-auth-secret-file"):
        read.add_argument(name)
    given, _ = read.parse_known_args()
    secret = Path(given.superexec_auth_secret_file)
    Executor(f"{given.host}:{given.port}", "flwr-clientapp", secret, authority=None).start()
    client.time = Eager(float(os.environ[POLL]))  # type: ignore[assignment]
    client._pull_and_store_message = only_strata(client._pull_and_store_message, client._insert_message)
    flower_supernode()


def only_strata(pull: Callable[..., int | None], insert: Callable[..., None]) -> Callable[..., int | None]:
    """Flower's step that takes a message from the server, with a look at the bundle that the message is for."""
    from flwr.app import Error, Message
    from flwr.common.constant import ErrorCode

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
            return _run_of_waiting_reply(rest["state"]) if taken is None else taken
        except ForeignApp:
            message = messages[-1]
            print(f"strata: refused a foreign app of run {message.metadata.run_id}", flush=True)
            reply = Message(Error(ErrorCode.INVALID_FAB, REFUSED), reply_to=message)
            insert(reply, rest["state"], rest["object_store"])
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


if __name__ == "__main__":
    main()
