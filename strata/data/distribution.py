"""Who holds what: samples per device and class, as numbers, a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from strata.core import pictures
from strata.data.partitions import Partition

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def holdings(partition: Partition, labels: Tensor | np.ndarray, classes: int, limit: int | None = None) -> np.ndarray:
    """int64 [devices, classes]: how many samples of each class each of the first `limit` devices holds."""
    values = np.asarray(labels)
    devices = len(partition) if limit is None else min(limit, len(partition))
    counts = np.zeros((devices, classes), dtype=np.int64)
    for device in range(devices):
        counts[device] = np.bincount(values[partition[device]], minlength=classes)
    return counts


def table(counts: np.ndarray, names: Sequence[str] = (), widest: int = 16) -> str:
    """One line per device. With many classes: how many it has, and its largest three."""
    devices, classes = counts.shape
    labels = list(names) if len(names) == classes else [str(c) for c in range(classes)]
    if classes <= widest:
        width = [max(len(label), len(str(counts[:, c].max(initial=0)))) for c, label in enumerate(labels)]
        head = "device  samples  classes  " + "  ".join(label.rjust(w) for label, w in zip(labels, width, strict=True))
        rows = ["  ".join((str(v) if v else ".").rjust(w) for v, w in zip(row, width, strict=True)) for row in counts]
    else:
        head = "device  samples  classes  most of"
        rows = []
        for row in counts:
            top = [int(c) for c in np.argsort(-row, kind="stable")[:3] if row[c] > 0]
            rows.append(", ".join(f"{labels[c]} ({row[c]})" for c in top))
    lines = [f"{d:>6}  {counts[d].sum():>7}  {(counts[d] > 0).sum():>7}  {row}" for d, row in enumerate(rows)]
    return "\n".join([head, *lines]) if devices else head


def picture(counts: np.ndarray, path: str | Path, title: str = "", names: Sequence[str] = ()) -> None:
    """The ending of `path` decides the format."""
    devices, classes = counts.shape
    with pictures.style():
        figure, axes = pictures.blank(min(14.0, 2.5 + 0.22 * devices), min(12.0, 2.0 + 0.28 * classes))
        draw(axes, counts, names)
        axes.set(title=title)
        pictures.save(figure, path)


def draw(axes: Axes, counts: np.ndarray, names: Sequence[str] = (), largest: float = 220.0) -> None:
    """A dot per device and class, its area the number of samples; the largest in square points."""
    devices, classes = counts.shape
    device, label = np.nonzero(counts)
    area = min(largest, 40 * largest / max(devices, classes))  # smaller where it gets crowded
    shares = counts[device, label] / max(1, counts.max(initial=1))
    axes.scatter(device, label, s=area * shares, color=pictures.DOTS, linewidths=0)
    axes.set(xlabel="device", ylabel="class", xlim=(-0.7, devices - 0.3), ylim=(-0.7, classes - 0.3))
    axes.locator_params(axis="both", integer=True)
    if classes <= 30:
        axes.set_yticks(range(classes), list(names) if len(names) == classes else [str(c) for c in range(classes)])
