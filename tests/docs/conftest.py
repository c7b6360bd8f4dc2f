from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.docs.playing import Warm


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    process = Warm(tmp_path_factory.mktemp("warm"))
    yield process
    process.close()
