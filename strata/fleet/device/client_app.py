"""The device's Flower app: hands the server's message to the device's working process, and its answer back.

No torch in this file: Flower starts a process with it for every message.
"""

from __future__ import annotations

import os
import traceback

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from strata.core.errors import BadInput
from strata.core.processes import watch_parent
from strata.fleet.device.work_socket import ask
from strata.fleet.protocol import codec
from strata.fleet.protocol.envelope import content, payload
from strata.fleet.protocol.failures import failure
from strata.fleet.protocol.settings import DeviceSettings

app = ClientApp()


@app.query()
@app.train()
@app.evaluate()
def work(message: Message, context: Context) -> Message:
    watch_parent(os.getppid())  # as in server_app.py
    return Message(content(answer(message, context)), reply_to=message)


def answer(message: Message, context: Context) -> bytes:
    try:
        settings = DeviceSettings.from_config(context.node_config)
        data = payload(message.content)
        meta = codec.decode(data).meta
        limits = [seconds for seconds in (settings.deadline, meta.get("deadline")) if seconds is not None]
        return ask(settings, str(meta["model"]), data, min(limits, default=None), os.getppid())
    except (BadInput, codec.Malformed, KeyError):
        traceback.print_exc()
        return failure("refused")
    except Exception:  # else Flower would send its words to the server
        traceback.print_exc()
        return failure("failed")
