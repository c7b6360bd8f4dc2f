"""Data sets as the paper's experiments use them: devices, rounds, and sizes that are known without having the data."""

from __future__ import annotations

from dataclasses import dataclass

from strata.results.appearance import label_of


@dataclass(frozen=True)
class Setup:
    data: str
    classes: int
    input: tuple[int, ...]
    devices: int
    per_round: int
    rounds: int  # the paper's R
    samples: int  # training samples: for estimates only, the run takes what is on disk
    test_samples: int
    augmentation: str  # the data's own
    each: int | None = None  # samples of a device; None: all are dealt
    vocabulary: int | None = None  # of text: how many ids there are

    @property
    def per_device(self) -> int:
        """For estimates."""
        return self.each or self.samples // self.devices

    def partition(self, name: str) -> str:
        """As a run is asked for it. Writers have what they have."""
        return name if self.each is None or name == WRITERS else f"{name}:{self.each}"


SETUPS = {
    setup.data: setup
    for setup in (
        Setup("cifar10", 10, (3, 32, 32), 100, 10, 2500, 50_000, 10_000, "cifar"),
        Setup("cifar100", 100, (3, 32, 32), 100, 10, 2500, 50_000, 10_000, "cifar"),
        # the paper states neither class count (the authors' code: 62 and 200); LEAF's split by sample is 90 : 10,
        # and the authors give each device 180 images
        Setup("femnist", 62, (3, 32, 32), 3550, 35, 1000, 724_000, 81_000, "femnist", each=180),
        Setup("tinyimagenet", 200, (3, 64, 64), 100, 10, 2500, 100_000, 10_000, "tinyimagenet"),
        Setup("imagenet64", 1000, (3, 64, 64), 500, 10, 4000, 1_281_167, 50_000, "imagenet64"),
        # not of the paper: text, by MiniLM's tokenizer and by characters
        Setup("banking77", 77, (32,), 100, 10, 30, 10_003, 3_080, "none", vocabulary=30_522),
        Setup("20newsgroups", 20, (64,), 100, 10, 30, 11_314, 7_532, "none", vocabulary=30_522),
        Setup("shakespeare", 75, (80,), 100, 10, 200, 4_266, 10_402, "none", vocabulary=75),
        Setup("digits", 10, (3, 32, 32), 30, 5, 100, 1500, 297, "none"),  # not of the paper: for trying things out
    )
}

IID, NONIID = "iid", "dirichlet:0.1"  # non-iid FEMNIST too: not by writer
WRITERS = "user"

_LABELS = {
    "cifar10": "CIFAR10", "cifar100": "CIFAR100", "femnist": "FEMNIST", "tinyimagenet": "TinyImageNet",
    "imagenet64": "ImageNet (64×64)", "resnet20": "ResNet20", "resnet44": "ResNet44", "resnet56": "ResNet56",
    "resnet18": "ResNet18", "resnet18_gn": "ResNet18 with group norm",
    "densenet40": "DenseNet40", "banking77": "Banking77", "20newsgroups": "20 Newsgroups",
    "shakespeare": "Shakespeare", "minilm-l6": "MiniLM-L6",
    "dirichlet:0.1": "non-iid (Dirichlet 0.1)", "user": "by writer",
}  # fmt: skip


def label(name: str) -> str:
    """Of a data set, a network, a distribution or a method."""
    return _LABELS.get(name) or label_of(name)
