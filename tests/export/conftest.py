"""The native library for tests: that of `make native`, or one built here, once for all test processes."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.core.cache import private_folder
from strata.core.files import locked
from strata.export.native import LIBRARY, native_folder

SOURCES = Path(__file__).parents[2] / "native"


@pytest.fixture(scope="session")
def executorch() -> Path:
    found = pytest.importorskip("executorch", reason="ExecuTorch is not installed (make native installs it)")
    try:
        import executorch.exir  # noqa: F401
    except ImportError as error:
        pytest.skip(f"ExecuTorch lacks what it imports: {error}")
    return Path(next(iter(found.__path__)))


@pytest.fixture(scope="session")
def native(executorch: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder with libstrata_step and pocket."""
    found = native_folder() or _built(executorch, tmp_path_factory)
    before = os.environ.get("STRATA_NATIVE")
    os.environ["STRATA_NATIVE"] = str(found)
    yield found
    if before is None:
        del os.environ["STRATA_NATIVE"]
    else:
        os.environ["STRATA_NATIVE"] = before


def _built(executorch: Path, temporary: pytest.TempPathFactory) -> Path:
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        pytest.skip("there is no cmake or no C++ compiler to build the native library with")
    kept = private_folder("native-tests") or temporary.mktemp("native")
    content = [path.read_bytes() for path in sorted(SOURCES.glob("*")) if path.is_file()]
    folder = kept / hashlib.sha256(repr((content, str(executorch))).encode()).hexdigest()[:16]
    with locked(kept / "lock"):
        if not (folder / LIBRARY).exists():
            for command in (
                ["cmake", "-S", str(SOURCES), "-B", str(folder), f"-DEXECUTORCH={executorch}"],
                ["cmake", "--build", str(folder)],
            ):
                subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)
    return folder
