"""What secure aggregation does not go with, said before the first round."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from strata.core.errors import BadInput
from strata.fleet.protocol.settings import MOST_SUMMED, Terms
from strata.fleet.server.secure_training import SecureTerms
from strata.methods.aggregate import MeanOverAll, RunningMean

if TYPE_CHECKING:
    from strata.methods import Method
    from strata.runs.config import RunConfig

UNLIKELY = 1e-9  # a chance, over a whole run, that nobody has to think of


def check_asked(config: RunConfig, terms: Terms) -> None:
    """By what was asked for alone."""
    updates = config.updates
    if config.options.robust is not None:
        raise BadInput(
            f"aggregation {updates.aggregation} compares single updates, and with secure aggregation the server "
            "sees sums only: leave it out; --secure-clip bounds what one device can do"
        )
    if updates.norm_bound is not None:
        raise BadInput(
            "--norm-bound measures single updates, and with secure aggregation the server sees sums only: leave it "
            "out; --secure-clip bounds each value, on the device"
        )
    if updates.weighted:
        raise BadInput(
            "with secure aggregation every device counts the same: leave out --weighted, by which a server could give "
            "one device nearly all the weight"
        )
    if terms.evaluation == "devices":
        raise BadInput(
            "with secure aggregation the server evaluates on data of its own: what a device counts and measures on its "
            "data would be seen alone; give --evaluation server"
        )
    per_round, fewest = config.fleet.per_round, fewest_of(config, terms)
    if per_round < fewest:
        raise BadInput(
            f"a secure sum is over at least {fewest} devices, and a round asks {per_round}: raise --per-round, or "
            "lower --secure-fewest or --quorum"
        )
    if per_round > MOST_SUMMED:
        raise BadInput(f"a secure sum is over at most {MOST_SUMMED} devices, and a round asks {per_round}: lower that")


def fewest_of(config: RunConfig, terms: Terms) -> int:
    """Devices of a sum: a quorum's at least, so that a round in which one was seen is never redone."""
    return terms.summed(config.fleet.quorum)


def check_fleet(method: Method, devices: int, config: RunConfig, terms: Terms, state: Mapping[str, Tensor]) -> None:
    """By what the method gives the devices that are there."""
    fewest = fewest_of(config, terms)
    own = method.aggregation(0, state)
    if own is not None and type(own) not in (RunningMean, MeanOverAll):
        raise BadInput(
            f"{method.name} as asked for looks at every device's own update, and with secure aggregation the server "
            "sees sums only: leave out --variant, or choose another method"
        )
    private = config.options.private
    for round in {0, config.course.rounds - 1}:
        tasks = method.assign(round, range(devices))
        cuts = Counter(task.cut for task in tasks)
        alone = sum(count for count in cuts.values() if count < fewest)
        if len(tasks) < fewest:
            raise BadInput(
                f"{len(tasks)} devices can take part, and a secure sum is over at least {fewest}: start more of them"
            )
        if alone:
            raise BadInput(
                f"{alone} of {len(tasks)} devices would train a part of the model that fewer than {fewest} train, and "
                "their sum would give them away: choose a method that gives all devices of a level the same part (slt, "
                "small, fedavg, heterofl, fedrolex, fd with --variant shared), fewer --levels, or start more devices"
            )
        if private is not None:
            rate = config.fleet.per_round / devices
            chance = config.course.rounds * sum(_fewer(count, rate, fewest) for count in cuts.values())
            if chance > UNLIKELY:
                raise BadInput(
                    "with differential privacy and secure aggregation a round must hardly ever have too few devices "
                    f"for a sum, because that would show who took part (here the chance is {min(1.0, chance):.2g}): "
                    "raise --per-round, or have fewer levels"
                )


def _fewer(devices: int, rate: float, fewest: int) -> float:
    """The chance that fewer than `fewest` of so many devices take part, each for itself."""
    rate = min(1.0, rate)
    return sum(math.comb(devices, k) * rate**k * (1 - rate) ** (devices - k) for k in range(min(fewest, devices + 1)))


def secure_terms(config: RunConfig, terms: Terms) -> SecureTerms | None:
    """None: updates are sent in the clear."""
    if not terms.secure_aggregation:
        return None
    private = config.options.private
    if private is not None:  # no value of a change of that norm is larger
        return SecureTerms(fewest_of(config, terms), private.clip, private.clip)
    return SecureTerms(fewest_of(config, terms), terms.secure_clip, factor=config.updates.norm_factor or None)
