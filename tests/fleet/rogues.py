"""Client apps of devices that misbehave: modules' texts, because each runs in its own device's processes."""

from __future__ import annotations

# Sends back its first update in every later round.
REPLAYING = """
from pathlib import Path
from flwr.app import Message
from flwr.clientapp import ClientApp
from strata.fleet.device import client_app
from strata.fleet.protocol import codec
from strata.fleet.protocol import envelope
app = ClientApp()
first = Path(__file__).with_name("first-update")

@app.query()
@app.train()
@app.evaluate()
def work(message, context):
    answer = client_app.answer(message, context)
    if codec.decode(answer).meta["what"] == "update":
        if first.exists():
            answer = first.read_bytes()
        else:
            first.write_bytes(answer)
    return Message(envelope.content(answer), reply_to=message)
"""

# Takes its first task, says so in a file, and never comes back.
HANGING = """
import os
import select
from pathlib import Path
from flwr.app import Message
from flwr.clientapp import ClientApp
from strata.fleet.device import client_app
from strata.fleet.protocol import envelope
from strata.core.processes import watch_parent
app = ClientApp()

@app.query()
@app.evaluate()
def work(message, context):
    return Message(envelope.content(client_app.answer(message, context)), reply_to=message)

@app.train()
def hang(message, context):
    watch_parent(os.getppid())  # it hangs, but leaves nothing behind
    Path(__file__).with_name("has-its-task").touch()
    select.select([], [], [])
"""

# Says that it has five times the memory that it really has; what it trains in the end is not finite.
BOASTING = """
from flwr.app import Message
from flwr.clientapp import ClientApp
from strata.fleet.device import client_app
from strata.fleet.protocol import codec
from strata.fleet.protocol import envelope
app = ClientApp()

@app.query()
@app.train()
@app.evaluate()
def work(message, context):
    packet = codec.decode(client_app.answer(message, context))
    meta, tensors = packet.meta, packet.tensors()
    if meta["what"] == "device":
        meta = {**meta, "budget": 5 * meta["budget"]}
    elif meta["what"] == "update":
        next(iter(tensors.values())).fill_(float("nan"))
    return Message(envelope.content(codec.encode(meta, tensors)), reply_to=message)
"""
