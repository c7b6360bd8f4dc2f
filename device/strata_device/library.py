"""Where the native library is. What it does is in native.py, which the device's lasting process does not load."""

from __future__ import annotations

import os
from pathlib import Path

from strata_device.errors import BadInput

ABI = 1  # of native/strata_step.h
LIBRARY = "libstrata_step.so"
VARIABLE = "STRATA_STEP_LIBRARY"


def find(given: str | None) -> str:
    """The library's file: as told, beside this package, or where `make native` puts it in a clone."""
    here = Path(__file__).parent
    places = [given, os.environ.get(VARIABLE)]
    if not any(places):
        places = [str(here / LIBRARY), str(here.parents[1] / "native" / "build" / LIBRARY)]
    for place in filter(None, places):
        path = Path(place).expanduser()
        if path.is_file():
            return str(path.absolute())
    raise BadInput(
        f"there is no {next(filter(None, places))}: build it with `make native` and give --library {LIBRARY}"
    )
