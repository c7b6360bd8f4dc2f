"""Tables and figures from run folders made by hand."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from strata.core.errors import BadInput
from strata.experiments import Asked, Cell, Results, experiment, steps
from strata.experiments.published import content
from strata.results.curves import cost_to_reach, highest_so_far, mean_cost_to_reach, over_rounds
from strata.results.tables import Table, escape, latex
from tests.experiments.fabricated import fabricate, write


def cell(method: str, level: float = 0.125, **more: object) -> Cell:
    return Cell("cifar10", "resnet20", "iid", (level,), method, **more)  # type: ignore[arg-type]


def rendered(name: str, root: Path, out: Path, asked: Asked | None = None) -> tuple[str, list[dict[str, str]], str]:
    """Markdown, CSV and LaTeX."""
    out.mkdir()
    files = experiment(name, asked).render(Results(root, asked=asked or Asked()), out)
    assert all(path.stat().st_size > 0 for path in files)
    with open(out / "table.csv", encoding="utf-8") as file:
        records = list(csv.DictReader(file))
    return (out / "table.md").read_text(), records, (out / "table.tex").read_text()


def row(text: str, start: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return [part.strip() for part in line.strip("|").split("|")]


def test_tables_say_what_their_runs_were_trained_on_and_how_they_began(tmp_path: Path) -> None:
    folders = [fabricate(tmp_path / "runs", cell(method), 2, 0, [0.05, 0.5]) for method in ("slt", "small")]
    text, _, _ = rendered("table-iid", tmp_path / "runs", tmp_path / "old")
    assert "cifar10. These runs are from before 0.2: their networks began with `kaiming_normal_`'s" in text
    for number, folder in enumerate(folders):
        config = json.loads((folder / "config.json").read_text())
        known = {"data": {"name": "cifar10", "sha256": "4466"}}
        write(folder / "config.json", {**config, "format": 2, "settings": known})
        text, _, _ = rendered("table-iid", tmp_path / "runs", tmp_path / str(number))
        assert "`data.sha256` of config.json: cifar10" in text and "cifar10 4466." in text
        assert ("Some of these runs are from before 0.2" in text) == (number == 0)


def test_mean_std_published_value_and_ranking(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for method, accuracies in {
        "slt": (0.72, 0.74, 0.76), "small": (0.78, 0.78, 0.78), "fedrolex": (0.20, 0.22, 0.24), "fd": (0.10, 0.1, 0.1),
    }.items():  # fmt: skip
        for seed, accuracy in enumerate(accuracies):
            fabricate(root, cell(method), 2, seed, [0.05, accuracy])
    text, records, tex = rendered("table-iid", root, tmp_path / "out")
    # 72, 74, 76: mean 74, sample standard deviation 2: the small model's 78 is further ahead than that
    assert row(text, "SLT")[1] == "74.0 ± 2.0 (74.1 ± 0.8)"
    assert row(text, "small model")[1] == "78.0 ± 0.0 (66.3 ± 0.3)"
    assert row(text, "FD")[1:3] == ["10.0 ± 0.0 (19.0 ± 1.4)", "– (36.7 ± 1.8)"]
    assert row(text, "ranking")[1:] == ["✗ small model > SLT", "–", "–", "–"]
    assert row(text, "rounds (full length)")[1] == "2 (2500)" and row(text, "seeds")[1] == "3"
    assert "Batch norm in evaluation: batch." in text and "Accounting of SLT's plans: paper." in text
    assert "NeurIPS 2023" in text
    slt = next(r for r in records if (r["data"], r["levels"], r["method"]) == ("cifar10", "0.125", "slt"))
    assert (float(slt["accuracy_mean"]), float(slt["accuracy_std"])) == (74.0, 2.0)
    assert (slt["published_mean"], slt["published_std"], slt["rounds"], slt["seeds"]) == ("74.1", "0.8", "2", "3")
    assert (slt["bn"], slt["accounting"], slt["ranking"]) == ("batch", "paper", "differs")
    assert len(records) == 48
    small = next(r for r in records if (r["data"], r["levels"], r["method"]) == ("cifar10", "0.125", "small"))
    assert float(small["accuracy_std"]) == 0.0
    assert r"74.0 $\pm$ 2.0 (74.1 $\pm$ 0.8)" in tex and tex.count(r"\begin{tabular}") == 1
    assert "No run is finished of: FEMNIST, ResNet20, iid; CIFAR100, DenseNet40, iid; TinyImageNet" in text


def test_nothing_finished_shows_what_would_be_there(tmp_path: Path) -> None:
    text, _, tex = rendered("table-iid", tmp_path / "runs", tmp_path / "out")
    assert row(text, "SLT")[1] == "– (74.1 ± 0.8)" and tex.count(r"\begin{tabular}") == 4
    assert "No run is finished of" not in text


def test_a_ranking_that_agrees_and_one_that_is_within_the_papers_std(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for method, accuracy in {"slt": 0.9, "small": 0.8, "fedrolex": 0.7, "fd": 0.6}.items():
        fabricate(root, cell(method), 1, 0, [accuracy])
        femnist = Cell("femnist", "resnet20", "iid", (0.25,), method)
        # 71.4 ± 2.1 against 70.4 ± 0.2 in the paper: the order of these two is no news; but slt > small is 85.8 > 85.5
        fabricate(root, femnist, 1, 0, [{"fedrolex": 0.6, "fd": 0.7}.get(method, accuracy)])
    text, records, _ = rendered("table-iid", root, tmp_path / "out")
    ranking = [line for line in text.splitlines() if line.startswith("| ranking")]
    assert ranking[0] == "| ranking | ✓ | – | – | – |"
    assert ranking[1] == "| ranking | – | ✗ FD > FedRolex° | – | – |"
    assert {r["ranking"] for r in records if r["data"] == "cifar10" and r["levels"] == "0.125"} == {"agrees"}
    assert row(text, "SLT")[1] == "90.0 (74.1 ± 0.8)"  # one seed: no standard deviation


def test_what_our_own_noise_does_not_let_apart_is_a_tie(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    # a single seed: over its last five evaluations SLT has 70, 74, 70, 74, 72, so a deviation of 2
    fabricate(root, cell("slt"), 6, 0, [0.1, 0.7, 0.74, 0.7, 0.74, 0.72])
    for seed, accuracy in enumerate((0.735, 0.735)):
        fabricate(root, cell("small"), 6, seed, [None] * 5 + [accuracy])
    fabricate(root, cell("fd"), 6, 0, [0.1] * 6)
    slt = Results(root).of(cell("slt"))
    assert slt is not None and slt.std is None and slt.noise == pytest.approx(2.0)
    text, records, _ = rendered("table-iid", root, tmp_path / "out")
    assert row(text, "ranking")[1] == "✓ SLT = small model"
    fabricate(root, cell("slt", 0.25), 1, 0, [0.5])
    fabricate(root, cell("small", 0.25), 1, 0, [0.5])
    text, records, _ = rendered("table-iid", root, tmp_path / "again")
    assert row(text, "ranking")[2] == "tie SLT = small model"
    assert {r["ranking"] for r in records if r["levels"] == "0.25" and r["data"] == "cifar10"} == {"tie"}


def test_runs_of_different_length_have_columns_of_their_own(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    fabricate(root, cell("slt"), 3, 0, [0.1, 0.2, 0.3])
    fabricate(root, cell("slt"), 1, 0, [0.9])
    fabricate(root, cell("small"), 1, 0, [0.5])
    text, records, _ = rendered("table-iid", root, tmp_path / "out")
    assert row(text, "ours (published), accuracy in %")[1:4] == ["0.125, 1 rounds", "0.125, 3 rounds", "0.25"]
    assert row(text, "SLT")[1:3] == ["90.0 (74.1 ± 0.8)", "30.0 (74.1 ± 0.8)"]
    assert row(text, "small model")[1:3] == ["50.0 (66.3 ± 0.3)", "– (66.3 ± 0.3)"]
    assert row(text, "ranking")[1:3] == ["✓", "–"]
    assert row(text, "rounds (full length)")[1:4] == ["1 (2500)", "3 (2500)", "– (2500)"]
    assert [(r["accuracy_mean"], r["rounds"]) for r in records[:8:4]] == [("90.0", "1"), ("30.0", "3")]


def test_runs_with_other_settings_are_not_mixed_with_the_papers(tmp_path: Path) -> None:
    root, asked = tmp_path / "runs", Asked(settings=(("schedule", "authors"),))
    fabricate(root, cell("slt"), 1, 0, [0.7])
    fabricate(root, asked.varied(cell("slt")), 1, 0, [0.9])
    fabricate(root, asked.varied(cell("small")), 1, 0, [0.5])  # it has no schedule: one run serves both
    plain, _, _ = rendered("table-iid", root, tmp_path / "plain")
    other, records, _ = rendered("table-iid", root, tmp_path / "other", asked)
    assert row(plain, "SLT")[1] == "70.0 (74.1 ± 0.8)" and row(other, "SLT")[1] == "90.0 (74.1 ± 0.8)"
    assert row(plain, "small model")[1] == row(other, "small model")[1] == "50.0 (66.3 ± 0.3)"
    assert other.startswith("# Accuracy with iid data; schedule authors\n")
    assert [(r["method"], r["variant"]) for r in records[:2]] == [("slt", "authors"), ("small", "")]
    assert Results(root, asked=asked).at_one_length([cell("slt")]).of(cell("slt")).mean == 90  # type: ignore[union-attr]


def test_runs_of_different_length_are_not_divided_by_each_other(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    fabricate(root, cell("slt"), 2, 0, [0.1, 0.3])
    fabricate(root, cell("slt"), 4, 0, [0.1, 0.1, 0.1, 0.3])
    fabricate(root, cell("fd"), 2, 0, [0.1, 0.3])
    text, _, _ = rendered("figure-communication", root, tmp_path / "out")
    short, long = text.split("## ")[1:3]
    assert (
        short.startswith("CIFAR10, ResNet20 at 0.125, 2 rounds") and row(short, "upload in GB to 30 %")[2] == "2 (1×)"
    )
    assert long.startswith("CIFAR10, ResNet20 at 0.125, 4 rounds") and len(row(long, "upload in GB to 30 %")) == 2


def test_results_may_be_restricted(tmp_path: Path) -> None:
    slt, small = cell("slt"), cell("small")
    for rounds, seed, accuracy in ((1, 0, 0.9), (1, 1, 0.7), (3, 0, 0.3)):
        fabricate(tmp_path, slt, rounds, seed, [accuracy] * rounds)
    fabricate(tmp_path, small, 1, 0, [0.5])
    fabricate(tmp_path, small, 1, 1, [0.5]).rename(tmp_path / small.name / "rounds-1" / "seed-1-old")  # not ours

    def mean(results: Results, of: Cell, rounds: int | None = None) -> float | None:
        return (found := results.of(of, rounds)) and found.mean

    every = Results(tmp_path)
    assert mean(every, slt) == 30 and mean(every, slt, 1) == 80 and mean(every, slt, 2) is None
    assert every.lengths([slt, small]) == [1, 3] and mean(every, small) == 50
    assert mean(every.at_one_length([slt, small]), slt) == 80, "both have 1 round, one of them 3"
    assert mean(every.at_one_length([slt]), slt) == 30, "of equals the longer"
    assert mean(Results(tmp_path, {slt.name: 1}, seeds=1), slt) == 90
    assert mean(Results(tmp_path, {slt.name: 1}), small) is None
    assert mean(Results(tmp_path, cells=frozenset([small.name])), slt) is None


def test_unfinished_runs_do_not_count(tmp_path: Path) -> None:
    folder = fabricate(tmp_path, cell("slt"), 1, 0, [0.9])
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(BadInput, match="cannot read .*metrics.jsonl"):
        _ = Results(tmp_path).of(cell("slt")).metrics  # type: ignore[union-attr]
    (folder / "summary.json").unlink()
    assert Results(tmp_path).of(cell("slt")) is None


def test_highest_so_far_and_what_it_takes() -> None:
    records = [
        {"accuracy": accuracy, "upload_bytes": 3, "train_flops": 5, "round": n}
        for n, accuracy in enumerate([0.2, None, 0.1, 0.5, 0.4])
    ]
    assert highest_so_far(records, "upload_bytes") == [(3, 20), (9, 20), (12, 50), (15, 50)]
    assert cost_to_reach(records, "train_flops", 20) == 5
    assert cost_to_reach(records, "train_flops", 21) == 20
    assert cost_to_reach(records, "train_flops", 51) is None
    other = [{**records[0], "accuracy": 0.5}]
    assert mean_cost_to_reach([records, other], "upload_bytes", 50) == (12 + 3) / 2
    assert mean_cost_to_reach([records, [records[0]]], "upload_bytes", 50) is None
    curve = over_rounds([records, [{**r, "accuracy": 0.3} for r in records]])
    assert curve.rounds == (1, 3, 4, 5) and curve.percent == pytest.approx((25, 20, 40, 35))
    assert curve.spread[0] == pytest.approx(5 * 2**0.5)  # of 20 and 30


def test_communication(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    fabricate(root, cell("slt"), 4, 0, [0.1, 0.2, 0.3, 0.45], upload=2 * 10**9, flops=10**15)
    fabricate(root, cell("fd"), 4, 0, [0.05, 0.05, 0.1, 0.2], upload=10**10, flops=10**16)
    text, records, _ = rendered("figure-communication", root, tmp_path / "out")
    # SLT reaches 20 % in round 2, for 4 GB and 2 PFLOP; FD in round 4, for 40 GB and 40 PFLOP
    assert row(text, "upload in GB to 20 %") == ["upload in GB to 20 %", "4", "40 (10×)"]
    assert row(text, "training in PFLOP to 20 %")[1:] == ["2", "40 (20×)"]
    assert row(text, "upload in GB to 40 %")[1:] == ["8", "–"]
    assert {(r["method"], r["to_accuracy"]) for r in records if r["upload_bytes"]} == {
        ("slt", "20.0"), ("slt", "30.0"), ("slt", "40.0"), ("fd", "20.0"),
    }, "10 % of 10 classes is chance"  # fmt: skip
    assert (tmp_path / "out" / "figure-cifar10-0.125-4.png").exists() and "figure-cifar10-0.125-4.png" in text
    assert (tmp_path / "out" / "figure-cifar10-0.125-4.svg").read_text().startswith("<?xml")
    assert "as finely as a run was evaluated: every 25 rounds here" in text


def test_mapping_says_the_patience_that_was_used(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    runs = {run.cell.variant: run for run in experiment("figure-mapping", Asked(0.06, 1)).runs}
    for variant, accuracy in (("", 0.5), ("equal", 0.4), ("early-stopping-25", 0.3)):
        fabricate(root, runs[variant].cell, 2, 0, [0.1, accuracy], steps=[0, 1])
    text, records, _ = rendered("figure-mapping", root, tmp_path / "out")
    assert row(text, "cumulative")[1:] == ["50.0", "2", "1"]
    assert row(text, "early stopping 25 (patience 2 here)")[1] == "30.0"
    assert row(text, "early stopping 5")[1:] == ["–", "–", "–"]
    assert [r["accuracy_mean"] for r in records] == ["50.0", "", "", "40.0", "", "", "30.0"]


@pytest.mark.parametrize(
    "name", ["figure-motivation", "figure-steps", "figure-limited-randomness", "figure-ablation", "figure-mapping"]
)
def test_figures_with_all_their_runs_and_with_none(name: str, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    rendered(name, root, tmp_path / "empty")
    for run in experiment(name, Asked(seeds=2)).runs:
        fabricate(root, run.cell, 3, run.request.seed, [0.1, None, 0.4 + run.request.seed / 10], steps=[0, 1, 2])
    text, records, _ = rendered(name, root, tmp_path / "out")
    assert (tmp_path / "out" / "figure.png").stat().st_size > 10_000
    assert (tmp_path / "out" / "figure.svg").read_text() != (tmp_path / "empty" / "figure.svg").read_text()
    # seeds at 40 and 50 %: mean 45, standard deviation 10 / sqrt(2)
    assert "45.0 ± 7.1" in text and all(float(r["accuracy_mean"]) == 45 for r in records)


def test_steps_against_the_paper_and_the_authors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "DATA_OF", {"resnet20": "cifar10"})  # the others take long; tests/planning has them all
    ours = steps.our_steps(Asked())
    assert ours == {("resnet20", 0.5): 8, ("resnet20", 0.25): 12, ("resnet20", 0.125): 16}  # golden.yaml N_exact
    monkeypatch.undo()
    every = {(row["model"], row["constraint"]): 14 for row in content()["steps"]}
    monkeypatch.setattr(steps, "our_steps", lambda asked: every | ours)
    text, records, _ = rendered("table-steps", tmp_path, tmp_path / "out")
    assert "| ResNet20 | 0.5 | 8 | 8 | 8 | ✓ |" in text and "| ResNet20 | 0.25 | 12 | 14 | 12 | ✗ |" in text
    assert "| ResNet56 | 0.5 | 14 | – | 18 | – |" in text and len(records) == 11
    assert set(steps.DATA_OF) == {row["model"] for row in content()["steps"]}


def test_latex_is_escaped() -> None:
    assert escape("50 % of A_1 & B > C") == r"50 \% of A\_1 \& B $>$ C"
    text = latex([Table("a_b", ("x", "y"), (("1 ± 2", "✓"),))], ["note"])
    assert r"1 $\pm$ 2 & $\checkmark$ \\" in text and r"\caption{a\_b}" in text and text.startswith("% \\usepackage")
