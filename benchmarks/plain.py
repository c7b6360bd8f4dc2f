"""The plain PyTorch loop, as research repositories write it: what Strata is measured against.

One process; a DataLoader over PIL images with torchvision's per-sample transforms (torchvision cannot be imported here:
they are written out below, operation by operation); a deep copy of the model per device; SGD with momentum; the mean of
state dicts; evaluation in batches of 1024 with batch norm in train mode. The model is the plain module of the same cut,
with the same weights, that Strata's devices train.

    .venv/bin/python -m benchmarks.plain --case 0.125 --threads 1
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Subset

from benchmarks import common

Transform = Callable[[Image.Image], Tensor]
EVALUATION_BATCH = 1024


class PilImages(Dataset[tuple[Tensor, int]]):
    """As torchvision.datasets.CIFAR10: an array of images, each made a PIL image when it is asked for."""

    def __init__(self, images: Tensor, labels: Tensor, transform: Transform) -> None:
        self.images = images.permute(0, 2, 3, 1).contiguous().numpy()
        self.labels = labels.tolist()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


@dataclass(frozen=True)
class Prepare:
    """ToTensor and Normalize; before them, in training, RandomCrop(32, padding=4) and RandomHorizontalFlip()."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: bool

    def __call__(self, image: Image.Image) -> Tensor:
        if self.augment:
            width, height = image.size
            image = ImageOps.expand(image, border=4, fill=0)
            top = int(torch.randint(0, image.height - height + 1, size=(1,)))
            left = int(torch.randint(0, image.width - width + 1, size=(1,)))
            image = image.crop((left, top, left + width, top + height))
            if torch.rand(1) < 0.5:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        tensor = torch.from_numpy(np.array(image, np.uint8, copy=True)).permute(2, 0, 1).contiguous()
        tensor = tensor.to(torch.get_default_dtype()).div(255)
        mean = torch.as_tensor(self.mean, dtype=tensor.dtype).view(-1, 1, 1)
        std = torch.as_tensor(self.std, dtype=tensor.dtype).view(-1, 1, 1)
        return tensor.clone().sub_(mean).div_(std)


def plain_model(case: str) -> nn.Module:
    """The network of this cut as a module of its own. (Its forward pass has no calls of submodules: no slower.)"""
    if case == "1":
        return copy.deepcopy(common.model())
    cut = common.cut_of(case)
    small: Any = common.graph().submodel(cut, cut.extract(common.model().state_dict()))
    small.cut = None  # Strata's own; a deep copy should not pay for it
    return small


def train_device(model: nn.Module, samples: Dataset[tuple[Tensor, int]], lr: float, batch_size: int = 32) -> int:
    """One epoch of local SGD, in place; how many samples it saw."""
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=lr, momentum=0.9, weight_decay=1e-5)
    seen = 0
    for x, y in DataLoader(samples, batch_size=batch_size, shuffle=True):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        seen += len(y)
    return seen


def average(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        name: torch.stack([s[name].float() for s in states]).mean(0).to(states[0][name].dtype) for name in states[0]
    }


def evaluate(model: nn.Module, samples: Dataset[tuple[Tensor, int]]) -> float:
    """Accuracy, each batch normalised by its own statistics."""
    model.train()
    right = total = 0
    with torch.no_grad():
        for x, y in DataLoader(samples, batch_size=EVALUATION_BATCH, shuffle=False):
            right += int((model(x).argmax(1) == y).sum())
            total += len(y)
    return right / total


@dataclass(frozen=True)
class Round:
    samples: int
    train_seconds: float  # with the deep copies
    average_seconds: float
    evaluate_seconds: float
    images: int


def play(model: nn.Module, train: PilImages, holds: Sequence[np.ndarray], test: PilImages, images: int) -> Round:
    """One round over devices that hold these samples, and an evaluation on the first `images` test images."""
    started, states, samples = time.perf_counter(), [], 0
    for indices in holds:
        local = copy.deepcopy(model)
        samples += train_device(local, Subset(train, indices.tolist()), common.LR)
        states.append(local.state_dict())
    trained = time.perf_counter()
    model.load_state_dict(average(states))
    averaged = time.perf_counter()
    if images:
        evaluate(model, Subset(test, range(images)))
    evaluated = time.perf_counter()
    return Round(samples, trained - started, averaged - trained, evaluated - averaged, images)


def measure(case: str, devices: int, samples: int, images: int) -> Round:
    torch.manual_seed(0)  # its own process, and the loop's style: the global seed
    data, parts = common.data(), common.partition(samples)
    train = PilImages(data.train.images, data.train.labels, Prepare(data.train.mean, data.train.std, augment=True))
    test = PilImages(data.test.images, data.test.labels, Prepare(data.test.mean, data.test.std, augment=False))
    model = plain_model(case)
    play(copy.deepcopy(model), train, [parts[0][:64]], test, min(images, 64))  # buffers and kernels exist from now on
    return play(model, train, [parts[device] for device in range(devices)], test, images)


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--case", choices=common.CASES, default="0.125")
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--devices", type=int)
    parser.add_argument("--samples", type=int)
    parser.add_argument("--images", type=int, default=0, help="test images to evaluate after the round")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    size = common.size(args.quick)
    done = measure(args.case, args.devices or size.plain_devices, args.samples or size.samples, args.images)
    rate = done.samples / (done.train_seconds + done.average_seconds)
    if args.json:
        print(json.dumps({**done.__dict__, "samples_per_second": rate, "threads": torch.get_num_threads()}))
    else:
        print(f"{common.title(args.case)}, {torch.get_num_threads()} threads: {rate:.0f} samples/s")
        if done.images:
            print(f"evaluation: {done.images / done.evaluate_seconds:.0f} images/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
