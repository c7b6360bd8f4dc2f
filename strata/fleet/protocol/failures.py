"""What a device says where it has no answer: one of these kinds, and nothing else.

What its errors say stays in the device's own logs: their words may name its files, and files are named after people.
The server shows the sentence of the kind, so that no device writes into its log either. No torch in this file.
"""

from __future__ import annotations

from typing import Any

from strata.fleet.protocol import codec

LOG = "the device's own logs say why"
SENTENCES = {
    "memory": "out of memory: the task needs more than this device's budget",
    "late": "stopped at its deadline",
    "model": "it is not told to build this run's model: install its package there and start the device with --model",
    "unready": f"it cannot make its data or the model ready: {LOG}",
    "refused": f"it refused the server's message: {LOG}",
    "program": f"it cannot run its step program: {LOG}",
    "failed": f"its work failed: {LOG}",
}


def failure(kind: str) -> bytes:
    """The message, of a kind that has a sentence."""
    assert kind in SENTENCES
    return codec.encode({"what": "failure", "kind": kind})


def sentence(kind: Any) -> str:
    """Of whatever a device gives as its kind."""
    known = SENTENCES.get(kind) if isinstance(kind, str) else None
    return known or "it failed in a way that is not known here"
