"""The client of benchmarks/flower.py: a module of its own, so that ray's workers import it and keep what it built."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.data import Subset

from benchmarks import common, plain


@cache
def train_images() -> plain.PilImages:
    train = common.data().train
    return plain.PilImages(train.images, train.labels, plain.Prepare(train.mean, train.std, augment=True))


@cache
def network(case: str) -> nn.Module:
    return plain.plain_model(case)


def train(message: Any, context: Any) -> Any:
    """What a client does: load the weights, train one epoch, answer with its weights."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    torch.set_num_threads(1)
    config = message.content["config"]
    model = network(str(config["case"]))
    model.load_state_dict(message.content["weights"].to_torch_state_dict())
    holds = common.partition(int(config["samples"]))[int(config["device"])]
    seen = plain.train_device(model, Subset(train_images(), holds.tolist()), common.LR)
    content = RecordDict({"weights": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"samples": seen})})
    return Message(content=content, reply_to=message)
