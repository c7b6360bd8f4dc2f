"""Where the native library is. What it does is in native.py, which the device's lasting process does not load."""

from __future__ import annotations

import os
from pathlib import Path

from strata_device.errors import BadInput

ABI = 1  # of native/strata_step.h
LIBRARY = "libstrata_step.so"
VARIABLE = "STRATA_NATIVE"  # the folder that it was built in


def find(given: str | None) -> str:
    """The library's file: as told, beside this package, or where `make native` puts it in a clone."""
    here = Path(__file__).parent
    told = os.environ.get(VARIABLE)
    places = [here / LIBRARY, here.parents[1] / "native" / "build" / LIBRARY]
    if given or told:
        places = [Path(given) if given else Path(told or "") / LIBRARY]
    for place in places:
        path = place.expanduser()
        if path.is_file():
            return str(path.absolute())
    raise BadInput(f"there is no {places[0]}: build it with `make native`, and give --library {LIBRARY}")
