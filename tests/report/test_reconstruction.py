"""What is rebuilt from a request is what the run had; what is not provably the same is left out with a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from strata.data import load, parse_partition
from strata.execution import Execution
from strata.methods import FD, FedRolex
from strata.report.page import embedded
from strata.report.page_data import page_data
from strata.report.reconstruction import Missing, Reconstruction
from strata.report.tables import summary
from strata.report.trained_parts import parts_of, spans
from strata.results.reading import read_run
from strata.runs.folder import describe_data
from tests.report.made import PLAN, make_run
from tests.report.test_damage import changed, places

REQUEST = {"model": "resnet20", "data": "digits", "data_dir": None, "constraints": [0.5], "input": [3, 32, 32]}


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory: pytest.TempPathFactory) -> Reconstruction:
    """One graph for all tests here."""
    from strata.graph import ChannelGraph
    from strata.models import resnet20

    made = Reconstruction()
    made._graphs["resnet20", 10, (3, 32, 32), "residual"] = ChannelGraph(resnet20(10, 32), (3, 32, 32))
    return made


def run_on_digits(path: Path, rebuilt: Reconstruction, method: str = "fd", **more: object) -> Path:
    (graph,) = rebuilt._graphs.values()
    structure = {"class": "ResNet", "structure": graph.hash}
    more = {"data": describe_data(load("digits")), "model": structure, "request": REQUEST} | more
    return make_run(path, method=method, **more)  # type: ignore[arg-type]


def test_holdings_are_those_of_the_runs_partition(tmp_path: Path, rebuilt: Reconstruction) -> None:
    run = read_run(run_on_digits(tmp_path / "a", rebuilt, seed=3, partition="dirichlet:0.3", devices=20))
    made = rebuilt.holdings(run)
    data = load("digits")
    parts = parse_partition("dirichlet:0.3", data, 20, 3)
    for device in (0, 7, 19):
        expected = np.bincount(data.train.labels.numpy()[parts[device]], minlength=10)
        assert made["counts"][device] == expected.tolist()


def test_other_data_and_own_partitions_are_left_out_with_a_reason(tmp_path: Path, rebuilt: Reconstruction) -> None:
    other = describe_data(load("digits")) | {"sha256": "0000"}
    cases = {
        "not the one the run used": run_on_digits(tmp_path / "a", rebuilt, data=other),
        "a partition of its own": run_on_digits(tmp_path / "b", rebuilt, partition="own:abc"),
        "from Python": make_run(tmp_path / "c"),
        "is not here": run_on_digits(
            tmp_path / "d", rebuilt, request=REQUEST | {"data": "cifar10", "data_dir": str(tmp_path / "none")}
        ),
        "not here .*home directory": run_on_digits(
            tmp_path / "e", rebuilt, request=REQUEST | {"data_dir": "~nosuchuser/x"}
        ),
        "not one of Strata's": run_on_digits(tmp_path / "f", rebuilt, request=REQUEST | {"data": "folder:²"}),
    }
    for reason, path in cases.items():
        with pytest.raises(Missing, match=reason):
            rebuilt.holdings(read_run(path))
    made = page_data([read_run(path) for path in cases.values()], rebuilt)
    assert all("left out" in one["missing"] for one in made["data"])


def test_nothing_that_a_run_names_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nmake = None")
    monkeypatch.syspath_prepend(str(tmp_path))
    run = make_run(tmp_path / "a", request=REQUEST | {"model": "evil:make"})
    with pytest.raises(Missing, match="imports no code"):
        Reconstruction().graph(read_run(run))
    page_data([read_run(run)], Reconstruction())
    assert not (tmp_path / "ran").exists()


def test_folders_of_a_runs_choosing_are_not_written_to(tmp_path: Path, rebuilt: Reconstruction) -> None:
    from PIL import Image

    tiny = tmp_path / "tiny"
    for wnid in ("n1", "n2"):
        (tiny / "train" / wnid / "images").mkdir(parents=True)
        Image.new("RGB", (64, 64)).save(tiny / "train" / wnid / "images" / "0.JPEG")
    (tiny / "val" / "images").mkdir(parents=True)
    (tiny / "val" / "val_annotations.txt").write_text("0.JPEG\tn1\n")
    Image.new("RGB", (64, 64)).save(tiny / "val" / "images" / "0.JPEG")
    request = REQUEST | {"data": "tinyimagenet", "data_dir": str(tiny)}
    run = run_on_digits(tmp_path / "a", rebuilt, request=request)
    folder = run_on_digits(tmp_path / "b", rebuilt, request=request | {"data": "folder"})
    before = sorted(tiny.rglob("*"))
    with pytest.raises(Missing, match="not been decoded yet"):
        Reconstruction().data(read_run(run))
    with pytest.raises(Missing, match="not one of Strata's"):
        Reconstruction().data(read_run(folder))
    assert sorted(tiny.rglob("*")) == before
    config = json.loads((run / "config.json").read_text())
    config["settings"]["data"] = describe_data(load("tinyimagenet", tiny))  # this decodes it
    (run / "config.json").write_text(json.dumps(config))
    assert Reconstruction().data(read_run(run)).classes == 2


def test_where_rounds_are_left_out_the_pictures_know_theirs(tmp_path: Path, rebuilt: Reconstruction) -> None:
    for method, rounds, drawn in (("fedrolex", 60, 60), ("fedrolex", 121, 60), ("small", 121, 1)):
        run = run_on_digits(tmp_path / f"{method}-{rounds}", rebuilt, method, rounds=rounds)
        parts = parts_of(read_run(run), rebuilt)
        assert len(parts["frames"]) == drawn and parts["thinned"] == (drawn == 60 < rounds)
        assert parts.get("note", "") == ("Of 121 rounds 60 are drawn." if parts["thinned"] else "")


def test_pictures_show_the_very_channels_that_trained(tmp_path: Path, rebuilt: Reconstruction) -> None:
    (graph,) = rebuilt._graphs.values()
    width, layer = graph.state_shapes["blocks.4.conv1.weight"][0], graph.layer_of["blocks.4.conv1.weight"]
    assert width == 32
    for method in (FD(graph, (0.5,), seed=0), FedRolex(graph, (0.5,))):
        described = {"name": method.name, "constraints": [0.5]} | ({"seed": 0} if method.name == "fd" else {})
        run = read_run(run_on_digits(tmp_path / method.name, rebuilt, method.name, settings_method=described))
        parts = parts_of(run, rebuilt)
        assert parts["exact"] and len(parts["frames"]) == 4 and parts["layers"][layer - 1]["width"] == 32
        for frame in parts["frames"]:
            kept = method.cut_for(frame["round"], 1).kept["blocks.4.conv1.weight"][0]  # 1: first of the devices 1, 4
            assert kept is not None
            shown = [[round(a / 32, 5), round(b / 32, 5)] for a, b in spans(kept)]
            assert frame["layers"][layer - 1]["kept"] == shown


def test_slt_freezes_trains_and_thins_as_planned(tmp_path: Path, rebuilt: Reconstruction) -> None:
    plan = json.loads(json.dumps(PLAN)) | {"input": [3, 32, 32]}
    parts = parts_of(read_run(run_on_digits(tmp_path / "a", rebuilt, "slt", plan=plan, rounds=6)), rebuilt)
    assert [frame["round"] for frame in parts["frames"]] == [0, 2, 4]  # two rounds a step
    pre, one, two = ([layer["frozen"] for layer in frame["layers"]] for frame in parts["frames"])
    assert not any(pre) and not any(one) and two == [True] + [False] * 19
    head = parts["frames"][1]["layers"]
    assert head[0] == {"frozen": False, "share": 1.0, "kept": [[0.0, 1.0]]}  # layer 1 in full
    assert head[1]["kept"] == [[0.0, 0.5]] and 0 < head[1]["share"] < 1
    assert parts["frames"][2]["trained"] + parts["frames"][2]["frozen"] == parts["parameters"]  # scale 1: all there


def test_an_unknown_network_is_drawn_from_its_plan_and_says_so(tmp_path: Path) -> None:
    parts = parts_of(read_run(make_run(tmp_path / "a", method="slt", plan=PLAN, rounds=6)), Reconstruction())
    assert "plan alone" in parts["note"] and not parts["exact"]
    assert [layer["name"] for layer in parts["layers"]] == ["layer 1", "layer 2", "all above"]
    assert parts["frames"][2]["layers"][0]["frozen"] and parts["frames"][1]["layers"][2]["kept"] == [[0.0, 0.5]]


def test_width_methods_are_accounted_as_the_constraint_means(tmp_path: Path, rebuilt: Reconstruction) -> None:
    from strata.execution import memory

    (graph,) = rebuilt._graphs.values()
    made = page_data([read_run(run_on_digits(tmp_path / "a", rebuilt, "small"))], rebuilt)
    shown = made["groups"][0]["memory"]
    expected = memory(graph, graph.prefix(0.5), Execution(), "paper").total
    assert shown["budgets"] == [expected] and shown["steps"][0]["memory_bytes"] == expected
    assert shown["steps"][0]["measured"] == 3 << 20
    assert summary(made).rows[0][5] == 0.4


def test_micro_batches_are_accounted_and_checkpointing_by_true_bytes(tmp_path: Path, rebuilt: Reconstruction) -> None:
    from strata.execution import memory

    (graph,) = rebuilt._graphs.values()
    in_parts = {"batch_size": 32, "micro_batch": 8}
    run = read_run(run_on_digits(tmp_path / "a", rebuilt, "small", training=in_parts))
    made = rebuilt.accounted(run)
    expected = memory(graph, graph.prefix(0.5), Execution(32, 8), "paper").total
    assert made["budgets"] == [expected] and made["memory_bytes"] == expected
    assert expected < memory(graph, graph.prefix(0.5), Execution(), "paper").total
    in_segments = {"batch_size": 32, "micro_batch": None, "activation_checkpointing": "auto"}
    run = read_run(run_on_digits(tmp_path / "b", rebuilt, "small", training=in_segments))
    shown = page_data([run], rebuilt)["groups"][0]["memory"]
    assert shown["note"] == "Only measured: the paper's accounting does not know what activation checkpointing saves."
    assert shown["steps"] == [{"step": 0, "measured": 3 << 20}] and shown["budgets"] == []
    run.request["accounting"] = "peak"
    made = rebuilt.accounted(run)
    assert made["memory_bytes"] == memory(graph, graph.prefix(0.5), Execution(32, None, "auto")).total


@pytest.mark.parametrize("method", ["slt", "fd"])
def test_damaged_settings_are_left_out_not_raised(tmp_path: Path, rebuilt: Reconstruction, method: str) -> None:
    """As test_damage, but where everything else would have been rebuilt."""
    plan = {**PLAN, "input": [3, 32, 32]} if method == "slt" else None
    run = run_on_digits(tmp_path / "a", rebuilt, method, rounds=6, plan=plan, validation=0.1)
    for file, keys in (("config.json", ("method", "training", "devices", "seed", "validation", "partition", "data")),
                       ("plan.json", ("steps", "levels", "input"))):  # fmt: skip
        whole = json.loads((run / file).read_text())
        part = whole["settings"] if file == "config.json" else whole
        ways = [(key, *way) for key in keys if key in part for way in places(part[key])]
        for way in ways[::2][:30]:
            for junk in (None, [], "x", -1, 10**30, [None, 1]):
                damaged = changed(part, way, junk)
                (run / file).write_text(
                    json.dumps({**whole, "settings": damaged} if file == "config.json" else damaged)
                )
                try:
                    embedded(page_data([read_run(run)], rebuilt))
                except Exception as error:
                    raise AssertionError(f"{file}: {way} = {junk!r}") from error
        (run / file).write_text(json.dumps(whole))
