"""The device's own samples: made ready once, as flat files that are mapped when they are used.

    digits       the 8x8 digits of scikit-learn, enlarged to 32x32, as `strata` has them
    FILE.npz     images uint8 [N, C, H, W] or [N, H, W] (grey), labels whole numbers [N]; class_names, classes if there
    FOLDER       with one such file in it

Runs in a process of its own, which ends: what it needs for this the device does not hold. numpy is needed for --part
alone, whose split is that of `strata fleet device`.
"""

from __future__ import annotations

import array
import ast
import hashlib
import json
import random
import struct
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from strata_device.errors import BadInput, one_line
from strata_device.settings import FACTS, Settings

DIGITS = Path(__file__).with_name("digits.npz")
DIGITS_TRAIN, DIGITS_SIZE = 1500, 32
IMAGES, LABELS = ("images", "x", "samples"), ("labels", "y", "targets")
KINDS = {"|u1": "B", "|i1": "b", "<i2": "h", "<u2": "H", "<i4": "i", "<u4": "I", "<i8": "q", "<u8": "Q"}
LARGEST_HEADER = 1 << 16
IID = 0x11D  # as strata/data/partitions.py numbers its purposes


class Facts(NamedTuple):
    """What the device says of its data. Images have `stored` channels on disk and `input[0]` for the network."""

    train: int
    held: int
    classes: int
    input: list[int]
    stored: int
    mean: list[float]
    std: list[float]
    augmentation: str
    labels: str

    @classmethod
    def read(cls, folder: Path) -> Facts:
        return cls(**json.loads((folder / FACTS).read_text()))

    @property
    def image_bytes(self) -> int:
        return self.stored * self.input[1] * self.input[2]


class _Source(NamedTuple):
    """`images` gives one at a time, in order."""

    images: Iterator[bytes]
    labels: Sequence[int]
    shape: tuple[int, int, int]  # as stored
    channels: int  # of the network
    classes: int | None
    names: Sequence[str]


def prepare(settings: Settings) -> Facts:
    """Into the device's folder: train.bin, train.labels, held.bin, held.labels, data.json."""
    folder = settings.place
    try:
        source = _digits() if settings.data == "digits" else _npz(_file(settings.data))
        count = len(source.labels)
        kept, held = _split(_own(count, settings), settings)
        if not kept:
            raise BadInput(f"device {settings.name} has no samples to train on: every device needs at least one")
        histogram = _write(folder, source, set(kept), set(held))
    except (OSError, EOFError, zipfile.BadZipFile, ValueError, struct.error, SyntaxError) as error:
        raise BadInput(f"{settings.data} cannot be read as samples: {one_line(error, 200)}") from None
    for name, chosen in (("train", kept), ("held", held)):
        labels = array.array("q", (source.labels[index] for index in chosen))
        (folder / f"{name}.labels").write_bytes(labels.tobytes())
    mean, std = _statistics(histogram)
    repeated = source.channels // source.shape[0]
    facts = Facts(
        train=len(kept),
        held=len(held),
        classes=_classes(settings, source),
        input=[source.channels, *source.shape[1:]],
        stored=source.shape[0],
        mean=mean * repeated,
        std=std * repeated,
        augmentation="none",
        labels=_label_digest(source.names),
    )
    (folder / FACTS).write_text(json.dumps(facts._asdict()))
    return facts


def _write(folder: Path, source: _Source, kept: set[int], held: set[int]) -> list[Counter[int]]:
    """The images; and of each channel how often each value occurs, over all training images of the source."""
    planes, size = source.shape[0], source.shape[1] * source.shape[2]
    found: list[Counter[int]] = [Counter() for _ in range(planes)]
    with (folder / "train.bin").open("wb") as train, (folder / "held.bin").open("wb") as rest:
        for index, image in enumerate(source.images):
            for plane, counts in enumerate(found):
                counts.update(image[plane * size : (plane + 1) * size])
            if index in kept:
                train.write(image)
            elif index in held:
                rest.write(image)
    return found


def _statistics(histograms: Sequence[Counter[int]]) -> tuple[list[float], list[float]]:
    """Of each channel scaled to 0..1: as strata/data/images.py, to the last digit."""
    means, stds = [], []
    for counts in histograms:
        total = max(1, sum(counts.values()))
        first = sum(level * count for level, count in counts.items())
        second = sum(level * level * count for level, count in counts.items())
        mean = first / total
        means.append(round(mean / 255, 6))
        stds.append(round(max((second / total - mean * mean) ** 0.5, 1.0) / 255, 6))
    return means, stds


def _own(count: int, settings: Settings) -> list[int]:
    """The indices of this device's part, sorted."""
    if settings.parts == 1:
        return list(range(count))
    try:
        import numpy as np
    except ImportError:
        raise BadInput("--part needs numpy for the split of `strata`: pip install 'strata-device[parts]'") from None
    if count < settings.parts:
        raise BadInput(f"{count} samples cannot be split into {settings.parts} parts: give fewer")
    size = count // settings.parts
    order = np.random.default_rng([settings.seed, IID]).permutation(count)
    part = order[settings.part * size : (settings.part + 1) * size]
    return [int(index) for index in np.sort(part)]


def _split(own: list[int], settings: Settings) -> tuple[list[int], list[int]]:
    """(to train on, to evaluate on). With a share above 0 and two samples, at least one on either side."""
    if settings.hold_out == 0:
        return own, []
    count = min(max(1, round(settings.hold_out * len(own))), len(own) - 1)
    held = set(random.Random(f"{settings.seed} {settings.part} hold-out").sample(own, max(0, count)))
    return [index for index in own if index not in held], sorted(held)


def _classes(settings: Settings, source: _Source) -> int:
    most = max(source.labels) + 1
    said = settings.classes or source.classes or len(source.names) or most
    if min(source.labels) < 0 or most > said:
        raise BadInput(
            f"labels run from {min(source.labels)} to {most - 1}; with {said} classes they should be within 0 to "
            f"{said - 1}: give --classes"
        )
    return said


def _label_digest(names: Sequence[str]) -> str:
    """Equal where the same classes have the same numbers; empty where they have no names."""
    return hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()[:16] if names else ""


# --- sources ---------------------------------------------------------------------------------------------------------


def _digits() -> _Source:
    made = _npz(DIGITS)
    labels = made.labels[:DIGITS_TRAIN]
    images = (_enlarged(image) for _, image in zip(labels, made.images, strict=False))
    return _Source(images, labels, (1, DIGITS_SIZE, DIGITS_SIZE), 3, 10, list("0123456789"))


def _enlarged(image: bytes, source: int = 8, size: int = DIGITS_SIZE) -> bytes:
    """0..16 to 0..255, then bilinear with pixel centres aligned, in whole numbers: as strata/data/images.py has it."""
    levels = [(value * 255 + 8) // 16 for value in image]
    taps = []
    for place in range(size):
        position = max((2 * place + 1) * source - size, 0)
        low = min(position // (2 * size), source - 1)
        weight = position - low * 2 * size
        taps.append((low, min(low + 1, source - 1), 2 * size - weight, weight))
    rows = [levels[row * source : (row + 1) * source] for row in range(source)]
    unit = 4 * size * size
    made = bytearray()
    for low, high, first, second in taps:
        row = [a * first + b * second for a, b in zip(rows[low], rows[high], strict=True)]
        made += bytes((row[i] * f + row[j] * s + unit // 2) // unit for i, j, f, s in taps)
    return bytes(made)


def _file(data: str) -> Path:
    path = Path(data).expanduser()
    if path.is_dir():
        found = sorted(path.glob("*.npz"))
        if len(found) != 1:
            raise BadInput(f"{path} has {len(found)} .npz files: it should have one, or give the file itself")
        return found[0]
    if path.suffix != ".npz" or not path.is_file():
        raise BadInput(f"--data is digits, an .npz file or a folder with one, not {data!r}")
    return path


def _npz(path: Path) -> _Source:
    archive = zipfile.ZipFile(path)
    there = {Path(name).stem: name for name in archive.namelist()}
    images = next((there[name] for name in IMAGES if name in there), None)
    labels = next((there[name] for name in LABELS if name in there), None)
    if images is None or labels is None:
        raise BadInput(f"{path} has {', '.join(sorted(there)) or 'nothing'}: it should have images and labels")
    with archive.open(labels) as file:
        kind, shape = _header(file)
        if len(shape) != 1 or kind not in KINDS:
            raise BadInput(f"labels in {path} are {kind} of {len(shape)} dims: they should be whole numbers, one each")
        values = array.array(KINDS[kind], file.read())
    stream = archive.open(images)
    kind, shape = _header(stream)
    if kind != "|u1" or len(shape) not in (3, 4) or 0 in shape or shape[0] != len(values):
        raise BadInput(
            f"images in {path} are {kind} of shape {'x'.join(map(str, shape))} for {len(values)} labels: they should "
            "be uint8 [N, C, H, W] or [N, H, W], one for each label"
        )
    planes, height, width = (1, *shape[1:]) if len(shape) == 3 else shape[1:]
    names = _texts(archive, there["class_names"]) if "class_names" in there else []
    classes = _numbers(archive, there["classes"])[0] if "classes" in there else None
    return _Source(
        _rows(stream, shape[0], planes * height * width), values, (planes, height, width), planes, classes, names
    )


def _rows(stream: IO[bytes], count: int, size: int) -> Iterator[bytes]:
    for _ in range(count):
        row = stream.read(size)
        if len(row) != size:
            raise EOFError("it ends before its last image")
        yield row


def _header(stream: IO[bytes]) -> tuple[str, tuple[int, ...]]:
    """Of an array in numpy's format: dtype and shape."""
    magic = stream.read(8)
    if magic[:6] != b"\x93NUMPY" or magic[6] not in (1, 2, 3):
        raise ValueError("an array in it is not in numpy's format")
    long = magic[6] > 1
    (length,) = struct.unpack("<I" if long else "<H", stream.read(4 if long else 2))
    if length > LARGEST_HEADER:
        raise ValueError("an array in it has no proper header")
    said: Any = ast.literal_eval(stream.read(length).decode("latin-1"))
    shape = said["shape"] if isinstance(said, dict) and "shape" in said else None
    if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("an array in it has no proper header")
    if said.get("fortran_order") and len(shape) > 1:
        raise ValueError("an array in it is in Fortran's order: save it with numpy.ascontiguousarray")
    return str(said.get("descr")), shape


def _numbers(archive: zipfile.ZipFile, name: str) -> array.array[int]:
    with archive.open(name) as file:
        kind, _ = _header(file)
        if kind not in KINDS:
            raise ValueError(f"{Path(name).stem} is {kind}: it should be a whole number")
        return array.array(KINDS[kind], file.read())


def _texts(archive: zipfile.ZipFile, name: str) -> list[str]:
    with archive.open(name) as file:
        kind, shape = _header(file)
        size = int(kind[2:]) * 4 if kind.startswith("<U") and kind[2:].isdigit() else 0
        if not size or len(shape) != 1:
            raise ValueError(f"{Path(name).stem} is {kind}: it should be a list of names")
        return [file.read(size).decode("utf-32-le").rstrip("\0") for _ in range(shape[0])]
