"""`hf:FOLDER`: a model of the transformers library, from a local folder; nothing is fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from strata.core.errors import BadInput, one_line
from strata.core.paths import expanded
from strata.models.weights import FILES, INDICES, load_weights

PREFIX = "hf:"
# what is learnt -> the class of transformers that has a head for it
HEADS = {
    "next-token": "AutoModelForCausalLM",
    "per-position": "AutoModelForTokenClassification",
}
PICTURES = "AutoModelForImageClassification"
TEXTS = "AutoModelForSequenceClassification"


def load_folder(name: str, classes: int | None, task: str, notes: list[str]) -> nn.Module:
    """`name`: with its prefix. `notes`: gets what there is to say of its weights."""
    folder = expanded(name.removeprefix(PREFIX))
    if not (folder / "config.json").is_file():
        raise BadInput(f"{folder} is no folder of a Hugging Face model: it has no config.json")
    transformers = _transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        model = _maker(transformers, config, task).from_config(_for_training(config, classes, task))
    except Exception as error:
        raise BadInput(f"the model in {folder} cannot be made: {one_line(error, 300, kind=True)}") from error
    if has_weights(folder):
        notes += load_weights(model, folder)
    else:
        notes.append(f"{folder} has no weights: the model begins from random ones")
    return model.float()


def has_weights(folder: Path) -> bool:
    return any((folder / file).is_file() for file in (*FILES, *INDICES))


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise BadInput("hf: models are made by the transformers library: pip install transformers") from None
    return transformers


def _maker(transformers: Any, config: Any, task: str) -> Any:
    if task in HEADS:
        return getattr(transformers, HEADS[task])
    pictures = type(config) in getattr(transformers, PICTURES)._model_mapping
    return getattr(transformers, PICTURES if pictures else TEXTS)


def _for_training(config: Any, classes: int | None, task: str) -> Any:
    """Without what only generation needs, and with so many classes; of next tokens the vocabulary says how many."""
    config.use_cache = False
    if task != "next-token" and classes is not None:
        config.num_labels = classes
    if getattr(config, "pad_token_id", 0) is None:  # a decoder's classifier finds the last token by it
        config.pad_token_id = 0
    return config
