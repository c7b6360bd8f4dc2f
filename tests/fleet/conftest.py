"""Where Flower (the extra `flower`) is not installed there is nothing to test here."""

from __future__ import annotations

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("flwr") else ["test_*.py"]


@pytest.fixture
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's messages know which run they are of."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
