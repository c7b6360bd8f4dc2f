"""When runs end, for the audit log. A run may complete, fail or be stopped, and its process may be killed: Flower knows
of each in another place, so its record of runs is looked at while there is one."""

from __future__ import annotations

import threading
import time
from typing import Any

from strata.core.errors import one_line
from strata.fleet.security.audit import AuditLog

LOOK = 2.0  # seconds between two looks


class RunEndings:
    """`log` None: nothing is written."""

    def __init__(self, log: AuditLog | None, pause: float = LOOK) -> None:
        self._log, self._pause = log, pause
        self._open: dict[int, Any] = {}  # run -> Flower's record of runs
        self._lock = threading.Lock()

    def began(self, run: int, state: Any) -> None:
        if self._log is None:
            return
        with self._lock:
            self._open[run] = state
            if len(self._open) == 1:
                threading.Thread(target=self._watch, name="strata-run-endings", daemon=True).start()

    def _watch(self) -> None:
        """Until there is no run left; the next one gets another thread."""
        while True:
            time.sleep(self._pause)
            with self._lock:
                for run, state in list(self._open.items()):
                    if (ended := ending(state, run)) is not None:
                        del self._open[run]
                        assert self._log is not None
                        self._log.record("run ended", run=str(run), state=ended)
                if not self._open:
                    return


def ending(state: Any, run: int) -> str | None:
    """completed, failed or stopped; None while it goes on, or where Flower's record cannot be read now."""
    try:
        found = state.get_run_info(run_ids=[run])
        if not found:
            return "unknown"
        status = found[0].status
    except Exception as error:  # of a database, each kind its own; the next look may do better
        print(f"strata: run {run} cannot be looked up: {one_line(error, kind=True)}", flush=True)
        return None
    return str(status.sub_status) if status.status == "finished" else None
