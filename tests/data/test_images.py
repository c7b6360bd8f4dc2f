from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from strata.core.errors import BadInput
from strata.data import FederatedData, ImageSet, hold_out, wrap
from strata.data.images import channel_statistics


def images(count: int) -> torch.Tensor:
    return torch.arange(count * 12, dtype=torch.uint8).view(count, 3, 2, 2)


def test_an_image_set_checks_itself():
    with pytest.raises(BadInput, match="uint8"):
        ImageSet(images(2).float(), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(BadInput, match="2 images but 3 labels"):
        ImageSet(images(2), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(BadInput, match="int64"):
        ImageSet(images(2), torch.zeros(2))
    with pytest.raises(BadInput, match="mean and std"):
        ImageSet(images(2), torch.zeros(2, dtype=torch.int64), (0.5,), (0.5,))
    part = ImageSet(images(2), torch.tensor([0, 3]))
    with pytest.raises(BadInput, match="within 0 to 2"):
        FederatedData(part, part, "mine", classes=3)


def test_statistics_by_hand():
    pixels = torch.tensor([0, 255, 0, 255, 51, 51, 51, 51], dtype=torch.uint8).view(1, 2, 2, 2)
    mean, std = channel_statistics(pixels)
    assert mean == (0.5, 0.2) and std == (0.5, round(1 / 255, 6))  # a constant channel counts as one grey level wide


def test_own_datasets_are_kept_as_uint8():
    labels = torch.tensor([0, 2, 1])
    from_bytes = wrap(TensorDataset(images(3), labels), TensorDataset(images(3), labels), users=[[0, 2], [1]])
    assert from_bytes.classes == 3 and from_bytes.name == "custom" and torch.equal(from_bytes.train.images, images(3))
    assert from_bytes.users is not None and from_bytes.users[0].tolist() == [0, 2]
    floats = wrap(TensorDataset(images(3) / 255, labels), TensorDataset(images(3) / 255, labels), classes=5)
    assert torch.equal(floats.train.images, images(3)) and floats.classes == 5
    assert floats.train.mean == from_bytes.train.mean


class Odd(Dataset):
    def __init__(self, *samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int):
        return self.samples[index]


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([], "is empty"),
        ([(images(1)[0] / 255 - 0.5, 0)], "some images are 8-bit ones and others are not"),
        ([(torch.full((3, 2, 2), float("nan")), 0)], "not finite"),
        ([(images(1)[0].long(), 0)], "uint8, uint16 or float"),
        ([(images(1)[0], 0), (images(1)[0][:, :1], 0)], "sample 1 .* one shape"),
        ([images(1)[0][:1, :1, :1]], "not a pair"),
        ([(np.zeros((3, 2, 2)), 0)], "image tensor"),
    ],
)
def test_unfit_datasets_are_named(samples, words):
    good = Odd((images(1)[0], 0))
    with pytest.raises(BadInput, match=words):
        wrap(Odd(*samples), good)


def test_deeper_images_keep_all_they_have():
    labels = torch.arange(3) % 2
    deep = torch.tensor([0, 1, 65535], dtype=torch.int32).view(3, 1, 1, 1).expand(3, 1, 2, 2).to(torch.uint16)
    data = wrap(TensorDataset(deep, labels), TensorDataset(deep, labels))
    assert not data.train.has_images and data.inputs.inputs[0].dtype == torch.float32
    assert data.train.inputs["x"][:, 0, 0, 0].tolist() == [0.0, np.float32(1 / 65535), 1.0]
    floats = torch.tensor([-0.5, 0.25, 3.0]).view(3, 1, 1, 1)  # normalised already, say
    data = wrap(TensorDataset(floats, labels), TensorDataset(floats, labels))
    assert data.train.inputs["x"].flatten().tolist() == [-0.5, 0.25, 3.0] and data.train.mean == ()
    with pytest.raises(BadInput, match="images are torch.float64, and networks take float32"):
        wrap(TensorDataset(floats.double(), labels), TensorDataset(floats.double(), labels))


def test_a_share_to_test_on():
    labels = torch.arange(20) % 2
    pictures = torch.arange(20, dtype=torch.uint8).view(20, 1, 1, 1).expand(20, 3, 1, 1)
    data = wrap(TensorDataset(pictures, labels), test_share=0.25, users=[range(10), range(10, 20)])
    again = wrap(TensorDataset(pictures, labels), test_share=0.25)
    assert len(data.test) == 5 and torch.equal(data.test.images, again.test.images)
    values = [*data.train.images[:, 0, 0, 0].tolist(), *data.test.images[:, 0, 0, 0].tolist()]
    assert sorted(values) == list(range(20))
    assert data.train.mean[0] == pytest.approx(np.mean(values[:15]) / 255, abs=1e-6)  # of those that are trained on
    assert data.users is not None
    assert {int(data.train.images[i, 0, 0, 0]) for i in data.users[0]} == {v for v in values[:15] if v < 10}
    with pytest.raises(BadInput, match="give either a data set to test on, or with test_share"):
        wrap(TensorDataset(pictures, labels))


def test_held_out_images_leave_their_users():
    labels = torch.arange(20) % 2
    part = ImageSet(torch.arange(20, dtype=torch.uint8).view(20, 1, 1, 1), labels)
    users = [np.arange(0, 10), np.arange(10, 19), np.array([19])]
    data = FederatedData(part, part, "mine", 2, users=users)
    rest, validation = hold_out(data, 0.25, seed=0)
    assert len(validation) == 5 and len(rest.train) == 15
    seen = torch.cat([rest.train.images, validation.images]).flatten().tolist()
    assert sorted(seen) == list(range(20))
    assert rest.users is not None
    owners = [rest.train.images[torch.as_tensor(user)].flatten().tolist() for user in rest.users]
    assert sorted(sum(owners, [])) == sorted(rest.train.images.flatten().tolist())
    assert all(value < 10 for value in owners[0])
    for share in (0.0, 1.0, 0.001):
        with pytest.raises(BadInput, match="validation share"):
            hold_out(data, share, seed=0)
