"""How long a device that is refused goes on trying, on a clock of the test's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
from strata.core.errors import BadInput
from strata.fleet.device import command as device
from strata.fleet.protocol.settings import DeviceSettings
from strata.fleet.security.addresses import Address

LIFE = 4.0  # seconds that the runtime takes to start and be refused


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(device, "time", clock)
    monkeypatch.setattr(device, "need_server", lambda *_: None)
    monkeypatch.setattr(device, "_command", lambda *_: [])
    return clock


def live(clock: Clock, monkeypatch: pytest.MonkeyPatch, words: str, until: float) -> None:
    """The runtime says `words` and ends; from then on the server admits it, and Ctrl-C is pressed."""

    def one_life(command: Any, env: Any, log: Path, *rest: Any) -> bool:
        clock.sleep(LIFE)
        if clock.now > until:
            raise device.Stopped
        with log.open("a") as file:
            file.write(words)
        return False

    monkeypatch.setattr(device, "_one_life", one_life)


def work(folder: Path) -> int:
    settings = DeviceSettings("a", cache=str(folder))
    return device.work(settings, Address("localhost", 1), None, say=lambda _: None)


REFUSED = "Failed to initialize the connection to the SuperLink.\n"


def test_a_device_that_lost_its_power_is_admitted_in_time(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    live(clock, monkeypatch, REFUSED, until=90.0)  # Flower takes a minute to see that it was away
    assert work(tmp_path) == 0


def test_a_key_that_is_unknown(clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    live(clock, monkeypatch, REFUSED, until=1e9)
    with pytest.raises(BadInput, match="does not admit this device's key"):
        work(tmp_path)
    assert 120 <= clock.now < 160


def test_a_runtime_that_does_not_start(clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    live(clock, monkeypatch, "Segmentation fault\n", until=1e9)
    with pytest.raises(BadInput, match="does not start; the end of .*\nSegmentation fault"):
        work(tmp_path)
    assert clock.now < 60
