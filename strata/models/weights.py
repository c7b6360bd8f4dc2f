"""Weights from elsewhere into a model: of a run, of a folder of Hugging Face's, or of a file.

Names are matched up to a prefix; what is of another size (the head, as a rule) or missing stays as the model has it,
and is named.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from strata.core.errors import BadInput, one_line

FILES = ("model.safetensors", "pytorch_model.bin")
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")  # of weights in several files
INSIDE = ("state_dict", "model_state_dict", "model")  # where training scripts put a state dict beside other things
ENOUGH = 0.5  # of the model's entries: fewer are another model's
Sizes = Mapping[str, Sequence[int]]
NAMED = 6  # names in a sentence, at the most


def load_weights(model: nn.Module, path: Path, anew: Collection[str] | None = None) -> list[str]:
    """What there is to say of it, a sentence each. `anew`: the entries that the model has from nowhere else (None: all
    of them)."""
    said, left, sizes = load(model, path)
    return [*said, *left_out(path, left, sizes, model, anew)]


def load(model: nn.Module, path: Path) -> tuple[list[str], list[str], Sizes]:
    """What there is to say of their numbers, the entries that were not loaded, and the sizes of what is there."""
    found = _renamed(read_weights(path), model)
    own = model.state_dict()
    fitting = {name: tensor for name, tensor in found.items() if name in own and own[name].shape == tensor.shape}
    if not enough(own, fitting):
        raise BadInput(_refusal(model, path, found, fitting))
    said = _converted(path, fitting, own)
    with torch.no_grad():
        for name, tensor in fitting.items():
            own[name].copy_(tensor)
    return said, not_loaded(own, fitting), {name: tuple(one.shape) for name, one in found.items()}


def enough(own: Mapping[str, Tensor], fitting: Collection[str]) -> bool:
    """Whether so many of the model's entries are the same model's."""
    wanted = _wanted(own)
    return len([name for name in wanted if name in fitting]) >= max(1, ENOUGH * len(set(map(_place(own), wanted))))


def not_loaded(own: Mapping[str, Tensor], fitting: Collection[str]) -> list[str]:
    place = _place(own)
    loaded = {place(name) for name in fitting}  # a weight that is used twice may be there under one of its names
    return [name for name in _wanted(own) if place(name) not in loaded]


def _wanted(own: Mapping[str, Tensor]) -> list[str]:
    return [name for name in own if not name.endswith("num_batches_tracked")]


def read_weights(path: Path) -> dict[str, Tensor]:
    """From a folder or a file; of what torch.save wrote, without running code in it."""
    if path.is_dir():
        return _of_folder(path)
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return _state_dict(_of_torch(path))
    except FileNotFoundError:
        raise BadInput(f"there is no file {path} to start from") from None
    except Exception as error:
        raise BadInput(f"{path} does not hold weights for this model: {one_line(error, 300)}") from error


def _of_torch(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of how the file was pickled
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except RuntimeError as error:  # of the reader of archives
            raise BadInput("the file is damaged, or was cut short") from error
        except Exception as error:  # of any kind, where it is no pickle; torch's words are a page
            raise BadInput(
                "it is no state dict that torch.save has written (a whole module, or other objects than tensors and "
                "numbers, are not read, since that could run code): save model.state_dict()"
            ) from error


def _of_folder(folder: Path) -> dict[str, Tensor]:
    for name in FILES:
        if (folder / name).is_file():
            return read_weights(folder / name)
    for name in INDICES:
        if (folder / name).is_file():
            parts = sorted(set(_index(folder / name).values()))
            return {key: tensor for part in parts for key, tensor in read_weights(folder / part).items()}
    if (folder / "checkpoint").is_dir():
        raise BadInput(f"the run in {folder} is not finished, so it has no {FILES[0]} to start from yet")
    raise BadInput(f"there are no weights in the folder {folder}: it has neither {' nor '.join(FILES)}")


def _index(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path} is not an index of weights: {one_line(error, 200)}") from error


def _state_dict(value: Any) -> dict[str, Tensor]:
    if isinstance(value, Mapping):
        inner = next((value[key] for key in INSIDE if isinstance(value.get(key), Mapping)), value)
        found = _tensors(inner)
        if not found:  # under a name of its own: there should be one alone that it can be
            within = [one for one in map(_tensors, inner.values()) if one]
            found = within[0] if len(within) == 1 else {}
        if found:
            return found
    raise BadInput(f"it holds {type(value).__name__}, not a state dict of tensors")


def _tensors(value: Any) -> dict[str, Tensor]:
    named = value.items() if isinstance(value, Mapping) else ()
    return {str(name): tensor for name, tensor in named if isinstance(tensor, Tensor)}


def _converted(path: Path, fitting: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    """What there is to say of weights of another type than the model's; those that are none, or would become others,
    are refused."""
    kinds: dict[torch.dtype, bool] = {}  # and whether all are held exactly
    for name, tensor in fitting.items():
        held = own[name]
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise BadInput(f"{path} has NaN in {name}: a training that failed left no weights to start from")
        if tensor.dtype == held.dtype:
            continue
        there, here = (str(one.dtype).removeprefix("torch.") for one in (tensor, held))
        became = tensor.to(held.dtype)
        same = bool((became.to(tensor.dtype) == tensor).all())
        if tensor.is_floating_point() != held.is_floating_point() or tensor.is_complex():
            raise BadInput(
                f"{path} has {there} in {name}, and the model has {here} there: convert them if that is meant"
            )
        if not same and (not held.is_floating_point() or bool((became.isinf() & tensor.isfinite()).any())):
            raise BadInput(f"{path} has values in {name} that {here} cannot hold ({there} there)")
        if held.is_floating_point():
            kinds[tensor.dtype] = kinds.get(tensor.dtype, True) and same
    return [
        f"{path} has weights in {str(kind).removeprefix('torch.')}, "
        + ("which become float32 exactly" if same else "which are rounded to float32")
        for kind, same in kinds.items()
    ]


def _renamed(found: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """By the model's names: less a prefix, or with one more, whichever fits most."""
    own = {name: tensor.shape for name, tensor in model.state_dict().items()}

    def fits(named: Mapping[str, Tensor]) -> tuple[int, int]:
        there = [name for name in named if name in own]
        return sum(own[name] == named[name].shape for name in there), len(there)

    return max(_candidates(found, own), key=fits)  # the first of equals: as they are


def _candidates(found: Mapping[str, Tensor], own: Mapping[str, Any]) -> Iterator[dict[str, Tensor]]:
    yield dict(found)
    for prefix in _prefixes(found):
        # what has not the prefix may still be there by its name: the head beside a backbone
        yield {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    for prefix in _prefixes(own):
        yield {name if name in own else prefix + name: tensor for name, tensor in found.items()}


def _prefixes(names: Mapping[str, Any]) -> list[str]:
    """Of one or two parts, such as "module." and "model.encoder."."""
    parts = [name.split(".") for name in names]
    made = [".".join(one[:count]) + "." for one in parts for count in (1, 2) if len(one) > count]
    return list(dict.fromkeys(made))


def _place(own: Mapping[str, Tensor]) -> Any:
    """Where an entry's values are: the same for all names of one weight."""
    return lambda name: (own[name].data_ptr(), own[name].shape) if own[name].numel() else name


def left_out(
    path: Path, left: Sequence[str], sizes: Sizes, model: nn.Module, anew: Collection[str] | None = None
) -> list[str]:
    """The sentences on entries of the model that were not loaded. `sizes`: of what is there."""
    own = model.state_dict()

    def of(name: str) -> str:
        if name not in sizes:
            return f"{name} (not there)"
        there, here = ("x".join(map(str, size)) for size in (sizes[name], own[name].shape))
        return f"{name} ({there} there, {here} here)"

    def sentence(what: str, names: Sequence[str]) -> list[str]:
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        return [f"left out of {path}, and {what}: {', '.join(map(of, names[:NAMED]))}{more}"] if names else []

    kept = [] if anew is None else [name for name in left if name not in anew]
    begun = [name for name in left if name not in kept]
    return sentence("begun anew", begun) + sentence("left as the model's own folder has it", kept)


def _refusal(model: nn.Module, path: Path, found: Mapping[str, Tensor], fitting: Mapping[str, Tensor]) -> str:
    """One sentence: what there is, and what would be right."""
    own = model.state_dict()
    there, here = next(iter(found), "nothing"), next(iter(own))
    other = next((name for name in found if name in own and name not in fitting), None)
    if other is not None:
        sizes = ("x".join(map(str, one[other].shape)) for one in (found, own))
        why = f"{other} is {' there and '.join(sizes)} here"
    else:
        why = f"its first is called {there} and the model's {here}"
    return (
        f"{path} does not hold weights for this model: {len(fitting)} of {len(own)} entries of {type(model).__name__} "
        f"are there in their size ({why}); give weights of the same network"
    )
