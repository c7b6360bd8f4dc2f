"""`strata methods`: what --method accepts."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strata.methods.card import Card

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "methods", help="the methods, what their devices train and the papers they come from",
        description="The methods that --method accepts.", epilog="example: strata methods --json",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="as JSON on stdout")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> None:
    from strata.methods import METHODS  # torch: only once it is needed

    cards = [method.card for method in METHODS.values()]
    if args.json:
        print(json.dumps([to_json(card) for card in cards], indent=2))
        return
    for card in cards:
        print(f"{card.name}\n  a device trains  {card.trains}\n  evaluated        {card.evaluates}")
        print(f"  several levels   {card.levels}\n  paper            {card.paper}")
        if card.options:
            print(f"  options          {', '.join(card.options)}")
    print("auto\n  what `strata fit` recommends within a --budget (docs/fit.md)")
    print("your own\n  --method package.module:Class   (docs/adding-a-method.md)")


def to_json(card: Card) -> dict[str, Any]:
    keys = ("name", "trains", "evaluates", "levels", "paper", "label", "colour")
    return {**{key: getattr(card, key) for key in keys}, "options": list(card.options)}
