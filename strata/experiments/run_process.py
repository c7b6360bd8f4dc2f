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
from pathlib import Path
from typing import Any

import torch

from strata.core.errors import BadInput, Infeasible, one_line
from strata.engines import EngineFailed
from strata.federation import RoundFailed
from strata.runs.config import RunConfig
from strata.runs.launch import Resources, launch


def attempt(resources: Resources, job: Mapping[str, Any]) -> str | None:
    """What went wrong, None if nothing did. The other runs go on."""
    folder = Path(job["folder"])
    try:
        config = RunConfig.from_json(job["request"])
        config = config.changed(workers=job["workers"], checkpoint_every=job["checkpoint_every"])
        resume = (folder / "config.json").exists()
        launch(config, folder, resume=resume, progress=False, resources=resources)
        return None
    except (BadInput, Infeasible, RoundFailed, EngineFailed) as error:
        resources.close()
        return str(error)
    except Exception as error:
        traceback.print_exc()
        resources.close()
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
    resources = Resources()
    try:
        while (line := jobs.get()) is not None:
            job = json.loads(line)
            error = attempt(resources, job)
            idle.set()
            print(json.dumps({"folder": job["folder"], **({} if error is None else {"error": error})}), flush=True)
    except KeyboardInterrupt:
        return 130
    finally:
        resources.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
