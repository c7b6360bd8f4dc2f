"""The live page: only this machine, no polling, alive after the run, gone after Ctrl-C."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from strata.cli import main
from strata.report import server as page_server
from strata.report.server import PageServer, serving
from tests.report.made import append, finish, make_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "a", done=2)


@pytest.fixture
def server(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageServer]:
    monkeypatch.setattr(page_server, "LOOK", 0.05)
    with serving(run) as server:
        yield server


def get(server: PageServer, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request("GET", f"/{server.secret}{path}", headers=headers)
    return connection.getresponse()


def test_page_and_data(server: PageServer) -> None:
    answer = get(server, "/")
    assert answer.status == 200 and b'id="data"' in answer.read()
    answer = get(server, "/data.json")
    value, tag = json.loads(answer.read()), answer.headers["ETag"]
    assert value["live"] and value["groups"][0]["done"] == 2
    time.sleep(0.3)  # the slow part may publish once more
    tag = get(server, "/data.json").headers["ETag"]
    again = get(server, "/data.json", **{"If-None-Match": tag})
    assert again.status == 304 and again.read() == b""
    assert get(server, "/../../etc/passwd").status == 404


def test_only_for_this_machine(server: PageServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert get(server, "/data.json", Host="evil.example").status == 403
    for name in ("evil.example:80", "127.0.0.1.evil.example", "localhost:80:80", "localhost:", "evil@localhost", ""):
        assert get(server, "/data.json", Host=name).status == 403
    for name in (f"localhost:{server.server_port}", "127.0.0.1:9000", "LOCALHOST", "[::1]:9000"):  # through a tunnel
        assert get(server, "/data.json", Host=name).status == 200


def test_only_for_who_knows_the_address(server: PageServer) -> None:
    """Every user of this machine can reach the port."""
    assert server.address == f"http://127.0.0.1:{server.server_port}/{server.secret}/" and len(server.secret) > 20
    for path in ("/", "/data.json", "/events", "//", "", f"/{server.secret[:-1]}/data.json", f"/%00{server.secret}/"):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == 403 and server.secret.encode() not in answer.read()


def events(server: PageServer) -> tuple[socket.socket, Iterator[int]]:
    stream = socket.create_connection(("127.0.0.1", server.server_port), timeout=20)
    stream.sendall(f"GET /{server.secret}/events HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode())
    lines = stream.makefile("rb")
    return stream, (int(line.split()[1]) for line in lines if line.startswith(b"data: "))


def test_a_new_round_and_the_end_are_told_at_once(server: PageServer, run: Path) -> None:
    stream, versions = events(server)
    try:
        version = next(versions)
        append(run, 2, 0.3)
        while json.loads(get(server, "/data.json").read())["groups"][0]["done"] < 3:
            later = next(versions)
            assert later > version
            version = later
        append(run, 3, 0.4)
        finish(run, "small", 0, 4)
        while json.loads(get(server, "/data.json").read())["groups"][0]["status"] != "finished":
            version = next(versions)
    finally:
        stream.close()
    assert get(server, "/").status == 200  # the run has ended, the page stays


def test_nothing_new_is_not_told(server: PageServer) -> None:
    time.sleep(0.3)
    before = server.watched.version
    time.sleep(0.4)
    assert server.watched.version == before


def test_many_open_pages_are_refused(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(page_server.STREAMS):
        server.streams.acquire()
    assert get(server, "/events").status == 503
    assert get(server, "/data.json").status == 200


def test_a_comparison_that_has_just_begun_waits(tmp_path: Path) -> None:
    (tmp_path / "compare.json").write_text("{}")
    with serving(tmp_path) as server:
        assert json.loads(get(server, "/data.json").read())["groups"] == []


def test_bad_input_is_said(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["watch", str(run), "--port", str(taken.getsockname()[1])]) == 2
    assert main(["watch", str(run), "--port", "seventy"]) == 2
    for port in ("70000", "²", "9" * 5000):
        assert main(["watch", str(run), "--port", port]) == 2
    for place in (tmp_path / "none", tmp_path / ("x" * 300)):
        assert main(["watch", str(place)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 7 and all(line.startswith("strata watch: ") for line in errors)


def test_ctrl_c_ends_it_cleanly(run: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "strata", "watch", str(run)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a suite in the background ignores Ctrl-C
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "http://127.0.0.1:" in line
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 0 and error == ""


def data(server: PageServer) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(get(server, "/data.json").read())
    return value


def wait(condition: Callable[[], bool]) -> None:
    for _ in range(200):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it did not come about")


def test_what_nobody_expected_is_said_and_survived(
    server: PageServer, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time.sleep(0.3)
    with monkeypatch.context() as broken:
        broken.setattr(page_server, "page_data", lambda *_: 1 / 0)
        append(run, 2, 0.3)
        wait(lambda: "ZeroDivisionError" in str(data(server)["problems"]))
        version = server.watched.version
        assert data(server)["groups"][0]["done"] == 2  # what was seen last
        time.sleep(0.3)
        assert server.watched.version == version  # said once
    wait(lambda: data(server)["groups"][0]["done"] == 3 and data(server)["problems"] == [])


def test_a_large_tree_is_walked_through_less_often(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "checkpoint").mkdir()
    for number in range(50):
        (run / f"sub-{number}").mkdir()
    watched = page_server.WatchedFolder(run.parent)
    with patch.object(os, "scandir", wraps=os.scandir) as scandir:
        watched._state()
    assert [call.args for call in scandir.call_args_list] == [(str(run.parent),), (str(run),)]  # not within a run
    rests: list[float] = []

    def wait(seconds: float) -> bool:
        rests.append(seconds)
        return len(rests) == 2

    monkeypatch.setattr(watched._over, "wait", wait)
    monkeypatch.setattr(watched, "look_again", lambda: setattr(watched, "_effort", 0.5 if rests else 0.001))
    watched.watch()
    assert rests == [page_server.LOOK, 5.0]


def test_a_folder_that_vanishes_is_survived(server: PageServer, run: Path) -> None:
    time.sleep(0.3)
    run.rename(run.with_name("elsewhere"))
    time.sleep(0.3)
    assert json.loads(get(server, "/data.json").read())["groups"][0]["done"] == 2  # what was seen last
    run.with_name("elsewhere").rename(run)
    append(run, 2, 0.3)
    for _ in range(100):
        if json.loads(get(server, "/data.json").read())["groups"][0]["done"] == 3:
            return
        time.sleep(0.1)
    raise AssertionError("the page did not come back")
