"""The page of a run while it trains, on this machine only, and there for who knows its address only.

One thread looks at the folder once a second (a few `stat` calls; less often where there are thousands of folders) and
reads it again only if something changed. Pages hold one open stream each, over which they hear of a new version, and
then fetch it once: nobody polls.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from strata.core.errors import BadInput, one_line
from strata.report.page import page, plotly_script
from strata.report.page_data import page_data
from strata.report.reconstruction import Reconstruction
from strata.results.growing import GrowingRecords
from strata.results.reading import DEEPEST, RecordedRun, clean, find_runs, is_running

LOOK = 1.0  # seconds between two looks at the folder
REST = 10.0  # times as long as a look took that brought nothing, if that is longer: a large tree is no constant work
KEEP_ALIVE = 15.0  # seconds after which an idle stream says that it lives
STREAMS = 24  # open pages; each holds a thread
LONGEST_TROUBLE = 300
# any port: at the other end of `ssh -L 9000:127.0.0.1:8000` it is another one
THIS_MACHINE = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
FILES = ("config.json", "plan.json", "metrics.jsonl", "summary.json")


class WatchedFolder:
    """The newest page data of a folder, with a version that grows."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.version = 0
        self._changed = threading.Condition()
        self._rebuilt: Reconstruction | None = None
        self._over = threading.Event()
        self._seen: Any = None
        self._effort = 0.0  # seconds that the last look took, of reading what was new half
        self._trouble = ""  # why the newest state is not on the page
        self._metrics: dict[Path, GrowingRecords] = {}  # of each run, as far as they were read
        self._read: dict[str, Any] = {}  # the last data that could be made
        self._value: dict[str, Any] = {}  # the same as published
        self.look()

    def look(self) -> bool:
        """Reads the folder again if its files changed. Raises BadInput only at the first look."""
        began = time.monotonic()
        seen = self._state()
        if seen == self._seen and not self._trouble:
            return False
        try:
            runs = self._runs()
            value = page_data(runs, self._rebuilt, f"{self.place.resolve().name}, live")
        except BadInput:
            if self._seen is None:
                raise
            return False  # the folder is being moved or removed: what was seen last stays on the page
        self._seen, self._read, self._trouble = seen, value, ""
        self._publish(value)
        self._effort = max(self._effort, (time.monotonic() - began) / 2)  # a long run's page is made less often
        return True

    def look_again(self) -> None:
        """Survives whatever a look may come across: what was read last stays on the page, which says why."""
        began = time.monotonic()
        try:
            self.look()
        except Exception as error:
            self._effort = time.monotonic() - began
            reason = clean(one_line(error, LONGEST_TROUBLE, kind=True))
            trouble = f"What was read last is shown; the newest could not be ({reason})."
            if trouble != self._trouble:
                self._trouble = trouble
                self._publish({**self._read, "problems": [*self._read["problems"], trouble]})

    def _runs(self) -> list[RecordedRun]:
        try:
            return find_runs([self.place], self._metrics)
        except BadInput:
            if os.path.exists(self.place / "compare.json"):  # a comparison that has just begun
                return []
            raise

    def _state(self) -> Any:
        """Changes whenever a run writes, begins or ends."""
        found = []
        began = time.monotonic()
        for folder, below, files in os.walk(self.place):
            deep = len(Path(folder).relative_to(self.place).parts) >= DEEPEST
            is_run = all(name in files for name in ("config.json", "plan.json", "metrics.jsonl"))  # no runs within
            below[:] = [] if deep or is_run else sorted(n for n in below if n != "checkpoint" and not n.startswith("."))
            for name in (name for name in FILES if name in files):
                with contextlib.suppress(OSError):
                    status = os.stat(os.path.join(folder, name))
                    running = name == "config.json" and "summary.json" not in files and is_running(Path(folder))
                    found.append((folder, name, status.st_size, status.st_mtime_ns, running))
        self._effort = time.monotonic() - began
        return found

    def _publish(self, value: dict[str, Any]) -> None:
        with self._changed:
            self.version += 1
            self._value = {**value, "live": True, "version": self.version}
            self._changed.notify_all()

    def value(self) -> dict[str, Any]:
        with self._changed:
            return self._value

    def watch(self) -> None:
        self._rebuilt = Reconstruction()  # the slow part, once, while the page is already there
        self._seen = ()  # not None: from here on a folder that vanishes is survived
        self.look_again()
        while not self._over.wait(max(LOOK, REST * self._effort)):
            self.look_again()

    def close(self) -> None:
        self._over.set()
        with self._changed:
            self._changed.notify_all()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def versions(self) -> Iterator[int | None]:
        """The newest version at once, then each one that comes; None when nothing came for a while."""
        told = 0
        while not self.over:
            with self._changed:
                if self.version == told:
                    self._changed.wait(KEEP_ALIVE)
                if self.over:
                    return
                fresh = self.version != told
                told = self.version
            yield told if fresh else None


class PageServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, watched: WatchedFolder, port: int) -> None:
        self.watched = watched
        self.plotly = plotly_script()
        self.streams = threading.BoundedSemaphore(STREAMS)
        self.secret = secrets.token_urlsafe(16)  # other users of this machine reach the port, but do not know this
        try:
            super().__init__(("127.0.0.1", port), PageHandler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise BadInput(f"cannot serve on port {port} ({reason}): choose another --port, or none") from error

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{self.secret}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A page that was closed is no news."""


class PageHandler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version = "strata"
    sys_version = ""
    timeout = 60

    def do_GET(self) -> None:
        # a page of another site can point its own name at 127.0.0.1; it cannot choose the Host it asks for
        if not THIS_MACHINE.fullmatch(self.headers.get("Host", "")):
            return self._send(403, "text/plain", b"this server answers only to 127.0.0.1\n")
        _, secret, *rest = (self.path.partition("?")[0] + "/").split("/", 2)
        if not hmac.compare_digest(secret.encode(), self.server.secret.encode()):
            return self._send(403, "text/plain", b"open the address that strata watch has printed\n")
        answers: dict[str, Callable[[], None]] = {
            "/": self._page,
            "/index.html": self._page,
            "/data.json": self._data,
            "/events": self._events,
        }
        answer = answers.get("/" + rest[0].removesuffix("/"))
        return answer() if answer else self._send(404, "text/plain", b"there is only one page here\n")

    do_HEAD = do_GET

    def _page(self) -> None:
        self._send(200, "text/html; charset=utf-8", page(self.server.watched.value(), self.server.plotly).encode())

    def _data(self) -> None:
        value = self.server.watched.value()
        tag = f'"{os.getpid()}-{value["version"]}"'
        if self.headers.get("If-None-Match") == tag:
            return self._send(304, "application/json", b"", tag)
        return self._send(200, "application/json", json.dumps(value, allow_nan=False).encode(), tag)

    def _events(self) -> None:
        if self.command == "HEAD" or not self.server.streams.acquire(blocking=False):
            return self._send(503, "text/plain", b"too many pages are open\n")
        try:
            self.close_connection = True
            self.send_response(200)
            self._headers("text/event-stream")
            self.end_headers()
            self.wfile.write(b"retry: 3000\n\n")
            for version in self.server.watched.versions():
                self.wfile.write(b": still here\n\n" if version is None else f"data: {version}\n\n".encode())
        except OSError:  # the page was closed
            pass
        finally:
            self.server.streams.release()

    def _send(self, code: int, kind: str, body: bytes, tag: str | None = None) -> None:
        self.send_response(code)
        self._headers(kind)
        if tag:
            self.send_header("ETag", tag)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _headers(self, kind: str) -> None:
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: the terminal is for the address."""


@contextlib.contextmanager
def serving(place: str | Path, port: int = 0) -> Iterator[PageServer]:
    """Served from its own threads until the block is left. Port 0: a free one."""
    if not 0 <= port <= 65535:
        raise BadInput(f"a port is a number from 1 to 65535, not {port}")
    watched = WatchedFolder(Path(place))
    server = PageServer(watched, port)
    threads = [threading.Thread(target=target, daemon=True) for target in (watched.watch, server.serve_forever)]
    for thread in threads:
        thread.start()
    try:
        yield server
    finally:
        watched.close()
        server.shutdown()
        server.server_close()
