from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.core.errors import BadInput
from strata.data import (
    FederatedData,
    ImageSet,
    Indexed,
    LazyIid,
    by_user,
    check_range,
    dirichlet,
    from_indices,
    iid,
    load,
    parse_partition,
    shards,
)
from strata.data.distribution import holdings
from strata.data.partitions import lognormal_sizes


def everything(partition) -> np.ndarray:
    return np.concatenate([partition[device] for device in range(len(partition))])


def cifar_labels() -> torch.Tensor:
    return torch.arange(50_000) % 10


def small_data(users=None) -> FederatedData:
    labels = torch.arange(40) % 4
    images = ImageSet(torch.zeros(40, 1, 2, 2, dtype=torch.uint8), labels)
    return FederatedData(images, images, "small", 4, users=users)


@given(n=st.integers(1, 300), devices=st.integers(1, 60), seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_iid_deals_each_sample_once_in_equal_sizes(n, devices, seed):
    if devices > n:
        with pytest.raises(BadInput, match="leave devices empty"):
            iid(n, devices, seed)
        return
    partition = iid(n, devices, seed)
    dealt = everything(partition)
    assert len(partition) == devices
    assert all(len(partition[device]) == n // devices for device in range(devices))
    assert len(np.unique(dealt)) == len(dealt) == devices * (n // devices)
    assert all((np.diff(partition[device]) > 0).all() for device in range(devices))


def test_seeds_are_known_bits():
    """Written down once: a change of numpy or of the code that moves samples shows here."""
    assert iid(10, 2, seed=0)[0].tolist() == [0, 3, 4, 6, 9]
    assert LazyIid(1000, 10**9, 5, seed=3)[123_456_789].tolist() == [408, 526, 618, 672, 716]
    assert dirichlet(torch.arange(20) % 4, 2, 0.5, seed=1)[0].tolist() == [1, 7, 8, 11, 13, 14, 15, 17, 18, 19]
    assert not np.array_equal(iid(100, 2, seed=0)[0], iid(100, 2, seed=1)[0])


def test_dirichlet_on_cifar_sizes_has_the_papers_mix():
    labels = cifar_labels()
    means = []
    for seed in range(5):
        partition = dirichlet(labels, 100, 0.1, seed)
        counts = holdings(partition, labels, 10)
        assert (counts.sum(axis=1) == 500).all()
        assert len(np.unique(everything(partition))) == 50_000  # without replacement, and all are dealt
        means.append((counts > 0).sum(axis=1).mean())
    assert 4.2 < np.mean(means) < 4.9  # docs/method.md: about 4.5


def test_dirichlet_goes_to_its_limits():
    labels = cifar_labels()
    even = holdings(dirichlet(labels, 100, 1e5, 0), labels, 10)
    assert even[:90].min() > 20  # 50 of each class expected; the last devices take what is left
    one = holdings(dirichlet(labels, 100, 1e-4, 0), labels, 10)
    assert (one.max(axis=1) == 500).mean() > 0.85  # nearly every device has a single class
    with pytest.raises(BadInput, match="positive"):
        dirichlet(labels, 100, 0.0, 0)


@given(st.lists(st.integers(0, 5), min_size=6, max_size=200), st.integers(1, 6), st.floats(0.01, 50), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_dirichlet_is_exact_for_any_labels(labels, devices, alpha, seed):
    partition = dirichlet(np.array(labels), devices, alpha, seed)
    dealt = everything(partition)
    assert [len(partition[d]) for d in range(devices)] == [len(labels) // devices] * devices
    assert len(np.unique(dealt)) == len(dealt)


def test_shards_hold_few_classes():
    labels = cifar_labels()
    partition = shards(labels, 100, 2, seed=0)
    counts = holdings(partition, labels, 10)
    assert (counts.sum(axis=1) == 500).all() and len(np.unique(everything(partition))) == 50_000
    assert (counts > 0).sum(axis=1).max() == 2  # 250 divides 5000: a shard never spans two classes
    with pytest.raises(BadInput, match="cannot be cut"):
        shards(labels, 100, 501, seed=0)


def test_by_user_keeps_each_users_samples():
    users = [np.array([3, 1]), np.array([0]), np.array([2, 4, 5])]
    whole = by_user(users)
    assert [whole[d].tolist() for d in range(3)] == [[1, 3], [0], [2, 4, 5]]
    two = by_user(users, devices=2, seed=0)
    assert len(two) == 2 and all(two[d].tolist() in ([1, 3], [0], [2, 4, 5]) for d in range(2))
    with pytest.raises(BadInput, match="3 users"):
        by_user(users, devices=4)


def test_lazy_fleet_takes_no_memory_and_is_evenly_drawn():
    fleet = LazyIid(n=50, devices=10**12, samples=40, seed=0)
    assert len(fleet) == 10**12 and np.array_equal(fleet[10**11], fleet[10**11])
    assert not np.array_equal(fleet[0], fleet[1])
    drawn = np.bincount(np.concatenate([fleet[d] for d in range(500)]), minlength=50)
    assert 300 < drawn.min() and drawn.max() < 500  # 400 expected, standard deviation 20
    with pytest.raises(IndexError):
        fleet[10**12]
    with pytest.raises(BadInput):
        LazyIid(50, 10, 0, 0)


def test_own_lists_are_checked():
    mine = from_indices([[4, 0], np.array([1], dtype=np.int32)], n=5)
    assert mine[0].tolist() == [0, 4] and mine[1].dtype == np.int64
    for lists, words in [
        ([], "no devices"),
        ([[0], []], "device 1 of the partition has no samples"),
        ([[0, 5]], "sample 5; with 5 training samples indices should be 0 to 4"),
        ([[-1]], "sample -1"),
        ([[0.5]], "whole numbers"),
        ([[[0]]], "flat list"),
    ]:
        with pytest.raises(BadInput, match=words):
            from_indices(lists, n=5)


def test_a_partition_must_be_within_the_data():
    check_range(iid(10, 2, 0), 10)
    check_range(LazyIid(10, 3, 4, 0), 10)
    with pytest.raises(BadInput, match="device 1 of the partition holds sample 7; with 5 training samples"):
        check_range(Indexed(np.array([0, 1, 7, 2]), np.array([0, 2, 4])), 5)
    with pytest.raises(BadInput, match="draws from 10 samples, and there are 5"):
        check_range(LazyIid(10, 3, 4, 0), 5)


def test_a_lazy_device_draws_no_more_than_memory_holds():
    with pytest.raises(BadInput, match="1 to 268435456 samples, drawn with replacement, not 99999999999999999999"):
        LazyIid(50, 10, 99999999999999999999, 0)


def test_a_device_cannot_change_the_partition():
    partition = iid(10, 2, 0)
    before = partition[0].copy()
    partition[0][:] = 9
    assert np.array_equal(partition[0], before)


def test_partitions_by_name():
    users = [np.arange(10), np.arange(10, 40)]
    data = small_data(users)
    assert np.array_equal(parse_partition("iid", data, 4, 7)[3], iid(40, 4, 7)[3])
    assert np.array_equal(parse_partition("dirichlet:0.3", data, 4, 7)[1], dirichlet(data.train.labels, 4, 0.3, 7)[1])
    assert np.array_equal(parse_partition("shards:2", data, 4, 7)[2], shards(data.train.labels, 4, 2, 7)[2])
    assert parse_partition("user", data, 2, 7)[0].tolist() == list(range(10))
    assert len(parse_partition("lazy:6", data, 1000, 7)[999]) == 6
    assert len(parse_partition("lazy", data, 1000, 7)[0]) == 1  # a hundredth of 40, at least one
    some = parse_partition("iid:7", data, 4, 7)
    assert [len(some[device]) for device in range(4)] == [7] * 4 and len(np.unique(everything(some))) == 28
    some = parse_partition("dirichlet:0.5:3", data, 4, 7)
    assert [len(some[device]) for device in range(4)] == [3] * 4 and len(np.unique(everything(some))) == 12
    wrong = ("", "iid:x", "iid:0", "iid:11", "dirichlet", "dirichlet:", "dirichlet:nan", "dirichlet:0.5:",
             "dirichlet:0.5:11", "shards:x", "shards:0", "lazy:0", "user:1", "no")  # fmt: skip
    for text in wrong:
        with pytest.raises(BadInput):
            parse_partition(text, data, 4, 7)
    with pytest.raises(BadInput, match="has no users"):
        parse_partition("user", small_data(), 4, 7)


def test_unequal_sizes_use_every_sample_and_leave_no_device_empty():
    sizes = lognormal_sizes(1000, 50, 1.0, 0)
    assert sizes.sum() == 1000 and sizes.min() >= 1 and sizes.max() > 3 * np.median(sizes)
    assert np.array_equal(sizes, lognormal_sizes(1000, 50, 1.0, 0))
    # by hand: shares of 8 - 3 samples in proportion to the weights, the left over one to the largest fraction
    weights = np.exp(np.random.default_rng([0, 0x512E]).standard_normal(3))
    shares = 5 * weights / weights.sum()
    expected = 1 + np.floor(shares)
    for place in np.argsort(np.floor(shares) - shares)[: int(8 - expected.sum())]:
        expected[place] += 1
    assert lognormal_sizes(8, 3, 1.0, 0).tolist() == expected.tolist()
    spread = [np.std(np.log(lognormal_sizes(100_000, 200, sigma, 1))) for sigma in (0.5, 1.0)]
    assert spread == pytest.approx([0.5, 1.0], rel=0.15)


@pytest.mark.parametrize("text", ["iid", "dirichlet:0.5"])
def test_partitions_of_unequal_sizes(text):
    data = load("digits")
    parts = parse_partition(text, data, 20, 3, "lognormal:1")
    assert [len(parts[device]) for device in range(20)] == lognormal_sizes(1500, 20, 1.0, 3).tolist()
    assert sorted(np.concatenate([parts[device] for device in range(20)])) == list(range(1500))


def test_sizes_that_make_no_sense():
    data = load("digits")
    for text in ("user", "shards:2", "lazy", "iid:5", "dirichlet:0.1:5"):
        with pytest.raises(BadInput, match="sizes are for the partitions iid and dirichlet:ALPHA"):
            parse_partition(text, data, 4, 0, "lognormal:1")
    for sizes in ("lognormal", "lognormal:x", "pareto:1"):
        with pytest.raises(BadInput, match="sizes are lognormal:SIGMA"):
            parse_partition("iid", data, 4, 0, sizes)
    with pytest.raises(BadInput, match="should be a positive number"):
        parse_partition("iid", data, 4, 0, "lognormal:0")


def test_a_partition_in_a_file(tmp_path):
    data, path = load("digits"), tmp_path / "mine.json"
    path.write_text("[[3, 1], [0]]")
    parts = parse_partition(f"file:{path}", data, 2, 0)
    assert [parts[device].tolist() for device in range(2)] == [[1, 3], [0]]
    with pytest.raises(BadInput, match="has 2 devices, not 100: give --devices 2"):
        parse_partition(f"file:{path}", data, 100, 0)
    with pytest.raises(BadInput, match="there is no file"):
        parse_partition(f"file:{tmp_path / 'none.json'}", data, 2, 0)
    for content, said in [
        ("[[0], [1500]]", "holds sample 1500; with 1500 training samples"),
        ("[[0], []]", "device 1 of the partition has no samples"),
        ("[[0], [1.5]]", "something else than whole numbers"),
        ("[[0], [true]]", "something else than whole numbers"),
        ("{}", "a JSON list with a list of sample indices per device"),
        ("[[0]", "is not a partition"),
    ]:
        path.write_text(content)
        with pytest.raises(BadInput, match=said):
            parse_partition(f"file:{path}", data, 2, 0)
