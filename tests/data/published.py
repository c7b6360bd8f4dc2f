"""Small files in the exact published formats, written by hand so that loaders are tested against the format."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


class Python2:
    """Pickle protocol 2 as Python 2's cPickle wrote it: byte strings, and a memo entry after every object."""

    def dumps(self, value: Any) -> bytes:
        self.memo = 0
        return b"\x80\x02" + self.write(value) + b"."

    def put(self) -> bytes:
        self.memo += 1
        return b"q" + bytes([self.memo]) if self.memo < 256 else b"r" + struct.pack("<I", self.memo)

    def write(self, value: Any) -> bytes:
        if value is None:
            return b"N"
        if isinstance(value, bool):
            return b"\x88" if value else b"\x89"
        if isinstance(value, int):
            if 0 <= value < 256:
                return b"K" + bytes([value])
            return b"M" + struct.pack("<H", value) if 0 <= value < 65536 else b"J" + struct.pack("<i", value)
        if isinstance(value, bytes):
            head = b"U" + bytes([len(value)]) if len(value) < 256 else b"T" + struct.pack("<i", len(value))
            return head + value + self.put()
        if isinstance(value, tuple):
            end = {1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(value))
            parts = b"".join(self.write(one) for one in value)
            return (parts + end if end else b"(" + parts + b"t") + self.put()
        if isinstance(value, list):
            return b"]" + self.put() + b"(" + b"".join(self.write(one) for one in value) + b"e"
        if isinstance(value, dict):
            head = b"}" + self.put() + b"("
            return head + b"".join(self.write(k) + self.write(v) for k, v in value.items()) + b"u"
        assert isinstance(value, np.ndarray) and value.dtype == np.uint8
        made = b"cnumpy.core.multiarray\n_reconstruct\n" + self.put() + b"cnumpy\nndarray\n" + self.put()
        made += b"K\x00\x85" + self.put() + self.write(b"b") + b"\x87" + self.put() + b"R" + self.put()
        made += b"(K\x01" + self.write(value.shape)
        made += b"cnumpy\ndtype\n" + self.put() + self.write((b"u1", 0, 1)) + b"R" + self.put()
        made += self.write((3, b"|", None, None, None, -1, -1, 0)) + b"b\x89" + self.write(value.tobytes())
        return made + b"t" + self.put() + b"b"


def cifar10(folder: Path, per_batch: int = 4) -> dict[str, tuple[np.ndarray, list[int]]]:
    """batches.meta is protocol 0, the batches protocol 2. Returns what each file holds."""
    folder.mkdir(parents=True)
    held = {}
    for seed, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        data, labels = noise((per_batch, 3072), seed), [(seed + i) % 10 for i in range(per_batch)]
        files = [b"image_%05d.png" % i for i in range(per_batch)]
        batch = {b"batch_label": name.encode(), b"labels": labels, b"data": data, b"filenames": files}
        (folder / name).write_bytes(Python2().dumps(batch))
        held[name] = (data, labels)
    names = "airplane automobile bird cat deer dog frog horse ship truck".split()
    meta = "(dp1\nS'num_cases_per_batch'\np2\nI10000\nsS'label_names'\np3\n(lp4\n"
    meta += "".join(f"S'{name}'\np{5 + i}\na" for i, name in enumerate(names)) + "sS'num_vis'\np15\nI3072\ns."
    (folder / "batches.meta").write_text(meta)
    return held


def cifar100(folder: Path, count: int = 6) -> dict[str, tuple[np.ndarray, list[int]]]:
    folder.mkdir(parents=True)
    held = {}
    for seed, name in enumerate(["train", "test"]):
        data, labels = noise((count, 3072), seed), [(17 * i + seed) % 100 for i in range(count)]
        coarse = [label // 5 for label in labels]
        batch = {b"filenames": [b"x.png"] * count, b"batch_label": b"training batch 1 of 1", b"fine_labels": labels,
                 b"coarse_labels": coarse, b"data": data}  # fmt: skip
        (folder / name).write_bytes(Python2().dumps(batch))
        held[name] = (data, labels)
    names = [b"class %d" % i for i in range(100)]
    (folder / "meta").write_bytes(Python2().dumps({b"fine_label_names": names, b"coarse_label_names": [b"all"]}))
    return held


def idx(path: Path, array: np.ndarray) -> None:
    raw = struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


def mnist(folder: Path, ending: str = "", count: int = 5) -> dict[str, np.ndarray]:
    held = {}
    for seed, part in enumerate(["train", "t10k"]):
        held[part] = noise((count, 28, 28), seed)
        idx(folder / f"{part}-images-idx3-ubyte{ending}", held[part])
        idx(folder / f"{part}-labels-idx1-ubyte{ending}", (np.arange(count) % 10).astype(np.uint8))
    return held


def leaf(path: Path, writers: dict[str, tuple[list[list[float]], list[int]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    users = list(writers)
    data = {user: {"x": x, "y": y} for user, (x, y) in writers.items()}
    content = {"users": users, "num_samples": [len(writers[user][1]) for user in users], "user_data": data}
    path.write_text(json.dumps(content))


def tinyimagenet(folder: Path) -> None:
    """Two classes, two training pictures each (one grey), one to validate; plain colours, so JPEG is exact."""
    for wnid, colour in (("n02", (200, 10, 10)), ("n01", (10, 200, 10))):
        for number in range(2):
            path = folder / "train" / wnid / "images" / f"{wnid}_{number}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture = Image.new("RGB", (64, 64), colour) if number == 0 else Image.new("L", (64, 64), 100)
            picture.save(path, quality=95)
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text(f"{wnid}_0.JPEG\t0\t0\t63\t63\n")
    images = folder / "val" / "images"
    images.mkdir(parents=True)
    Image.new("RGB", (64, 64), (10, 200, 10)).save(images / "val_0.JPEG")
    Image.new("RGB", (64, 64), (200, 10, 10)).save(images / "val_1.JPEG")
    boxes = "val_0.JPEG\tn01\t0\t32\t44\t62\nval_1.JPEG\tn02\t52\t55\t57\t59\n"
    (folder / "val" / "val_annotations.txt").write_text(boxes)
    (folder / "wnids.txt").write_text("n02\nn01\n")


def imagenet64(folder: Path, batches: int = 2, count: int = 3) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    folder.mkdir(parents=True)
    held = {}
    for seed, name in enumerate([*(f"train_data_batch_{k}" for k in range(1, batches + 1)), "val_data"]):
        data, labels = noise((count, 12288), seed), np.array([1, 500, 1000][:count])
        extra = {"mean": np.zeros(12288)} if name.startswith("train") else {}
        np.savez(folder / f"{name}.npz", data=data, labels=labels, **extra)
        held[name] = (data, labels)
    return held


def noise(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
