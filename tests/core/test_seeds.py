from __future__ import annotations

import subprocess
import sys

import torch

from strata.core.seeds import derive, generator


def test_a_key_means_the_same_number_in_every_process() -> None:
    code = "from strata.core.seeds import derive; print(derive(3, 'augmentation', 7, 12))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == derive(3, "augmentation", 7, 12) == 6143530424899431124


def test_keys_do_not_collide() -> None:
    keys = [(s, p, r, d) for s in range(3) for p in ("order", "dropout") for r in range(20) for d in range(20)]
    assert len({derive(*key) for key in keys}) == len(keys)
    assert derive(0, "a", 1) != derive(0, "a", 1, 0)


def test_generator_is_independent_of_the_global_seed() -> None:
    torch.manual_seed(0)
    first = torch.rand(3, generator=generator(1, "x", 2))
    torch.manual_seed(1)
    assert torch.equal(first, torch.rand(3, generator=generator(1, "x", 2)))
