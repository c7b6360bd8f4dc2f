"""What a device does with a message: takes a program, trains it, measures and evaluates. In a child that ends."""

from __future__ import annotations

import array
import ctypes
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from strata_device import library, native
from strata_device.codec import Packet, Tensor
from strata_device.data import Facts
from strata_device.draws import derive, randperm
from strata_device.errors import CannotRun, Refused, one_line
from strata_device.files import mapped
from strata_device.frozen import FrozenLayers
from strata_device.memory import limited
from strata_device.native import Library, SampleView, Step, address_of
from strata_device.programs import Entry, Program, Programs, check_tensors
from strata_device.settings import Settings

Made = tuple[dict[str, Any], dict[str, Tensor]]
CALIBRATION_IMAGES = 512  # as strata/training/statistics.py
EVALUATED = 256  # samples whose scores are held at a time
BINS = 256  # as strata/data/objectives.py
# of a task: what else may be there would change what has to be done, such as masking the update
KNOWN = frozenset(
    {"what", "model", "token", "round", "device", "lr", "seeds", "training", "cut", "levels", "frozen", "deadline"}
    | {"program"}
)
MEAN, VARIANCE = "running_mean", "running_var"


class Work:
    """`budget`: bytes for training; None: none is enforced."""

    def __init__(self, settings: Settings, authority: Path | None, budget: int | None) -> None:
        self._folder, self._budget = settings.place, budget
        self._facts = Facts.read(self._folder)
        self._programs = Programs(self._folder, authority)
        self._library = Library(library.find(settings.library))

    def answer(self, packet: Packet) -> Made:
        kinds = {"program": self._program, "train": self._train, "statistics": self._statistics,
                 "evaluate": self._evaluate}  # fmt: skip
        what = packet.meta.get("what")
        if what not in kinds:
            raise Refused(f"the server asks for {what!r}: is it of another version of Strata?")
        try:
            meta, tensors = kinds[what](packet)
        except (KeyError, TypeError, ValueError, OverflowError, ctypes.ArgumentError) as error:
            raise Refused(f"the server's message does not say what it should ({type(error).__name__})") from None
        return {"token": packet.meta.get("token"), **meta}, tensors

    # --- programs ----------------------------------------------------------------------------------------------

    def _program(self, packet: Packet) -> Made:
        """Takes what is offered, once it has shown that it can be opened here."""
        program = self._programs.take(packet)
        self._check_images(program)
        with limited(self._budget):
            self._open(program).close()
        self._programs.keep(program)
        return {"what": "program", "program": program.id, "programs": self._programs.ids()}, {}

    def _named(self, packet: Packet) -> Program | None:
        program = self._programs.get(packet.meta["program"])
        if program is not None:
            self._check_images(program)
        return program

    def _check_images(self, program: Program) -> None:
        if list(program.image) != self._facts.input or program.classes != self._facts.classes:
            raise CannotRun(
                f"the step program is for {program.classes} classes of images {program.image}, and this device has "
                f"{self._facts.classes} of {tuple(self._facts.input)}"
            )

    def _open(self, program: Program) -> Step:
        return self._library.open(program.manifest, address_of(program.code), len(program.code))

    # --- training ----------------------------------------------------------------------------------------------

    def _train(self, packet: Packet) -> Made:
        meta, facts = packet.meta, self._facts
        unknown = sorted(set(meta) - KNOWN)
        if unknown:
            raise Refused(f"the server's task has {one_line(unknown[0], 60)}, which this device knows nothing of")
        training = _training(meta)
        program = self._named(packet)
        kept = FrozenLayers(self._folder)
        if program is None:
            return {"what": "lacks", "holds": kept.digests(), "programs": self._programs.ids()}, {}
        lacking = kept.missing(program, packet.tensors, meta["frozen"])
        if lacking:
            return {"what": "lacks", "holds": kept.digests()}, {}
        check_tensors(program, packet.tensors, frozenset(entry.name for entry in program.frozen))
        frozen = kept.row(program, packet.tensors, meta["frozen"])
        with self._samples("train", 0, facts.train) as samples, limited(self._budget):
            step = self._open(program)
            _put(step, native.TRAINED, program.trained, packet.tensors)
            if program.buffers:  # of norms whose statistics are fixed in training
                _put(step, native.BUFFERS, program.buffers, packet.tensors)
            if program.frozen:
                step.lend(address_of(frozen), len(frozen) // 4)
            loss, peak = step.train(samples, training)
            update = step.read(native.TRAINED)
            step.close()
        return {
            "what": "update",
            "round": int(meta["round"]),
            "device": int(meta["device"]),
            "cut": program.cut,
            "samples": facts.train,
            "loss": loss if math.isfinite(loss) else None,
            "peak_bytes": peak,
            "holds": kept.digests(),
        }, _tensors(program.trained, update)

    # --- evaluation --------------------------------------------------------------------------------------------

    def _statistics(self, packet: Packet) -> Made:
        """Batch norm's statistics on some of the device's training images, some at a time."""
        meta, facts = packet.meta, self._facts
        mean, std = _normalisation(meta["training"])
        program = self._for_evaluation(packet)
        chosen = randperm(facts.train, derive(int(meta["seed"]), "calibration images"))[:CALIBRATION_IMAGES]
        found: list[tuple[int, Any]] = []
        with limited(self._budget):
            step = self._loaded(program, packet)
            for start in range(0, len(chosen), program.at_once):
                rows = chosen[start : start + program.at_once]
                if len(rows) > 1 or not found:  # of one image there is no variance
                    with self._gathered("train", rows) as samples:
                        found.append((len(rows), step.statistics(samples, mean, std)))
            step.close()
        tensors = _tensors(program.buffers, pooled(found, program.buffers))
        counters = {name: tensor for name, tensor in packet.tensors.items() if tensor.dtype == "int64"}
        return {"what": "statistics", "images": sum(count for count, _ in found)}, {**tensors, **counters}

    def _evaluate(self, packet: Packet) -> Made:
        """Sums over what the device holds out."""
        meta, facts = packet.meta, self._facts
        mean, std = _normalisation(meta["training"])
        program = self._for_evaluation(packet)
        own = {"re-estimated": False, "batch": True}[meta["bn"]]
        sums = Sums(program.classes)
        loss = 0.0
        with limited(self._budget):
            step = self._loaded(program, packet)
            for start in range(0, facts.held, EVALUATED):
                count = min(EVALUATED, facts.held - start)
                with self._samples("held", start, count) as samples:
                    added, scores = step.evaluate(samples, own, mean, std, program.classes)
                loss += added
                sums.add(scores, self._labels("held", start, count))
            step.close()
        said = loss if math.isfinite(loss) else None
        return {"what": "sums", "sums": sums.made(), "loss_sum": said}, {}

    def _for_evaluation(self, packet: Packet) -> Program:
        if packet.meta["fixed"]:
            raise Refused("this device measures all of a network's statistics or none")
        program = self._named(packet)
        if program is None:
            raise Refused("the server asks for a program that it has not offered")
        check_tensors(program, packet.tensors)
        return program

    def _loaded(self, program: Program, packet: Packet) -> Step:
        step = self._open(program)
        lists = ((native.TRAINED, program.trained), (native.FROZEN, program.frozen), (native.BUFFERS, program.buffers))
        for which, entries in lists:
            if entries:
                _put(step, which, entries, packet.tensors)
        return step

    # --- samples -----------------------------------------------------------------------------------------------

    def _samples(self, name: str, start: int, count: int) -> _Kept:
        """So many of them, where they are mapped."""
        images, labels = (mapped(self._folder / f"{name}.{kind}") for kind in ("bin", "labels"))
        size = self._facts.image_bytes
        if len(images) < (start + count) * size or len(labels) < 8 * (start + count):
            raise RuntimeError("the device's samples have changed since it was started")
        part = images[start * size : (start + count) * size]
        targets = labels[8 * start : 8 * (start + count)]
        return _Kept(self._view(count, address_of(part), address_of(targets)), part, targets)

    def _gathered(self, name: str, rows: Sequence[int]) -> _Kept:
        """Copies of these."""
        images, labels = (mapped(self._folder / f"{name}.{kind}") for kind in ("bin", "labels"))
        size = self._facts.image_bytes
        part = memoryview(b"".join(images[row * size : (row + 1) * size] for row in rows))
        targets = memoryview(b"".join(labels[8 * row : 8 * (row + 1)] for row in rows))
        return _Kept(self._view(len(rows), address_of(part), address_of(targets)), part, targets)

    def _view(self, count: int, images: int, labels: int) -> SampleView:
        stored, wanted = self._facts.stored, self._facts.input[0]
        return SampleView(count, images, labels, 0 if stored == wanted else stored)

    def _labels(self, name: str, start: int, count: int) -> array.array[int]:
        return array.array("q", mapped(self._folder / f"{name}.labels")[8 * start : 8 * (start + count)].tobytes())


class _Kept:
    """Addresses, with what has to stay for as long as they are used."""

    def __init__(self, view: SampleView, *kept: memoryview) -> None:
        self._view, self._kept = view, kept

    def __enter__(self) -> SampleView:
        return self._view

    def __exit__(self, *_: object) -> None:
        self._kept = ()


def _training(meta: dict[str, Any]) -> dict[str, Any]:
    """What the native library takes of the server's settings."""
    said = meta["training"]
    order, augmentation, _, dropout = (int(seed) for seed in meta["seeds"])
    if said["momentum_dtype"] != "float32" or said.get("update_rule", "sgd") != "sgd":
        raise Refused("this device trains by SGD, and keeps momentum in float32")
    mean, std = _normalisation(said)
    return {
        "epochs": int(said["epochs"]),
        "batch": int(said["batch_size"]),
        "micro_batch": int(said["micro_batch"] or 0),
        "lr": float(meta["lr"]),
        "momentum": float(said["momentum"]),
        "weight_decay": float(said["weight_decay"]),
        "proximal": float(said["proximal"]),
        "clip": float(said["clip"] or 0.0),
        "order_seed": order,
        "augmentation_seed": augmentation,
        "dropout_seed": dropout,
        "augmentation": str(said["augmentation"]),
        "mean": mean,
        "std": std,
    }


def _normalisation(training: dict[str, Any]) -> tuple[list[float], list[float]]:
    mean, std = ([float(value) for value in training[name]] for name in ("mean", "std"))
    return mean, std


def _put(step: Step, which: int, entries: Sequence[Entry], tensors: dict[str, Tensor]) -> None:
    """One after another, as the library wants them."""
    row = (ctypes.c_float * sum(entry.values for entry in entries))()
    target, at = memoryview(row).cast("B"), 0
    for entry in entries:
        data = tensors[entry.name].data
        target[at : at + len(data)] = data
        at += len(data)
    step.write(which, row)


def _tensors(entries: Sequence[Entry], row: Any) -> dict[str, Tensor]:
    whole, at, made = memoryview(row).cast("B"), 0, {}
    for entry in entries:
        made[entry.name] = Tensor("float32", entry.shape, whole[at : at + 4 * entry.values])
        at += 4 * entry.values
    return made


def pooled(found: Sequence[tuple[int, Any]], entries: Sequence[Entry]) -> array.array[float]:
    """Statistics of several batches as those of all the images together, as strata/fleet/pooled_statistics.py does it:
    the variance is taken around the common mean."""
    total = sum(count for count, _ in found)
    places, at = {}, 0
    for entry in entries:
        places[entry.name] = at
        at += entry.values
    made = array.array("f", bytes(4 * at))
    for entry in entries:
        of_mean = places.get(entry.name.removesuffix(VARIANCE) + MEAN) if entry.name.endswith(VARIANCE) else None
        for place in range(entry.values):
            here = places[entry.name] + place
            values = [row[here] for _, row in found]
            if of_mean is not None:
                means = [row[of_mean + place] for _, row in found]
                centre = _weighted(means, found, total)
                values = [value + (mean - centre) ** 2 for value, mean in zip(values, means, strict=True)]
            made[here] = _weighted(values, found, total)
    return made


def _weighted(values: Sequence[float], found: Sequence[tuple[int, Any]], total: int) -> float:
    return math.fsum(value * count for value, (count, _) in zip(values, found, strict=True)) / total


class Sums:
    """What the server makes its score of: counts by class, as strata's Classification has them."""

    def __init__(self, classes: int) -> None:
        self._classes = classes
        names = ("correct", "counts", "predicted")
        self._made = {name: [0] * classes for name in names}
        if classes == 2:
            self._made |= {name: [0] * BINS for name in ("positives", "negatives")}

    def add(self, scores: Sequence[float], labels: Sequence[int]) -> None:
        for row, label in zip(_rows(scores, self._classes), labels, strict=True):
            best = max(range(self._classes), key=row.__getitem__)  # the first of the largest, as torch's argmax
            self._made["counts"][label] += 1
            self._made["predicted"][best] += 1
            self._made["correct"][label] += best == label
            if self._classes == 2:
                share = 1 / (1 + math.exp(min(700.0, max(-700.0, row[0] - row[1])))) if row[0] == row[0] else 0.0
                place = min(BINS - 1, max(0, int(share * BINS)))
                self._made["positives" if label == 1 else "negatives"][place] += 1

    def made(self) -> dict[str, list[int]]:
        return self._made


def _rows(scores: Sequence[float], size: int) -> Iterator[Sequence[float]]:
    for start in range(0, len(scores), size):
        yield scores[start : start + size]
