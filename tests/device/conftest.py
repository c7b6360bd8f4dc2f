"""The native library: that of `make native`, or one that is built here (tests/export/conftest.py)."""

from __future__ import annotations

from tests.export.conftest import executorch, native

__all__ = ["executorch", "native"]
