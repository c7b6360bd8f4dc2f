"""Arguments that several commands share. Values come back checked, or BadInput says what is wrong with them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from strata.core.errors import BadInput
from strata.core.sizes import at_least_one, parse_bytes, parse_ratio, parse_shape, show_bytes

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "add_budget_arguments", "add_model_arguments", "at_least_one", "budgets_of", "constraints_of", "input_shape_of",
    "model_of", "parse_bytes", "parse_ratio", "parse_shape", "show_bytes", "split_list",
]  # fmt: skip


def add_model_arguments(parser: argparse.ArgumentParser, of_data: bool = False) -> None:
    """--model, --classes, --input, --batch, --micro-batch. Classes and input are the data's where there is data."""
    classes = (
        "number of classes: the data's" if of_data else "number of classes (default 10, or what the callable chooses)"
    )
    shape = "input shape, no batch: the data's" if of_data else "input shape, no batch (default 3x32x32)"
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", default="resnet20", metavar="NAME",
        help="resnet20, resnet44, resnet56, densenet40 or package.module:callable (default resnet20)",
    )  # fmt: skip
    group.add_argument("--classes", metavar="N", help=classes)
    group.add_argument("--input", default="3x32x32", metavar="CxHxW", help=shape)
    group.add_argument("--batch", default="32", metavar="N", help="samples in a mini-batch (default 32)")
    group.add_argument(
        "--micro-batch", type=int, metavar="N",
        help="samples of it at a time, gradients summed over the batch; batch norm sees only those",
    )  # fmt: skip


def add_budget_arguments(parser: argparse.ArgumentParser) -> None:
    """--constraint, --budget, --accounting; both budgets may be repeated or comma lists: heterogeneous levels."""
    group = parser.add_argument_group("memory")
    group.add_argument(
        "--constraint", action="append", metavar="S",
        help="what the width-scaled model of this ratio needs, e.g. 0.25; several (0.125,0.25): device levels",
    )  # fmt: skip
    group.add_argument(
        "--budget", action="append", metavar="SIZE", help="bytes per device, e.g. 24MiB; several: device levels"
    )
    group.add_argument(
        "--accounting", choices=("paper", "peak"),
        help="how bytes are counted (default: paper with --constraint, peak with --budget)",
    )  # fmt: skip


def split_list(values: str | Sequence[str] | None) -> list[str]:
    """Repeated options and comma lists: ["0.125,0.25", "0.5"] -> ["0.125", "0.25", "0.5"]."""
    if values is None:
        return []
    texts = [values] if isinstance(values, str) else values
    parts = [part.strip() for text in texts for part in text.split(",")]
    if any(not part for part in parts):
        raise BadInput(f"a list is written a,b,c with no empty places, not {','.join(texts)!r}")
    return parts


def constraints_of(args: argparse.Namespace) -> list[float]:
    return [parse_ratio(value) for value in split_list(args.constraint)]


def budgets_of(args: argparse.Namespace) -> list[int]:
    return [parse_bytes(value) for value in split_list(args.budget)]


def input_shape_of(args: argparse.Namespace) -> tuple[int, ...]:
    return parse_shape(args.input)


def model_of(args: argparse.Namespace) -> nn.Module:
    """The model --model names, made for --classes and --input."""
    from strata.models.loading import load_model  # torch: only once it is needed

    classes = None if args.classes is None else at_least_one(args.classes, "--classes")
    return load_model(args.model, classes, input_shape_of(args))
