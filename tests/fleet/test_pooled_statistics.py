from __future__ import annotations

import torch
from torch import Tensor

from strata.fleet.pooled_statistics import pooled


def measured(values: Tensor) -> tuple[int, dict[str, Tensor]]:
    return len(values), {"bn.running_mean": values.mean(0), "bn.running_var": values.var(0, unbiased=False)}


def test_pooling_gives_the_statistics_of_all_images_together() -> None:
    """Parts of other sizes and other classes: the mean of their variances would leave out how far they are apart."""
    parts = [torch.randn(count, 3) + shift for count, shift in ((32, 0.0), (32, 5.0), (5, -3.0))]
    found = pooled([measured(part) for part in parts])
    _, whole = measured(torch.cat(parts))
    for name, value in whole.items():
        torch.testing.assert_close(found[name], value)


def test_a_robust_run_takes_medians() -> None:
    honest = [(10, {"bn.running_mean": torch.tensor([m]), "bn.running_var": torch.tensor([2.0])}) for m in (0.0, 1.0)]
    liar = (512, {"bn.running_mean": torch.tensor([1e38]), "bn.running_var": torch.tensor([1e38])})
    found = pooled([*honest, liar], robust=True)
    # means 0, 1 and a lie: 1; around that 2 + 1, 2 + 0 and a lie: 3
    assert found == {"bn.running_mean": torch.tensor([1.0]), "bn.running_var": torch.tensor([3.0])}
    spoilt = pooled([*honest, liar])
    assert all(bool(torch.isfinite(value).all()) for value in spoilt.values())
