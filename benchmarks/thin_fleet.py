"""The README's first run over a fleet of devices without torch, beside the same run with torch; and what they hold.

    .venv/bin/python -m benchmarks.thin_fleet [--rounds 40] [--devices 20] [--seeds 5] [--json]

Needs `make native`. Real processes on loopback behind TLS: a server, `strata-device`s with their parts of `digits`, and
`strata fleet run`. With torch: the local engine, which has a torch fleet's bits; its seeds differ in how the digits are
split among devices, so how far they are apart is the noise. A device's processes are looked at ten times a second while
the fleet trains: the sum of their VmHWM, and of their PSS (a share of pages that other Pythons have too). One line as
soon as it is known; the exit code is 1 if a device took more than 64 MiB and its arena at work, or 40 MiB idle.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import common
from strata.core.flags import flags_of
from strata.fleet.security.keys import make_keys
from strata.runs.config import RunConfig
from strata.runs.folder import read_summary
from strata.runs.launch import launch
from strata.runs.metrics import read_metrics
from tests.fleet.processes import Commands, descendants, free_port, memory_of, thin_device

MIB = 2**20
AT_WORK, IDLE = 64 * MIB, 40 * MIB


@dataclass
class Held:
    """The most that one device's processes held together."""

    resident: int = 0
    share: int = 0

    def look(self, pids: list[int]) -> None:
        resident = share = 0
        for pid in pids:
            try:
                own = memory_of(pid), memory_of(pid, "Pss", "smaps_rollup")
            except (OSError, StopIteration):  # it has ended, or is about to
                continue
            resident, share = resident + own[0], share + own[1]
        self.resident, self.share = max(self.resident, resident), max(self.share, share)


@dataclass
class Watch:
    """Looks at devices until it is stopped."""

    pids: list[int]
    held: dict[int, Held] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def _look(self) -> None:
        while not self.ended.wait(0.1):
            for pid in self.pids:
                try:
                    every = [pid, *descendants(pid)]
                except OSError:
                    continue
                self.held.setdefault(pid, Held()).look(every)

    def stop(self) -> Held:
        self.ended.set()
        self.thread.join()
        every = self.held.values()
        return Held(max(one.resident for one in every), max(one.share for one in every))


RUN = {
    "model": "resnet20",
    "data": "digits",
    "method": "slt",
    "constraints": (0.125,),
    "per_round": 5,
    "eval_every": 10,
}


def natively(folder: Path, devices: int, rounds: int, seed: int) -> dict[str, Any]:
    names = [f"device-{number}" for number in range(devices)]
    keys, out, place = folder / "keys", folder / "run", f"127.0.0.1:{free_port()}"
    make_keys(keys, ["127.0.0.1"], names)
    host, port = place.split(":")
    with Commands(folder / "output") as started:
        server = started("fleet", "server", "--keys", str(keys), "--host", host, "--port", port)
        server.wait_for("serving", seconds=600)
        fleet = [
            started(
                "--server", place, "--keys", str(keys / "devices" / name), "--cache", str(folder / name), "--part",
                f"{number}/{devices}", "--split-seed", str(seed), "--budget", "16MiB", "--poll", "0.2",
                program=thin_device(),
            )
            for number, name in enumerate(names)
        ]  # fmt: skip
        for device in fleet:
            device.wait_for("is connected", seconds=600)
        pids = [device.process.pid for device in fleet]
        idle = Watch(pids)
        threading.Event().wait(3)
        resting = idle.stop()
        work = Watch(pids)
        asked = flags_of(RunConfig.of(**RUN, rounds=rounds, seed=seed))
        run = started(
            "fleet", "run", "--server", place, "--keys", str(keys), *asked,
            "--wait-for", str(devices), "--out", str(out),
        )  # fmt: skip
        if run.wait(7200) != 0:
            raise SystemExit(run.text())
        working = work.stop()
    records = read_metrics(out)
    arenas = [json.loads(one.read_text())["bytes"]["arena"] for one in (out / "programs").glob("*/manifest.json")]
    return {
        "accuracy": read_summary(out)["accuracy"],
        "loss": records[-1]["train_loss"],
        "dropped": sum(len(one["dropped"]) for one in records),
        "programs": len(arenas),
        "arena": max(arenas),
        "idle": vars(resting),
        "at_work": vars(working),
    }


def with_torch(folder: Path, devices: int, rounds: int, seed: int) -> float:
    config = RunConfig.of(**RUN, rounds=rounds, seed=seed, devices=devices)
    return float(launch(config, folder, progress=False).accuracy)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--devices", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=5, help="of the runs with torch")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    where = common.provenance()

    def say(text: str) -> None:
        if not asked.json:
            print(text, flush=True)

    say(f"commit {where['commit']}, {where['machine']['cpu']}, load {where['machine']['load_average_before']} before")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        thin = natively(folder / "thin", asked.devices, asked.rounds, seed=0)
        say(f"without torch, seed 0: accuracy {thin['accuracy']:.1%}, loss {thin['loss']:.3f}")
        say(f"{thin['dropped']} updates dropped")
        say(f"{thin['programs']} programs, the largest arena {thin['arena'] / MIB:.1f} MiB")
        for when in ("idle", "at_work"):
            resident, share = (thin[when][kind] / MIB for kind in ("resident", "share"))
            say(f"{when.replace('_', ' ')}: VmHWM {resident:.1f} MiB, PSS {share:.1f} MiB")
        beside = thin["at_work"]["resident"] - thin["arena"]
        say(f"at work, beside the arena: {beside / MIB:.1f} MiB (goal {AT_WORK / MIB:.0f}; idle {IDLE / MIB:.0f})")
        torchs = []
        for seed in range(asked.seeds):
            torchs.append(with_torch(folder / f"{seed}", asked.devices, asked.rounds, seed))
            say(f"with torch, seed {seed}: {torchs[-1]:.1%}")
    if asked.json:
        print(json.dumps({**where, "thin": thin, "torch": torchs}, indent=1))
    return 0 if beside <= AT_WORK and thin["idle"]["resident"] <= IDLE else 1


if __name__ == "__main__":
    sys.exit(main())
