"""table-frontier: every method within the same true bytes."""

from __future__ import annotations

from pathlib import Path

from strata.experiments import Asked, Results, experiment
from strata.experiments.frontier import PANELS


def test_cells_are_named_by_their_bytes_and_asked_for_lean() -> None:
    made = experiment("table-frontier", Asked(scale=0.06, seeds=1))
    names = [run.name for run in made.runs]
    assert names[0] == "cifar10/resnet20/iid/2.5MiB/small/rounds-150/seed-0"
    assert "cifar10/resnet20/dirichlet-0.1/6.5MiB/slt/rounds-150/seed-0" in names
    assert len(names) == len(set(names)) == sum(len(panel.cells()) for panel in PANELS) == 25
    for run in made.runs:
        assert run.request.approach.lean and not run.request.approach.constraints
    assert made.runs[0].request.approach.budgets == (2_621_440,)


def test_it_renders_before_any_run_is_finished(tmp_path: Path) -> None:
    made = experiment("table-frontier", Asked(seeds=1))
    files = made.render(Results(tmp_path / "none"), tmp_path)
    page = (tmp_path / "table.md").read_text()
    assert {file.name for file in files} >= {"table.md", "table.csv", "figure.png"}
    assert "| 4 MiB | whole model | does not fit |" in page and "| 6.5 MiB | whole model | – |" in page
