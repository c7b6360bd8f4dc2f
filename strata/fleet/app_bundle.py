"""The Flower app bundle of every run. It names Strata's own apps and holds no code: what runs is what is installed.

It has the same bytes for every run and on every machine, so that a device can refuse any other.
"""

from __future__ import annotations

import functools
import hashlib
import io
import zipfile

CONFIG = b"""\
[project]
name = "strata"
version = "1.0.0"
description = "Names the apps of the installed Strata"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "strata"

[tool.flwr.app.components]
serverapp = "strata.fleet.server.server_app:app"
clientapp = "strata.fleet.device.client_app:app"

[tool.flwr.app.config]
strata = ""
"""


@functools.cache
def bundle(config: bytes = CONFIG) -> bytes:
    """A zip with the manifest that Flower checks. Stored, not deflated: compressors differ between machines."""
    manifest = f"pyproject.toml,{hashlib.sha256(config).hexdigest()},{8 * len(config)}".encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as file:
        for name, content in (("pyproject.toml", config), (".info/CONTENT", manifest)):
            entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system = 3  # "made on Unix", wherever it is made
            file.writestr(entry, content)
    return buffer.getvalue()


def bundle_hash() -> str:
    return hashlib.sha256(bundle()).hexdigest()
