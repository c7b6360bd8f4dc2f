"""A model by name: one of Strata's own networks, or any `package.module:callable` that returns an nn.Module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import torch
from torch import nn

from strata.core.errors import BadInput, one_line
from strata.core.importing import find
from strata.models.densenet import densenet40
from strata.models.huggingface import PREFIX, load_folder
from strata.models.resnet import resnet20, resnet44, resnet56
from strata.models.resnet18 import resnet18, resnet18_gn

# name -> (maker, what the image side must be a multiple of)
BUILT_IN: dict[str, tuple[Callable[..., nn.Module], int]] = {
    "resnet20": (resnet20, 16),
    "resnet44": (resnet44, 16),
    "resnet56": (resnet56, 16),
    "densenet40": (densenet40, 32),
    "resnet18": (resnet18, 8),
    "resnet18_gn": (resnet18_gn, 8),
}
DEFAULT_CLASSES = 10


def load_model(
    name: str,
    classes: int | None = None,
    input_shape: tuple[int, ...] = (3, 32, 32),
    vocabulary: int | None = None,
    task: str = "classification",
    notes: list[str] | None = None,
    *,
    padding: int | None = None,
    anew: set[str] | None = None,
) -> nn.Module:
    """`classes` None means 10 for the built-in networks and the callable's own choice for others. `vocabulary`: ids of
    text, for a callable that has a parameter of this name. `task`: the name of the objective, for models that come
    without a head. `notes`: gets what there is to say of weights. `padding`: the id after a text's end, for models that
    go by it. `anew`: gets the entries that begin from random values, where a folder of weights has others."""
    if classes is not None and classes < 1:
        raise BadInput(f"the number of classes must be at least 1, not {classes}")
    if name.startswith(PREFIX):
        return load_folder(name, classes, task, [] if notes is None else notes, padding, anew)
    if ":" in name:
        made = _call(name, _find(name), classes, vocabulary)
        check_float32(made)
        return made
    if name not in BUILT_IN:
        raise BadInput(f"unknown model {name!r}: use {', '.join(BUILT_IN)}, hf:FOLDER or package.module:callable")
    make, multiple = BUILT_IN[name]
    if vocabulary is not None:
        raise BadInput(
            f"{name} takes images of 3 channels, such as 3x32x32, and the data is text: give a model of text"
        )
    if len(input_shape) != 3 or input_shape[0] != 3:
        raise BadInput(f"{name} takes images of 3 channels, such as 3x32x32, not {show_shape(input_shape)}")
    if input_shape[1] != input_shape[2] or input_shape[1] % multiple:
        raise BadInput(
            f"{name} takes square images whose side is a multiple of {multiple}, such as 3x32x32 or 3x64x64, "
            f"not {show_shape(input_shape)}"
        )
    return make(num_classes=classes or DEFAULT_CLASSES, image_size=input_shape[1])


def refuse_vocabulary(name: str, vocabulary: int | None) -> None:
    """Where it was asked for and the model has its own, or none."""
    if vocabulary is not None and (":" not in name or name.startswith(PREFIX) or not _takes_vocabulary(name)):
        raise BadInput(
            f"--vocabulary is for a callable that has a parameter of this name, not for {name}: leave it out"
        )


def check_float32(model: nn.Module) -> None:
    """Plans and runs say it alike, before anything slow."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            kind = str(parameter.dtype).removeprefix("torch.")
            raise BadInput(f"the model's {name} is {kind} and runs train in float32: give model.float()")


def show_shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _find(name: str) -> Callable[..., object]:
    found = find(
        name, "model", "package.module:callable, such as mypkg.nets:make_net", purpose="to make the model with"
    )
    if not callable(found) or isinstance(found, nn.Module):
        raise BadInput(f"{name!r} is not a function or class that makes an nn.Module")
    return found


def _call(name: str, make: Callable[..., object], classes: int | None, vocabulary: int | None) -> nn.Module:
    known = {"num_classes": classes} if classes is not None and _takes_classes(make) else {}
    asked = _parameters(make).get("vocabulary")
    if asked is not None and vocabulary is not None:
        known["vocabulary"] = vocabulary
    elif asked is not None and asked.default is asked.empty:
        raise BadInput(
            f"{name!r} makes a model of text, for a vocabulary: run it on data that are text, such as --data "
            "text:FILE.jsonl, and say to plan or fit without data how many ids there are, such as --vocabulary 257"
        )
    try:
        model = make(**known)
    except (Exception, SystemExit) as error:
        raise BadInput(f"calling {name!r} to make the model raised {one_line(error, kind=True)}") from error
    if not isinstance(model, nn.Module):
        raise BadInput(f"{name!r} must return a torch.nn.Module, not {type(model).__name__}")
    return model


def _takes_vocabulary(name: str) -> bool:
    return "vocabulary" in _parameters(_find(name))


def _takes_classes(make: Callable[..., object]) -> bool:
    parameters = _parameters(make)
    return "num_classes" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _parameters(make: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(make).parameters
    except (TypeError, ValueError):  # builtins without a signature
        return {}
