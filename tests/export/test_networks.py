"""The paper's networks, and others, exported at full, narrow and SLT cuts: bytes against the plan, gradients against
torch's in double precision, with the same ReLUs. The deep ones take minutes of processor time: `make slow`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.pocket import CUTS, MORE, SHOWN, case
from strata.export.verify import ROUNDING

DEEP = ("resnet44", "resnet56", "densenet40")


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("network", [pytest.param(one, marks=pytest.mark.slow if one in DEEP else ()) for one in SHOWN])
def test_step_against_torch(native: Path, network: str, cut: str) -> None:
    if network.startswith("hf_"):
        pytest.importorskip("transformers", reason="transformers is not installed")
    found = case(network, cut, trials=0, batch=4)
    assert found["off"] <= MORE
    assert found["loss_off"] <= 1e-5
    assert found["gradient_off"] <= ROUNDING
