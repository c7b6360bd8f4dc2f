"""Epsilon: what a run's releases can tell about one device, by Google's dp-accounting (an extra, imported when needed).

Privacy loss distributions (Koskela et al., 2020; Doroshenko et al., 2022) of the Poisson-sampled Gaussian, composed
over all releases; adjacent fleets differ by one device more or less. Discretised upwards: epsilon is an upper bound.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import os
from pathlib import Path

from strata.errors import BadInput
from strata.federation.files import said_plainly

GRID = 1e-3  # of the privacy loss; 1e-4 takes ten times as long and is lower by some percent where epsilon is small


def check_installed() -> None:
    """Before anything is written."""
    if importlib.util.find_spec("dp_accounting") is None:
        raise BadInput("differential privacy needs an accountant, dp-accounting: pip install 'strata-fl[privacy]'")


def accountant() -> str:
    return f"dp-accounting {importlib.metadata.version('dp-accounting')}, PLD"


def epsilon(rate: float, noise: float, releases: int, delta: float) -> float | None:
    """After so many rounds, each with `rate` as the chance of a device. None: there is no finite bound."""
    import dp_accounting
    from dp_accounting import pld

    if releases == 0:
        return 0.0
    spent = pld.PLDAccountant(value_discretization_interval=GRID)
    spent.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)), releases)
    value = float(spent.get_epsilon(delta))
    return value if math.isfinite(value) else None


class Ledger:
    """privacy.jsonl: a line for every round that was begun, on disk before its devices are asked.

    A round that is run again after a crash is another release with other noise, so it counts twice. Lines are never
    removed: an interrupted round may count for nothing, none is forgotten.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "privacy.jsonl"
        with said_plainly(self._path):
            self.releases = len(self._path.read_bytes().split()) if self._path.exists() else 0

    def begin(self, round: int) -> None:
        with said_plainly(self._path), open(self._path, "ab") as file:
            file.write(json.dumps({"round": round}, separators=(",", ":")).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.releases += 1
