"""`strata run`: train by one method; `strata run --resume DIR`: go on where it stopped."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata.cli.arguments import (
    add_budget_arguments,
    add_model_arguments,
    at_least_one,
    budgets_of,
    constraints_of,
    parse_ratio,
    parse_shape,
)
from strata.core.errors import BadInput
from strata.core.paths import expanded

if TYPE_CHECKING:
    from strata.engines.ray import Ray

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

EXAMPLES = """examples:
  strata run --data digits --method slt --constraint 0.125 --rounds 60 --devices 50 --out runs/a
  strata run --model resnet20 --data cifar10 --data-dir DIR --method slt --constraint 0.125 --rounds 500 --out runs/b
  strata run --resume runs/b
"""
SIMPLE = (
    "model", "data", "partition", "method", "variant", "pool", "accounting", "schedule", "init", "epochs", "momentum",
    "weight_decay", "proximal", "augmentation", "micro_batch", "activation_checkpointing",
    "devices", "per_round", "seed", "lr", "lr_end", "quorum", "dropout", "device", "kernels",
    "stragglers", "deadline", "server_optimizer", "server_lr", "server_momentum", "norm_bound", "eval_every", "bn",
    "validation", "aggregation", "dp_noise", "dp_clip", "dp_delta", "dp_seed",
)  # fmt: skip


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "run", help="train by one method, or resume a run",
        description="Train a model over a fleet of devices into a run folder. A run can be stopped and resumed at any "
        "moment, to the same bits.",
        epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_run_arguments(parser)
    group = parser.add_argument_group("this run")
    group.add_argument("--method", metavar="NAME", help="see `strata methods`, or package.module:Class (default slt)")
    group.add_argument("--seed", type=int, metavar="N", help="everything random follows from it (default 0)")
    group.add_argument("--out", metavar="DIR", help="the run folder: new or empty")
    group.add_argument("--resume", metavar="DIR", help="continue this run folder with its own settings")
    group.add_argument("--tensorboard", action="store_true", help="also log to DIR/tensorboard (an extra)")
    group.add_argument("--mlflow", action="store_true", help="also log to MLflow (an extra)")
    parser.set_defaults(func=run)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """All that `run` and `compare` share. Values not given stay None: the defaults are Request's."""
    from strata.cli.plan import add_schedule_arguments

    add_model_arguments(parser, of_data=True)
    add_budget_arguments(parser)
    add_schedule_arguments(parser)
    parser.set_defaults(model=None, input=None, batch=None, rounds=None, schedule=None, head_fraction=None)
    data = parser.add_argument_group("data")
    data.add_argument("--data", metavar="NAME", help="see `strata data` (default digits)")
    data.add_argument("--data-dir", metavar="DIR", help="where the data is on disk")
    data.add_argument("--partition", metavar="P", help="iid, dirichlet:0.1, shards:2, user or lazy[:N] (default iid)")
    fleet = parser.add_argument_group("fleet")
    fleet.add_argument("--devices", type=int, metavar="N", help="devices in the fleet (default 100)")
    fleet.add_argument("--per-round", type=int, metavar="N", help="devices asked in a round (default 10)")
    fleet.add_argument("--quorum", type=int, metavar="N", help="updates a round needs, else it is redone (default 1)")
    fleet.add_argument("--dropout", type=float, metavar="P", help="simulated: share of devices that fail (default 0)")
    fleet.add_argument("--stragglers", metavar="SHARE:SLOWDOWN", help="simulated: slow devices, such as 0.2:3")
    fleet.add_argument(
        "--deadline", type=float, metavar="T",
        help="simulated: updates later than T times an ordinary device's time are lost",
    )  # fmt: skip
    fleet.add_argument("--weighted", action="store_true", default=None, help="mean weighted by samples")
    fleet.add_argument("--server-optimizer", choices=("none", "momentum", "adam"), help="of the server (default none)")
    fleet.add_argument("--server-lr", type=float, metavar="X", help="its learning rate (default 1; adam 0.01)")
    fleet.add_argument("--server-momentum", type=float, metavar="X", help="its first beta (default 0.9)")
    fleet.add_argument("--norm-bound", type=float, metavar="X", help="refuse updates that change more than this (L2)")
    fleet.add_argument(
        "--aggregation", metavar="RULE",
        help="mean (default), or against devices that lie: median, trimmed:SHARE (left out at each end; default 0.1)",
    )  # fmt: skip
    private = parser.add_argument_group("differential privacy of devices (docs/security.md says what it covers)")
    private.add_argument("--dp-noise", type=float, metavar="Z", help="deviation of the noise, in units of the clip")
    private.add_argument("--dp-clip", type=float, metavar="C", help="a device's change is scaled down to this L2 norm")
    private.add_argument("--dp-delta", type=float, metavar="D", help="of the reported epsilon (default devices^-1.1)")
    private.add_argument(
        "--dp-seed", type=int, metavar="N",
        help="noise and sampling from this seed, for tests and studies: who knows it can take the noise off again",
    )  # fmt: skip
    local = parser.add_argument_group("training on a device")
    local.add_argument("--lr", type=float, metavar="X", help="learning rate of the first round (default 0.1)")
    local.add_argument("--lr-end", type=float, metavar="X", help="of the last, along a cosine (default 0.01)")
    local.add_argument(
        "--activation-checkpointing", type=segments, metavar="N",
        help="forward in at most N segments (auto: as many as lower the peak), computed anew in backward; same bits",
    )  # fmt: skip
    local.add_argument("--epochs", type=int, metavar="N", help="local epochs (default 1)")
    local.add_argument("--momentum", type=float, metavar="X", help="SGD momentum (default 0.9)")
    local.add_argument("--weight-decay", type=float, metavar="X", help="default 1e-5")
    local.add_argument("--proximal", type=float, metavar="MU", help="FedProx's mu (default 0)")
    local.add_argument("--augmentation", metavar="NAME", help="default: what suits the data")
    local.add_argument("--init", metavar="FILE", help="start from these weights (.safetensors or a torch state dict)")
    local.add_argument("--variant", metavar="NAME", help="of fd: device (default), shared or pool")
    local.add_argument("--pool", type=int, metavar="N", help="of fd's variant pool: number of sets")
    local.add_argument(
        "--exact", action="store_true", default=None,
        help="simulate every device on its own and by torch's convolutions, as a real one trains; else narrow ones run "
        "as one network, and our own convolutions are used: equal up to float32 rounding",
    )  # fmt: skip
    local.add_argument(
        "--kernels", choices=("auto", "off"),
        help="our own convolutions in C, where a compiler can build them (default auto): quicker, other rounding",
    )  # fmt: skip
    local.add_argument("--device", metavar="NAME", help="where networks run: cpu (default), cuda, cuda:N")
    judge = parser.add_argument_group("evaluation")
    judge.add_argument("--eval-every", type=int, metavar="N", help="rounds (default: a hundredth of all, at least 1)")
    judge.add_argument(
        "--bn", choices=("re-estimated", "batch"), help="batch norm in evaluation (default re-estimated)"
    )
    judge.add_argument(
        "--validation", type=float, metavar="SHARE",
        help="of the training data, held out: for early stopping, and for batch norm under differential privacy",
    )  # fmt: skip
    machine = parser.add_argument_group("machine (changes no result, but for --task-timeout)")
    machine.add_argument("--workers", type=int, metavar="N", help="worker processes (default: one per core; 0: none)")
    machine.add_argument("--engine", choices=("local", "ray"), default="local", help="where they are (default local)")
    machine.add_argument("--ray-address", metavar="HOST:PORT", help="of a Ray cluster, or auto; else one here, for now")
    machine.add_argument(
        "--ray-gpus", type=float, metavar="SHARE", help="of a GPU, for each worker (with --device cuda)"
    )
    machine.add_argument("--checkpoint-every", type=int, default=1, metavar="N", help="rounds (default 1)")
    machine.add_argument(
        "--task-timeout", type=float, metavar="SECONDS",
        help="give up a device whose work takes longer in real time (off: results would depend on the machine)",
    )  # fmt: skip
    machine.add_argument("--quiet", action="store_true", help="no progress")
    machine.add_argument("--json", action="store_true", help="the summary as JSON on stdout")


def segments(text: str) -> int | str:
    """Which numbers make sense is for LocalTraining to say."""
    return int(text) if text.lstrip("-").isdigit() else text


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of Request that were given on the command line."""
    values = {name: getattr(args, name, None) for name in SIMPLE}
    values["constraints"] = tuple(constraints_of(args)) or None
    values["budgets"] = tuple(budgets_of(args)) or None
    values["input"] = None if args.input is None else parse_shape(args.input)
    values["data_dir"] = None if args.data_dir is None else str(expanded(args.data_dir).absolute())
    values["head_fraction"] = (
        None if args.head_fraction is None else parse_ratio(args.head_fraction, "the head fraction")
    )
    values["weighted"] = args.weighted
    values["exact"] = args.exact
    for name in ("classes", "batch", "rounds", "patience"):
        text = getattr(args, name)
        values[name] = None if text is None else at_least_one(text, f"--{name}")
    return {name: value for name, value in values.items() if value is not None}


def ray_of(args: argparse.Namespace) -> Ray | None:
    from strata.engines.ray import Ray

    if args.engine == "ray":
        return Ray(args.ray_address, args.ray_gpus or 0.0)
    if args.ray_address is not None or args.ray_gpus is not None:
        raise BadInput("--ray-address and --ray-gpus are for --engine ray: give that too")
    return None


def timeout_of(args: argparse.Namespace) -> float | None:
    """--task-timeout, which needs processes that can be given up."""
    seconds: float | None = args.task_timeout
    if seconds is not None and not 0 < seconds < math.inf:
        raise BadInput(f"--task-timeout is a number of seconds above 0, not {seconds:g}")
    if seconds is not None and args.engine == "local" and args.workers == 0:
        raise BadInput("--task-timeout gives up worker processes, and --workers 0 has none: leave one of them out")
    return seconds


def run(args: argparse.Namespace) -> int:
    if (args.out is None) == (args.resume is None):
        raise BadInput("give either --out DIR for a new run or --resume DIR to continue one")
    asked, ray, timeout = given(args), ray_of(args), timeout_of(args)
    from strata.engines import EngineFailed
    from strata.federation import RoundFailed
    from strata.methods.choice import refuse_unused
    from strata.runs.request import Request, launch
    from strata.runs.summary import summarise

    folder = Path(args.resume or args.out)
    request = Request.of_folder(folder, asked) if args.resume else Request(**asked)
    if not args.resume:
        refuse_unused(asked, [request.method])
    try:
        result = launch(
            request, folder, resume=args.resume is not None, workers=args.workers, timeout=timeout,
            checkpoint_every=args.checkpoint_every, progress=not args.quiet, tensorboard=args.tensorboard,
            mlflow=args.mlflow, ray=ray,
        )  # fmt: skip
    except (RoundFailed, EngineFailed) as error:
        print(f"strata run: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps({"out": str(result.out), **result.summary}, indent=2))
    else:
        summarise(result)
    return 0
