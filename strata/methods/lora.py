"""LoRA: beside each target layer stands a pair of thin ones, whose product is added; they and the classifier train.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022, with alpha = rank. The pairs are layers of
the model that devices train parts of (`prepare`), so they are counted, sent, averaged and checked like all others, and
after the first time nothing else is sent. model.safetensors has them merged into the weights beside which they stand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from strata.core.errors import BadInput
from strata.core.settings import Setting
from strata.graph.tied import aliases
from strata.methods.base import OneCut
from strata.methods.card import Card
from strata.methods.heads import called

if TYPE_CHECKING:
    from strata.graph import Cut, InputSpec

RANK = 8


class Adapted(nn.Module):
    """A model with pairs of layers beside some of its own; `places` says of each pair where it stands."""

    def __init__(self, model: nn.Module, inputs: InputSpec, rank: int, places: list[str]) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs
        self.places = {place.replace(".", "-"): place for place in places}
        self.adapters = nn.ModuleDict(
            {name: _pair(model.get_submodule(place), rank) for name, place in self.places.items()}
        )

    def forward(self, *inputs: Tensor) -> Any:
        def hook(pair: nn.Module) -> Any:
            return lambda module, given, value: value + pair(given[0])

        parts = [(self.model.get_submodule(place), self.adapters[name]) for name, place in self.places.items()]
        handles = [part.register_forward_hook(hook(pair)) for part, pair in parts]
        try:
            return called(self.model, self.inputs, inputs)
        finally:
            for handle in handles:
                handle.remove()

    def merged(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's own entries, with what the pairs add."""
        found = {name: tensor for name, tensor in state.items() if name.startswith("model.")}
        for name, place in self.places.items():
            down, up = (state[f"adapters.{name}.{number}.weight"] for number in (0, 1))
            added = torch.einsum("or,r...->o...", up.flatten(1), down)
            weight = f"model.{place}.weight"
            found[weight] = found[weight] + (added.T if _transposed(self.model.get_submodule(place)) else added)
        return found


def adapted(model: nn.Module, inputs: InputSpec, rank: int = RANK, targets: str | None = None) -> Adapted:
    """`targets`: names of parts, or how they end, such as "q_proj,v_proj"; None: every linear layer and convolution
    that runs, but the last, which is the classifier."""
    *places, _ = _called_parts(model, inputs) or [""]
    shared = {id(model.get_parameter(name)) for name in aliases(model)}  # what is added to one use would be to all
    places = [place for place in places if id(model.get_submodule(place).weight) not in shared]
    if targets is not None:
        wanted = [one.strip() for one in targets.split(",")]
        lacking = [one for one in wanted if not any(_is_named(place, one) for place in places)]
        if lacking:
            ends = ", ".join(dict.fromkeys(place.rpartition(".")[2] for place in places))
            raise BadInput(f"{type(model).__name__} has no layer {lacking[0]} for lora: its layers end in {ends}")
        places = [place for place in places if any(_is_named(place, one) for one in wanted)]
    if not places:
        raise BadInput(f"{type(model).__name__} has no linear layer or convolution below its last for lora")
    return Adapted(model, inputs, rank, places)


@dataclass(frozen=True)
class Lora(OneCut):
    card = Card(
        "lora",
        label="LoRA",
        colour="#3b5bdb",
        trains="pairs of thin layers beside the model's own, and the classifier; all weights stay as they are",
        evaluates="the whole model",
        levels="the same on all devices, which must all be able to hold it",
        paper="Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022",
        for_pretrained=True,
        options={
            "rank": Setting(f"how thin the pairs are (default {RANK})", metavar="R", least=1, whole=True),
            "targets": Setting("layers beside which they stand, such as q_proj,v_proj", metavar="NAMES"),
        },
    )
    rank: int = field(default=RANK, metadata={"since": 2})
    targets: str | None = field(default=None, metadata={"since": 2})

    @classmethod
    def prepare(cls, model: nn.Module, inputs: InputSpec, rank: int = RANK, targets: str | None = None) -> nn.Module:
        return adapted(model, inputs, rank, targets)

    @property
    def setting(self) -> str:
        return f"rank {self.rank}"

    @cached_property
    def cut(self) -> Cut:
        return self.graph.only(name for name in self.graph.parameter_names if name.startswith("adapters."))


def _called_parts(model: nn.Module, inputs: InputSpec) -> list[str]:
    """Of the parts that a pair can stand beside, those that run, in the order of their last call."""
    seen: list[str] = []

    def hook(name: str) -> Any:
        def after(module: nn.Module, given: Any, value: Any) -> None:
            if name in seen:
                seen.remove(name)
            seen.append(name)

        return after

    handles = [part.register_forward_hook(hook(name)) for name, part in model.named_modules() if _has_pair(part)]
    modes = [(part, part.training) for part in model.modules()]
    try:
        with torch.no_grad():
            called(model.eval(), inputs, inputs.example(2))
    finally:
        for part, mode in modes:
            part.training = mode
        for handle in handles:
            handle.remove()
    return seen


def _is_named(place: str, name: str) -> bool:
    return place == name or place.endswith(f".{name}")


def _has_pair(part: nn.Module) -> bool:
    return isinstance(part, nn.Linear) or (isinstance(part, nn.Conv2d) and part.groups == 1) or _transposed(part)


def _transposed(part: nn.Module) -> bool:
    """GPT-2's linear layer, whose weight is [in, out]."""
    return type(part).__name__ == "Conv1D" and hasattr(part, "nf")


def _pair(part: nn.Module, rank: int) -> nn.Sequential:
    """Down to the rank as the part goes, then up from it; up is zero, so that in the beginning nothing is added."""
    down: nn.Module
    up: nn.Linear | nn.Conv2d
    if isinstance(part, nn.Conv2d):
        shape: Any = {
            key: getattr(part, key) for key in ("kernel_size", "stride", "padding", "dilation", "padding_mode")
        }
        down = nn.Conv2d(part.in_channels, rank, **shape, bias=False)
        up = nn.Conv2d(rank, part.out_channels, 1, bias=False)
    else:
        assert isinstance(part.weight, Tensor)
        taken, given = part.weight.shape if _transposed(part) else reversed(part.weight.shape)
        down, up = nn.Linear(taken, rank, bias=False), nn.Linear(rank, given, bias=False)
    nn.init.zeros_(up.weight)
    return nn.Sequential(down, up)
