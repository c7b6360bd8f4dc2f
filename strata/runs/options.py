"""The settings of a run that are not its model, data or method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strata.core.errors import BadInput
from strata.federation.aggregation import ServerOptimizer
from strata.federation.privacy import Privacy
from strata.federation.robust import Robust, parse_aggregation
from strata.federation.simulated_fleet import Fleet, parse_stragglers
from strata.training import BN_MODES

DEFAULT_ROUNDS = 500
LATER = ("aggregation", "dp_noise", "dp_clip", "dp_delta", "dp_seed")  # unknown to older run folders


@dataclass(frozen=True)
class Common:
    """What Python (Options) and the command line (Request) call by the same names. Defaults are the paper's."""

    rounds: int = DEFAULT_ROUNDS
    devices: int = 100
    per_round: int = 10
    seed: int = 0
    lr: float = 0.1
    lr_end: float = 0.01
    quorum: int = 1
    dropout: float = 0.0
    stragglers: str | None = None  # SHARE:SLOWDOWN
    deadline: float | None = None  # in units of an ordinary device's time
    weighted: bool = False  # mean weighted by samples
    norm_bound: float | None = None
    aggregation: str = "mean"  # or median, trimmed:SHARE
    dp_noise: float | None = None  # differential privacy: the noise in units of the clip
    dp_clip: float | None = None  # and the largest L2 norm of a device's change
    dp_delta: float | None = None  # None: devices ** -1.1
    dp_seed: int | None = None  # None: the operating system's randomness; a number: for tests and studies
    eval_every: int | None = None  # None: 100 times in a run, each round in short ones
    bn: str = "re-estimated"
    validation: float = 0.0
    exact: bool = False  # every device on its own (the reference), also where cohorts would be quicker


@dataclass(frozen=True)
class Options(Common):
    """Everything about a run that is not the model, the data or the method."""

    server: ServerOptimizer = ServerOptimizer()

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise BadInput(f"at least 1 round is needed, not {self.rounds}")
        if self.devices < 1:  # the fleet says so too, but delta is made of this number before
            raise BadInput(f"a fleet has at least 1 device, not {self.devices}")
        if not isinstance(self.seed, int) or self.seed < 0:
            raise BadInput(f"the seed is a whole number of at least 0, not {self.seed}")
        if not 0 < self.lr_end <= self.lr < float("inf"):
            raise BadInput(f"the learning rate falls from lr to lr_end > 0, not from {self.lr:g} to {self.lr_end:g}")
        if self.bn not in BN_MODES:
            raise BadInput(f"bn is one of {', '.join(BN_MODES)}, not {self.bn!r}")
        if self.eval_every is None:
            object.__setattr__(self, "eval_every", max(1, self.rounds // 100))
        elif self.eval_every < 1:
            raise BadInput(f"evaluation is every 1 or more rounds, not every {self.eval_every}")
        if self.validation != 0 and not 0 < self.validation < 1:
            raise BadInput(
                f"validation is the share of training data to hold out, such as 0.05, not {self.validation:g}"
            )
        if self.norm_bound is not None and not 0 < self.norm_bound < float("inf"):
            raise BadInput(f"the norm bound must be a number above 0, not {self.norm_bound:g}")
        if self.robust and self.weighted:
            raise BadInput(f"aggregation {self.aggregation} gives every device one voice: leave out weighted")
        self._check_privacy()

    def _check_privacy(self) -> None:
        if (self.dp_noise is None) != (self.dp_clip is None):
            raise BadInput("differential privacy needs both: dp_noise (such as 1) and dp_clip (such as 0.5)")
        if self.dp_noise is None and (self.dp_delta is not None or self.dp_seed is not None):
            raise BadInput("dp_delta and dp_seed belong to differential privacy: give dp_noise and dp_clip with them")
        if self.privacy is None:
            return
        if self.weighted:
            raise BadInput("with differential privacy how many samples a device has is private: leave out weighted")
        if self.robust:
            raise BadInput(f"differential privacy bounds a sum, and {self.aggregation} is none: leave one of them out")
        if self.quorum != 1:
            raise BadInput("with differential privacy a round counts whoever answers, and is never redone: leave out "
                           "the quorum")  # fmt: skip

    @property
    def robust(self) -> Robust | None:
        return parse_aggregation(self.aggregation)

    @property
    def privacy(self) -> Privacy | None:
        if self.dp_noise is None or self.dp_clip is None:
            return None
        delta = self.devices**-1.1 if self.dp_delta is None else self.dp_delta
        return Privacy(self.dp_noise, self.dp_clip, delta, self.dp_seed)

    def fleet(self) -> Fleet:
        share, slowdown = parse_stragglers(self.stragglers)
        return Fleet(self.seed, self.devices, self.dropout, share, slowdown, self.deadline)

    def to_json(self) -> dict[str, Any]:
        """As in config.json. What came later and was not used is left out, so that older runs can be resumed."""
        defaults = type(self).__dataclass_fields__
        values = {k: v for k, v in self.__dict__.items() if k not in LATER or v != defaults[k].default}
        return {**values, "server": dict(self.server.__dict__)}
