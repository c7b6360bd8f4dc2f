"""Messages of a secure sum: refused in one of two ways, on both sides, or taken."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
from hypothesis import strategies as st

pytest.importorskip("flwr")
from strata.core.errors import BadInput
from strata.fleet.protocol.codec import Malformed
from strata.fleet.protocol.secure_sum import Collector, Member, SumFailed
from tests.fleet.test_secure_sum import Fleet, some_values
from tests.fuzz.budget import fuzzed
from tests.fuzz.mutations import changed_text

DEVICES = 3
Said = dict[str, Any]


@cache
def proper() -> tuple[dict[str, Said], Fleet]:
    """What one device said at each stage of a sum that went well, and all that took part in it."""
    said: dict[str, Said] = {}

    def keep(number: int, stage: str, message: Said) -> Said:
        if number == 1 and stage != "masked":
            said[stage] = message
        return message

    fleet = Fleet(some_values(DEVICES, 4))
    fleet.play(change=keep)
    return said, fleet


def of(text: bytes) -> Said | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


@fuzzed(
    st.deferred(
        lambda: st.one_of(*(st.tuples(st.just(stage), changed_text(said)) for stage, said in proper()[0].items()))
    ),
    examples=60,
)
def test_what_devices_say(made: tuple[str, bytes]) -> None:
    stage, said = made[0], of(made[1])
    server: Collector = copy.deepcopy(proper()[1].server)
    if said is None:
        return
    if stage == "keys":
        del server.keys[1]
    with suppress(Malformed, SumFailed):
        getattr(server, f"take_{stage}")(1, said)
        server.total()


@cache
def asked() -> Said:
    fleet = Fleet(some_values(DEVICES, 4))
    for number, member in fleet.members.items():
        fleet.server.take_keys(number, member.keys())
    return {"own": fleet.members[1].to_json(), "said": fleet.server.for_shares()}


@fuzzed(st.deferred(lambda: changed_text(asked()["said"])), examples=30)
def test_what_a_server_says(text: bytes) -> None:
    said = of(text)
    if said is not None:
        with suppress(BadInput, Malformed):
            Member.from_json(asked()["own"]).share(said)
