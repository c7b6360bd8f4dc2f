"""The paper's networks, and others, exported at full, narrow and SLT cuts: bytes against the plan, gradients against
torch's in double precision, with the same ReLUs. All of them take ten minutes of processor time: `make slow`."""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from benchmarks.pocket import CUTS, MORE, SHOWN, case
from strata.export.verify import ROUNDING

ALWAYS = {("resnet20", "slt"), ("mobilenet", "prefix"), ("vgg", "full"), ("gated", "slt"), ("hf_vit", "full")}


def each() -> list[ParameterSet]:
    pairs = [(network, cut) for network in SHOWN for cut in CUTS]
    return [pytest.param(*pair, marks=() if pair in ALWAYS else pytest.mark.slow) for pair in pairs]


@pytest.mark.parametrize(("network", "cut"), each())
def test_step_against_torch(native: Path, network: str, cut: str) -> None:
    if network.startswith("hf_"):
        pytest.importorskip("transformers", reason="transformers is not installed")
    found = case(network, cut, trials=0, batch=4)
    assert found["off"] <= MORE
    assert found["loss_off"] <= 1e-5
    assert found["gradient_off"] <= ROUNDING
