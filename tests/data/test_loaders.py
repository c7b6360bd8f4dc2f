"""Each loader on small files of the exact published format, and on what goes wrong with such files."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from strata.core.errors import BadInput
from strata.data import Reading, load
from strata.data.cifar import read_pickle
from strata.data.files import read_npz
from strata.data.folders import decode_pictures, load_folder
from strata.data.idx import read_idx
from strata.data.images import resize_bilinear
from tests.data import published


def test_digits_are_scikit_learns_and_need_nothing(tmp_path):
    from sklearn.datasets import load_digits

    theirs = load_digits()
    data = load("digits")
    assert (len(data.train), len(data.test), data.classes, data.input_shape) == (1500, 297, 10, (3, 32, 32))
    assert torch.cat([data.train.labels, data.test.labels]).tolist() == theirs.target.tolist()
    # the corner pixel of the enlarged image is the corner pixel, 0..16 brought to 0..255
    corners = np.concatenate([data.train.images[:, 1, 0, 0].numpy(), data.test.images[:, 1, 0, 0].numpy()])
    assert corners.tolist() == [(int(v) * 255 + 8) // 16 for v in theirs.images[:, 0, 0]]
    values = data.train.normalise(data.train.images)
    assert abs(float(values.mean())) < 1e-3 and abs(float(values.std()) - 1) < 1e-3


def test_enlarging_by_hand_and_as_torch_does():
    two = np.array([[[0, 100], [200, 40]]], dtype=np.uint8)
    # centres: -1/4, 1/4, 3/4, 5/4 of a source pixel, so the weights are 0, 1/4, 3/4, 1
    assert resize_bilinear(two, 4)[0].tolist() == [
        [0, 25, 75, 100], [50, 59, 76, 85], [150, 126, 79, 55], [200, 160, 80, 40],
    ]  # fmt: skip
    images = published.noise((3, 28, 28), 0)
    theirs = torch.nn.functional.interpolate(torch.from_numpy(images)[None].double(), size=32, mode="bilinear")[0]
    assert (torch.from_numpy(resize_bilinear(images, 32)).double() - theirs).abs().max() <= 0.5


def test_cifar10(tmp_path):
    held = published.cifar10(tmp_path / "cifar-10-batches-py")
    for root in (tmp_path, tmp_path / "cifar-10-batches-py"):
        data = load("cifar10", root)
        assert (len(data.train), len(data.test), data.classes, data.augmentation) == (20, 4, 10, "cifar")
        assert data.class_names[:2] == ("airplane", "automobile")
        pixels, labels = held["data_batch_3"]
        assert np.array_equal(data.train.images[8:12].numpy().reshape(4, -1), pixels)  # channels first, as published
        assert data.train.labels[8:12].tolist() == labels
        assert np.array_equal(data.test.images.numpy().reshape(4, -1), held["test_batch"][0])


def test_cifar100(tmp_path):
    held = published.cifar100(tmp_path / "cifar-100-python")
    data = load("cifar100", tmp_path)
    assert data.classes == 100 and len(data.class_names) == 100
    assert data.train.labels.tolist() == held["train"][1]  # the fine labels
    assert np.array_equal(data.test.images.numpy().reshape(6, -1), held["test"][0])


def test_a_memo_of_more_than_a_byte_is_read(tmp_path):
    held = published.cifar10(tmp_path / "cifar-10-batches-py", per_batch=300)  # as in the real files: LONG_BINPUT
    assert b"r\x00\x01\x00\x00" in (tmp_path / "cifar-10-batches-py" / "test_batch").read_bytes()
    assert load("cifar10", tmp_path).test.labels.tolist() == held["test_batch"][1]


class _Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def _hostile_files(mark: str) -> dict[str, bytes]:
    array = published.Python2().dumps({b"data": np.zeros((2, 2), np.uint8)})
    return {
        "a call": pickle.dumps({b"data": _Evil(mark)}, protocol=2),
        "a call, protocol 4": pickle.dumps({b"data": _Evil(mark)}, protocol=4),
        "a call, protocol 0": pickle.dumps(_Evil(mark), protocol=0),
        "eval by name": b"\x80\x02c__builtin__\neval\nU\x05'1'+1\x85R.",
        "inst": b"(U\x01/ios\nmkdir\n.",
        "an object array": b"\x80\x02cnumpy\ndtype\nU\x01OK\x00K\x01\x87R.",
        "attribute of numpy": b"\x80\x02cnumpy\nload\nU\x01x\x85R.",
        "a memo of 32 GB": b"\x80\x02}r\xff\xff\xff\x7f.",
        "a string of 2 GB that is not there": b"\x80\x02T\xff\xff\xff\x7fabc.",
        "an extension": b"\x80\x02\x82\x01.",
        "persistent": b"\x80\x02U\x01aQ.",
        "no dict": b"\x80\x02]q\x01.",
        "nothing": b"",
        "text": b"<html>not found</html>",
        "shape that lies": array.replace(b"K\x02K\x02", b"K\x02K\x03"),
    }


@pytest.mark.parametrize("kind", sorted(_hostile_files("x")))
def test_hostile_pickles_are_refused_and_do_nothing(tmp_path, kind):
    mark = tmp_path / "was here"
    path = tmp_path / "data_batch_1"
    path.write_bytes(_hostile_files(str(mark))[kind])
    with pytest.raises(BadInput, match="is not a CIFAR file as published"):
        read_pickle(path)
    assert not mark.exists()


def test_cifar_that_does_not_add_up(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    published.cifar10(folder)
    whole = (folder / "data_batch_2").read_bytes()
    (folder / "data_batch_2").write_bytes(whole[:-2000])
    with pytest.raises(BadInput, match="data_batch_2 is not a CIFAR file as published"):
        load("cifar10", tmp_path)
    write = published.Python2().dumps
    (folder / "data_batch_2").write_bytes(write({b"labels": [1], b"data": np.zeros((2, 3072), np.uint8)}))
    with pytest.raises(BadInput, match="2 images but 1 labels"):
        load("cifar10", tmp_path)
    (folder / "data_batch_2").write_bytes(write({b"labels": [1, 11], b"data": np.zeros((2, 3072), np.uint8)}))
    with pytest.raises(BadInput, match="labels run from 0 to 11"):
        load("cifar10", tmp_path)
    huge = write({b"labels": [1, 77], b"data": np.zeros((2, 3072), np.uint8)})
    assert huge.count(b"K\x4d") == 1
    (folder / "data_batch_2").write_bytes(huge.replace(b"K\x4d", b"\x8a\x09" + (2**70).to_bytes(9, "little")))
    with pytest.raises(BadInput, match="has no list of labels"):
        load("cifar10", tmp_path)
    (folder / "data_batch_2").write_bytes(write({b"labels": [1, 2], b"data": np.zeros((2, 3071), np.uint8)}))
    with pytest.raises(BadInput, match="3x32x32"):
        load("cifar10", tmp_path)
    (folder / "data_batch_2").unlink()
    with pytest.raises(BadInput, match="data_batch_2 is missing"):
        load("cifar10", tmp_path)


def test_missing_data_says_what_to_run(tmp_path):
    with pytest.raises(BadInput, match=f"run: strata data get cifar10 --dir {tmp_path}"):
        load("cifar10", tmp_path)
    with pytest.raises(BadInput, match="there is no data set 'cifar'"):
        load("cifar", tmp_path)


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize(("name", "folder"), [("mnist", "mnist"), ("fashion-mnist", "FashionMNIST/raw")])
def test_mnist(tmp_path, name, folder, ending):
    held = published.mnist(tmp_path / folder, ending)
    data = load(name, tmp_path)
    assert data.input_shape == (3, 32, 32) and data.train.labels.tolist() == [0, 1, 2, 3, 4]
    enlarged = resize_bilinear(held["t10k"], 32)
    assert all(np.array_equal(data.test.images[:, channel].numpy(), enlarged) for channel in range(3))
    assert data.train.images.untyped_storage().nbytes() == 5 * 32 * 32  # three channels, the bytes of one
    part = data.train.subset([4, 0])
    assert torch.equal(part.images, data.train.images[[4, 0]]) and part.images.untyped_storage().nbytes() == 2 * 1024


def test_broken_idx_files(tmp_path):
    path = tmp_path / "train-images-idx3-ubyte"
    array = published.noise((2, 28, 28), 0)
    published.idx(path, array)
    assert np.array_equal(read_idx(path), array)
    whole = path.read_bytes()
    packed = tmp_path / "packed.gz"
    for raw, words in [
        (whole[:-1], "cut short"),
        (whole + b"x", "too long"),
        (whole[:9], "cut short"),
        (b"", "not an idx file"),
        (b"\0\0\x0d\x01" + whole[4:], "not an idx file"),  # floats
        (struct.pack(">I3I", 0x803, 2**31, 2**31, 2**31), "claims"),
    ]:
        path.write_bytes(raw)
        packed.write_bytes(gzip.compress(raw))
        for file in (path, packed):
            with pytest.raises(BadInput, match=words):
                read_idx(file)
    packed.write_bytes(gzip.compress(whole)[:-20])
    with pytest.raises(BadInput, match="cut short"):
        read_idx(packed)


def test_mnist_with_a_label_too_few(tmp_path):
    published.mnist(tmp_path)
    published.idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(4, np.uint8))
    with pytest.raises(BadInput, match="5 images but 4 labels"):
        load("mnist", tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    published.mnist(tmp_path / "other")
    (tmp_path / "other" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(BadInput, match="no t10k-labels-idx1-ubyte"):
        load("mnist", tmp_path / "other")


def _grey(value: float) -> list[float]:
    return [value] * 784


def test_femnist_by_writer(tmp_path):
    root = tmp_path / "femnist"
    later = {"f2": ([_grey(1.0), _grey(0.0)], [61, 3]), "f1": ([_grey(0.2)], [10])}
    published.leaf(root / "train" / "all_data_1.json", later)
    published.leaf(root / "train" / "all_data_0.json", {"f0": ([_grey(0.4), _grey(0.6), _grey(0.8)], [1, 2, 3])})
    published.leaf(root / "test" / "all_data_0.json", {"f0": ([_grey(1)], [5]), "f1": ([], [])})
    for _ in range(2):  # the second time from the decoded arrays
        data = load("femnist", tmp_path)
        assert data.classes == 62 and data.input_shape == (3, 32, 32)
        assert data.train.labels.tolist() == [1, 2, 3, 10, 61, 3]
        assert data.users is not None
        assert [user.tolist() for user in data.users] == [[0, 1, 2], [3], [4, 5]]  # f0, f1, f2
        assert data.train.images[:, 2, 16, 16].tolist() == [102, 153, 204, 51, 255, 0]
        assert data.test.images.unique().tolist() == [255] and data.test.labels.tolist() == [5]
    assert len(list((root / ".strata-decoded").iterdir())) == 1


def test_femnist_in_one_file(tmp_path):
    """The same data as above; a third writer has test images only."""
    grey = np.array([102, 255, 153, 255, 204, 51, 0, 255], np.uint8)
    arrays = {
        "x": np.broadcast_to(grey[:, None, None], (8, 28, 28)),
        "y": np.array([1, 61, 2, 5, 3, 10, 3, 7], np.uint8),
        "writer": np.array([0, 2, 0, 0, 0, 1, 2, 3], np.int16),
        "is_test": np.array([0, 0, 0, 1, 0, 0, 0, 1], np.uint8),
    }
    np.savez(tmp_path / "femnist_leaf.npz", **arrays)
    for _ in range(2):
        data = load("femnist", tmp_path)
        assert data.train.labels.tolist() == [1, 2, 3, 10, 61, 3] and data.test.labels.tolist() == [5, 7]
        assert [user.tolist() for user in data.users] == [[0, 1, 2], [3], [4, 5]]
        assert data.train.images[:, 2, 16, 16].tolist() == [102, 153, 204, 51, 255, 0]
    np.savez(tmp_path / "femnist_leaf.npz", **{**arrays, "y": arrays["y"][1:]})
    with pytest.raises(BadInput, match="y, writer and is_test of N each"):
        load("femnist", tmp_path)
    np.savez(tmp_path / "femnist_leaf.npz", x=arrays["x"])
    with pytest.raises(BadInput, match="should hold the arrays x, y, writer and is_test"):
        load("femnist", tmp_path)
    (tmp_path / "femnist_leaf.npz").write_bytes(b"PK")
    with pytest.raises(BadInput, match="should hold the arrays"):
        load("femnist", tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[0.0', "not complete JSON"),
        ('{"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": [[0.0]], "y": [1]}}}', "does not agree"),
        ('{"users": ["a"], "num_samples": [1], "user_data": {}}', "not in LEAF's form"),
        ("[]", "not in LEAF's form"),
        ('{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[0.0]], "y": [1]}}}', "784 numbers"),
        ('{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [%s], "y": [1]}}}' % ([2.0] * 784), "outside"),
    ],
)
def test_broken_leaf_files(tmp_path, content, words):
    published.leaf(tmp_path / "test" / "a.json", {"a": ([_grey(1.0)], [1])})
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.json").write_text(content)
    with pytest.raises(BadInput, match=words):
        load("femnist", tmp_path)


def test_tinyimagenet(tmp_path):
    folder = tmp_path / "tiny-imagenet-200"
    published.tinyimagenet(folder)
    for _ in range(2):
        data = load("tinyimagenet", tmp_path)
        assert data.class_names == ("n01", "n02") and data.input_shape == (3, 64, 64)
        assert data.train.labels.tolist() == [0, 0, 1, 1] and data.test.labels.tolist() == [0, 1]
        green, grey = data.train.images[0, :, 5, 5].tolist(), data.train.images[1, :, 5, 5].tolist()
        assert green[1] > 195 > 15 > green[0] and grey == [100, 100, 100]
    # a changed picture is seen, and a broken one is named
    (folder / "train" / "n02" / "images" / "n02_0.JPEG").write_bytes(b"\xff\xd8 no picture")
    with pytest.raises(BadInput, match="n02_0.JPEG is not a readable picture"):
        load("tinyimagenet", tmp_path)
    (folder / "train" / "n02" / "images" / "n02_0.JPEG").unlink()
    (folder / "val" / "images" / "val_1.JPEG").unlink()
    with pytest.raises(BadInput, match="val_1.JPEG is missing"):
        load("tinyimagenet", tmp_path)
    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn99\t0\t0\t0\t0\n")
    with pytest.raises(BadInput, match="line 1"):
        load("tinyimagenet", tmp_path)


def test_decoded_arrays_are_private_and_heal(tmp_path):
    folder = tmp_path / "tiny-imagenet-200"
    published.tinyimagenet(folder)
    first = load("tinyimagenet", tmp_path).train.images
    before = first.clone()
    first.zero_()  # a write stays in this process
    assert torch.equal(load("tinyimagenet", tmp_path).train.images, before)
    kept = next((folder / ".strata-decoded").iterdir()) / "train.npy"
    kept.write_bytes(kept.read_bytes()[:-100])
    assert torch.equal(load("tinyimagenet", tmp_path).train.images, before)
    assert kept.stat().st_size == 128 + before.numel()


def _picture(path, colour, size=(8, 8)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


def _claimed(width: int, height: int, bits: int, colour: int = 0, content: bytes = b"") -> bytes:
    """A grey PNG (of colour: 2) of a few bytes that says it is this large."""
    header = struct.pack(">2I5B", width, height, bits, colour, 0, 0, 0)
    made = b"\x89PNG\r\n\x1a\n"
    for kind, body in ((b"IHDR", header), (b"IDAT", zlib.compress(content)), (b"IEND", b"")):
        made += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    return made


@pytest.mark.parametrize("size", [8, None])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (POSTSCRIPT, "cat.png is not a readable picture"),
        (_claimed(9000, 9000, bits=1), "cat.png has 9000x9000 pixels, more than the 33554432 that are read"),
        (_claimed(100_000, 100_000, bits=1), "cat.png is not a readable picture"),  # Pillow's own limit
        (_claimed(64, 64, bits=8), "cat.png is not a readable picture|differ in size"),
    ],
)
def test_a_picture_that_is_another_thing_or_claims_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str, size: int | None
) -> None:
    from PIL import EpsImagePlugin

    started: list[object] = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *arguments: started.append(arguments))
    for kind in ("ants", "bees"):
        for number in range(2):
            _picture(tmp_path / kind / f"{number}.png", (number, 0, 0))
    (tmp_path / "bees" / "cat.png").write_bytes(content)
    with pytest.raises(BadInput, match=message):
        load_folder(tmp_path, size)
    assert not started


def test_published_pictures_are_no_larger_than_published(tmp_path: Path) -> None:
    _picture(tmp_path / "a.png", (1, 2, 3), size=(300, 300))
    into = np.empty((1, 3, 64, 64), dtype=np.uint8)
    decode_pictures([tmp_path / "a.png"], into)
    with pytest.raises(BadInput, match="300x300 pixels, more than the 65536"):
        decode_pictures([tmp_path / "a.png"], into, 16 * 64 * 64)


def test_a_picture_whose_name_is_not_utf_8(tmp_path):
    for kind in ("cat", "dog"):
        for number in range(2):
            _picture(tmp_path / kind / f"{number}.png", (number, 0, 0))
    os.rename(tmp_path / "cat" / "0.png", os.fsencode(tmp_path / "cat") + b"/caf\xe9.png")
    assert len(load("folder", tmp_path).train) == 2


def test_a_folder_per_class(tmp_path):
    for part, count in (("train", 3), ("test", 1)):
        for label, name in enumerate(["ant", "bee"]):
            for number in range(count):
                _picture(tmp_path / "split" / part / name / f"{number}.png", (label * 100, number, 0))
    data = load("folder", tmp_path / "split")
    assert data.class_names == ("ant", "bee") and data.input_shape == (3, 8, 8)
    assert data.train.images[:, :2, 0, 0].tolist() == [[0, 0], [0, 1], [0, 2], [100, 0], [100, 1], [100, 2]]
    assert load("folder:16", tmp_path / "split").input_shape == (3, 16, 16)

    for name in ("ant", "bee"):
        for number in range(20):
            _picture(tmp_path / "flat" / name / f"{number:02d}.png", (number, 0, 0))
    flat = load("folder", tmp_path / "flat")
    assert np.bincount(flat.test.labels).tolist() == [2, 2] and len(flat.train) == 36
    assert torch.equal(flat.test.images, load("folder", tmp_path / "flat").test.images)

    _picture(tmp_path / "flat" / "bee" / "wide.png", (0, 0, 0), size=(9, 8))
    with pytest.raises(BadInput, match="folder:64"):
        load("folder", tmp_path / "flat")
    with pytest.raises(BadInput, match="two or more"):
        load("folder", tmp_path / "flat" / "bee")
    with pytest.raises(BadInput, match="is not a folder"):
        load("folder", tmp_path / "none")
    for name in ("folder:x", "folder:0", "folder:"):
        with pytest.raises(BadInput, match="size in pixels"):
            load(name, tmp_path / "flat")
    _picture(tmp_path / "split" / "test" / "cat" / "0.png", (0, 0, 0))
    with pytest.raises(BadInput, match="'cat'"):
        load("folder", tmp_path / "split")


def test_imagenet64(tmp_path):
    held = published.imagenet64(tmp_path / "imagenet64")
    for _ in range(2):
        data = load("imagenet64", tmp_path)
        assert data.classes == 1000 and data.input_shape == (3, 64, 64)
        assert data.train.labels.tolist() == [0, 499, 999, 0, 499, 999]  # published from 1 to 1000
        assert np.array_equal(data.train.images[3:].numpy().reshape(3, -1), held["train_data_batch_2"][0])
        assert np.array_equal(data.test.images.numpy().reshape(3, -1), held["val_data"][0])


def test_broken_imagenet64(tmp_path):
    folder = tmp_path / "imagenet64"
    published.imagenet64(folder, batches=3)
    first = folder / "train_data_batch_1.npz"
    whole = first.read_bytes()
    first.write_bytes(whole[:-200])
    with pytest.raises(BadInput, match="not a whole ImageNet64 batch"):
        load("imagenet64", tmp_path)
    np.savez(first, data=np.zeros((2, 12288), np.uint8), labels=np.array([1, 2, 3]))
    with pytest.raises(BadInput, match="3 labels"):
        load("imagenet64", tmp_path)
    np.savez(first, data=np.array([{}], dtype=object), labels=np.array([1]))  # a pickle inside
    with pytest.raises(BadInput, match="not a whole"):
        load("imagenet64", tmp_path)
    first.write_bytes(whole)
    (folder / "train_data_batch_2.npz").unlink()
    with pytest.raises(BadInput, match="a batch is missing"):
        load("imagenet64", tmp_path)


# --- values that no data set has -------------------------------------------------------------------------------------


def test_an_array_without_its_state_is_refused(tmp_path: Path) -> None:
    hollow = b"\x80\x02}U\x04datacnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00U\x01btRs."
    (tmp_path / "hollow").write_bytes(hollow)
    with pytest.raises(BadInput, match="array without content"):
        read_pickle(tmp_path / "hollow")


def _npz(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def test_encrypted_absurd_and_other_archives_are_refused(tmp_path: Path) -> None:
    path = _npz(tmp_path / "a.npz", y=np.arange(4))
    assert read_npz(path, ("y",), "test")["y"].tolist() == [0, 1, 2, 3]
    whole = bytearray(path.read_bytes())
    encrypted = whole.copy()
    encrypted[6] |= 1  # in the file's own header, and in the list at the end
    encrypted[whole.rindex(b"PK\x01\x02") + 8] |= 1
    large = whole.copy()
    large[whole.rindex(b"PK\x01\x02") + 24 :][:4] = b"\xff\xff\xff\xfe"
    huge = tmp_path / "huge.npz"
    with zipfile.ZipFile(huge, "w") as archive:
        header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (1152921504606846975,), }\n"
        archive.writestr("y.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
    np.save(tmp_path / "array.npy", np.arange(4))
    for name, content in (
        ("encrypted", bytes(encrypted)),
        ("array", (tmp_path / "array.npy").read_bytes()),
        ("half", bytes(whole[: len(whole) // 2])),
        ("huge", huge.read_bytes()),
        ("nothing", b""),
    ):
        (tmp_path / f"{name}.npz").write_bytes(content)
        with pytest.raises(BadInput, match=f"{name}.npz is not a whole test"):
            read_npz(tmp_path / f"{name}.npz", ("y",), "test")
    with pytest.raises(BadInput, match="a.npz is not a whole test"):
        read_npz(path, ("x",), "test")
    with pytest.raises(BadInput, match="a.npz: y has 160 bytes, more than"):
        read_npz(path, ("y",), "test", most=100)


LEAF = {"users": ["w"], "num_samples": [1], "user_data": {"w": {"x": [[0.5] * 784], "y": [1]}}}


@pytest.mark.parametrize("label", [1.9, True, "1", None, 2**70, -1, 62, [1], {}])
def test_labels_of_leaf_are_whole_numbers(tmp_path: Path, label: object) -> None:
    _leaf(tmp_path, {**LEAF, "user_data": {"w": {"x": [[0.5] * 784], "y": [label]}}})
    with pytest.raises(BadInput, match="labels that are not whole numbers within 0 to 61"):
        load("femnist", tmp_path)


@pytest.mark.parametrize(
    "change",
    [{"num_samples": 1}, {"users": 5}, {"users": [["w"]]}, {"user_data": []}, {"user_data": {"w": {"x": [], "y": 3}}}],
)
def test_lists_of_leaf_that_are_none(tmp_path: Path, change: dict[str, object]) -> None:
    _leaf(tmp_path, {**LEAF, **change})
    with pytest.raises(BadInput, match="not in LEAF's form"):
        load("femnist", tmp_path)


def test_pixels_of_leaf_are_numbers(tmp_path: Path) -> None:
    _leaf(tmp_path, {**LEAF, "user_data": {"w": {"x": [["0.5"] * 784], "y": [1]}}})
    with pytest.raises(BadInput, match="not lists of 784 numbers"):
        load("femnist", tmp_path)


def _leaf(root: Path, content: object) -> None:
    for part in ("train", "test"):
        (root / part).mkdir()
        (root / part / "all.json").write_text(json.dumps(content))


@pytest.mark.parametrize("name", ["y", "writer", "is_test"])
def test_columns_of_the_one_file_are_whole_numbers(tmp_path: Path, name: str) -> None:
    columns = {key: np.array([0, 1]) for key in ("y", "writer", "is_test")}
    columns[name] = np.array([0, 1.9])
    _npz(tmp_path / "femnist_leaf.npz", x=np.zeros((2, 28, 28), dtype=np.uint8), **columns)
    with pytest.raises(BadInput, match="whole numbers"):
        load("femnist", tmp_path)


def test_pictures_that_cannot_be_read_are_left_out_where_that_is_asked_for(tmp_path):
    for name in ("ant", "bee"):
        for number in range(10):
            _picture(tmp_path / name / f"{number}.png", (number, 0, 0))
    broken = tmp_path / "bee" / "5.png"
    broken.write_bytes(broken.read_bytes()[:45])  # a good beginning
    (tmp_path / "ant" / "notes.png").write_text("no picture")
    with pytest.raises(BadInput, match="is not a readable picture .* leave such out with --skip-unreadable"):
        load("folder:8", tmp_path)
    data = load("folder:8", tmp_path, Reading(skip_unreadable=True))
    assert len(data.train) + len(data.test) == 19
    assert data.notes == (f"{tmp_path}: 2 unreadable pictures are left out: ant/notes.png, bee/5.png",)
    with pytest.raises(BadInput, match="--skip-unreadable is not for the data digits: leave it out"):
        load("digits", reading=Reading(skip_unreadable=True))


def _odd_pictures() -> dict[str, tuple[Image.Image, str]]:
    """Pictures that 8-bit colour cannot hold, by the file's name, and what is said of them."""
    deep = np.linspace(1000, 40000, 64).reshape(8, 8)
    clear = Image.new("RGBA", (8, 8), (9, 9, 9, 128))
    index = Image.new("P", (8, 8), 0)
    index.info["transparency"] = 0
    return {
        "deep.png": (Image.fromarray(deep.astype(np.uint16)), "values of more than 8 bits"),
        "whole.tif": (Image.fromarray(deep.astype(np.int32)), "values of more than 8 bits"),
        "float.tif": (Image.fromarray((deep / 40000).astype(np.float32)), "floating point values"),
        "clear.png": (clear, "transparency"),
        "grey.png": (clear.convert("LA"), "transparency"),
        "index.png": (index, "transparency"),
    }


@pytest.mark.parametrize("name", sorted(_odd_pictures()))
def test_pictures_are_not_narrowed_to_8_bit_colour(tmp_path: Path, name: str) -> None:
    for kind in ("ant", "bee"):
        for number in range(3):
            _picture(tmp_path / kind / f"{number}.png", (number, 0, 0))
    picture, what = _odd_pictures()[name]
    picture.save(tmp_path / "bee" / name)
    with pytest.raises(BadInput, match=f"bee/{name} has {what}, .* 8-bit colour: .*--skip-unreadable leaves it out"):
        load("folder", tmp_path)
    data = load("folder", tmp_path, Reading(skip_unreadable=True))
    assert data.notes == (f"{tmp_path}: 1 unreadable pictures are left out: bee/{name} ({what})",)


def test_leaving_out_pictures_leaves_some_of_each_class(tmp_path: Path) -> None:
    for kind in ("ant", "bee"):
        for number in range(3):
            _picture(tmp_path / kind / f"{number}.png", (number, 0, 0))
            if kind == "bee":
                _odd_pictures()["deep.png"][0].save(tmp_path / kind / f"{number}.png")
    with pytest.raises(
        BadInput, match="none is left to train on in the class 'bee'; .*bee/0.png, which has values of more"
    ):
        load("folder", tmp_path, Reading(skip_unreadable=True))


def test_colours_of_16_bits_are_not_narrowed(tmp_path: Path) -> None:
    """Pillow opens them as RGB and would say nothing."""
    (tmp_path / "a.ppm").write_bytes(b"P6 2 1 65535\n" + bytes(range(12)))
    (tmp_path / "a.png").write_bytes(_claimed(2, 1, bits=16, colour=2, content=b"\0" + bytes(range(12))))
    for name in ("a.ppm", "a.png"):
        with pytest.raises(BadInput, match=f"{name} has values of more than 8 bits"):
            decode_pictures([tmp_path / name], np.empty((1, 3, 2, 2), dtype=np.uint8))


def test_what_8_bit_colour_holds_is_read_as_before(tmp_path: Path) -> None:
    colour = (10, 200, 30)
    opaque = Image.new("RGBA", (2, 2), (*colour, 255))
    index = Image.new("P", (2, 2), 1)
    index.putpalette([0, 0, 0, *colour])
    paths = []
    for name, picture in (("a.png", opaque), ("b.gif", index), ("c.bmp", Image.new("RGB", (2, 2), colour))):
        picture.save(tmp_path / name)
        paths.append(tmp_path / name)
    into = np.empty((3, 3, 2, 2), dtype=np.uint8)
    decode_pictures(paths, into)
    assert into[:, :, 0, 0].tolist() == [list(colour)] * 3
