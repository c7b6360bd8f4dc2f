"""`strata-device` at the command line and at the server's door: one sentence for whatever is wrong."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from strata_device import cli, codec
from strata_device.addresses import Address, parse_address
from strata_device.device import ANSWER, LOG, TASK, Device
from strata_device.errors import BadInput, OutOfMemory, Refused, Unreachable, kind_of
from strata_device.keys import Signer, device_keys
from strata_device.link import Link
from strata_device.objects import Metadata, Tree
from strata_device.settings import Settings

from strata.fleet.protocol import failures
from strata.fleet.security.keys import make_keys
from strata.fleet.security.signatures import fingerprint, fingerprint_of_file

DEVICE = Path(__file__).parents[2] / "device"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give --keys"),
        (["--insecure"], "give --name"),
        (["--insecure", "--keys", "k"], "leave out --insecure, or --keys"),
        (["--insecure", "--name", "a b"], "a device's name"),
        (["--insecure", "--name", "a", "--budget", "much"], "a budget is a number of bytes"),
        (["--insecure", "--name", "a", "--part", "3/2"], "a device holds part 0 to 1"),
        (["--insecure", "--name", "a", "--part", "x"], "--part is written I/N"),
        (["--insecure", "--name", "a", "--split-seed", "1"], "give --part"),
        (["--insecure", "--name", "a", "--poll", "0"], "--poll is from"),
        (["--insecure", "--name", "a", "--hold-out", "1"], "hold-out"),
        (["--insecure", "--name", "a", "--server", "10.0.0.1:1"], "for this machine alone"),
        (["--insecure", "--name", "a", "--server", "x:y"], "HOST:PORT"),
        (["--insecure", "--name", "a", "--library", "/nowhere.so"], "there is no /nowhere.so"),
        (["--keys", "/nowhere"], "cannot be read"),
    ],
)
def test_wrong_arguments(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = ["--server", "localhost:1", "--cache", str(tmp_path / "cache"), *arguments]
    assert cli.main(given) == 2
    said = capsys.readouterr().err
    assert words in said and said.startswith("strata-device: ") and said.count("\n") == 1


def test_neither_torch_nor_flower_nor_numpy_is_loaded() -> None:
    code = "import sys, strata_device.cli, strata_device.device, strata_device.work, strata_device.worker; "
    code += "print(sorted({'torch', 'flwr', 'numpy', 'google', 'grpc', 'httpx'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], cwd=DEVICE, capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_the_key_is_the_one_that_the_server_registers(tmp_path: Path) -> None:
    folder = make_keys(tmp_path / "keys", [], ["ant", "bee"]).folder
    keys = device_keys(folder.path, "ant")
    assert keys == device_keys(folder.path / "devices" / "ant", None) and keys.name == "ant"
    public = Signer.of(keys).public
    assert fingerprint(public) == fingerprint_of_file((folder.registered / "ant.pub").read_bytes())
    with pytest.raises(BadInput, match=r"several devices.*there: ant, bee"):
        device_keys(folder.path, None)
    keys.key.write_bytes(folder.key.read_bytes())
    with pytest.raises(BadInput, match="is not a key of"):
        Signer.of(keys)


def test_nobody_there_and_somebody_else_there(tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        place = Address(*server.getsockname())
        with pytest.raises(Unreachable, match="no server answers at 127.0.0.1"):
            Link(place, None).activate()
        folder = make_keys(tmp_path / "keys", [], ["ant"]).folder
        folder.device("ant").authority.write_text("no certificate")
        with pytest.raises(BadInput, match="is not a certificate"):
            Link(place, device_keys(folder.path, "ant"))
    assert str(parse_address("[::1]:7")) == "[::1]:7" and parse_address("a").port == 8477


def test_the_server_has_a_sentence_for_every_kind() -> None:
    kinds = {kind_of(error) for error in (OutOfMemory(), MemoryError(), Refused(), BadInput(), KeyError("x"))}
    assert kinds == {"memory", "refused", "unready", "failed"}
    for kind in (*kinds, "program", "late"):
        assert failures.sentence(kind) == failures.SENTENCES[kind]


class Door:
    """A server that sends these bytes as a message."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def fetch(self, asked: Any, to: Path) -> None:
        to.write_bytes(self.data)

    def confirm(self, asked: Any) -> None:
        pass


def test_messages_that_are_none_cost_a_refusal_of_one_kind(tmp_path: Path) -> None:
    device = object.__new__(Device)
    device._settings, device._folder, device._log = Settings("ant", str(tmp_path)), tmp_path, tmp_path / LOG
    draw = random.Random(4)
    good = codec.encode({"what": "nothing", "secret": "hands off"})
    for number in range(50):
        data = draw.randbytes(40) if number % 2 else good[: draw.randrange(len(good) - 20)]
        device._take(Door(data), (Metadata.read(memoryview(b"")), Tree("x")))  # type: ignore[arg-type]
        assert (tmp_path / TASK).exists()
        assert (tmp_path / ANSWER).read_bytes() == failures.failure("refused")
    assert len((tmp_path / LOG).read_text().splitlines()) == 50
