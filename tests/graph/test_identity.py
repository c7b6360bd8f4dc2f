"""The number under which an exported graph is kept: the same for the same model, another for whatever matters."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strata.graph import InputSpec
from strata.graph.identity import identity
from tests.networks import NETWORKS

NET = """
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple
import math

import torch
from torch import nn

from {package}.helpers import scaled
from {package} import helpers, more
from {package}.base import Base

FACTOR = 2.0
TABLE = {{"a": [1, 2], "f": abs}}


class Kind(Enum):
    A = 1
    B = 2


class Pair(NamedTuple):
    a: int
    b: int = 2


@dataclass
class Config:
    width: int = 8
    kind: Kind = Kind.A
    pair: Pair = Pair(1)


def unused():
    import os
    return os.environ["HOME"]


class Net(Base):
    def __init__(self, width=8, hook=None):
        super().__init__()
        self.config = Config(width)
        self.first, self.second = nn.Linear(5, width), nn.Linear(width, 3)
        self.activation = torch.relu if hook is None else hook
        self.rates = [0.1, math.pi]

    def forward(self, x):
        x = self.activation(self.first(x)) * FACTOR * self.gain() * TABLE["a"][0]
        return self.second(scaled(more.inner.deep(helpers.twice(x))))
"""
HELPERS = (
    "def twice(x):\n    return _inner(x) * 2\n\ndef _inner(x):\n    return x + 1\n\ndef scaled(x):\n    return x\n"
)
INNER = "DEPTH = 3\n\ndef deep(x):\n    return x * DEPTH\n"
BASE = "from torch import nn\n\nclass Base(nn.Module):\n    def gain(self):\n        return 1\n"


class Package:
    """A package on disk whose files can be edited; `number()` imports it as a new process would."""

    def __init__(self, folder: Path) -> None:
        self.name = "identity_test_package"
        self.folder = folder / self.name
        self.folder.mkdir()
        more = self.folder / "more"
        more.mkdir()
        (self.folder / "__init__.py").write_text("")
        (more / "__init__.py").write_text(f"from {self.name}.more import inner\n")
        (more / "inner.py").write_text(INNER)
        (self.folder / "helpers.py").write_text(HELPERS)
        (self.folder / "base.py").write_text(BASE)
        (self.folder / "net.py").write_text(NET.format(package=self.name))

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.folder / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def load(self) -> types.ModuleType:
        self.forget()
        importlib.invalidate_caches()
        return importlib.import_module(f"{self.name}.net")

    def forget(self) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == self.name]:
            del sys.modules[name]

    def number(self, *args: Any, **kwargs: Any) -> str | None:
        return number(self.load().Net(*args, **kwargs))


def number(model: nn.Module, shape: tuple[int, ...] = (5,)) -> str | None:
    return identity(model, InputSpec.of(shape, model))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two edits within a second would look the same
    made = Package(tmp_path)
    yield made
    made.forget()


def test_the_same_model_has_the_same_number_in_every_process(package: Package) -> None:
    first = package.number()
    assert first is not None and package.number() == first
    torch.manual_seed(7)  # other weights
    assert package.number() == first
    net = package.load().Net()
    net.eval()
    assert number(net) == first  # whoever exports sets the mode


EDITS: dict[str, tuple[str, str, str]] = {
    "forward": ("net.py", "self.second(scaled(", "self.second(2 * scaled("),
    "a global": ("net.py", "FACTOR = 2.0", "FACTOR = 3.0"),
    "inside a global": ("net.py", '"a": [1, 2]', '"a": [5, 2]'),
    "a method of a base class in another file": ("base.py", "return 1", "return 4"),
    "a function in another file": ("helpers.py", "return _inner(x) * 2", "return _inner(x) * 3"),
    "a function that only that one calls": ("helpers.py", "return x + 1", "return x + 2"),
    "a function imported by name": ("helpers.py", "def scaled(x):\n    return x", "def scaled(x):\n    return x * 2"),
    "a global of a module within a package": ("more/inner.py", "DEPTH = 3", "DEPTH = 4"),
    "a value of an enum": ("net.py", "A = 1", "A = 3"),
    "a default in a dataclass": ("net.py", "kind: Kind = Kind.A", "kind: Kind = Kind.B"),
    "a constant in a list": ("net.py", "[0.1, math.pi]", "[0.2, math.pi]"),
    "a comment (lines move)": ("net.py", "FACTOR = 2.0", "# about 2\nFACTOR = 2.0"),
}


@pytest.mark.parametrize("what", EDITS)
def test_an_edit_changes_it(package: Package, what: str) -> None:
    before = package.number()
    package.edit(*EDITS[what])
    after = package.number()
    assert before is not None and after is not None and before != after


CHANGES: dict[str, Callable[[Any, Any], object]] = {
    "a global of the module": lambda module, net: setattr(module, "FACTOR", 5.0),
    "a function of another module": lambda module, net: setattr(module.helpers, "twice", lambda x: x),
    "what only another function uses": lambda module, net: setattr(module.more.inner, "DEPTH", 9),
    "a method of the class": lambda module, net: setattr(module.Net, "gain", lambda self: 7),
    "a method of the instance": lambda module, net: setattr(net, "forward", types.MethodType(_other, net)),
    "an attribute": lambda module, net: setattr(net, "rates", [0.5]),
    "inside an attribute": lambda module, net: setattr(net.config, "width", 9),
    "an attribute of a layer of torch": lambda module, net: setattr(net.first, "in_features", 6),
    "a method of a layer of torch": lambda module, net: setattr(net.first, "forward", types.MethodType(_other, net)),
    "a frozen weight": lambda module, net: net.first.weight.requires_grad_(False),
    "a wider layer": lambda module, net: setattr(net, "second", nn.Linear(8, 4)),
    "the precision": lambda module, net: net.double(),
    "a hook": lambda module, net: net.first.register_forward_hook(lambda *given: None),
    "a buffer": lambda module, net: net.register_buffer("more", torch.zeros(2), persistent=False),
    "another buffer in the state": lambda module, net: net.register_buffer("more", torch.zeros(2)),
    "a tensor that is no buffer": lambda module, net: setattr(net, "table", torch.zeros(2)),
    "what that tensor holds": lambda module, net: setattr(net, "table", torch.ones(2)),
}


def _other(self: Any, x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_while_it_runs_changes_it(package: Package, what: str) -> None:
    module = package.load()
    numbers = {number(module.Net())}
    for change in (CHANGES[what], CHANGES["a tensor that is no buffer"]):
        net = module.Net()
        change(module, net)
        numbers.add(number(net))
    assert None not in numbers and len(numbers) == (2 if what == "a tensor that is no buffer" else 3)


def test_a_change_of_torchs_own_class_changes_it(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    net = package.load().Net()
    before = number(net)
    for patch in (_other, functools.wraps(nn.Linear.forward)(_other)):
        with monkeypatch.context() as during:
            during.setattr(nn.Linear, "forward", patch)
            assert number(net) not in (None, before)
    assert number(net) == before


def test_arguments_closures_and_inputs_count(package: Package) -> None:
    def times(factor: float) -> Callable[[Tensor], Tensor]:
        return lambda x: x * factor

    module = package.load()
    net = module.Net()
    numbers = [number(net), number(net, (6,)), number(module.Net(9))]
    numbers += [number(module.Net(hook=hook)) for hook in (times(1.0), times(2.0), torch.tanh, lambda x, y=1: x)]
    numbers += [identity(net, InputSpec.of({"x": ((5,), dtype)})) for dtype in (torch.float64, torch.int64)]
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        numbers.append(identity(net, InputSpec.of((5,))))
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        numbers.append(number(net))
    assert None not in numbers and len(set(numbers)) == len(numbers)
    assert number(module.Net(hook=times(2.0))) == numbers[4]


DOUBTS: dict[str, tuple[str, str]] = {
    "reads the environment": ("x = self.act", "import os; x = os.environ['A'] or self.act"),
    "imports as it runs": ("x = self.act", "from identity_test_package.helpers import twice\n        x = self.act"),
    "evaluates text": ("x = self.act", "x = eval('1') * self.act"),
    "draws numbers of its own": ("import math\n", "import math, random\nR = random.Random()\n"),
    "holds a lock": ("self.rates = ", "import threading; self.lock = threading.Lock(); self.rates = "),
    "holds a module that is not registered": ("self.rates = ", "self.hidden = [nn.Linear(2, 2)]; self.rates = "),
}


@pytest.mark.parametrize("what", DOUBTS)
def test_what_is_in_doubt_has_no_number(package: Package, what: str) -> None:
    package.edit("net.py", *DOUBTS[what])
    if what == "draws numbers of its own":
        package.edit("net.py", "* FACTOR", "* R.random()")
    assert package.number() is None


def test_a_class_without_a_file_has_no_number() -> None:
    scope: dict[str, Any] = {"__name__": "nowhere", "nn": nn}
    exec("class Net(nn.Module):\n    def forward(self, x):\n        return x", scope)
    assert number(scope["Net"]()) is None


def test_a_mode_of_torch_or_a_hook_on_everything_is_doubt() -> None:
    model, shape = NETWORKS["vgg"]()
    before = number(model, shape)
    assert before is not None
    with torch.device("meta"):
        assert number(model, shape) != before
    handle = nn.modules.module.register_module_forward_hook(lambda *given: None)
    try:
        assert number(model, shape) is None
    finally:
        handle.remove()
    assert number(model, shape) == before


@pytest.mark.parametrize("name", ["resnet20", "mobilenet", "hf_vit", "hf_convnext"])
def test_networks_have_one(name: str) -> None:
    (first, shape), (second, _) = NETWORKS[name](), NETWORKS[name]()
    assert number(first, shape) == number(second, shape) is not None
