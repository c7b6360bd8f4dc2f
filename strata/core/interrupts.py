"""Ctrl-C and SIGTERM stop a run between two system calls of nothing important: never inside a checkpoint."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Interrupts:
    """Raises KeyboardInterrupt only inside `with allowed()`; a signal that comes elsewhere waits for the next one."""

    def __init__(self) -> None:
        self._allowed = False
        self.pending = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.pending = True
        if self._allowed:
            self._allowed = False  # what follows is tidying up: not interrupted again
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        self._allowed = True  # first: a signal between these two lines must not be missed
        try:
            if self.pending:
                raise KeyboardInterrupt
            yield
        finally:
            self._allowed = False
