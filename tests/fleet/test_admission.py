"""One TLS server and real devices: who is let in, who is not, and what is left when processes end."""

from __future__ import annotations

import shutil
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

pytest.importorskip("flwr")
from strata.cli import main
from strata.fleet.security.addresses import parse_address
from strata.fleet.security.audit import read_log, verify
from strata.fleet.security.keys import KeyFolder, make_keys
from strata.fleet.security.revocation import revoke
from strata.fleet.security.tokens import make_token, revoke_token
from strata.fleet.server.control import Access, connect
from strata.fleet.server.status import DeviceStatus, look
from tests.fleet.processes import PATIENCE, Command, descendants, free_port, strata, wait_until_gone


class Fleet:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keys = folder / "keys"
        make_keys(self.keys, [], ["a", "b", "stranger"])
        (self.keys / "registered" / "stranger.pub").unlink()
        self.address = f"127.0.0.1:{free_port()}"
        self.server = self.start_server()

    def start_server(self) -> Command:
        host, port = self.address.split(":")
        server = Command(self.folder, "fleet", "server", "--keys", "keys", "--host", host, "--port", port)
        server.wait_for("serving at")
        return server

    def device(self, name: str, *more: str) -> Command:
        return Command(
            self.folder, "fleet", "device", "--server", self.address, "--keys", "keys", "--name", name,
            "--budget", "64MiB", "--cache", f"cache-{name}", *more,
        )  # fmt: skip

    def status(self) -> dict[str, DeviceStatus]:
        state = look(Access.of(parse_address(self.address), self.keys, insecure=False))
        return {device.name: device for device in state.devices}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    yield fleet
    assert fleet.server.stop() == 0


def test_a_registered_device_is_admitted_and_seen(fleet: Fleet) -> None:
    assert replace(fleet.status()["a"], node="") == DeviceStatus("a", "", "registered", last_seen=None)
    device = fleet.device("a")
    try:
        device.wait_for("a is connected")
        seen = fleet.status()["a"]
        assert seen.state == "online" and seen.last_seen and seen.last_seen.startswith("20")
        below = descendants(device.process.pid)
        assert below
    finally:
        assert device.stop(signal.SIGINT) == 0
    assert wait_until_gone(below) == []
    assert fleet.status()["a"].state == "offline"


def test_an_unregistered_key_is_refused(fleet: Fleet) -> None:
    device = fleet.device("stranger", "--no-wait")
    assert device.wait() == 2
    assert "does not admit this device's key: is registered/stranger.pub" in device.text()
    assert set(fleet.status()) >= {"a", "b"} and "stranger" not in fleet.status()


def test_a_plain_text_client_is_refused(fleet: Fleet) -> None:
    device = Command(fleet.folder, "fleet", "device", "--insecure", "--server", fleet.address, "--name", "a",
                     "--cache", "cache-a")  # fmt: skip
    assert device.wait() == 2 and "gives no answer in plain text" in device.text()
    with pytest.raises(httpx.HTTPError):
        httpx.post(f"http://{fleet.address}/v1/fleet/pull-messages", timeout=PATIENCE)
    # Flower's own device program, which asks nobody before it speaks
    plain = Command(
        fleet.folder, "--insecure", "--superlink", fleet.address, "--port", str(free_port()), "--max-retries", "1",
        program=["flower-supernode"],
    )  # fmt: skip
    assert plain.wait() != 0 and "Failed to initialize the connection" in plain.text()


def test_no_process_has_the_token_in_its_environment(fleet: Fleet) -> None:
    token = (fleet.keys / "operator.token").read_bytes().strip()
    processes = [fleet.server.process.pid, *descendants(fleet.server.process.pid)]
    assert len(processes) > 1
    assert not [pid for pid in processes if token in Path(f"/proc/{pid}/environ").read_bytes()]


def test_only_the_operator_controls(fleet: Fleet) -> None:
    from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest
    from flwr.supercore.control import ControlHttpClient

    certificate = (fleet.keys / "ca.pem").read_bytes()
    with ControlHttpClient.from_server_address(fleet.address, False, certificate, []) as anybody:
        for call, request in ((anybody.ListNodes, ListNodesRequest()), (anybody.RegisterNode, RegisterNodeRequest())):
            with pytest.raises(httpx.HTTPStatusError) as refused:
                call(request)
            assert refused.value.response.status_code == 401
    other = fleet.folder / "other"
    other.mkdir()
    shutil.copy(fleet.keys / "ca.pem", other)
    (other / "operator.token").write_text("guess\n")
    done = strata("fleet", "status", "--server", fleet.address, "--keys", "other", cwd=fleet.folder)
    assert done.returncode == 2 and "refused this operator.token" in done.stderr


def test_a_token_to_watch_is_for_watching(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    make_token(KeyFolder(fleet.keys), "ada", "watch")
    there = ["--server", fleet.address, "--keys", str(fleet.keys / "operators" / "ada")]
    assert main(["fleet", "status", *there, "--json"]) == 0
    assert '"name": "a"' in capsys.readouterr().out
    assert main(["fleet", "run", *there, "--rounds", "1", "--out", str(fleet.folder / "never")]) == 2
    assert "lets this operator.token watch and nothing else" in capsys.readouterr().err
    assert main(["fleet", "logs", "12", *there]) == 2
    assert "knows no run 12: `strata fleet status` lists them" in capsys.readouterr().err
    revoke_token(KeyFolder(fleet.keys), "ada")
    make_token(KeyFolder(fleet.keys), "bob", "run")  # another, with ca.pem and a token of another name
    shutil.copytree(fleet.keys / "operators" / "bob", fleet.keys / "operators" / "ada")
    assert main(["fleet", "status", *there]) == 0
    revoke_token(KeyFolder(fleet.keys), "bob")
    assert main(["fleet", "status", *there]) == 2
    assert "refused this operator.token" in capsys.readouterr().err


def test_nothing_is_read_of_what_a_stranger_sends(fleet: Fleet) -> None:
    host, port = fleet.address.split(":")
    context = ssl.create_default_context(cafile=fleet.keys / "ca.pem")
    head = "POST /v1/fleet/push-object HTTP/1.1\r\nHost: a\r\nContent-Type: application/protobuf\r\n"
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as plain:
        with context.wrap_socket(plain, server_hostname=host) as anybody:
            anybody.sendall(f"{head}Content-Length: {1 << 30}\r\n\r\n".encode())
            assert anybody.recv(12) == b"HTTP/1.1 401"
            while anybody.recv(1 << 16):  # it hangs up, though we would go on
                pass


def test_the_server_runs_no_code_of_others(fleet: Fleet) -> None:
    from flwr.common.serde import fab_to_proto
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.supercore.fab import Fab

    from strata.core.errors import BadInput
    from tests.fleet.test_foreign_apps import altered

    access = Access.of(parse_address(fleet.address), fleet.keys, insecure=False)
    with pytest.raises(BadInput, match="answered 412"), connect(access) as client:
        client.StartRun(StartRunRequest(fab=fab_to_proto(Fab("", altered(), {}))))
    with pytest.raises(BadInput, match="answered 412"), connect(access) as client:
        client.StartRun(StartRunRequest(app_spec="@somebody/app"))


def test_devices_come_and_go_while_the_server_runs(fleet: Fleet) -> None:
    done = strata("fleet", "keys", "keys", "--devices", "late", cwd=fleet.folder)
    assert done.returncode == 0 and "admits them within seconds" in done.stdout
    fleet.server.wait_for("admitted: late")
    device = fleet.device("late")
    try:
        device.wait_for("late is connected")
        shut_out = shutil.copy(fleet.keys / "registered" / "late.pub", fleet.folder)
        done = strata("fleet", "revoke", "late", "--keys", "keys", cwd=fleet.folder)
        assert done.returncode == 0 and "late is shut out for good" in done.stdout
        fleet.server.wait_for("no longer admitted: late")
        device.wait_for("the connection has ended")  # it is told with its next question
        assert "late" not in fleet.status()
    finally:
        device.stop()
    shutil.copy(shut_out, fleet.keys / "registered")
    fleet.server.wait_for("registered/late.pub: this key was shut out")
    (fleet.keys / "registered" / "late.pub").unlink()


def test_who_came_and_went_is_in_the_audit_log(fleet: Fleet) -> None:
    """After the tests before this one."""
    verify(fleet.keys / "audit")
    lines = [line.facts or {} for line in read_log(fleet.keys / "audit")[0]]
    late = [(line["what"], line.get("from")) for line in lines if line.get("device") == "late"]
    events = ("device key made", "device admitted", "device connected", "device revoked", "device shut out")
    assert set(late) >= {(what, "127.0.0.1" if what == "device connected" else None) for what in events}
    assert len({line["key"] for line in lines if line.get("device") == "late" and "key" in line}) == 1
    assert [line["why"] for line in lines if line.get("token") == "ada" and line["what"] == "refused"] == [
        "not for the role watch"
    ]
    what = {line["what"] for line in lines}
    assert {"server started", "device refused", "refused", "looked"} <= what


def test_a_device_that_was_never_seen_is_shut_out(fleet: Fleet) -> None:
    make_keys(fleet.keys, [], ["unseen"])
    fleet.server.wait_for("admitted: unseen")
    revoke(KeyFolder(fleet.keys), "unseen")
    fleet.server.wait_for("no longer admitted: unseen")
    assert "unseen" not in fleet.status() and "trying again" not in fleet.server.text()


def test_a_device_comes_back_after_the_server(fleet: Fleet) -> None:
    device = fleet.device("b")
    try:
        device.wait_for("b is connected")
        below = descendants(fleet.server.process.pid)
        fleet.server.process.kill()  # nothing is said to anybody
        fleet.server.process.wait()
        assert wait_until_gone(below) == []
        fleet.server = fleet.start_server()
        deadline = time.monotonic() + PATIENCE
        while fleet.status()["b"].state != "online" and time.monotonic() < deadline:
            time.sleep(1)
        assert fleet.status()["b"].state == "online"
        below = descendants(device.process.pid)
        device.process.kill()
        assert wait_until_gone(below) == []
    finally:
        device.stop()
