"""The loaders on real CIFAR-10 and TinyImageNet."""

from __future__ import annotations

import numpy as np

from strata.data import dirichlet, load
from strata.data.distribution import holdings
from strata.data.images import channel_statistics
from tests.data.real import real_cifar10, real_tinyimagenet


def test_real_cifar10():
    data = load("cifar10", real_cifar10())
    assert data.train.images.shape == (50_000, 3, 32, 32) and data.test.images.shape == (10_000, 3, 32, 32)
    assert np.bincount(data.train.labels).tolist() == [5000] * 10
    assert np.bincount(data.test.labels).tolist() == [1000] * 10
    assert data.class_names[0] == "airplane" and data.class_names[9] == "truck"
    mean, std = channel_statistics(data.train.images)  # the published statistics, as far as JPEG keeps them
    assert np.allclose(mean, data.train.mean, atol=0.001) and np.allclose(std, data.train.std, atol=0.003)
    held = (holdings(dirichlet(data.train.labels, 100, 0.1, seed=0), data.train.labels, 10) > 0).sum(axis=1)
    assert 4.0 < held.mean() < 5.0


def test_real_tinyimagenet():
    data = load("tinyimagenet", real_tinyimagenet())
    assert data.train.images.shape == (10_000, 3, 64, 64) and data.test.images.shape == (2_000, 3, 64, 64)
    assert np.bincount(data.train.labels).tolist() == [50] * 200
    assert np.bincount(data.test.labels).tolist() == [10] * 200
    assert data.class_names[0] == "n01443537"
    mean, std = channel_statistics(data.train.images)
    assert np.allclose(mean, data.train.mean, atol=0.005) and np.allclose(std, data.train.std, atol=0.005)
