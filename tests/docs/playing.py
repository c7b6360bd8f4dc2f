"""Plays a page: every block in order, as a reader would who pastes them one after the other into an empty folder."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

from tests.conftest import RAY
from tests.docs.pages import ROOT, Block

SECONDS = 300.0  # for one block; an idle machine takes some seconds for the slowest


class Warm:
    """The warm process, and a folder of shims for the PATH."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "warm"
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in ("strata", "python", "pip", "make"):
            shim = self.bin / name
            shim.write_text(
                f'#!/bin/sh\nexec {sys.executable} -S -E {Path(__file__).with_name("shim.py")} {name} "$@"\n'
            )
            shim.chmod(0o755)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.docs.warm", str(self.socket)], cwd=ROOT, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )  # fmt: skip
        assert self._process.stdout is not None and self._process.stdout.readline() == "ready\n"

    def environment(self, home: Path) -> dict[str, str]:
        return {
            "PATH": f"{self.bin}:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": str(home), "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "COLUMNS": "120", "LC_ALL": "C.UTF-8", "WARM_SOCKET":
            str(self.socket), "COLD_PYTHON": sys.executable, "STRATA_DATA": str(home / "data"),
            "STRATA_CACHE": os.environ.get("STRATA_CACHE", ""), "STRATA_WORKERS": "0", **RAY,
        }  # fmt: skip

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


class Interpreter:
    """Where a page's python blocks run."""

    def __init__(self, warm: Warm, folder: Path, out: IO[str]) -> None:
        ours, theirs = socket.socketpair()
        self._asked = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._asked.connect(str(warm.socket))
        request = {"program": "session", "argv": [""], "cwd": str(folder), "env": warm.environment(folder)}
        socket.send_fds(self._asked, [json.dumps(request).encode()], [theirs.fileno(), out.fileno(), out.fileno()])
        theirs.close()
        self._line = ours
        ours.settimeout(SECONDS)

    def run(self, block: Block) -> int:
        self._line.sendall(json.dumps({"code": block.small, "where": block.where}).encode() + b"\n")
        answer = self._line.recv(16)
        return int(answer) if answer else -1  # it has died

    def close(self) -> None:
        self._line.close()
        self._asked.close()  # ends it, should it still be at work


def play(blocks: list[Block], folder: Path, warm: Warm) -> list[tuple[Block, float]]:
    """Runs what runs; the seconds of each. Raises AssertionError at the first block that does not do as documented."""
    folder.mkdir()
    log, said, seconds = folder.with_name(f"{folder.name}.log"), "", []
    with ExitStack() as stack, open(log, "w") as out:
        interpreter: Interpreter | None = None
        for block in with_free_ports(blocks):
            if block.title is not None:
                (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
                (folder / block.title).write_text(block.small)
            elif block.is_output:
                check_output(block, said)
            elif block.runs:
                began, start = time.monotonic(), log.stat().st_size
                if block.language == "python":
                    if interpreter is None:
                        interpreter = Interpreter(warm, folder, out)
                        stack.callback(interpreter.close)
                    code = interpreter.run(block)
                elif block.background is not None:
                    stack.enter_context(in_background(block, folder, warm, out, log, start))
                    code = 0
                else:
                    code = bash(block, folder, warm, out)
                said = _said(log, start)
                assert code == block.exit_code, f"{block.where} ended with {code}:\n{block.small}\n{said[-4000:]}"
                seconds.append((block, time.monotonic() - began))
    return seconds


def with_free_ports(blocks: list[Block]) -> Iterator[Block]:
    ports: dict[str, str] = {}
    for block in blocks:
        if block.port is not None:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                ports[block.port] = str(probe.getsockname()[1])
        yield replace(block, replacements=(*block.replacements, *((a, b) for a, b in ports.items() if a in block.code)))


def _said(log: Path, start: int) -> str:
    return log.read_bytes()[start:].decode(errors="replace")


def _shell(block: Block, folder: Path, warm: Warm, out: IO[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["/bin/bash", "-e", "-o", "pipefail", "-c", block.small], cwd=folder, env=warm.environment(folder), stdout=out,
        stderr=out, stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def bash(block: Block, folder: Path, warm: Warm, out: IO[str]) -> int:
    shell = _shell(block, folder, warm, out)
    try:
        return shell.wait(timeout=SECONDS)
    finally:
        _end(shell, signal.SIGKILL)


@contextmanager
def in_background(block: Block, folder: Path, warm: Warm, out: IO[str], log: Path, start: int) -> Iterator[None]:
    shell = _shell(block, folder, warm, out)
    deadline = time.monotonic() + SECONDS
    try:
        while block.background not in (said := _said(log, start)):
            assert shell.poll() is None, f"{block.where} ended with {shell.returncode}:\n{block.small}\n{said[-4000:]}"
            assert time.monotonic() < deadline, f"{block.where} never said {block.background!r}:\n{said[-4000:]}"
            time.sleep(0.05)
        yield
    finally:
        _end(shell, signal.SIGINT)  # as the reader's Ctrl-C


def _end(shell: subprocess.Popen[bytes], first: signal.Signals) -> None:
    """The whole group, which is ours alone (start_new_session)."""
    for number in (first, signal.SIGKILL):
        try:
            os.killpg(shell.pid, number)
        except ProcessLookupError:
            return
        try:
            shell.wait(timeout=30)
        except subprocess.TimeoutExpired:
            continue


def check_output(block: Block, said: str) -> None:
    """Every line of the block, in order, in what was said; spaces and table lines count for nothing, … is anything."""
    rest = _plain(said)
    for line in block.code.splitlines():
        if not _plain(line).strip("… "):
            continue
        pattern = ".*?".join(re.escape(part.strip()) for part in _plain(line).strip().split("…"))
        found = re.search(pattern, rest)
        assert found, f"{block.where}: not printed (here or at all): {line!r}\n{said[-4000:]}"
        rest = rest[found.end() :]


def _plain(text: str) -> str:
    return re.sub(r"[\s─━│┃╭╮╰╯┏┓┗┛┡┩└┘├┤┬┴┼┳┻╇]+", " ", text)
