"""TinyImageNet in its original layout, and any tree with one folder of pictures per class."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strata.core.errors import BadInput, one_line
from strata.data.files import Allocate, Arrays, decoded_once, fingerprint
from strata.data.images import ImageSet, channel_statistics
from strata.data.samples import FederatedData

# What Pillow may take a file for, whatever its name: without such a list one that is PostScript starts Ghostscript.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "PPM", "TIFF")
MOST_PIXELS = 32 << 20  # of a picture that is made smaller here, a camera's; some kilobytes may claim far more
LARGE = 4 << 20  # pixels: above this, one at a time and not one per thread
ENDINGS = frozenset({".jpeg", ".jpg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"})
Listing = list[tuple[Path, int]]  # picture, class


def find_tinyimagenet(root: Path) -> Path | None:
    for folder in (root / "tiny-imagenet-200", root):
        if (folder / "val" / "val_annotations.txt").is_file() and (folder / "train").is_dir():
            return folder
    return None


def load_tinyimagenet(folder: Path) -> FederatedData:
    """train/<wnid>/images/*.JPEG; val/images with val_annotations.txt is the test set (test/ has no labels)."""
    wnids = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())
    number = {wnid: index for index, wnid in enumerate(wnids)}
    train = [(path, number[wnid]) for wnid in wnids for path in _pictures(folder / "train" / wnid / "images")]
    test: Listing = []
    annotations = folder / "val" / "val_annotations.txt"
    for line, text in enumerate(annotations.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        fields = text.split("\t")
        if len(fields) < 2 or fields[1] not in number or "/" in fields[0]:
            raise BadInput(f"{annotations} line {line} does not name a picture and one of the {len(wnids)} classes")
        test.append((folder / "val" / "images" / fields[0], number[fields[1]]))
    mean, std = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)
    most = 16 * 64 * 64  # they are published as 64x64
    return _load(folder, "tinyimagenet", train, test, 64, tuple(wnids), "tinyimagenet", (mean, std), most)


def load_folder(root: Path, size: int | None = None, seed: int = 0, skip: bool = False) -> FederatedData:
    """root/train/CLASS/* and root/test|val/CLASS/*; or root/CLASS/*, a tenth of which is held out.

    Pictures are brought to size x size; without a size they must all be square and alike. `skip`: files that cannot
    be read are left out, and named in the data's notes.
    """
    if not root.is_dir():
        raise BadInput(f"{root} is not a folder; give one with a folder of pictures per class")
    train_root = root / "train" if (root / "train").is_dir() else root
    test_root = next((root / name for name in ("test", "val") if (root / name).is_dir()), None)
    names = sorted(path.name for path in train_root.iterdir() if path.is_dir() and _pictures_in(path))
    if len(names) < 2:
        raise BadInput(f"{train_root} has {len(names)} folders with pictures; it should have two or more")
    train = [(path, index) for index, name in enumerate(names) for path in _pictures_in(train_root / name)]
    if train_root is not root and test_root is not None:
        unknown = sorted({path.name for path in test_root.iterdir() if path.is_dir()} - set(names))
        if unknown:
            raise BadInput(f"{test_root} has the class {unknown[0]!r}, which {train_root} has not")
        test = [(path, index) for index, name in enumerate(names) for path in _pictures_in(test_root / name)]
    else:
        train, test = _hold_out_tenth(train, len(names), seed)
    unreadable = _unreadable([path for path, _ in (*train, *test)]) if skip else {}
    if unreadable:
        train, test = ([one for one in part if one[0] not in unreadable] for part in (train, test))
        bare = sorted(set(range(len(names))) - {label for _, label in train})
        if bare or not test:
            where = f"to train on in the class {names[bare[0]]!r}" if bare else "to test on"
            first = min(unreadable)
            raise BadInput(
                f"{root}: without {len(unreadable)} unreadable pictures none is left {where}; the first of them is "
                f"{first.relative_to(root)}{f', which has {unreadable[first]}' if unreadable[first] else ''}"
            )
    if size is None:
        size = _common_size(path for path, _ in (*train, *test))
    data = _load(root, "folder", train, test, size, tuple(names), "pictures", None)
    if not unreadable:
        return data
    named = [f"{path.relative_to(root)}{f' ({why})' if why else ''}" for path, why in sorted(unreadable.items())]
    more = f" and {len(named) - 5} more" if len(named) > 5 else ""
    shown = ", ".join(named[:5]) + more
    return replace(data, notes=(f"{root}: {len(named)} unreadable pictures are left out: {shown}",))


def _unreadable(paths: Sequence[Path]) -> dict[Path, str]:
    """With what they hold that 8-bit colour cannot, if that is why. Each is decoded, since a file that is cut short has
    a good beginning."""

    def why(path: Path) -> str | None:
        try:
            with _opened(path, MOST_PIXELS) as picture:
                return _beyond_8_bit_colour(picture)
        except BadInput:
            return ""

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return {path: one for path, one in zip(paths, pool.map(why, paths), strict=True) if one is not None}


def _hold_out_tenth(listing: Listing, classes: int, seed: int) -> tuple[Listing, Listing]:
    labels = np.array([label for _, label in listing])
    order = np.random.default_rng([seed, 0xF01D]).permutation(len(listing))
    test: set[int] = set()
    for label in range(classes):
        members = order[labels[order] == label]
        if len(members) < 2:
            raise BadInput("a class with a single picture cannot be split; add pictures, or train and test folders")
        test.update(members[: max(1, len(members) // 10)].tolist())
    return (
        [entry for index, entry in enumerate(listing) if index not in test],
        [entry for index, entry in enumerate(listing) if index in test],
    )


def _pictures(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in ENDINGS)


def _pictures_in(folder: Path) -> list[Path]:
    return _pictures(folder) or _pictures(folder / "images")


def _common_size(paths: Iterable[Path]) -> int:
    sizes: dict[tuple[int, int], Path] = {}
    for path in paths:
        with _opened(path, MOST_PIXELS) as picture:
            sizes.setdefault(picture.size, path)
        if len(sizes) > 1 or picture.size[0] != picture.size[1]:
            raise BadInput(
                f"the pictures differ in size or are not square ({path.name} is {picture.size[0]}x{picture.size[1]}); "
                "name the size to bring them to, as in --data folder:64"
            )
    return next(iter(sizes))[0]


def _load(
    folder: Path, name: str, train: Listing, test: Listing, size: int, names: tuple[str, ...], augmentation: str,
    statistics: tuple[tuple[float, ...], tuple[float, ...]] | None, most: int = MOST_PIXELS,
) -> FederatedData:  # fmt: skip
    if not train or not test:
        raise BadInput(f"{folder} has {len(train)} training and {len(test)} test pictures; fetch the data set again")

    def decode(allocate: Allocate) -> Arrays:
        arrays = {}
        for part, listing in (("train", train), ("test", test)):
            images = allocate(part, (len(listing), 3, size, size), np.uint8)
            decode_pictures([path for path, _ in listing], images, most)
            arrays[part] = images
        return arrays

    paths = [path for path, _ in (*train, *test)]
    try:
        # the users' own that were decoded by version 1 may have been clipped; published ones are 8-bit colour
        key = fingerprint(folder, paths, f"pictures {2 if name == 'folder' else 1} {size}")
    except OSError as error:
        raise BadInput(f"{error.filename} is missing; the data set is incomplete, fetch it again") from error
    arrays = decoded_once(folder, key, decode)
    images = {part: torch.from_numpy(arrays[part]) for part in ("train", "test")}
    mean, std = statistics or channel_statistics(images["train"])
    labels = {"train": torch.tensor([y for _, y in train]), "test": torch.tensor([y for _, y in test])}
    return FederatedData(
        train=ImageSet(images["train"], labels["train"], mean, std),
        test=ImageSet(images["test"], labels["test"], mean, std),
        name=name, classes=len(names), augmentation=augmentation, class_names=names,
    )  # fmt: skip


@contextlib.contextmanager
def _opened(path: Path, most: int) -> Iterator[Any]:
    """The picture, of which only the header has been read. What Pillow says of it here or later becomes a sentence."""
    from PIL import Image

    try:
        with Image.open(path, formats=FORMATS) as picture:
            width, height = picture.size
            if width * height > most:
                raise BadInput(
                    f"{path} has {width}x{height} pixels, more than the {most} that are read: make it smaller"
                )
            yield picture
    except BadInput:
        raise
    except Exception as error:  # of any kind, where a file is broken on purpose
        raise BadInput(
            f"{path} is not a readable picture ({one_line(error)}); fetch the data set again, or of "
            "your own pictures leave such out with --skip-unreadable"
        ) from error


def _beyond_8_bit_colour(picture: Any) -> str | None:
    """What the picture holds that RGB of 8 bits would lose; it is decoded to know."""
    if _is_deep(picture):
        return "floating point values" if picture.mode == "F" else "values of more than 8 bits"
    picture.load()
    if picture.has_transparency_data and picture.convert("RGBA").getchannel("A").getextrema()[0] < 255:
        return "transparency"
    return None


def _is_deep(picture: Any) -> bool:
    """Of colours with 16 bits Pillow keeps 8, in its usual mode: only how it will decode them tells."""
    if picture.mode in ("I", "F") or picture.mode.startswith("I;16"):
        return True
    for tile in picture.tile:
        form, *more = tile.args if isinstance(tile.args, tuple) else (tile.args,)
        if isinstance(form, str) and ";16" in form and not form.startswith("BGR;16"):  # which is 5, 6 and 5 bits
            return True
        if tile.codec_name in ("ppm", "ppm_plain") and more and more[0] > 255:
            return True
    return False


def _refuse_narrowing(path: Path, picture: Any) -> None:
    lost = _beyond_8_bit_colour(picture)
    if lost is not None:
        instead = (
            "put it on a background"
            if lost == "transparency"
            else "save it as 8-bit colour, or give such images as tensors, with strata.data.wrap"
        )
        raise BadInput(
            f"{path} has {lost}, and pictures in folders are read as 8-bit colour: {instead} (--skip-unreadable leaves "
            "it out)"
        )


def decode_pictures(paths: Sequence[Path], into: np.ndarray, most: int = MOST_PIXELS) -> None:
    """Decode into uint8 [N, 3, size, size], in threads (Pillow lets go of the interpreter while it decodes). `most`:
    pixels of a picture as it is stored."""
    from PIL import Image

    size = into.shape[-1]
    one_at_a_time = threading.Lock()

    def decode(index: int) -> None:
        with _opened(paths[index], most) as picture:
            large = picture.size[0] * picture.size[1] > LARGE
            with one_at_a_time if large else contextlib.nullcontext():
                _refuse_narrowing(paths[index], picture)
                colour = picture.convert("RGB")  # TinyImageNet has grey ones too
                if colour.size != (size, size):
                    colour = colour.resize((size, size), Image.Resampling.BILINEAR)
        into[index] = np.asarray(colour).transpose(2, 0, 1)

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        for _ in pool.map(decode, range(len(paths)), chunksize=64):
            pass
