"""Real data for tests: ../shared/data unpacked once into a cache folder outside the repository."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
CACHE = Path(os.environ.get("STRATA_TEST_CACHE", Path.home() / ".cache" / "strata-tests"))


def real_cifar10() -> Path:
    """The folder that holds cifar-10-batches-py; skips the test where there is none."""

    def unpack(folder: Path) -> None:
        script = str(SHARED / "unpack_cifar10.py")
        subprocess.run([sys.executable, script, str(folder)], check=True, capture_output=True)

    return _once("cifar10_jpeg.npz", unpack)


def real_tinyimagenet() -> Path:
    """The folder that holds tiny-imagenet-200 (50 + 10 images per class); skips the test where there is none."""

    def unpack(folder: Path) -> None:
        with zipfile.ZipFile(SHARED / "tiny-imagenet-200-subset.zip") as archive:
            archive.extractall(folder)

    return _once("tiny-imagenet-200-subset.zip", unpack)


def _once(name: str, unpack: Callable[[Path], None]) -> Path:
    source = SHARED / name
    if not source.is_file():
        pytest.skip(f"needs the real data {source}")
    target = CACHE / f"{source.stem}-{source.stat().st_size}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{source.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several pytest workers one unpacks, the others wait
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
                whole = Path(scratch) / "whole"
                whole.mkdir()
                unpack(whole)
                whole.rename(target)  # only ever complete
    return target
