"""The process that makes the data ready, or does one message's work, and ends: what it takes is gone afterwards.

It has neither TLS nor the device's key. Started by device.py as `python -S -c ... ACTION SETTINGS AUTHORITY BUDGET`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from strata_device import codec, library, native
from strata_device.errors import BadInput, OutOfMemory, Refused, kind_of, one_line
from strata_device.files import mapped, write_whole
from strata_device.memory import status_bytes
from strata_device.settings import Settings

TASK, ANSWER = "task.bin", "answer.bin"
PR_SET_PDEATHSIG = 1
FAILURE = 2


def main() -> None:
    parent = int(sys.argv[5])
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    action, settings = sys.argv[1], Settings.read(sys.argv[2])
    authority = Path(sys.argv[3]) if sys.argv[3] else None
    budget = int(sys.argv[4]) if sys.argv[4] else None
    if action == "prepare":
        prepare(settings)
    else:
        work(settings, authority, budget)


def prepare(settings: Settings) -> None:
    """On stdout what a process that works holds before it has work; the data's facts are in a file."""
    from strata_device.data import prepare as prepare_data

    try:
        native.Library(library.find(settings.library))
        held = status_bytes("VmHWM")
        prepare_data(settings)
    except BadInput as error:
        print(one_line(error), file=sys.stderr)
        sys.exit(FAILURE)
    print(held)


def work(settings: Settings, authority: Path | None, budget: int | None) -> None:
    from strata_device.work import Work

    folder = settings.place
    try:
        made: tuple[dict[str, Any], dict[str, codec.Tensor]]
        made = Work(settings, authority, budget).answer(codec.decode(mapped(folder / TASK)))
    except Exception as error:
        kind = kind_of(error)
        if isinstance(error, BadInput | Refused | OutOfMemory | MemoryError):
            print(f"{kind}: {one_line(error)}", flush=True)
        else:
            traceback.print_exc()
        made = {"what": "failure", "kind": kind}, {}
    write_whole(folder / ANSWER, codec.pieces(*made))
    print(f"peak {status_bytes('VmHWM')} bytes", flush=True)


if __name__ == "__main__":
    main()
