"""`hf:FOLDER`: a model of the transformers library, from a local folder; nothing is fetched."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from strata.core.errors import BadInput, one_line
from strata.core.paths import expanded
from strata.models.weights import FILES, INDICES, Sizes, enough, left_out, load, load_weights, not_loaded

PREFIX = "hf:"
# what is learnt -> the class of transformers that has a head for it
HEADS = {
    "next-token": "AutoModelForCausalLM",
    "per-position": "AutoModelForTokenClassification",
}
PICTURES = "AutoModelForImageClassification"
TEXTS = "AutoModelForSequenceClassification"


def load_folder(
    name: str,
    classes: int | None,
    task: str,
    notes: list[str],
    padding: int | None = None,
    anew: set[str] | None = None,
) -> nn.Module:
    """`name`: with its prefix. `notes`: gets what there is to say of its weights. `padding`: the id that the data have
    where a text has ended. `anew`: gets the entries that the folder has no values for."""
    folder = expanded(name.removeprefix(PREFIX))
    if not (folder / "config.json").is_file():
        raise BadInput(f"{folder} is no folder of a Hugging Face model: it has no config.json")
    transformers = _transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        maker = _maker(transformers, folder, config, task)
        model = maker.from_config(_for_training(config, classes, task))
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"the model in {folder} cannot be made: {one_line(error, 300, kind=True)}") from error
    model = model.float()
    left = list(model.state_dict())
    if has_weights(folder):
        said, left, sizes = _load(model, folder)
        notes += [*said, *left_out(folder, left, sizes, model)]
    else:
        notes.append(f"{folder} has no weights: the model begins from random ones")
    if anew is not None:
        anew.update(left)
    _pad_by(model.config, padding)
    return model


def load_onto(model: nn.Module, path: Path, anew: Collection[str] | None = None) -> list[str]:
    """Weights from elsewhere (weights.py), of a folder of transformers by its own loader."""
    if not (hasattr(model, "config") and (path / "config.json").is_file() and has_weights(path)):
        return load_weights(model, path, anew)
    said, left, sizes = _load(model, path)
    return [*said, *left_out(path, left, sizes, model, anew)]


def has_weights(folder: Path) -> bool:
    return any((folder / file).is_file() for file in (*FILES, *INDICES))


def _load(model: Any, folder: Path) -> tuple[list[str], list[str], Sizes]:
    """By transformers' own loader, which knows what entries were called when they were saved. What it finds goes into
    `model`, so that what it does not find begins as in a model made without weights. As weights.load: what there is to
    say, those entries, and the sizes of what is there."""
    transformers = _transformers()
    try:
        with _quiet(transformers.utils.logging):
            found, info = type(model).from_pretrained(
                folder,
                config=deepcopy(model.config),
                local_files_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception:
        return load(model, folder)  # which says what is wrong with them, if it cannot load them either
    own, sizes = model.state_dict(), {name: there for name, there, _ in info["mismatched_keys"]}
    fitting = own.keys() - set(info["missing_keys"]) - sizes.keys()
    if not enough(own, fitting):
        return load(model, folder)
    loaded = found.state_dict()
    with torch.no_grad():
        for name in fitting:
            own[name].copy_(loaded[name])
    return [], not_loaded(own, fitting), sizes


@contextmanager
def _quiet(log: Any) -> Iterator[None]:
    """Without a table of what was missing, which we say ourselves, and without a bar."""
    level, bar = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bar:
            log.enable_progress_bar()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise BadInput("hf: models are made by the transformers library: pip install transformers") from None
    return transformers


def _maker(transformers: Any, folder: Path, config: Any, task: str) -> Any:
    if task in HEADS:
        return getattr(transformers, HEADS[task])
    pictures = type(config) in getattr(transformers, PICTURES)._model_mapping
    if getattr(config, "is_encoder_decoder", False) and not pictures:
        raise BadInput(
            f"the model in {folder} is an encoder with a decoder ({config.model_type}), whose classifier goes by where "
            "a text ends, and a network that depends on the data cannot be cut: take an encoder, such as BERT, a "
            "decoder, such as GPT-2, or --objective per-position"
        )
    return getattr(transformers, PICTURES if pictures else TEXTS)


def _for_training(config: Any, classes: int | None, task: str) -> Any:
    """Without what only generation needs, and with so many classes; of next tokens the vocabulary says how many."""
    config.use_cache = False
    if task != "next-token" and classes is not None:
        config.num_labels = classes
    return config


def _pad_by(config: Any, padding: int | None) -> None:
    """A decoder's classifier finds the last token of a text by what comes after it, in the data. Once the model is
    made: tables of embeddings and positions go by the id that they were trained with."""
    for one in (config, config.get_text_config()):
        if padding is not None or getattr(one, "pad_token_id", 0) is None:
            one.pad_token_id = padding or 0
