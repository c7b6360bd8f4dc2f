"""InputSpec: what a model takes. Names, shapes and dtypes of its inputs, without the batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from strata.core.errors import BadInput
from strata.core.sizes import parse_input, parse_shape

MASK = "attention_mask"  # of text: where there is no padding. A model need not take it
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Input:
    """One input tensor; its first dim, the batch, is not part of `shape`.

    `held`: as the data holds it, where that is known. Elsewhere floats of the shape of images are taken for 8-bit ones,
    which are made floats when they go to the network."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    held: torch.dtype | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not all(isinstance(size, int) and size > 0 for size in self.shape):
            raise BadInput(f"input {self.name} has the shape {tuple(self.shape)}; its sizes must be whole and above 0.")

    @property
    def stored(self) -> torch.dtype:
        images = len(self.shape) == 3 and self.dtype.is_floating_point
        return self.held or (torch.uint8 if images else self.dtype)


@dataclass(frozen=True)
class InputSpec:
    """The inputs of a model, in the order in which a submodel takes them.

    >>> InputSpec.of({"ids": ((16,), torch.int64), "mask": ((16,), torch.bool)}).example(4)[0].shape
    torch.Size([4, 16])
    """

    inputs: tuple[Input, ...]

    def __post_init__(self) -> None:
        names = [one.name for one in self.inputs]
        if not names:
            raise BadInput("a model needs at least one input.")
        if len(set(names)) < len(names):
            raise BadInput(f"two inputs have the same name: {', '.join(names)}.")

    @classmethod
    def of(cls, given: InputsLike, model: nn.Module | None = None) -> InputSpec:
        """From a shape, a dict of names to (shape, dtype), the same as text ("ids:int64:64,mask:bool:64"), or an
        InputSpec, which stays as it is.

        A shape alone is one input of floats: of the model's own precision, named as its forward names its first."""
        if isinstance(given, InputSpec):
            return given
        if isinstance(given, str):
            named = parse_input(given)
            if isinstance(named, str):
                return cls(tuple(_input_of(part) for part in named.split(",")))
            given = named
        if isinstance(given, Mapping):
            return cls(tuple(Input(name, tuple(shape), dtype) for name, (shape, dtype) in given.items()))
        name = "x" if model is None else _first_parameter(model)
        return cls((Input(name, tuple(given), torch.float32 if model is None else float_dtype(model)),))

    @property
    def single(self) -> bool:
        return len(self.inputs) == 1

    @property
    def plain(self) -> tuple[int, ...] | InputSpec:
        """The shape alone where that says it all: one input of floats."""
        one = self.inputs[0]
        return one.shape if self.single and one.dtype.is_floating_point else self

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.inputs)

    @property
    def sample_bytes(self) -> int:
        """What one sample's inputs take."""
        return sum(torch.Size(one.shape).numel() * one.dtype.itemsize for one in self.inputs)

    @property
    def stored_bytes(self) -> int:
        """What they take as the data holds them."""
        return sum(torch.Size(one.shape).numel() * one.stored.itemsize for one in self.inputs)

    def stored_example(self, batch: int) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(batch, *one.shape, dtype=one.stored) for one in self.inputs)

    def example(self, batch: int, device: torch.device | str | None = None) -> tuple[Tensor, ...]:
        """Zeros: valid as numbers, as ids and as masks."""
        return tuple(torch.zeros(batch, *one.shape, dtype=one.dtype, device=device) for one in self.inputs)

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {"name": one.name, "shape": list(one.shape), "dtype": str(one.dtype).removeprefix("torch.")}
            for one in self.inputs
        ]

    @classmethod
    def from_json(cls, data: Iterable[Mapping[str, Any]]) -> InputSpec:
        return cls(
            tuple(Input(str(one["name"]), tuple(map(int, one["shape"])), dtype_named(one["dtype"])) for one in data)
        )

    @property
    def written(self) -> str:
        """As --input takes it."""
        shapes = ["x".join(map(str, one.shape)) for one in self.inputs]
        kinds = [str(one.dtype).removeprefix("torch.") for one in self.inputs]
        return ",".join(map(":".join, zip(self.names, kinds, shapes, strict=True)))

    def __str__(self) -> str:
        shapes = ["x".join(map(str, one.shape)) or "one number" for one in self.inputs]
        if self.single:
            return shapes[0]
        return ", ".join(f"{name} {shape}" for name, shape in zip(self.names, shapes, strict=True))


def _input_of(text: str) -> Input:
    name, dtype, shape = text.split(":")
    return Input(name, parse_shape(shape), dtype_named(dtype))


InputsLike = str | Sequence[int] | Mapping[str, tuple[Sequence[int], torch.dtype]] | InputSpec


@dataclass(frozen=True)
class Arguments:
    """How a model's forward is called with the inputs of a spec."""

    positional: tuple[str, ...]
    named: dict[str, str]  # parameter -> input

    @property
    def order(self) -> tuple[str, ...]:
        return (*self.positional, *self.named.values())

    def of(self, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(values[name] for name in self.positional), {p: values[name] for p, name in self.named.items()}


def arguments_of(model: nn.Module, inputs: InputSpec) -> Arguments:
    """By the names of forward's parameters; in order, if it takes any number of them. A single input of another name
    goes to the first. Among any further names (`**kwargs`) nothing goes: torch.export takes none there, and a name that
    is misspelt would be lost."""
    signature = inspect.signature(model.forward)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    by_name = {p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    unknown = [name for name in inputs.names if name not in by_name]
    if not unknown:
        try:
            bound = signature.bind(**{name: name for name in inputs.names})
        except TypeError as error:
            raise BadInput(f"{type(model).__name__}.forward cannot take {', '.join(inputs.names)}: {error}.") from error
        return Arguments(bound.args, bound.kwargs)
    if inspect.Parameter.VAR_POSITIONAL in kinds or (inputs.single and kinds & set(POSITIONAL)):
        return Arguments(inputs.names, {})
    has = ", ".join(sorted(by_name)) or "none of its own"
    raise BadInput(f"{type(model).__name__}.forward has no parameter named {unknown[0]}; it has {has}.")


def parameter_of(model: nn.Module, arguments: Arguments, name: str) -> str | None:
    """Of forward, to which this input goes; None where it goes among any number of them."""
    named = {given: parameter for parameter, given in arguments.named.items()}
    if name in named:
        return named[name]
    own = [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind in POSITIONAL]
    place = arguments.positional.index(name)
    return own[place] if place < len(own) else None


def taken_by(model: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Those of the inputs that a forward without a parameter for a mask can take: all but the mask."""
    parameters = inspect.signature(model.forward).parameters
    return tuple(name for name in names if name != MASK or name in parameters)


def float_dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())


def dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise BadInput(f"{name!r} is not a dtype of torch.")
    return dtype


def _first_parameter(model: nn.Module) -> str:
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind in POSITIONAL:
            return parameter.name
    return "x"


def input_json(plain: tuple[int, ...] | InputSpec) -> list[Any]:
    """Of InputSpec.plain: a shape as it always was, other inputs by name."""
    return plain.to_json() if isinstance(plain, InputSpec) else list(plain)


def input_from_json(data: Any) -> tuple[int, ...] | InputSpec:
    return InputSpec.from_json(data) if data and isinstance(data[0], Mapping) else tuple(map(int, data))


def show_input(plain: tuple[int, ...] | InputSpec) -> str:
    return str(plain) if isinstance(plain, InputSpec) else "x".join(map(str, plain))


def same_inputs(one: InputSpec, other: InputSpec) -> bool:
    """Names matter only where there are several; so does a network's own precision, in tests, not at all."""
    alone = one.single and other.single
    kinds = [[(i.shape, i.dtype.is_floating_point, "" if alone else i.name) for i in s.inputs] for s in (one, other)]
    return kinds[0] == kinds[1]


def images_last(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """With the channels of images last in memory."""
    return tuple(one.contiguous(memory_format=torch.channels_last) if one.dim() == 4 else one for one in tensors)
