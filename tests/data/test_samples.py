"""Inputs of any kind: what a model takes of them, and what is refused."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from strata.core.errors import BadInput
from strata.data import (
    IGNORED,
    FederatedData,
    ImageSet,
    MultiLabel,
    NextToken,
    PerPosition,
    Regression,
    Samples,
    hold_out,
    parse_partition,
    wrap,
)
from strata.training import LocalTraining

IDS = torch.arange(12).view(4, 3)
LABELS = torch.tensor([0, 1, 1, 0])


def test_what_a_model_takes() -> None:
    images = torch.zeros(4, 3, 2, 2, dtype=torch.uint8)
    both = Samples({"image": images, "ids": IDS}, LABELS)
    assert [(one.name, one.shape, one.dtype) for one in both.spec.inputs] == [
        ("image", (3, 2, 2), torch.float32),  # prepared by then
        ("ids", (3,), torch.int64),
    ]
    assert both.has_images and not Samples({"ids": IDS}, LABELS).has_images
    assert isinstance(ImageSet(images, LABELS), Samples) and ImageSet(images, LABELS).spec.single


def test_parts_of_them() -> None:
    samples = Samples({"a": IDS, "b": IDS.float()}, LABELS)
    chosen = samples.subset(np.array([2, 0]))
    assert chosen.inputs["a"].tolist() == [[6, 7, 8], [0, 1, 2]] and chosen.targets.tolist() == [1, 0]
    assert [len(part) for part in samples.split(3)] == [3, 1]
    assert torch.equal(torch.cat([part.inputs["b"] for part in samples.split(3)]), samples.inputs["b"])
    grey = torch.arange(4, dtype=torch.uint8).view(4, 1, 1, 1).expand(4, 3, 2, 2)
    part = ImageSet(grey, LABELS, (0.5,) * 3, (0.2,) * 3).subset([3, 1])
    assert isinstance(part, ImageSet) and part.images.stride(1) == 0 and part.mean == (0.5,) * 3
    assert isinstance(pickle.loads(pickle.dumps(part)), ImageSet)


def test_what_does_not_fit_together() -> None:
    with pytest.raises(BadInput, match="there are 3 of ids but 4 targets"):
        Samples({"ids": IDS[:3]}, LABELS)
    with pytest.raises(BadInput, match="at least one input"):
        Samples({}, LABELS)
    with pytest.raises(BadInput, match="mean and std"):
        Samples({"ids": IDS}, LABELS, (0.5,), (0.5,))
    with pytest.raises(BadInput, match="training samples are ids 3, more 3 and test samples 3"):
        FederatedData(Samples({"ids": IDS, "more": IDS}, LABELS), Samples({"ids": IDS}, LABELS), "mine", 2)
    with pytest.raises(BadInput, match="there are no test samples"):
        FederatedData(Samples({"ids": IDS}, LABELS), Samples({"ids": IDS[:0]}, LABELS[:0]), "mine", 2)


def test_only_images_are_prepared() -> None:
    settings = LocalTraining(augmentation="cifar", mean=(0.5,) * 3, std=(0.25,) * 3)
    images = torch.full((2, 3, 4, 4), 255, dtype=torch.uint8)
    batch = (images, IDS[:2], IDS[:2].float())
    prepared = settings.prepared(batch)
    assert prepared[0].unique().tolist() == [2.0] and prepared[1] is batch[1] and prepared[2] is batch[2]
    augmented = settings.augmented(batch, torch.Generator().manual_seed(0))
    assert augmented[0].dtype == torch.float32 and augmented[1] is batch[1]


def test_a_transform_sees_one_input_or_all() -> None:
    def negative(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return -x

    def first_negative(inputs: tuple[Tensor, ...], generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
        return -inputs[0], *inputs[1:]

    alone = LocalTraining(transform=negative, preparation=negative)
    assert torch.equal(alone.prepared((IDS,))[0], -IDS)
    both = LocalTraining(transform=first_negative, preparation=first_negative)
    one, other = both.augmented((IDS, IDS), torch.Generator())
    assert torch.equal(one, -IDS) and torch.equal(other, IDS)


def test_a_share_is_held_out_of_any_samples() -> None:
    data = FederatedData(Samples({"x": IDS.float()}, IDS[:, 0].float()), Samples({"x": IDS.float()}, IDS[:, 0].float()),
                         "numbers", 1, objective=Regression())  # fmt: skip
    rest, held = hold_out(data, 0.25, seed=0)
    assert len(rest.train) == 3 and len(held) == 1 and rest.objective == Regression()
    assert sorted([*rest.train.targets.tolist(), *held.targets.tolist()]) == [0.0, 3.0, 6.0, 9.0]
    for text in ("dirichlet:0.1", "shards:2"):
        with pytest.raises(BadInput, match="goes by classes"):
            parse_partition(text, data, 2, 0)
    assert len(parse_partition("iid", data, 2, 0)) == 2


class Listed(Dataset):
    def __init__(self, *samples: object) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> object:
        return self.samples[index]


def test_labels_are_never_turned_into_classes_silently() -> None:
    image = torch.zeros(3, 2, 2, dtype=torch.uint8)
    for label in (0.5, 1.0, np.float64(2.0), torch.tensor(0.0)):
        with pytest.raises(BadInput, match="labels are float.*Regression"):
            wrap(Listed((image, 0), (image, label)), Listed((image, 0)))
    with pytest.raises(BadInput, match="classes are whole numbers"):
        wrap(Listed((image, [0, 1])), Listed((image, [1, 0])))
    with pytest.raises(BadInput, match="a label that is no number: 'cat'"):
        wrap(Listed((image, "cat")), Listed((image, 0)))
    for label in (np.int32(1), torch.tensor([1]), True, torch.tensor(1, dtype=torch.uint8)):
        assert wrap(Listed((image, label)), Listed((image, label))).train.targets.tolist() == [1]


def test_own_datasets_of_other_inputs() -> None:
    data = wrap(Listed((IDS[0], 0), (IDS[1], 1)), Listed((IDS[2], 1)))
    assert data.inputs.inputs[0].dtype == torch.int64 and data.classes == 2 and not data.train.has_images
    image = torch.full((3, 2, 2), 7, dtype=torch.uint8)
    named = [({"image": image, "age": torch.tensor([0.5])}, 1.25), ({"image": image, "age": torch.tensor([1.5])}, 2.5)]
    data = wrap(Listed(*named), Listed(named[0]), objective=Regression())
    assert data.inputs.names == ("image", "age") and data.classes == 1
    assert data.train.targets.tolist() == [1.25, 2.5] and data.train.inputs["image"].dtype == torch.uint8
    data = wrap(Listed((image, 1.0)), Listed((image, 2.0)), objective=Regression())
    assert data.train.mean == (round(7 / 255, 6),) * 3 and data.train.has_images
    with pytest.raises(
        BadInput, match="sample 1 of the training data set has the inputs age, the first one image, age"
    ):
        wrap(Listed(named[0], ({"age": torch.tensor([1.0])}, 2.0)), Listed(named[0]), objective=Regression())


def test_classes_by_position_are_counted_by_their_values() -> None:
    image = torch.zeros(3, 8, 8, dtype=torch.uint8)
    mask = torch.full((8, 8), IGNORED)
    mask[0, 0] = 3
    assert wrap(Listed((image, mask)), Listed((image, mask * 0)), objective=PerPosition()).classes == 4
    ids = torch.tensor([1, 2, 5])
    assert wrap(Listed((ids, ids)), Listed((ids, ids)), objective=NextToken()).classes == 6
    several = torch.tensor([1, 0, 1])
    assert wrap(Listed((ids, several)), Listed((ids, several)), objective=MultiLabel()).classes == 3  # as ever


def test_ids_are_not_taken_for_classes() -> None:
    image = torch.zeros(3, 2, 2, dtype=torch.uint8)
    with pytest.raises(BadInput, match="makes 5001 classes, and 2 of them occur: .* say so with classes=5001"):
        wrap(Listed((image, 0), (image, 5000)), Listed((image, 0)))
    assert wrap(Listed((image, 0), (image, 5000)), Listed((image, 0)), classes=5001).unseen == 4999


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.ones(2, dtype=torch.float64), "the input age is float64, and networks take float32: give age.float"),
        (torch.ones(2, dtype=torch.float16), "the input age is float16"),
        (
            torch.tensor([1.0, float("nan")]),
            "sample 0 of the training data set has values that are not finite.* in age",
        ),
        (torch.ones(2, dtype=torch.complex64), "has complex numbers in age"),
    ],
)
def test_inputs_that_no_network_takes(value: torch.Tensor, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        wrap(Listed(({"age": value}, 0)), Listed(({"age": value}, 0)))
