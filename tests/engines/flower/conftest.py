"""Where Flower (the extra `flower`) is not installed there is nothing to test here."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("flwr") else ["test_*.py"]
