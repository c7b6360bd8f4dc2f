"""A small HTTP server that can resume, refuse to, break off, and serve the wrong file."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Site:
    files: dict[str, bytes]  # name -> content
    ranges: bool = True  # answers Range requests with 206
    break_after: list[int] = field(default_factory=list)  # the n-th answer stops after so many bytes of its body
    stall_after: list[int] = field(default_factory=list)  # the n-th answer then waits until `go` is set
    go: threading.Event = field(default_factory=threading.Event)
    errors: list[int] = field(default_factory=list)  # the n-th request gets this status (0: none)
    requests: list[tuple[str, str | None]] = field(default_factory=list)  # (name, Range header) as they came
    url: str = ""


@contextmanager
def serving(site: Site) -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name, wanted = self.path.lstrip("/"), self.headers.get("Range")
            site.requests.append((name, wanted))
            error = site.errors.pop(0) if site.errors else 0
            if error or name not in site.files:
                self.send_error(error or 404)
                return
            body = site.files[name]
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and site.ranges else 0
            if start >= len(body) > 0:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(body)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            stop = start + site.break_after.pop(0) if site.break_after else len(body)
            if site.stall_after:
                middle = start + site.stall_after.pop(0)
                self.wfile.write(body[start:middle])
                site.go.wait(20)
                return
            self.wfile.write(body[start:stop])
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
