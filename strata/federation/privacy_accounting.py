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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.core.errors import BadInput
from strata.core.files import open_to_append, said_plainly
from strata.federation.privacy import Privacy

if TYPE_CHECKING:
    from strata.federation.rounds import RoundSettings

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
            content = self._path.read_bytes() if self._path.exists() else b""
        # two ways to count: a flipped bit may hide a line from one of them, and none may be forgotten
        self.releases = max(len(content.split()), content.count(b"{"))

    def begin(self, round: int) -> None:
        with said_plainly(self._path), open_to_append(self._path) as file:
            file.write(json.dumps({"round": round}, separators=(",", ":")).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.releases += 1


@dataclass
class Account:
    """What a run has spent. With a seed, a round that is run again is the same release, so rounds are what counts."""

    privacy: Privacy
    rate: float
    ledger: Ledger | None

    @classmethod
    def of(cls, settings: RoundSettings, folder: Path) -> Account:
        privacy = settings.privacy
        assert privacy is not None
        return cls(privacy, settings.rate, Ledger(folder) if privacy.seed is None else None)

    def begin(self, round: int) -> None:
        if self.ledger:
            self.ledger.begin(round)

    def releases(self, rounds: int) -> int:
        return rounds if self.ledger is None else max(rounds, self.ledger.releases)

    def epsilon(self, rounds: int) -> float | None:
        """After so many rounds are done."""
        return epsilon(self.rate, self.privacy.noise, self.releases(rounds), self.privacy.delta)

    def summary(self, rounds: int) -> dict[str, Any]:
        return {
            "epsilon": self.epsilon(rounds),
            "delta": self.privacy.delta,
            "releases": self.releases(rounds),
            "sampling_rate": self.rate,
            "accountant": accountant(),
        }
