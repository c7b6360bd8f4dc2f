"""Runs of models of the transformers library, tiny ones: pictures and text, in Python and by the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import strata
from strata.core.errors import BadInput
from strata.data import wrap

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}


def test_pictures_go_to_the_first_parameter(tmp_path: Path) -> None:
    """Its forward takes pixel_values and any further names; the data say x."""
    config = transformers.ViTConfig(**SMALL, image_size=8, patch_size=4, num_labels=3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.ViTForImageClassification(config)
    images, labels = torch.rand(12, 3, 8, 8), torch.arange(12) % 3
    data = wrap(TensorDataset(images, labels), TensorDataset(images[:6], labels[:6]))
    result = strata.run(model, data, "fedavg", out=tmp_path / "run", rounds=1, devices=2, per_round=1, progress=False)
    assert result.summary["rounds"] == 1 and result.summary["upload_bytes"] > 0


def test_a_model_of_text_on_images_is_told_so(tmp_path: Path) -> None:
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, vocab_size=30))
    data = wrap(
        TensorDataset(torch.rand(4, 3, 8, 8), torch.arange(4) % 2),
        TensorDataset(torch.rand(2, 3, 8, 8), torch.arange(2)),
    )
    with pytest.raises(BadInput, match=r"takes text \(its input_ids\), and this input is of real numbers, 3x8x8: give"):
        strata.run(model, data, "fedavg", out=tmp_path / "run", rounds=1, devices=2, per_round=1, progress=False)
    assert not (tmp_path / "run").exists()
