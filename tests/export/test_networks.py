"""The paper's networks, and others, exported at full, narrow and SLT cuts: bytes against the plan, gradients against
torch's in double precision. Some twenty minutes of processor time: `make slow`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.pocket import CUTS, GRADIENT, MORE, SHOWN, case


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("network", SHOWN)
def test_step_against_torch(native: Path, network: str, cut: str) -> None:
    if network.startswith("hf_"):
        pytest.importorskip("transformers", reason="transformers is not installed")
    found = case(network, cut, trials=0, batch=4)
    assert found["off"] <= MORE
    assert found["loss_off"] <= 1e-5
    assert found["gradient_off"] <= GRADIENT
