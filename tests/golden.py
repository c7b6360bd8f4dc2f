"""Checked values to test against: tests/golden.yaml, a copy of the project's golden values."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml


@cache
def golden() -> dict[str, Any]:
    return yaml.safe_load((Path(__file__).parent / "golden.yaml").read_text())
