"""Which runs each experiment has, with the settings the paper gives."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from strata.cli.experiment import select
from strata.core.errors import BadInput
from strata.experiments import EXPERIMENTS, Asked, experiment
from strata.experiments.published import content, published
from strata.experiments.setups import SETUPS

RESULTS = Path(__file__).resolve().parents[3] / "shared" / "paper" / "results.yaml"


def cells(name: str, **asked: Any) -> list[str]:
    return [run.cell.name for run in experiment(name, Asked(seeds=1, **asked)).runs]


# 4 methods at each level and FedAvg: CIFAR10, FEMNIST, TinyImageNet 3 x 4 + 1 each, CIFAR100 2 x 4 + 1: 48
# heterogeneous: 5 columns x 5 methods, and the small models at 0.33 and 0.125, which serve all columns: 27
# ImageNet: 2 x (3 x 4 + 1) = 26; motivation: 3 x (3 x 3 + 1) = 30; communication: 13 + 9 + 13 = 35
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("table-iid", 48), ("table-noniid", 48), ("table-heterogeneous", 27), ("table-imagenet", 26),
        ("figure-motivation", 30), ("figure-communication", 35), ("figure-steps", 3),
        ("figure-limited-randomness", 9 + 4), ("figure-ablation", 8), ("figure-mapping", 7), ("table-steps", 0),
        ("table-digits", 9), ("table-writers", 3 * 4 + 1), ("table-true-bytes", 4 * 3 + 1 + 2 + 2 + 3),
    ],
)  # fmt: skip
def test_counts(name: str, count: int) -> None:
    runs = experiment(name).runs
    assert len(runs) == 3 * count and len({run.name for run in runs}) == 3 * count
    assert Counter(run.request.seed for run in runs) == ({0: count, 1: count, 2: count} if count else {})
    assert [run.request.seed for run in runs] == sorted(run.request.seed for run in runs)  # the first seed comes first


def test_every_experiment_is_counted_and_knows_its_name() -> None:
    assert all(experiment(name).name == name for name in EXPERIMENTS) and len(EXPERIMENTS) == 16


def test_settings_of_a_cifar_run() -> None:
    runs = experiment("table-iid").runs
    request = next(run.request for run in runs if run.cell.name == "cifar10/resnet20/iid/0.125/slt")
    assert (request.model, request.data, request.partition, request.constraints) == (
        "resnet20", "cifar10", "iid", (0.125,),
    )  # fmt: skip
    assert (request.rounds, request.devices, request.per_round) == (2500, 100, 10)
    assert (request.batch, request.epochs, request.lr, request.lr_end) == (32, 1, 0.1, 0.01)
    assert (request.momentum, request.weight_decay, request.weighted) == (0.9, 1e-5, False)
    assert (request.bn, request.schedule, request.accounting) == ("batch", "cumulative", None)  # None: paper


def test_settings_of_non_iid_femnist() -> None:
    runs = experiment("table-noniid").runs
    request = next(run.request for run in runs if run.cell.name == "femnist/resnet20/dirichlet-0.1/0.25/fd")
    assert (request.partition, request.rounds, request.devices, request.per_round) == (
        "dirichlet:0.1:180", 1000, 3550, 35,
    )  # fmt: skip


def test_femnist_by_writer() -> None:
    runs = experiment("table-writers", Asked(scale=0.1, seeds=1)).runs
    request = next(run.request for run in runs if run.cell.name == "femnist/resnet20/user/0.125/slt")
    assert (request.partition, request.rounds, request.devices, request.per_round) == ("user", 100, 454, 35)


def test_heterogeneous_devices_are_non_iid_and_small_is_the_weakest() -> None:
    runs = experiment("table-heterogeneous", Asked(seeds=1)).runs
    assert {run.request.partition for run in runs} == {"dirichlet:0.1"}
    assert {run.request.constraints for run in runs if run.request.method == "fjord"} == {
        (0.33, 0.66), (0.33, 0.66, 1.0), (0.125, 0.25), (0.125, 0.25, 0.5), (0.125, 0.25, 0.5, 1.0),
    }  # fmt: skip
    assert {run.request.constraints for run in runs if run.request.method == "small"} == {(0.33,), (0.125,)}
    assert {cell for cell in cells("table-heterogeneous") if "small" in cell} < set(cells("table-noniid"))


def test_imagenet() -> None:
    runs = experiment("table-imagenet").runs
    assert {(r.request.model, r.request.rounds, r.request.devices, r.request.per_round) for r in runs} == {
        ("resnet56", 4000, 500, 10)
    }
    assert {run.request.partition for run in runs} == {"iid", "dirichlet:0.1"}


def test_figures_reuse_the_runs_of_the_table() -> None:
    table = set(cells("table-iid"))
    for name in ("figure-motivation", "figure-communication", "figure-steps"):
        assert set(cells(name)) <= table
    assert "cifar10/resnet20/iid/0.25/slt" in cells("figure-mapping")
    assert "tinyimagenet/resnet44/iid/0.25/slt" in cells("figure-ablation")


def test_limited_randomness() -> None:
    runs = experiment("figure-limited-randomness", Asked(seeds=1)).runs
    assert {(run.request.variant, run.request.pool) for run in runs if run.request.method == "fd"} == {
        *(("pool", n) for n in (1, 2, 5, 10, 20, 50, 100, 200, 500)), ("shared", None), (None, None),
    }  # fmt: skip
    assert {run.request.constraints for run in runs} == {(0.25,)}


def test_ablation() -> None:
    runs = experiment("figure-ablation", Asked(seeds=1)).runs
    assert [run.request.head_fraction for run in runs] == [0.25, 0.5, 0.75, 1.0] * 2
    assert {run.request.method for run in runs} == {"slt"}


def test_mapping_and_how_patience_scales() -> None:
    def asked(scale: float) -> list[tuple[str, str, int, int]]:
        runs = experiment("figure-mapping", Asked(scale, 1)).runs
        return [(r.cell.variant, r.request.schedule, r.request.patience, r.request.rounds) for r in runs]

    assert [row[1:] for row in asked(1.0)] == [
        *((name, 15, 2500) for name in ("cumulative", "paper", "authors", "equal")),
        *(("early-stopping", n, 2500) for n in (5, 15, 25)),
    ]  # fmt: skip
    # 5, 15, 25 become 1, 3, 5 at a fifth; at 0.06 they are 0.3, 0.9 and 1.5: 1, 1 and 2, so only two runs
    assert [row[2] for row in asked(0.2)[4:]] == [1, 3, 5]
    assert [(row[0], row[2]) for row in asked(0.06)[4:]] == [("early-stopping-5", 1), ("early-stopping-25", 2)]


def test_evaluations_are_at_most_those_asked_for() -> None:
    assert [Asked(evaluations=n).eval_every(150) for n in (25, 100, 149, 150, 1000)] == [6, 2, 2, 1, 1]


def test_scale_is_a_share_of_the_rounds() -> None:
    assert {run.request.rounds for run in experiment("table-iid", Asked(scale=0.06)).runs} == {150, 60}
    assert {run.request.rounds for run in experiment("table-iid", Asked(scale=1e-9)).runs} == {1}
    for scale in (0.0, 1.5, float("nan")):
        with pytest.raises(BadInput, match="share of the paper's rounds"):
            Asked(scale=scale)
    with pytest.raises(BadInput, match="no experiment 'table-x'"):
        experiment("table-x")


def test_other_settings_have_names_of_their_own() -> None:
    asked = Asked(0.2, 1, settings=(("schedule", "authors"), ("weight_decay", 1e-3)))
    made = experiment("table-iid", asked)
    runs = {run.cell.name: run.request for run in made.runs}
    assert made.name == "table-iid-authors-weight-decay-0.001"
    assert made.title == "Accuracy with iid data; schedule authors, weight decay 0.001"
    slt = runs["cifar10/resnet20/iid/0.125/slt-authors-weight-decay-0.001"]
    small = runs["cifar10/resnet20/iid/0.125/small-weight-decay-0.001"]  # it has no schedule
    assert (slt.schedule, slt.weight_decay, small.schedule, small.weight_decay) == ("authors", 1e-3, "cumulative", 1e-3)
    assert len(made.runs) == 48 and not set(runs) & set(cells("table-iid"))


def test_settings_that_change_nothing_share_the_runs() -> None:
    # others than SLT have no schedule; at 0.25 figure-mapping has the same cell
    names = cells("table-iid", settings=(("schedule", "authors"),))
    assert len(set(names) & set(cells("table-iid"))) == 48 - 11 and names[4] in cells("figure-mapping")
    flipped = cells("table-iid", settings=(("augmentation", "femnist"),))  # which FEMNIST's has anyway
    assert [name for name in flipped if name in cells("table-iid")] == [n for n in cells("table-iid") if "femnist" in n]
    stopping = experiment("table-iid", Asked(0.2, 1, settings=(("schedule", "early-stopping"),))).runs[0]
    assert stopping.name == "cifar10/resnet20/iid/0.125/slt-early-stopping-15/rounds-500/seed-0"
    assert stopping.request.patience == 3  # a fifth, as in figure-mapping


def test_rivals_as_their_authors_train() -> None:
    names = cells("table-heterogeneous", settings=(("variant", "original"),))
    changed = {name.split("/")[-1] for name in names if name not in cells("table-heterogeneous")}
    assert changed == {"fedrolex-original", "heterofl-original", "fjord-original"}, "FD has other variants"
    for run in experiment("table-heterogeneous", Asked(0.2, 1, settings=(("variant", "original"),))).runs:
        static = run.cell.variant == "original" and run.cell.method in ("heterofl", "fedrolex")
        assert run.request.bn == ("re-estimated" if static else "batch")
        assert not static or run.request.bn_images == SETUPS[run.cell.data].samples  # all there are


@pytest.mark.parametrize(
    ("name", "key", "value", "says"),
    [
        ("figure-mapping", "schedule", "equal", "has a schedule of its own: leave out --schedule"),
        ("table-iid", "schedule", "cumulative", "--schedule cumulative changes no run of table-iid"),
        ("table-steps", "weight_decay", 0.1, "--weight-decay 0.1 changes no run of table-steps"),
        ("figure-limited-randomness", "schedule", "equal", "changes no run"),
        ("table-iid", "augmentation", "upside-down", "there is no augmentation 'upside-down'"),
        ("table-iid", "weight_decay", -1.0, "weight_decay must be 0 or more"),
    ],
)
def test_settings_that_make_no_sense(name: str, key: str, value: Any, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        experiment(name, Asked(settings=((key, value),)))


def test_only() -> None:
    runs = experiment("table-iid", Asked(seeds=2)).runs
    assert len(select(runs, ["/cifar10/*"])) == len(select(runs, ["cifar10/"])) == 13 * 2
    assert [run.name for run in select(runs, ["cifar10/*/0.125/slt/*seed-1"])] == [
        "cifar10/resnet20/iid/0.125/slt/rounds-2500/seed-1"
    ]
    assert len(select(runs, ["cifar10/*/0.125/", "fedavg"])) == (4 + 4) * 2
    with pytest.raises(BadInput, match="no run fits --only mnist9"):
        select(runs, ["mnist9"])


def test_published_columns_have_runs_with_their_settings() -> None:
    """Every number of published.json has its run, and the other way round."""
    for name in ("table-iid", "table-noniid", "table-heterogeneous", "table-imagenet"):
        expected = set()
        for column in content()["columns"]:
            if column["table"] == name:
                for method in column["accuracy"]:
                    levels = column["constraints"][:1] if method == "small" else column["constraints"]
                    settings = tuple(
                        column[key] for key in ("data", "model", "partition", "rounds", "devices", "per_round")
                    )
                    expected.add((method, tuple(levels), *settings))
        runs = experiment(name, Asked(seeds=1)).runs
        assert expected == {
            (
                r.method,
                r.constraints,
                r.data,
                r.model,
                r.partition.removesuffix(":180"),
                r.rounds,
                r.devices,
                r.per_round,
            )
            for r in (run.request for run in runs)
        }


def test_some_published_values_by_hand() -> None:
    found = published("table-iid", "cifar10", "resnet20", "iid", (0.125,))
    assert {method: (value.mean, value.std) for method, value in found.items()} == {
        "slt": (74.1, 0.8), "small": (66.3, 0.3), "fedrolex": (21.7, 1.9), "fd": (19.0, 1.4),
    }  # fmt: skip
    levels = (0.125, 0.25, 0.5, 1.0)
    assert published("table-heterogeneous", "tinyimagenet", "resnet44", "dirichlet:0.1", levels)["fjord"].mean == 27.5
    assert published("table-iid", "digits", "resnet20", "iid", (0.125,)) == {}


@pytest.mark.skipif(not RESULTS.exists(), reason="the paper's results.yaml is not here")
def test_published_json_holds_exactly_results_yaml() -> None:
    paper = yaml.safe_load(RESULTS.read_text())
    tables = {"tab:acc": "table-iid", "tab:acc_noniid": "table-noniid",
              "tab:acc_heterogeneous": "table-heterogeneous", "tab:acc_imagenet": "table-imagenet"}  # fmt: skip
    theirs = {
        (tables[r["table"]], r["dataset"].lower(), r["network"].lower(),
         "iid" if r["distribution"] == "iid" else f"dirichlet:{r['alpha']}", tuple(r["constraints"]), r["rounds"],
         r["devices"], r["devices_per_round"], r["method"].lower(), r["acc"], r["std"])
        for r in paper["results"]
    }  # fmt: skip
    ours = {
        (c["table"], c["data"], c["model"], c["partition"], tuple(c["constraints"]), c["rounds"], c["devices"],
         c["per_round"], method, *value)
        for c in content()["columns"]
        for method, value in c["accuracy"].items()
    }  # fmt: skip
    assert ours == theirs and len(ours) == 152
    steps = [(s["network"].lower(), s["constraint"], s["paper"], s["json"]) for s in paper["steps_N"]]
    assert [tuple(step.values()) for step in content()["steps"]] == steps
    for name, data in paper["datasets"].items():
        setup = SETUPS[name.lower()]
        assert (setup.devices, setup.per_round, setup.rounds) == (
            data["devices"], data["devices_per_round"], data["rounds"],
        )  # fmt: skip
        assert list(setup.input) == data["resolution"] and data["classes"] in (None, setup.classes)
