"""The device's process: `python -m strata.fleet.supernode ...` is flower-supernode that runs nothing but Strata.

Flower sends a device the code it is to run. Strata's bundle holds none, so any other bundle is refused here, before
a process is started for it, and the server is told.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strata.fleet.app import bundle
from strata.fleet.children import end_with_launcher
from strata.fleet.environment import be_quiet
from strata.fleet.executing import Executor

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
        try:
            return pull(receive=remembering, get_fab=checked, **rest)
        except ForeignApp:
            message = messages[-1]
            print(f"strata: refused a foreign app of run {message.metadata.run_id}", flush=True)
            reply = Message(Error(ErrorCode.INVALID_FAB, REFUSED), reply_to=message)
            insert(reply, rest["state"], rest["object_store"])
            return int(message.metadata.run_id)

    return pull_checked


if __name__ == "__main__":
    main()
