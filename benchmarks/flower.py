"""The same training in Flower's simulation engine (extra `flower`), through its Message API.

Clients train as benchmarks/plain.py does, on one thread; each has one CPU, so as many run side by side as there are
cores. The server averages state dicts. Rounds are timed after a first one that is not counted: ray's start-up, imports
and the building of networks are over by then. Telemetry of Flower and ray is off.

    .venv/bin/python -m benchmarks.flower --quick
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks import common, plain
from benchmarks.flower_client import train


def is_installed() -> bool:
    return find_spec("flwr") is not None and find_spec("ray") is not None


def play(grid: Any, nodes: list[int], case: str, samples: int, state: dict[str, torch.Tensor]) -> tuple[Any, int]:
    """The averaged weights after one round, and how many samples it trained."""
    from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

    weights = ArrayRecord(state)
    messages = []
    for device, node in enumerate(nodes):
        config = ConfigRecord({"case": case, "samples": samples, "device": device})
        content = RecordDict({"weights": weights, "config": config})
        messages.append(Message(content=content, dst_node_id=node, message_type="train"))
    replies = list(grid.send_and_receive(messages))
    failed = [reply.error for reply in replies if reply.has_error()]
    if failed or len(replies) != len(messages):
        raise RuntimeError(f"{len(failed)} of {len(messages)} Flower clients failed: {failed[:1]}")
    states = [dict(reply.content["weights"].to_torch_state_dict()) for reply in replies]
    return plain.average(states), sum(int(reply.content["metrics"]["samples"]) for reply in replies)


def measure(size: common.Size) -> dict[str, list[float]]:
    """Samples per second of each measured round, per case. One simulation for all cases."""
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    found: dict[str, list[float]] = {}
    server, client = ServerApp(), ClientApp()
    client.train()(train)

    @server.main()
    def main(grid: Any, context: Any) -> None:
        while len(nodes := list(grid.get_node_ids())) < size.per_round:
            time.sleep(0.1)
        for case in size.flower_cases:
            state = {name: value.clone() for name, value in plain.plain_model(case).state_dict().items()}
            rates = []
            for number in range(size.flower_rounds + 1):
                started = time.perf_counter()
                samples = size.samples if number else common.WARM_SAMPLES
                state, seen = play(grid, nodes[: size.per_round], case, samples, state)
                rates.append(seen / (time.perf_counter() - started))
            found[case] = rates[1:]

    backend: Any = {
        "init_args": {"num_cpus": common.cores(), "include_dashboard": False, "log_to_driver": False},
        "client_resources": {"num_cpus": 1, "num_gpus": 0},
    }
    run_simulation(server, client, num_supernodes=size.per_round, backend_config=backend)
    return found


def main() -> int:
    args = common.parser(__doc__).parse_args()
    if not is_installed():
        print(json.dumps({"status": "not installed"}) if args.json else "not installed: pip install -e '.[flower]'")
        return 0
    torch.set_num_threads(1)
    path = os.pathsep.join([str(common.ROOT), os.environ.get("PYTHONPATH", "")])  # ray's workers import from here
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": path}
    found = measure(common.size(args.quick))
    if args.json:
        print("\n" + json.dumps({"status": "measured", "samples_per_second": found}))
    else:
        for case, rates in found.items():
            print(f"{common.title(case)}: {sorted(rates)[len(rates) // 2]:.0f} samples/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
