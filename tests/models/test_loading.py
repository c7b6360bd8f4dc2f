from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from strata.core.errors import BadInput
from strata.models.loading import load_model

NETS = """
import torch
from torch import nn

def plain():
    return nn.Linear(4, 3)

def with_classes(num_classes=7):
    return nn.Linear(4, num_classes)

class Net(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.classifier = nn.Linear(4, options.get("num_classes", 5))

def raises():
    raise ValueError("no\\nweights here")

def wrong():
    return 3

instance = nn.Linear(4, 3)
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "strata_test_nets.py").write_text(NETS)
    (tmp_path / "strata_test_broken.py").write_text("import a_module_that_is_not_there")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("strata_test_nets", "strata_test_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "strata_test_nets"


def test_built_in_networks_take_classes_and_image_size() -> None:
    assert load_model("resnet20")(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert load_model("resnet44", 200, (3, 64, 64))(torch.zeros(2, 3, 64, 64)).shape == (2, 200)
    assert load_model("densenet40", 100)(torch.zeros(2, 3, 32, 32)).shape == (2, 100)


def test_callables_from_the_current_folder(nets: str) -> None:
    assert load_model(f"{nets}:plain").out_features == 3
    assert load_model(f"{nets}:plain", 9).out_features == 3  # takes no class count
    assert load_model(f"{nets}:with_classes").out_features == 7
    assert load_model(f"{nets}:with_classes", 9).out_features == 9
    assert load_model(f"{nets}:Net", 9).classifier.out_features == 9


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "resnet21",
            "unknown model 'resnet21': use resnet20, resnet44, resnet56, densenet40, .*, hf:FOLDER or",
        ),
        ("no_such_package.nets:make", "cannot import 'no_such_package.nets'.*No module named 'no_such_package'"),
        ("strata_test_broken:make", "cannot import 'strata_test_broken'.*a_module_that_is_not_there"),
        ("strata_test_nets:absent", "module 'strata_test_nets' has no 'absent'"),
        ("strata_test_nets:raises", "raised ValueError: no weights here"),
        ("strata_test_nets:wrong", "must return a torch.nn.Module, not int"),
        ("strata_test_nets:instance", "is not a function or class"),
        (":make", "a model is named package.module:callable"),
        ("package:", "a model is named package.module:callable"),
    ],
)
def test_one_clear_sentence(nets: str, name: str, message: str) -> None:
    with pytest.raises(BadInput, match=message) as raised:
        load_model(name)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "name, shape, message",
    [
        ("resnet20", (1, 32, 32), "3 channels"),
        ("resnet20", (3, 32), "3 channels"),
        ("resnet20", (3, 40, 40), "multiple of 16"),
        ("resnet20", (3, 32, 64), "square"),
        ("densenet40", (3, 48, 48), "multiple of 32"),
    ],
)
def test_shapes_that_do_not_suit(name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        load_model(name, 10, shape)


def test_no_classes() -> None:
    with pytest.raises(BadInput, match="classes must be at least 1, not 0"):
        load_model("resnet20", 0)
