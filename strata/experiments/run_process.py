"""A process that carries out runs one after the other: `python -m strata.experiments.run_process`.

One JSON line on stdin per run ({"request", "folder", "workers", "checkpoint_every"}), one on stdout when it is over
({"folder"} or {"folder", "error"}). When stdin ends, the run in progress is saved and the process ends: so none is left
behind when the parent is gone.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from strata.core.errors import BadInput, Infeasible, one_line
from strata.data import FederatedData
from strata.engines import Engine, EngineFailed
from strata.federation import RoundFailed
from strata.graph import ChannelGraph
from strata.runs.request import Request, jsonable
from strata.runs.running import make_engine, run
from strata.training import Workspace


@dataclass
class Bench:
    """Keeps data, network and engine from one run to the next where both need the same."""

    _data: tuple[Any, FederatedData] | None = None
    _engine: tuple[Any, ChannelGraph, Engine] | None = None

    def carry_out(self, request: Request, folder: Path, workers: int, checkpoint_every: int) -> None:
        data = self._data_of(request)
        training = request.make_training(data)
        model = request.make_model(data)
        key = (request.model, request.data, request.data_dir, training, workers)
        if self._engine is None or self._engine[0] != key:
            self.close()
            graph = ChannelGraph(model, data.inputs)
            self._engine = (key, graph, make_engine(model, data, training, workers, workspace=Workspace(graph)))
        _, graph, engine = self._engine
        run(
            model, data, request.make_method(graph), out=folder, rounds=request.rounds, devices=request.devices,
            partition=request.partition, training=training, engine=engine, checkpoint_every=checkpoint_every,
            resume=(folder / "config.json").exists(), progress=False, request=jsonable(request),
            **request.run_options(),
        )  # fmt: skip

    def _data_of(self, request: Request) -> FederatedData:
        key = (request.data, request.data_dir)
        if self._data is None or self._data[0] != key:
            self._data = None  # two data sets need not be in memory at once
            self._data = (key, request.load_data())
        return self._data[1]

    def close(self) -> None:
        if self._engine is not None:
            self._engine[2].close()
            self._engine = None


def attempt(bench: Bench, job: Mapping[str, Any]) -> str | None:
    """What went wrong, None if nothing did. The other runs go on."""
    try:
        request = Request.from_json(job["request"])
        bench.carry_out(request, Path(job["folder"]), job["workers"], job["checkpoint_every"])
        return None
    except (BadInput, Infeasible, RoundFailed, EngineFailed) as error:
        bench.close()
        return str(error)
    except Exception as error:
        traceback.print_exc()
        bench.close()
        return one_line(error, kind=True)


def main() -> int:
    torch.set_num_threads(1)
    jobs: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    idle = threading.Event()
    idle.set()

    def listen() -> None:
        for line in sys.stdin:
            idle.clear()
            jobs.put(line)
        jobs.put(None)
        if not idle.is_set():
            os.kill(os.getpid(), signal.SIGTERM)  # the run saves a checkpoint and stops

    threading.Thread(target=listen, daemon=True).start()
    bench = Bench()
    try:
        while (line := jobs.get()) is not None:
            job = json.loads(line)
            error = attempt(bench, job)
            idle.set()
            print(json.dumps({"folder": job["folder"], **({} if error is None else {"error": error})}), flush=True)
    except KeyboardInterrupt:
        return 130
    finally:
        bench.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
