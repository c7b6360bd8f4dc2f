"""How a device takes a training step. Bytes, FLOPs and training read this one value: what is counted is what runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strata.core.errors import BadInput
from strata.core.settings import Needs, check, setting, settings_of
from strata.core.sizes import parse_bytes

PRECISIONS = ("float32", "bfloat16")
UPDATE_RULES = ("sgd", "adam", "adamw")
_ADAM = Needs("optimizer", ("adam", "adamw"))
# batch: of each (micro-)batch its own. frozen: frozen layers have those of the time when they were frozen. fixed: all
# layers have fixed ones, and a batch in parts gives the gradients of the whole
NORM_STATISTICS = ("batch", "frozen", "fixed")


def parse_segments(text: str) -> int | str:
    """For the command line: "auto" or a number; what else there is, Execution says."""
    return int(text) if text.isdecimal() else text


@dataclass(frozen=True)
class Execution:
    """Defaults are the paper's."""

    batch_size: int = setting(32, "samples in a mini-batch", metavar="N", flag="batch", least=1, whole=True)
    micro_batch: int | None = setting(
        None,
        "samples of a batch at a time, gradients accumulated over it; batch norm sees only them, the others wait as "
        "they are stored",
        metavar="N",
        least=1,
        whole=True,
    )
    activation_checkpointing: int | str | None = setting(
        None,
        "compute activations anew in backward: auto, or at most so many segments of the forward pass (same bits)",
        metavar="N",
        parse=parse_segments,
        since=2,
    )
    frozen_chunk: int | None = setting(
        None,
        "samples at a time through layers that are frozen; batch norm still sees all of the (micro-)batch",
        metavar="N",
        least=1,
        whole=True,
        since=2,
    )
    release_gradients: bool = setting(
        False,
        "take a parameter's step as soon as its gradient is made, which then goes (same bits); with micro-batches it "
        "goes into SGD's momentum (the same step up to rounding)",
        since=2,
    )
    frozen_weights: str = setting(
        "memory",
        "where weights of frozen layers are: mapped leaves them in a file, whose pages need not stay in memory",
        choices=("memory", "mapped"),
        since=2,
    )
    update_rule: str = setting(
        "sgd",
        "of devices; weight decay is added to the gradient by sgd and adam, and taken off the weights by adamw",
        flag="optimizer",
        choices=UPDATE_RULES,
        since=2,
    )
    momentum: float = setting(0.9, "of SGD; of adam and adamw the first beta", metavar="X", least=0, below=1)
    momentum_dtype: str = setting(
        "float32", "what momentum is kept in; bfloat16 rounds it, in half the bytes", choices=PRECISIONS, since=2
    )
    beta: float = setting(
        0.999, "of adam and adamw: the second beta", metavar="X", least=0, below=1, needs=_ADAM, since=2
    )
    eps: float = setting(1e-8, "of adam and adamw: added to the root", metavar="X", above=0, needs=_ADAM, since=2)
    weight_decay: float = setting(1e-5, "by the optimizer, in every step", metavar="X", least=0)
    clip: float | None = setting(
        None, "scale the gradients of a step down to this L2 norm", metavar="X", above=0, since=2
    )
    # adds mu/2 |w - w_received|^2 to the loss, so the weights are kept as they came
    proximal: float = setting(0.0, "FedProx's mu", metavar="MU", least=0)
    norm_statistics: str = setting(
        "batch",
        "of batch norms in training: each (micro-)batch's own, fixed ones in frozen layers, or fixed ones in all from "
        "--fixed-after on",
        choices=NORM_STATISTICS,
        since=2,
    )
    cache_prefix: int | None = setting(
        None,
        "keep what frozen layers below all trained ones put out on the device's disk, at most so many bytes (2GiB): "
        "they then run once, one sample at a time (the bits of doing so in every step; not with augmentation)",
        metavar="SIZE",
        parse=parse_bytes,
        least=1,
        whole=True,
        since=2,
    )

    def __post_init__(self) -> None:
        check(self)
        if self.micro_batch is not None and self.micro_batch > self.batch_size:
            raise BadInput(
                f"the micro-batch must be within 1 and the batch size of {self.batch_size}, not {self.micro_batch}"
            )
        segments = self.activation_checkpointing
        number = isinstance(segments, int) and not isinstance(segments, bool) and segments >= 2
        if segments is not None and segments != "auto" and not number:
            raise BadInput(f"activation checkpointing takes auto or a number of segments from 2, not {segments!r}")
        if self.caches and self.frozen_chunk is not None:
            raise BadInput(
                "frozen layers whose outputs are kept run one sample at a time: leave out either frozen_chunk or "
                "cache_prefix"
            )
        if self.release_gradients and self.in_parts and not self.sums_in_momentum:
            raise BadInput(
                f"gradients of the parts of {self.micro_batch} of a batch of {self.batch_size} can be released as they "
                "are made into the momentum of sgd, kept in float32, and nowhere else: leave out either "
                "release_gradients or micro_batch"
            )
        if self.release_gradients and self.clip is not None:
            raise BadInput(
                "clipping goes by all gradients together, so they cannot be released as they are made: leave out "
                "either release_gradients or clip"
            )
        if self.momentum_dtype != "float32" and self.is_adam:
            raise BadInput(f"momentum in {self.momentum_dtype} is known for sgd, not for {self.update_rule}")
        if self.momentum_dtype != "float32" and not self.momentum:
            raise BadInput(f"without momentum none is kept in {self.momentum_dtype}: leave momentum_dtype out")

    @property
    def alone(self) -> Execution:
        """Without what a LocalTraining says beside it."""
        return Execution(**{name: getattr(self, name) for name in settings_of(Execution)})

    def __str__(self) -> str:
        """For people."""
        parts = "" if self.micro_batch is None else f" in parts of {self.micro_batch}"
        ways = [
            ("activations recomputed", self.activation_checkpointing is not None),
            (f"frozen layers by {self.frozen_chunk}", self.frozen_chunk is not None),
            ("outputs of frozen layers kept on disk", self.caches),
            ("gradients released", self.release_gradients),
            ("frozen weights mapped", self.maps),
            (f"momentum in {self.momentum_dtype}", self.momentum_dtype != "float32"),
            (self.update_rule, self.is_adam),
        ]
        return ", ".join([f"batch {self.batch_size}{parts}", *(text for text, taken in ways if taken)])

    def differences(self, other: Execution) -> dict[str, Any]:
        """Its settings that are not the other's."""
        values = {name: getattr(self, name) for name in settings_of(Execution)}
        return {name: value for name, value in values.items() if value != getattr(other, name)}

    @property
    def at_once(self) -> int:
        """Samples in one pass through the network, at the most."""
        return self.micro_batch or self.batch_size

    @property
    def is_lean(self) -> bool:
        """Whether steps are taken otherwise than plainly, to keep less (simulated: training/shortened.py)."""
        return (
            self.micro_batch is not None
            or self.activation_checkpointing is not None
            or self.frozen_at_once is not None
            or self.release_gradients
            or self.maps
            or self.momentum_dtype != "float32"
        )

    @property
    def caches(self) -> bool:
        return self.cache_prefix is not None

    @property
    def frozen_at_once(self) -> int | None:
        """Samples at a time through layers that are frozen; None: as through the others. What is kept of a sample must
        not depend on those beside it."""
        return 1 if self.caches else self.frozen_chunk

    @property
    def maps(self) -> bool:
        return self.frozen_weights == "mapped"

    @property
    def in_parts(self) -> bool:
        return self.at_once < self.batch_size

    @property
    def parts(self) -> tuple[int, ...]:
        """The samples of each pass in turn: gradients are summed over them."""
        whole, rest = divmod(self.batch_size, self.at_once)
        return (self.at_once,) * whole + ((rest,) if rest else ())

    @property
    def waits_as_stored(self) -> bool:
        """Whether samples of later parts wait as the data holds them (8-bit images), not as the network takes them."""
        return True

    @property
    def is_adam(self) -> bool:
        return self.update_rule != "sgd"

    @property
    def sums_in_momentum(self) -> bool:
        """Whether the optimizer has a place for the sum of a batch's gradients that holds nothing else of the step."""
        return self.update_rule == "sgd" and self.momentum > 0 and self.momentum_dtype == "float32"

    @property
    def slots(self) -> int:
        """Tensors that the optimizer keeps from step to step for each parameter, of its size."""
        return 2 if self.is_adam else 1 if self.momentum else 0

    def slot_bytes(self, parameters: int) -> int:
        """What they take, for so many bytes of parameters."""
        return self.slots * parameters // (1 if self.momentum_dtype == "float32" else 2)

    @property
    def step_copies(self) -> int:
        """Tensors of a parameter's size that the optimizer's step makes for each in turn: the proximal term and
        momentum of another precision need one."""
        return 1 if self.proximal > 0 or self.momentum_dtype != "float32" else 0
