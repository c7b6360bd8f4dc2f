"""What a device says of its errors: a kind. Their words may name its files, and stay where they are."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import UnidentifiedImageError

from strata.core.errors import BadInput
from strata.fleet.device import client_app, work_process
from strata.fleet.device.work_socket import receive, send
from strata.fleet.protocol import codec
from strata.fleet.protocol.failures import SENTENCES, failure, sentence

PATH = "/home/ward/pictures/train/tumour/Jane Doe 1961.png"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UnidentifiedImageError(f"cannot identify image file {PATH!r}"), "failed"),
        (FileNotFoundError(2, "No such file or directory", PATH), "failed"),
        (BadInput(f"{PATH} is not a picture"), "refused"),
        (codec.Malformed(PATH), "refused"),
    ],
)
def test_the_words_of_an_error_stay_on_the_device(
    error: Exception, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(packet: Any, client: int) -> bytes:
        raise error

    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(ours, codec.encode({"what": "train"}))
        assert work_process._work(SimpleNamespace(answer=fail), theirs, 1) == 0  # type: ignore[arg-type]
        sent = receive(ours)
    assert sent == failure(kind) and codec.decode(sent).meta == {"what": "failure", "kind": kind}
    assert "Jane Doe" in "".join(capfd.readouterr())  # in the device's own log


def test_nor_do_those_of_flowers_app_leave(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(config: Any) -> None:
        raise OSError(f"cannot open {PATH}")

    monkeypatch.setattr(client_app.DeviceSettings, "from_config", fail)
    assert client_app.answer(None, SimpleNamespace(node_config={})) == failure("failed")  # type: ignore[arg-type]
    assert "Jane Doe" in capsys.readouterr().err


def test_the_server_shows_sentences_of_its_own() -> None:
    assert sentence("late") == SENTENCES["late"] == "stopped at its deadline"
    assert sentence(["late"]) == sentence(PATH) == "it failed in a way that is not known here"
