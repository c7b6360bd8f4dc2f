"""Who holds which training samples. A partition has len(p) devices and p[device] -> sorted int64 indices.

Seeds go to numpy generators of their own per purpose, so the same seed gives the same partition everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor

from strata.core.errors import BadInput, one_line
from strata.core.paths import expanded
from strata.data.samples import FederatedData, class_labels

# one number per purpose, so that no two draws share a stream
_IID, _DIRICHLET, _USERS, _SHARDS, _LAZY, _SIZES = 0x11D, 0xD1, 0x05E4, 0x54A4, 0x1A2, 0x512E
_MOST_DRAWN = 1 << 28  # samples of a lazy device: 2 GiB of indices


class Partition(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, device: int) -> np.ndarray: ...


@dataclass(frozen=True, eq=False)
class Indexed:
    """One flat array and where each device's part of it begins: 8 bytes a sample, however many devices."""

    indices: np.ndarray
    starts: np.ndarray  # devices + 1 of them

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, device: int) -> np.ndarray:
        _check_device(device, len(self))
        return self.indices[self.starts[device] : self.starts[device + 1]].copy()


@dataclass(frozen=True)
class LazyIid:
    """`samples` random indices per device, with replacement, drawn when asked for: any fleet in no memory."""

    n: int
    devices: int
    samples: int
    seed: int

    def __post_init__(self) -> None:
        _check(self.n, self.devices, at_least_one_each=False)
        if not 1 <= self.samples <= _MOST_DRAWN:
            raise BadInput(
                f"a lazy partition gives each device 1 to {_MOST_DRAWN} samples, drawn with replacement, not "
                f"{self.samples}"
            )

    def __len__(self) -> int:
        return self.devices

    def __getitem__(self, device: int) -> np.ndarray:
        _check_device(device, self.devices)
        return np.sort(_random(self.seed, _LAZY, device).integers(0, self.n, self.samples))


def iid(
    n: int, devices: int, seed: int, each: int | None = None, sizes: Sequence[int] | np.ndarray | None = None
) -> Indexed:
    """Shuffle and deal. All devices get n // devices samples, as in the paper, or `each`, or by `sizes`; the rest stays
    unused.

    180 to each of as many devices as FEMNIST has writers (3550) is the equal split of the paper's authors.
    """
    if sizes is not None:
        order = _random(seed, _IID).permutation(n)
        ends = np.cumsum(sizes)
        return _ragged([np.sort(order[end - size : end]) for end, size in zip(ends, sizes, strict=True)])
    size = _size(n, devices, each)
    order = _random(seed, _IID).permutation(n)[: size * devices]
    return _equal(np.sort(order.reshape(devices, size), axis=1))


def lognormal_sizes(n: int, devices: int, sigma: float, seed: int) -> np.ndarray:
    """How many of n samples each device has: in proportion to draws from a log-normal distribution, at least one, and
    none is left over. Parts of a sample go to those with the largest ones."""
    _check(n, devices)
    if not (np.isfinite(sigma) and sigma > 0):
        raise BadInput(
            f"the deviation of a log-normal distribution is {sigma}; it should be a positive number, such as 1"
        )
    weights = np.exp(sigma * _random(seed, _SIZES).standard_normal(devices))
    shares = (n - devices) * weights / weights.sum()
    sizes = 1 + np.floor(shares).astype(np.int64)
    largest = np.argsort(np.floor(shares) - shares, kind="stable")[: n - int(sizes.sum())]
    sizes[largest] += 1
    return sizes


def dirichlet(
    labels: Tensor | np.ndarray,
    devices: int,
    alpha: float,
    seed: int,
    each: int | None = None,
    sizes: Sequence[int] | np.ndarray | None = None,
) -> Indexed:
    """Hsu et al. 2019 (arXiv:1909.06335) with equal sizes: each device draws its class proportions from a Dirichlet and
    takes samples accordingly, without replacement; a class that has run out is left out and the rest rescaled. All get
    as many samples as there are for each, or `each`, or by `sizes`.

    The concentration is alpha per class (times the class's share of the data relative to an even one).
    """
    values = np.asarray(labels)
    size = _size(len(values), devices, each)
    counts = [size] * devices if sizes is None else [int(one) for one in sizes]
    if not (np.isfinite(alpha) and alpha > 0):
        raise BadInput(f"the Dirichlet parameter is {alpha}; it should be a positive number, 0.1 for example")
    random = _random(seed, _DIRICHLET)
    classes, left = np.unique(values, return_counts=True)
    # each class's samples in random order: a device takes the next ones
    order = random.permutation(len(values))
    order = order[np.argsort(values[order], kind="stable")]
    next_of = np.concatenate([[0], np.cumsum(left)[:-1]])
    concentration = alpha * left / left.mean()
    result = []
    for own in counts:
        take = _class_counts(random.dirichlet(concentration), left, own, random)
        parts = [order[next_of[c] : next_of[c] + take[c]] for c in np.flatnonzero(take)]
        result.append(np.sort(np.concatenate(parts)))
        next_of += take
        left = left - take
    return _ragged(result)


def _class_counts(shares: np.ndarray, left: np.ndarray, size: int, random: np.random.Generator) -> np.ndarray:
    """How many samples of each class: multinomial, what a class lacks is drawn again from those with some left."""
    take = np.zeros(len(left), dtype=np.int64)
    while (missing := size - int(take.sum())) > 0:
        open_ = take < left
        weights = np.where(open_ & np.isfinite(shares), shares, 0.0)
        if weights.sum() <= 0:  # nothing of this device's own classes is left (or tiny alpha underflowed)
            weights = np.where(open_, left - take, 0).astype(np.float64)
        weights /= weights.sum()
        # numpy gives the last class whatever rounding leaves over: with weight 0 that would still be harmless (capped)
        take = np.minimum(take + random.multinomial(missing, weights), left)
    return take


def by_user(users: Sequence[np.ndarray], devices: int | None = None, seed: int = 0) -> Indexed:
    """One device per user (writer). Fewer devices than users: a random choice of users."""
    if devices is None:
        devices = len(users)
    if not 0 < devices <= len(users):
        raise BadInput(f"the data has {len(users)} users: a partition by user can have so many devices, not {devices}")
    chosen = np.sort(_random(seed, _USERS).permutation(len(users))[:devices])
    return _ragged([np.sort(users[user]) for user in chosen])


def shards(labels: Tensor | np.ndarray, devices: int, per_device: int, seed: int) -> Indexed:
    """McMahan et al. 2017: sort by label, cut into devices * per_device equal shards, deal `per_device` to each."""
    values = np.asarray(labels)
    _check(len(values), devices)
    if per_device < 1 or devices * per_device > len(values):
        raise BadInput(
            f"{per_device} shards for each of {devices} devices cannot be cut from {len(values)} samples; "
            f"give 1 to {len(values) // devices} per device"
        )
    random = _random(seed, _SHARDS)
    count = devices * per_device
    size = len(values) // count
    # shuffled before the stable sort, so that which samples of a class share a shard is random
    order = random.permutation(len(values))
    order = order[np.argsort(values[order], kind="stable")][: count * size].reshape(count, size)
    dealt = order[random.permutation(count)].reshape(devices, per_device * size)
    return _equal(np.sort(dealt, axis=1))


def from_indices(lists: Sequence[Sequence[int] | np.ndarray], n: int) -> Indexed:
    """Your own partition: for each device the indices of its samples among the n training samples."""
    if len(lists) == 0:
        raise BadInput("the partition has no devices; give one list of sample indices per device")
    parts = []
    for device, given in enumerate(lists):
        values = np.asarray(given)
        if values.size == 0:
            raise BadInput(f"device {device} of the partition has no samples; every device should have at least one")
        if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
            raise BadInput(f"device {device} of the partition should be a flat list of whole numbers")
        parts.append(np.sort(values.astype(np.int64)))
    made = _ragged(parts)
    check_range(made, n)
    return made


def check_range(partition: Partition, n: int) -> None:
    """That a partition names none but the n training samples. One of your own class is not asked: it may be lazy."""
    if isinstance(partition, LazyIid) and partition.n > n:
        raise BadInput(f"the lazy partition draws from {partition.n} samples, and there are {n}: make it for {n}")
    if not isinstance(partition, Indexed):
        return
    outside = np.flatnonzero((partition.indices < 0) | (partition.indices >= n))
    if len(outside):
        device = int(np.searchsorted(partition.starts, outside[0], side="right")) - 1
        raise BadInput(
            f"device {device} of the partition holds sample {partition.indices[outside[0]]}; with {n} training samples "
            f"indices should be 0 to {n - 1}"
        )


def parse_partition(text: str, data: FederatedData, devices: int, seed: int, sizes: str | None = None) -> Partition:
    """iid[:EACH] | dirichlet:ALPHA[:EACH] | shards:PER_DEVICE | user | lazy[:SAMPLES] (default: a hundredth of all) |
    file:PATH.json. `sizes`: lognormal:SIGMA, of the first two."""
    kind, colon, value = text.partition(":")
    n = len(data.train)
    if sizes is not None and (kind not in ("iid", "dirichlet") or text.count(":") > (kind == "dirichlet")):
        raise BadInput(f"sizes are for the partitions iid and dirichlet:ALPHA, not for {text}: leave one of them out")
    unequal = None if sizes is None else parse_sizes(sizes, n, devices, seed)
    if kind == "file":
        return from_file(expanded(value), n, devices)
    if kind == "iid":
        return iid(n, devices, seed, int(_number(text, value, int)) if colon else None, unequal)
    if kind == "dirichlet":
        alpha, more, size = value.partition(":")
        labels = class_labels(data.train, "a Dirichlet partition")
        each = int(_number(text, size, int)) if more else None
        return dirichlet(labels, devices, _number(text, alpha, float), seed, each, unequal)
    if kind == "shards":
        return shards(
            class_labels(data.train, "a partition into shards"), devices, int(_number(text, value, int)), seed
        )
    if kind == "user" and not colon:
        if data.users is None:
            raise BadInput(
                f"{data.name} has no users; a partition by user needs femnist, shakespeare, or your own data "
                "with users (--user-field)"
            )
        return by_user(data.users, devices, seed)
    if kind == "lazy":
        samples = int(_number(text, value, int)) if colon else max(1, n // 100)
        return LazyIid(n, devices, samples, seed)
    raise BadInput(
        f"there is no partition {text!r}; choose iid, dirichlet:0.1, shards:2, user, lazy (lazy:500) or file:PATH.json"
    )


def parse_sizes(text: str, n: int, devices: int, seed: int) -> np.ndarray:
    kind, _, value = text.partition(":")
    try:
        sigma = float(value)
    except ValueError:
        sigma = None
    if kind != "lognormal" or sigma is None:
        raise BadInput(f"sizes are lognormal:SIGMA, such as lognormal:1, not {text!r}")
    return lognormal_sizes(n, devices, sigma, seed)


def from_file(path: Path, n: int, devices: int) -> Indexed:
    """A JSON file with a list for each device: the indices of its samples among the n training samples."""
    try:
        lists = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"there is no file {path} with a partition") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(
            f"{path} is not a partition, a JSON list of lists of sample indices: {one_line(error, 200)}"
        ) from None
    if not isinstance(lists, list) or not all(isinstance(one, list) for one in lists):
        raise BadInput(f"{path} is not a partition: it should be a JSON list with a list of sample indices per device")
    if len(lists) != devices:
        raise BadInput(f"{path} has {len(lists)} devices, not {devices}: give --devices {len(lists)}")
    if any(type(index) is not int for one in lists for index in one):
        raise BadInput(f"{path} holds something else than whole numbers among its sample indices")
    try:
        return from_indices(lists, n)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None


def _number(text: str, value: str, kind: type[int] | type[float]) -> float:
    try:
        return kind(value)
    except ValueError:
        example = "dirichlet:0.1" if kind is float else f"{text.partition(':')[0]}:2"
        raise BadInput(f"the partition {text!r} needs a number after the colon, {example} for example") from None


def _random(seed: int, *purpose: int) -> np.random.Generator:
    if seed < 0:
        raise BadInput(f"the seed is {seed}; it should be 0 or more")
    return np.random.default_rng([seed, *purpose])


def _size(n: int, devices: int, each: int | None) -> int:
    """Samples of a device, where all have the same number."""
    _check(n, devices)
    if each is None:
        return n // devices
    if not 1 <= each <= n // devices:
        raise BadInput(
            f"{devices} devices cannot have {each} samples each of {n}: give 1 to {n // devices} samples, or fewer "
            "devices"
        )
    return each


def _check(n: int, devices: int, at_least_one_each: bool = True) -> None:
    if devices < 1:
        raise BadInput(f"a partition over {devices} devices is impossible; give 1 or more")
    if n < 1 or (at_least_one_each and devices > n):
        raise BadInput(
            f"{n} samples over {devices} devices would leave devices empty; give at most {n} devices, "
            "or the lazy partition, where devices share samples"
        )


def _check_device(device: int, devices: int) -> None:
    if not 0 <= device < devices:
        raise IndexError(f"device {device} of {devices}")


def _equal(rows: np.ndarray) -> Indexed:
    devices, size = rows.shape
    return Indexed(rows.reshape(-1), np.arange(devices + 1, dtype=np.int64) * size)


def _ragged(parts: Sequence[np.ndarray]) -> Indexed:
    starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
    return Indexed(np.concatenate(parts).astype(np.int64), starts)
