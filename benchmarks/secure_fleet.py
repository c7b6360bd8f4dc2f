"""Secure aggregation among strangers: 20 device processes, 5 of them hostile and 5 killed, beside the 10 honest ones.

Real processes on loopback: a server, devices with a twentieth of `digits` each, SLT within 800 KiB. The reference is
the same run in the clear with the ten honest devices alone, by the local engine, which has a fleet's bits, with this
seed and with four others: how far these are apart is the noise.

    .venv/bin/python -m benchmarks.secure_fleet [--quick] [--json]     (about 5 GB of memory)

Hostile: `rubbish` sends bytes that are no message in place of its shares; `short` a masked vector that lacks a value;
`shares` other shares than it was dealt; `spoil` random numbers in place of masked values; `poison` the largest change
that a masked vector can hold, in every value. Killed: one at each stage of its first sum, one in its second. Of each
that is killed the server hears nothing for a minute, two of Flower's heartbeats: five minutes of the time are that.
"""

from __future__ import annotations

import json
import resource
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import common
from strata.data import load, parse_partition
from strata.fleet.flower_patches import CONNECTED
from strata.fleet.protocol.settings import DeviceSettings, RunSettings
from strata.graph import ChannelGraph
from strata.runs import run
from strata.runs.config import RunConfig
from strata.runs.launch import make_method, make_model, make_training
from tests.fleet.loopback import HONEST, Loopback, end, wait_for

MODEL = "tests.fleet.nets:small"
BUDGET = 800 << 10
SEED = 3
SEEDS = range(SEED, SEED + 5)  # of the honest ones alone
ROUNDS = 5
HOSTILE = ("rubbish", "short", "shares", "spoil", "poison")
STAGES = (
    ("keys", 0),
    ("shares", 0),
    ("train", 0),
    ("reveal", 0),
    ("train", 1),
)  # where one is killed, in its first or second sum
DEADLINE = 900.0  # seconds; a task takes one on an idle core

ROGUE = """
import os
import select
from pathlib import Path
import numpy as np
import torch
from flwr.app import Message
from flwr.clientapp import ClientApp
from strata.core.processes import watch_parent
from strata.fleet.device import client_app
from strata.fleet.protocol import codec, envelope
app = ClientApp()
KIND, WHEN = {kind!r}, {when!r}

def hang():
    watch_parent(os.getppid())  # leaves nothing behind
    Path(__file__).with_name("at-its-stage").touch()
    select.select([], [], [])

def lie(stage, packet):
    meta, tensors = packet.meta, packet.tensors()
    if KIND == "rubbish" and stage == "shares":
        return b"no message"
    if stage == "train" and "masked" in tensors:
        masked = tensors["masked"]
        if KIND == "short":
            masked = masked[:-1]
        if KIND == "spoil":
            masked = torch.from_numpy(np.random.default_rng().integers(-2**31, 2**31, len(masked), dtype=np.int32))
        if KIND == "poison":
            masked = masked + 2**21 - 2**17  # its own change is near zero: now it is nearly the clip
        tensors = dict(masked=masked)
    if KIND == "shares" and stage == "reveal" and meta["what"] == "secure":
        meta = dict(meta, seeds=dict.fromkeys(meta["seeds"], "AQAAAAAA"))
    return codec.encode(meta, tensors)

@app.query()
@app.train()
@app.evaluate()
def work(message, context):
    asked = codec.decode(envelope.payload(message.content)).meta
    stage = asked.get("stage", asked["what"])
    rounds = Path(__file__).with_name("rounds")
    if stage == "keys":
        rounds.write_text(rounds.read_text() + "." if rounds.exists() else ".")
    if WHEN == [stage, len(rounds.read_text()) - 1 if rounds.exists() else 0]:
        hang()
    answer = lie(stage, codec.decode(client_app.answer(message, context)))
    return Message(envelope.content(answer), reply_to=message)
"""


class Patient(Loopback):
    """Devices yield to the server: on a few cores twenty that start at once would starve it."""

    def start(self, name: str, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        return super().start(name, command if name == "link" else ["nice", "-n", "1", *command], env)

    def connected(self, name: str) -> bool:
        return CONNECTED.encode() in (self.folder / f"{name}.log").read_bytes()


def request(devices: int, rounds: int, seed: int = SEED) -> dict[str, Any]:
    return {
        "model": MODEL, "method": "slt", "budgets": [BUDGET], "rounds": rounds, "per_round": devices, "seed": seed,
        "lr": 0.1, "batch": 16, "epochs": 8, "eval_every": 1,
    }  # fmt: skip


def in_the_clear(honest: int, parts: int, rounds: int, folder: Path, seed: int) -> list[float]:
    """The accuracies of the honest ones alone."""
    config = RunConfig.from_json(request(honest, rounds, seed)).changed(exact=True)
    data = load("digits")
    split = parse_partition("iid", data, parts, seed)
    model = make_model(config, data)
    method = make_method(config, ChannelGraph(model, data.input_shape))
    theirs = [split[part] for part in range(honest)]
    made = run(
        model, data, method, out=folder / f"clear-{seed}", rounds=rounds, partition=theirs,
        training=make_training(config, data), workers=0, progress=False, per_round=honest, seed=seed, lr=0.1,
        exact=True, eval_every=1,
    )  # fmt: skip
    return [float(record["accuracy"]) for record in made.metrics]


def secure(honest: int, hostile: int, killed: int, rounds: int, folder: Path) -> dict[str, Any]:
    """The same with the others among them."""
    apps = {f"honest-{n}": HONEST for n in range(honest)}
    apps |= {f"hostile-{kind}": ROGUE.format(kind=kind, when=None) for kind in HOSTILE[-hostile:]}
    doomed = {f"killed-{n}": list(STAGES[-n - 1]) for n in range(killed)}
    apps |= {name: ROGUE.format(kind="none", when=when) for name, when in doomed.items()}
    fleet = Patient(folder)
    try:
        fleet.link()
        processes = {}
        for part, (name, app) in enumerate(apps.items()):
            processes[name] = fleet.device(_device(folder, name, part, len(apps)), app)
            if part % 4 == 3:
                wait_for(lambda: all(map(fleet.connected, processes)), "the devices")
        wait_for(lambda: all(map(fleet.connected, processes)), "the devices")
        out = folder / "secure"
        number = fleet.run(
            RunSettings(
                request(len(apps), rounds),
                str(out),
                minimum=len(apps),
                wait=1800.0,
                deadline=DEADLINE,
                secure_aggregation=True,
            )
        )
        waiting = set(doomed)
        while fleet.ending(number) is None:
            for name in [name for name in waiting if (folder / name / "at-its-stage").exists()]:
                end(processes[name], signal.SIGKILL)
                waiting.discard(name)
            time.sleep(1.0)
        fleet.finished(number)
        said = (folder / "link.log").read_text(errors="replace").splitlines()
        log = [line for line in said if " sum" in line and "INFO" not in line]
        return {**_found(out, doomed.keys() - waiting), "log": log}
    finally:
        fleet.close()


def _device(folder: Path, name: str, part: int, parts: int) -> DeviceSettings:
    return DeviceSettings(
        name, budget=BUDGET, partition="iid", index=part, devices=parts, seed=SEED, models=(MODEL,),
        cache=str(folder / name / "cache"),
    )  # fmt: skip


def _found(out: Path, killed: set[str]) -> dict[str, Any]:
    names = json.loads((out / "fleet.json").read_text())["names"]
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    heard = [
        sorted(names[device] for device in set(record["devices"]) - {one["id"] for one in record["dropped"]})
        for record in records
    ]
    reasons = {names[one["id"]]: one["reason"] for record in records for one in record["dropped"]}
    return {
        "accuracy": [record["accuracy"] for record in records],
        "killed": sorted(killed),
        "heard": heard,
        "last_reasons": reasons,
        "seconds": [record["seconds"] for record in records],
    }


def measure(quick: bool) -> dict[str, Any]:
    honest, hostile, killed, rounds = (9, 1, 1, 1) if quick else (10, 5, 5, ROUNDS)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="secure-fleet-") as scratch:
        found = secure(honest, hostile, killed, rounds, Path(scratch))
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        found |= {"whole_seconds": time.monotonic() - began, "cpu_seconds": used.ru_utime + used.ru_stime}
        alone = {
            seed: in_the_clear(honest, honest + hostile + killed, rounds, Path(scratch), seed)
            for seed in (SEEDS[:2] if quick else SEEDS)
        }
    last = [accuracies[-1] for accuracies in alone.values()]
    found |= {"honest_alone": alone, "alone_mean": statistics.mean(last), "alone_deviation": statistics.stdev(last)}
    return {"honest": honest, "hostile": hostile, "killed_devices": killed, "rounds": rounds, **found}


def main() -> None:
    parser = common.parser(__doc__)
    args = parser.parse_args()
    found = measure(args.quick)
    if args.json:
        print(json.dumps(found, indent=2))
        return
    print(
        f"{found['rounds']} rounds, {found['whole_seconds']:.0f} s with the start of all processes, of these "
        f"{sum(found['seconds']):.0f} s in rounds; {found['cpu_seconds']:.0f} s of processor time"
    )
    print(f"killed: {', '.join(found['killed'])}")
    print(f"accuracy after each round: {_percent(found['accuracy'])}")
    for seed, accuracies in found["honest_alone"].items():
        print(f"the {found['honest']} honest ones alone, seed {seed}: {_percent(accuracies)}")
    print(f"the honest ones at the end: {found['alone_mean']:.1%}, deviation over seeds {found['alone_deviation']:.1%}")
    for number, names in enumerate(found["heard"]):
        print(f"round {number}: in the sums used: {', '.join(names)}")
    print("\n".join(found["log"]))


def _percent(values: list[float]) -> str:
    return ", ".join(f"{value:.1%}" for value in values)


if __name__ == "__main__":
    main()
