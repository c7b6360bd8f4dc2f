"""The components of a RunConfig: each owns its part of a run's settings, each field its help text and bounds. No torch
here: `strata --help` reads this file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.core.errors import BadInput
from strata.core.paths import expanded
from strata.core.settings import Needs, check, setting
from strata.core.sizes import parse_bytes, parse_input, parse_ratio
from strata.planning.reserve import RESERVES
from strata.planning.schedules import AVERAGINGS, DEFAULT_PATIENCE, FILLS, SCHEDULES

if TYPE_CHECKING:
    from strata.federation.aggregation import ServerOptimizer
    from strata.federation.privacy import Privacy
    from strata.planning.choosing import Ceilings

DEFAULT_ROUNDS = 500
SIMULATED = "it is simulated, and these devices are real"


def _path(text: str) -> str:
    return str(expanded(text).absolute())


def _found_again(text: str, kinds: Sequence[str]) -> str:
    """KIND:FILE of these kinds with the whole path: a run may be resumed from another folder."""
    kind, _, file = text.partition(":")
    return f"{kind}:{_path(file)}" if kind in kinds and file else text


class Component:
    """Values are checked where it is made."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class Problem(Component):
    """What is learnt: a model, from data."""

    model: str = setting(
        "resnet20",
        "resnet20, resnet44, resnet56, densenet40, resnet18, resnet18_gn, hf:FOLDER or package.module:callable",
        metavar="NAME",
    )
    classes: int | None = setting(None, "number of classes: the data's", metavar="N", whole=True, least=1)
    input: tuple[int, ...] | str | None = setting(
        None,
        "input shape, no batch, or NAME:DTYPE:SHAPE,... to choose among the data's inputs: the data's",
        metavar="CxHxW",
        parse=parse_input,
    )
    init: str | None = setting(
        None,
        "start from these weights: a .safetensors or torch file, a run's folder or one of Hugging Face's",
        metavar="PATH",
    )
    data: str = setting("digits", "see `strata data`; or text:FILE.jsonl, table:FILE.csv, folder", metavar="NAME")
    data_dir: str | None = setting(None, "where the data is on disk", metavar="DIR", parse=_path)
    partition: str = setting(
        "iid",
        "iid[:N], dirichlet:0.1[:N], shards:2, user, lazy[:N], or file:PATH.json, a list of sample indices per device",
        metavar="P",
        parse=lambda text: _found_again(text, ("file",)),
        simulated="each device has its own data (`strata fleet device --data`)",
    )
    sizes: str | None = setting(
        None,
        "of iid and dirichlet: how many samples devices have, lognormal:SIGMA (default: all the same)",
        metavar="HOW",
        since=2,
        simulated="each device has its own data (`strata fleet device --data`)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data_dir is None:  # else it is relative to that
            object.__setattr__(self, "data", _found_again(self.data, ("text", "table")))


@dataclass(frozen=True)
class Approach(Component):
    """The method, and what a device can hold."""

    method: str = setting("slt", "see `strata methods`, or package.module:Class", metavar="NAME")
    constraints: tuple[float, ...] = setting(
        (),
        "what the width-scaled model of this ratio needs, e.g. 0.25; several (0.125,0.25): device levels",
        metavar="S",
        flag="constraint",
        key="constraints",
        several=True,
        parse=parse_ratio,
    )
    budgets: tuple[int, ...] = setting(
        (),
        "bytes per device, e.g. 24MiB; several: device levels",
        metavar="SIZE",
        flag="budget",
        key="budgets",
        several=True,
        parse=parse_bytes,
    )
    accounting: str | None = setting(
        None,
        "how bytes are counted (default: paper with --constraint, peak with --budget)",
        choices=("paper", "peak"),
    )
    reserve: str | None = setting(
        None,
        "scratch: what libraries take beside the tensors of a step, measured here, has to fit the --budget too",
        choices=RESERVES,
        simulated="it is measured on this machine, and devices have a margin of their own for it",
        since=2,
    )
    width: str = setting(
        "residual",
        "of methods that narrow the model: cut its residual stream, which blocks add to, or only what is inner to them",
        choices=("residual", "inner"),
        since=2,
    )
    lean: bool = setting(
        False, "choose how each step is executed: the cheapest way that fits the budget (docs/memory.md)", since=2
    )
    max_flops: float | None = setting(
        None,
        "lean: of a training step, at most so many times the whole model's",
        metavar="X",
        above=0,
        since=2,
        needs=Needs("lean", instead="--max-flops is a limit for --lean: give that too, or leave it out"),
    )
    max_upload: int | None = setting(
        None,
        "lean: bytes that a device sends in a round, at most, e.g. 5MB",
        metavar="SIZE",
        parse=parse_bytes,
        whole=True,
        least=1024,
        since=2,
        needs=Needs("lean", instead="--max-upload is a limit for --lean: give that too, or leave it out"),
    )
    norm_samples: int | None = setting(
        None,
        "lean: micro-batches of no fewer samples under batch norm (4); the batch size: exact executions only",
        metavar="N",
        least=1,
        since=2,
        needs=Needs("lean", instead="--norm-samples is a limit for --lean: give that too, or leave it out"),
    )

    @property
    def ceilings(self) -> Ceilings:
        from strata.planning.choosing import Ceilings

        return Ceilings(self.max_flops, self.max_upload, self.norm_samples)


@dataclass(frozen=True)
class MethodOptions(Component):
    """Settings that only some methods look at: those that name them among their options (strata.methods)."""

    schedule: str = setting("cumulative", "of slt: rounds per step", choices=SCHEDULES)
    patience: int = setting(
        DEFAULT_PATIENCE,
        "of slt, early-stopping: rounds without better accuracy before the next step",
        metavar="N",
        whole=True,
        least=1,
        needs=Needs("schedule", ("early-stopping",)),
    )
    head_fraction: float = setting(
        1.0,
        "of slt, ablation: use this share of each head width and freeze fewer layers instead",
        metavar="F",
        above=0,
        most=1,
    )
    fill: str = setting(
        "published",
        "of slt: what channels that come into the head start from; as they were drawn, or by the narrow head's fan-in, "
        "zero on their outgoing side, copies of old ones",
        choices=FILLS,
        since=2,
    )
    averaging: str = setting(
        "trained",
        "of slt with several levels: a layer's mean is over those who trained it, or over all, as in the authors' runs",
        choices=AVERAGINGS,
        since=2,
    )
    variant: str | None = setting(
        None,
        "of fd: device (default), shared or pool; of heterofl, fedrolex and fjord: original, as their authors train",
        metavar="NAME",
    )
    pool: int | None = setting(None, "of fd's variant pool: number of sets", metavar="N", whole=True)
    rank: int | None = setting(
        None, "of lora: how thin its pairs of layers are (default 8)", metavar="R", whole=True, least=1, since=2
    )
    targets: str | None = setting(
        None, "of lora: layers beside which they stand, such as q_proj,v_proj (default: all)", metavar="NAMES", since=2
    )


@dataclass(frozen=True)
class Local(Component):
    """What a device does around its steps, and where it is simulated."""

    epochs: int = setting(1, "local epochs", metavar="N", whole=True, least=1)
    fixed_after: int | None = setting(
        None,
        "norm statistics fixed: the first round that uses them, before it each batch its own (default: half of all)",
        metavar="ROUND",
        whole=True,
        least=0,
        needs=Needs("norm_statistics", ("fixed",)),
        since=2,
    )
    augmentation: str | None = setting(None, "default: what suits the data", metavar="NAME")
    device: str = setting(
        "cpu", "where networks run: cpu, cuda, cuda:N", metavar="NAME", simulated="devices train where they are"
    )
    kernels: str = setting(
        "auto",
        "our own convolutions in C, where a compiler can build them: quicker, other rounding",
        choices=("auto", "off"),
        simulated="they are for simulated devices",
    )


@dataclass(frozen=True)
class Course(Component):
    """The course of a run: its rounds, and all that is random in them."""

    rounds: int = setting(DEFAULT_ROUNDS, "rounds of training", metavar="N", whole=True, least=1)
    seed: int = setting(
        0,
        "everything random follows from it",
        metavar="N",
        whole=True,
        least=0,
        refusal="the seed is a whole number of at least 0, not {}",
    )
    lr: float = setting(
        0.1, "learning rate of the first round (default 0.1; of adam and adamw 0.001)", metavar="X", above=0
    )
    lr_end: float = setting(
        0.01, "of the last, along a cosine (default 0.01, or a tenth of --lr)", metavar="X", above=0
    )
    warmup: int = setting(
        0,
        "rounds in which the learning rate rises to --lr, in equal steps (default 0; of --method auto, and in what "
        "`strata fit` says, 5, or a tenth of the rounds if that is less)",
        metavar="ROUNDS",
        whole=True,
        least=0,
        since=2,
    )
    keep_every: int | None = setting(
        None,
        "keep the checkpoint of every Nth round too, beside the newest two (--resume ... --from-round goes back)",
        metavar="N",
        whole=True,
        least=1,
        refusal="checkpoints are kept of every 1 or more rounds, not of every {}",
        since=2,
    )
    exact: bool = setting(
        False,
        "simulate every device on its own and by torch's convolutions, as a real one trains; else narrow ones run "
        "as one network, lean ones by a shorter way, and our own convolutions are used: equal up to float32 rounding",
        simulated="every device trains on its own already",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup >= self.rounds:
            raise BadInput(f"a warm-up of {self.warmup} rounds does not end in a run of {self.rounds}: give fewer")
        if self.lr_end > self.lr:
            raise BadInput(f"the learning rate falls from lr to lr_end > 0, not from {self.lr:g} to {self.lr_end:g}")


@dataclass(frozen=True)
class Fleet(Component):
    """The devices: how many, how many at a time, and what goes wrong with simulated ones."""

    devices: int = setting(
        100,
        "devices in the fleet",
        metavar="N",
        whole=True,
        least=1,
        refusal="a fleet has at least 1 device, not {}",
        simulated="the fleet is the devices that connect",
    )
    per_round: int = setting(
        10,
        "devices asked in a round",
        metavar="N",
        whole=True,
        least=1,
        refusal="at least 1 device per round is needed, not {}",
    )
    quorum: int = setting(1, "updates a round needs, else it is redone", metavar="N", whole=True, least=1)
    dropout: float = setting(
        0.0,
        "simulated: share of devices that fail",
        metavar="P",
        least=0,
        below=1,
        refusal="dropout is the share of devices that fail, from 0 to below 1, not {}",
        simulated=SIMULATED,
    )
    stragglers: str | None = setting(
        None,
        "simulated: slow devices, such as 0.2:3",
        metavar="SHARE:SLOWDOWN",
        simulated=SIMULATED,
        needs=Needs(
            "deadline",
            instead="--stragglers matter only where they can come too late: give a --deadline, such as 2, as well",
        ),
    )
    deadline: float | None = setting(
        None,
        "simulated: updates later than T times an ordinary device's time are lost",
        metavar="T",
        above=0,
        refusal="the deadline is a number of an ordinary device's times, above 0, such as 2, not {}",
    )


@dataclass(frozen=True)
class Updates(Component):
    """How the server takes what devices send."""

    weighted: bool = setting(False, "mean weighted by samples")
    weight_cap: float | None = setting(
        None,
        "a device counts as at most so many times the median device's samples (default: off; of real devices 4)",
        metavar="X",
        least=1,
        refusal="the weight cap is a number of median devices, at least 1, not {}",
        since=2,
    )
    norm_bound: float | None = setting(
        None,
        "refuse updates that change more than this (L2)",
        metavar="X",
        above=0,
        refusal="the norm bound must be a number above 0, not {}",
    )
    norm_factor: float | None = setting(
        None,
        "refuse updates that change so many times more than the median of those seen (0: none; default: off; of real "
        "devices 5)",
        metavar="X",
        least=0,
        refusal="the norm factor is a number of usual changes, such as 5, or 0 for no bound, not {}",
        since=2,
    )
    aggregation: str = setting(
        "mean",
        "mean (default), or against devices that lie: median, trimmed:SHARE (left out at each end; default 0.1)",
        metavar="RULE",
        since=2,
    )


@dataclass(frozen=True)
class Server(Component):
    """The server's optimizer, on the command line; in Python `server=ServerOptimizer(...)`."""

    server_optimizer: str = setting("none", "of the server", choices=("none", "momentum", "adam"))
    server_lr: float | None = setting(None, "its learning rate (default 1; adam 0.01)", metavar="X", above=0)
    server_momentum: float = setting(
        0.9,
        "its first beta",
        metavar="X",
        least=0,
        below=1,
        needs=Needs("server_optimizer", ("momentum", "adam")),
    )

    def optimizer(self) -> ServerOptimizer:
        from strata.federation.aggregation import ServerOptimizer

        lr = 0.01 if self.server_optimizer == "adam" else 1.0
        return ServerOptimizer(
            self.server_optimizer, lr if self.server_lr is None else self.server_lr, self.server_momentum
        )


@dataclass(frozen=True)
class PrivacySettings(Component):
    """Differential privacy of devices."""

    dp_noise: float | None = setting(None, "deviation of the noise, in units of the clip", metavar="Z", since=2)
    dp_clip: float | None = setting(None, "a device's change is scaled down to this L2 norm", metavar="C", since=2)
    dp_delta: float | None = setting(None, "of the reported epsilon (default devices^-1.1)", metavar="D", since=2)
    dp_seed: int | None = setting(
        None,
        "noise and sampling from this seed, for tests and studies: who knows it can take the noise off again",
        metavar="N",
        since=2,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.dp_noise is None) != (self.dp_clip is None):
            raise BadInput("differential privacy needs both: dp_noise (such as 1) and dp_clip (such as 0.5)")
        if self.dp_noise is None and (self.dp_delta is not None or self.dp_seed is not None):
            raise BadInput("dp_delta and dp_seed belong to differential privacy: give dp_noise and dp_clip with them")

    def of(self, devices: int) -> Privacy | None:
        from strata.federation.privacy import Privacy

        if self.dp_noise is None or self.dp_clip is None:
            return None
        delta = devices**-1.1 if self.dp_delta is None else self.dp_delta
        return Privacy(self.dp_noise, self.dp_clip, delta, self.dp_seed)


@dataclass(frozen=True)
class Evaluations(Component):
    """When and on what the model is evaluated."""

    eval_every: int | None = setting(
        None,
        "rounds (default: a hundredth of all, at least 1)",
        metavar="N",
        whole=True,
        least=1,
        refusal="evaluation is every 1 or more rounds, not every {}",
    )
    bn: str = setting(
        "re-estimated",
        "batch norm in evaluation",
        choices=("re-estimated", "batch"),
        refusal="bn is one of re-estimated, batch, not {}",
    )
    bn_images: int = setting(
        512,
        "training images that re-estimated statistics are measured on; more than there are: all of them",
        metavar="N",
        whole=True,
        least=1,
        refusal="statistics of batch norm are measured on 1 or more images, not {}",
        since=2,
    )
    validation: float = setting(
        0.0,
        "of the training data, held out: for early stopping, and for batch norm under differential privacy",
        metavar="SHARE",
        least=0,
        below=1,
        refusal="validation is the share of training data to hold out, such as 0.05, not {}",
    )


@dataclass(frozen=True)
class Machine(Component):
    """Where the work is done. Changes no result, but for task_timeout."""

    workers: int | None = setting(
        None,
        "worker processes (default: one per core; 0: none)",
        metavar="N",
        whole=True,
        least=0,
        refusal="workers are 0 (all in this process) or more, not {}",
    )
    engine: str = setting("local", "where they are", choices=("local", "ray"), simulated="it is the devices")
    ray_address: str | None = setting(
        None,
        "of a Ray cluster, or auto; else one here, for now",
        metavar="HOST:PORT",
        simulated="no Ray is used",
        needs=Needs("engine", ("ray",)),
    )
    ray_gpus: float | None = setting(
        None,
        "of a GPU, for each worker (with --device cuda)",
        metavar="SHARE",
        simulated="no Ray is used",
        needs=Needs("engine", ("ray",)),
    )
    checkpoint_every: int = setting(
        1,
        "rounds between checkpoints",
        metavar="N",
        whole=True,
        least=1,
        refusal="checkpoints are every 1 or more rounds, not every {}",
        simulated="a fleet's run is saved after every round",
    )
    task_timeout: float | None = setting(
        None,
        "give up a device whose work takes longer in real time (off: results would depend on the machine)",
        metavar="SECONDS",
        above=0,
        refusal="--task-timeout is a number of seconds above 0, not {}",
        simulated="use --deadline",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task_timeout is not None and self.engine == "local" and self.workers == 0:
            raise BadInput("--task-timeout gives up worker processes, and --workers 0 has none: leave one of them out")
