"""What all benchmarks share: the work that is compared, its sizes, the machine, and child processes."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from strata.data import FederatedData, ImageSet, load
from strata.data.partitions import LazyIid
from strata.graph import ChannelGraph, Cut
from strata.methods import Method
from strata.models import resnet20
from strata.planning.make import plan
from strata.runs.folder import commit, versions
from strata.training import LocalTraining, Workspace, kernels

ROOT = Path(__file__).resolve().parents[1]
CASES = ("1", "0.5", "0.25", "0.125", "slt-early", "slt-middle", "slt-last")  # scales, and steps of SLT at 0.125
SLT_CASES = CASES[4:]
LR = 0.1
FLEET = 100
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Size:
    """How much is measured. A round is `per_round` devices of `samples` samples; rates are medians over trials."""

    per_round: int = 10
    samples: int = 500
    images: int = 10_000  # evaluated
    rounds: int = 3  # measured in training, after a short one that is not
    whole_rounds: int = 2  # measured with evaluation and checkpoint, after one that is not
    plain_devices: int = 2  # measured in the plain loop, after one batch that is not; it has no other devices' costs
    cases: tuple[str, ...] = CASES
    flower_cases: tuple[str, ...] = ("1", "0.125", "slt-middle")
    flower_rounds: int = 2


FULL = Size()
QUICK = Size(
    per_round=2, samples=40, images=1100, rounds=1, whole_rounds=1, plain_devices=1, cases=("0.125", "slt-middle"),
    flower_cases=("0.125",), flower_rounds=1,
)  # fmt: skip
WARM_SAMPLES = 40  # per device in a round that is not counted: a full and a short batch


def parser(text: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works, the numbers mean nothing")
    made.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    return made


def size(quick: bool) -> Size:
    return QUICK if quick else FULL


@cache
def model() -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return resnet20()


@cache
def graph() -> ChannelGraph:
    return ChannelGraph(model(), (3, 32, 32))


@cache
def workspace() -> Workspace:
    return Workspace(graph())


def slt_step(case: str) -> int:
    """early: the first step that has a full-width layer; middle and last of the plan at constraint 0.125."""
    steps = len(_plan().steps) - 1
    return {"slt-early": 1, "slt-middle": (steps + 1) // 2, "slt-last": steps}[case]


@cache
def _plan() -> Any:
    return plan(graph(), batch_size=32, constraint=0.125, rounds=500, accounting="paper")


@cache
def cut_of(case: str) -> Cut:
    return _plan().cut(slt_step(case)) if case in SLT_CASES else graph().prefix(float(case))


def title(case: str) -> str:
    return f"SLT@0.125 step {slt_step(case)} of {len(_plan().steps) - 1}" if case in SLT_CASES else f"scale {case}"


@dataclass(frozen=True)
class OneCut(Method):
    """All devices train, and the server evaluates, the same cut in every round: one step of a plan held still."""

    name = "one cut"
    cut: Cut

    def cut_for(self, round: int, device: int) -> Cut:
        return self.cut

    def evaluation_cut(self, round: int) -> Cut:
        return self.cut


@cache
def data() -> FederatedData:
    """CIFAR-10 where the tests have it, else random images of its shape: the work is the same."""
    try:
        from tests.data.real import real_cifar10

        return load("cifar10", real_cifar10())
    except BaseException as error:  # pytest.skip's own, or pytest is not installed
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
    draw = torch.Generator().manual_seed(0)

    def images(count: int) -> ImageSet:
        pixels = torch.randint(0, 256, (count, 3, 32, 32), generator=draw, dtype=torch.uint8)
        return ImageSet(pixels, torch.randint(0, 10, (count,), generator=draw), (0.5,) * 3, (0.29,) * 3)

    return FederatedData(images(50_000), images(10_000), "random images", 10, augmentation="cifar")


def training() -> LocalTraining:
    train = data().train
    decided = kernels.available()  # as strata.run does
    return LocalTraining(batch_size=32, augmentation="cifar", mean=train.mean, std=train.std, kernels=decided)


def partition(samples: int) -> LazyIid:
    return LazyIid(len(data().train), FLEET, samples, seed=0)


def cores() -> int:
    return len(os.sched_getaffinity(0))


def child(module: str, *args: str, threads: int | None = None, timeout: float = 900) -> Any:
    """The JSON that `python -m module args --json` prints last. `threads=None`: whatever torch takes by default."""
    environment = {key: value for key, value in os.environ.items() if key not in THREAD_VARIABLES}
    if threads is not None:
        environment |= dict.fromkeys(THREAD_VARIABLES, str(threads))
    command = [sys.executable, "-m", module, *args, "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    if done.returncode not in (0, 1) or not done.stdout.strip():
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout[done.stdout.rindex("\n{") if "\n{" in done.stdout else 0 :])


def provenance() -> dict[str, Any]:
    """Where and of what these numbers are."""
    libraries = {}
    for name in ("flwr", "ray", "pillow"):
        try:
            libraries[name] = version(name)
        except PackageNotFoundError:
            libraries[name] = "not installed"
    return {
        "machine": {"cores": cores(), "cpu": _cpu(), "ram_gib": _ram_gib(), "system": platform.platform(),
                    "load_average_before": round(os.getloadavg()[0], 2)},
        "versions": versions() | libraries,
        "commit": commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "data": data().name,
    }  # fmt: skip


def _cpu() -> str:
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    wide = [flag for flag in ("avx2", "avx512f", "amx_tile") if flag in named.get("flags", "").split()]
    return f"{named.get('model name', platform.machine())} ({', '.join(wide) or 'no wide vectors'})"


def _ram_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
