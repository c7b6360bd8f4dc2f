"""What there is to say where a model does not take its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from strata.graph.inputs import Input, InputSpec, arguments_of, parameter_of

IDS, PICTURES = "input_ids", "pixel_values"  # parameters of transformers' models that say what they take


def misfit(model: nn.Module, inputs: InputSpec, why: str, works: Callable[[InputSpec], bool]) -> str:
    """A sentence. `why`: the first line of what the model raised. `works`: whether it takes other inputs."""
    name = type(model).__name__
    known = {parameter_of(model, arguments_of(model, inputs), one.name): one for one in inputs.inputs}
    if IDS in known and known[IDS].dtype.is_floating_point:
        return (
            f"{name} takes text (its {IDS}), and this input is of real numbers, {inputs}: give it ids, such as "
            "those of --data text:FILE.jsonl"
        )
    if PICTURES in known and not known[PICTURES].dtype.is_floating_point:
        return f"{name} takes images (its {PICTURES}), and this input is of ids, {inputs}: give it images"
    most = _most_tokens(model, inputs, works)
    if most is not None:
        length = inputs.inputs[0].shape[0]
        return (
            f"{name} takes texts of at most {most} tokens, and these have {length}: give --length {most} (where there "
            f"is no data yet, {most} in --input)"
        )
    return f"{name} fails on input {inputs} (batch of 2): {why}.{_hint(model, inputs)}"


def _most_tokens(model: nn.Module, inputs: InputSpec, works: Callable[[InputSpec], bool]) -> int | None:
    """The longest text that the model takes, where this one is too long."""
    length = _length(inputs.inputs)
    if length is None or not _tables(model):
        return None

    def takes(size: int) -> bool:
        return works(InputSpec(tuple(replace(one, shape=(size,)) for one in inputs.inputs)))

    if not takes(2):  # with one, a model of a single fixed length may broadcast
        return None
    most, too_many = 2, length
    while too_many - most > 1:
        middle = (most + too_many) // 2
        most, too_many = (middle, too_many) if takes(middle) else (most, middle)
    return most


def _length(inputs: tuple[Input, ...]) -> int | None:
    """Of ids and their mask, which are as long as each other."""
    shapes = {one.shape for one in inputs}
    if any(one.dtype.is_floating_point for one in inputs) or len(shapes) > 1:
        return None
    shape = shapes.pop()
    return shape[0] if len(shape) == 1 and shape[0] > 2 else None


def _tables(model: nn.Module) -> list[str]:
    return [name for name, part in model.named_modules() if isinstance(part, nn.Embedding)]


def _hint(model: nn.Module, inputs: InputSpec) -> str:
    """What is most often wrong elsewhere."""
    tables = _tables(model)
    if not tables or not all(one.dtype.is_floating_point for one in inputs.inputs):
        return ""
    return (
        f" It looks like a model of text or other ids ({tables[0]} is an embedding), and this input is of real numbers:"
        " give it ids, as integers."
    )
