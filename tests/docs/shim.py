"""`strata` and `python` for documented commands: hands the work to tests/docs/warm.py, with this process's streams.

`pip install` and `make` are looked up, not carried out: the extra and the target must exist. Uses no other module of
the tests, and is started with -S -E, to be quick.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def ask_warm(program: str) -> int:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(os.environ["WARM_SOCKET"])
    request = {"program": program, "argv": [program, *sys.argv[2:]], "cwd": os.getcwd(), "env": dict(os.environ)}
    socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
    answers = connection.makefile("r")
    child = json.loads(answers.readline())["pid"]
    for number in (signal.SIGINT, signal.SIGTERM):  # what is sent to us is meant for it
        signal.signal(number, lambda sent, _: os.kill(child, sent))
    code = json.loads(answers.readline())["exit"]
    return code if code >= 0 else 128 - code


def pip(arguments: list[str]) -> int:
    known = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE))
    asked = re.search(r"(?:strata-fl|\.)(?:\[([\w,]+)\])?$", arguments[-1])
    if arguments[0] != "install" or not asked or not set((asked[1] or "").split(",")) <= known | {""}:
        print(f"pip: the extras are {', '.join(sorted(known))}; this is none: {arguments}", file=sys.stderr)
        return 1
    return 0


def main() -> int:
    program = Path(sys.argv[1]).name
    if program == "pip":
        return pip(sys.argv[2:])
    if program == "make":
        return os.spawnv(os.P_WAIT, "/usr/bin/make", ["make", "-n", "-C", str(ROOT), *sys.argv[2:]])
    if program == "python" and not sys.argv[2].endswith(".py"):  # python -m: cold, as it is
        return os.spawnv(os.P_WAIT, os.environ["COLD_PYTHON"], ["python", *sys.argv[2:]])
    return ask_warm(program)


if __name__ == "__main__":
    sys.exit(main())
