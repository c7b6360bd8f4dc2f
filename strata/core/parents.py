"""Processes that end with the one that started them. No torch here: some of them live for one message only."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """This process ends when `parent`'s thread that forked it does, also in the middle of a computation."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        watch_parent(parent)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def watch_parent(parent: int) -> None:
    """The same within a second, whichever of the parent's threads did it."""
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
