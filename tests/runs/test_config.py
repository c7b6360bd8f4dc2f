"""RunConfig: flags, JSON and comparisons follow from one description of each setting."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from strata.cli import build_parser
from strata.core import flags
from strata.core.errors import BadInput
from strata.core.settings import Described, differences
from strata.methods import METHODS
from strata.runs import run
from strata.runs.config import FORMAT, RunConfig, RunOptions
from strata.runs.unused import of_some_methods, users_of
from strata.training.statistics import CALIBRATION_IMAGES

OLD = Path(__file__).parents[2] / "results" / "runs"
KNOWN = RunConfig.described()
PARSER = argparse.ArgumentParser()
flags.add_flags(PARSER, RunConfig)


def parser_of(*command: str) -> argparse.ArgumentParser:
    parser = build_parser()
    for name in command:
        (choices,) = (action.choices for action in parser._actions if isinstance(action.choices, dict))
        parser = choices[name]
    return parser


def options_of(parser: argparse.ArgumentParser) -> dict[str, str | None]:
    return {option: action.help for action in parser._actions for option in action.option_strings}


# --- flags ---------------------------------------------------------------------------------------------------------


def test_every_flag_of_a_run_comes_from_the_tree() -> None:
    own = {"-h", "--help", "--out", "--resume", "--from-round", "--tensorboard", "--mlflow", "--quiet", "--json"}
    found = options_of(parser_of("run"))
    assert set(found) - own == {one.option for one in KNOWN.values()}
    for one in KNOWN.values():
        assert one.known.help in (found[one.option] or ""), "the help is the setting's own"
        if one.default not in (None, False, ()):
            assert "default" in (found[one.option] or ""), one.key
    of_comparison = {"--methods", "--seeds"}
    assert set(options_of(parser_of("compare"))) - own - of_comparison == set(found) - own - {"--method"}


def test_a_fleet_refuses_what_is_simulated_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    parser = parser_of("fleet", "run")
    simulated = {one.option: one.known.simulated for one in KNOWN.values() if one.known.simulated}
    assert simulated["--devices"] == "the fleet is the devices that connect" and len(simulated) == 14
    for option, reason in simulated.items():
        with pytest.raises(SystemExit) as ended:
            parser.parse_args([option, "1"])
        assert ended.value.code == 2
        assert f"strata fleet run: {option} is not for real fleets: {reason}\n" == capsys.readouterr().err
    assert set(options_of(parser)) >= {one.option for one in KNOWN.values()}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rounds", "ten"], "--rounds must be a whole number of at least 1, not ten"),
        (["--batch", "0"], "--batch must be a whole number of at least 1, not 0"),
        (["--lr", "fast"], "--lr must be a finite number, not fast"),
        (["--micro-batch", "x"], "--micro-batch must be a whole number of at least 1, not x"),
        (["--momentum", "1"], "--momentum must be below 1, not 1.0"),
        (["--head-fraction", "1.5"], "--head-fraction must be at most 1, not 1.5"),
        (["--dropout", "1"], "dropout is the share of devices that fail, from 0 to below 1, not 1"),
        (["--constraint", "0.5,"], "no empty places"),
    ],
)
def test_a_flag_that_cannot_be_read_is_one_sentence(arguments: list[str], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        flags.given(parser_of("run").parse_args(arguments), RunConfig)


# --- there and back ------------------------------------------------------------------------------------------------

TEXTS = {
    "tokenizer": "/a/folder",
    "data_dir": "/data/sets",
    "partition": "dirichlet:0.1",
    "stragglers": "0.2:3",
    "aggregation": "trimmed:0.2",
    "ray_address": "10.0.0.1:6379",
}


def values_of(one: Described) -> st.SearchStrategy[Any]:
    known = one.known
    if one.hint is bool:
        return st.booleans()
    if known.choices is not None:
        return st.sampled_from(list(known.choices))
    if one.key == "activation_checkpointing":
        return st.one_of(st.just("auto"), st.integers(2, 9))
    if one.key == "input":
        return st.tuples(*[st.integers(1, 64)] * 3)
    if one.key == "columns":
        return st.lists(st.sampled_from(["a", "b", "c d"]), min_size=1, max_size=2).map(tuple)
    if one.key == "constraints":
        return st.lists(st.floats(0, 1, exclude_min=True), min_size=1, max_size=3).map(tuple)
    if one.key == "budgets":
        return st.lists(st.integers(1024, 2**40), min_size=1, max_size=3).map(tuple)
    if known.whole or one.hint in (int, int | None):
        return st.integers(int(known.least or 0), 10**6)
    if one.hint in (float, float | None):
        least = known.least if known.least is not None else known.above if known.above is not None else 0
        most = known.below if known.below is not None else known.most if known.most is not None else 1e9
        return st.floats(least, most, exclude_min=known.above is not None, exclude_max=known.below is not None)
    return st.just(TEXTS[one.key]) if one.key in TEXTS else st.text("abcxyz012:._", min_size=1)


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    keys = draw(st.lists(st.sampled_from(sorted(KNOWN)), unique=True, max_size=12))
    values = {key: draw(values_of(KNOWN[key])) for key in keys}
    try:
        return RunConfig.of(**values)
    except BadInput:  # such as lr_end above lr
        assume(False)
        raise


@settings(max_examples=100, deadline=None)
@given(configs())
def test_config_to_flags_and_back(config: RunConfig) -> None:
    again = RunConfig.of(**flags.given(PARSER.parse_args(flags.flags_of(config)), RunConfig))
    assert again == config


@settings(max_examples=100, deadline=None)
@given(configs())
def test_config_to_json_and_back(config: RunConfig) -> None:
    written = json.loads(json.dumps(config.to_json(), allow_nan=False))
    again = RunConfig.from_json(written)
    assert again == config.changed(**{key: KNOWN[key].default for key in set(KNOWN) - RunConfig.kept()})
    assert again.to_json() == written
    assert set(written) >= {key for key in RunConfig.kept() if KNOWN[key].known.since == 1}


def test_flat_names_and_the_tree_are_the_same_values() -> None:
    config = RunConfig.of(batch=8, constraints=(0.5,), rounds=7)
    assert config.batch == config.execution.batch_size == 8 and config.rounds == config.course.rounds == 7
    assert config.changed(lr=0.05).course.lr == 0.05 and config.course.lr == 0.1
    assert set(config.values()) == set(KNOWN) and not set(KNOWN) & set(RunConfig.parts())
    with pytest.raises(TypeError, match="no setting 'learning_rate'"):
        RunConfig.of(learning_rate=1)
    with pytest.raises(AttributeError, match="no setting 'learning_rate'"):
        _ = config.learning_rate


def test_bounds_hold_however_a_config_is_made() -> None:
    for values, says in (
        ({"rounds": 0}, "rounds must be a whole number of at least 1, not 0"),
        ({"seed": 1.5}, "the seed is a whole number of at least 0, not 1.5"),
        ({"lr": math.nan}, "lr must be a finite number"),
        ({"lr": 0.001, "lr_end": 0.01}, "the learning rate falls from lr to lr_end > 0, not from 0.001 to 0.01"),
        ({"bn": "running"}, "bn is one of re-estimated, batch, not 'running'"),
        ({"checkpoint_every": 0}, "checkpoints are every 1 or more rounds, not every 0"),
        ({"task_timeout": 5.0, "workers": 0}, "--workers 0 has none"),
    ):
        with pytest.raises(BadInput, match=says):
            RunConfig.of(**values)
    assert RunConfig.described()["bn_images"].default == CALIBRATION_IMAGES  # --help knows no torch
    with pytest.raises(BadInput, match="started by another version of Strata, with colour"):
        RunConfig.from_json({"colour": "red"})


# --- folders -------------------------------------------------------------------------------------------------------


def older() -> list[Path]:
    """Folders of before there were formats, whatever has come to stand beside them."""
    every = sorted((OLD / "cifar10").rglob("config.json"))
    return [path for path in every if "format" not in json.loads(path.read_text())][:5]


@pytest.mark.parametrize("path", older(), ids=lambda path: path.parts[-4])
def test_an_older_request_is_readable_and_the_same(path: Path) -> None:
    written = json.loads(path.read_text())
    config = RunConfig.of_folder(path.parent, {"workers": 3})  # the machine may be another
    assert differences(written["request"], config.to_json()) == [] and config.machine.workers == 3
    assert config.model == "resnet20" and config.batch == 32 and config.constraints
    with pytest.raises(BadInput, match=r"was started with other settings: lr was 0.1 and is now 0.2\. Resume"):
        RunConfig.of_folder(path.parent, {"lr": 0.2})


def test_a_folder_of_a_later_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"format": FORMAT + 1, "request": {}}))
    with pytest.raises(BadInput, match="written by a later version of Strata"):
        RunConfig.of_folder(tmp_path, {})


# --- what is for whom ----------------------------------------------------------------------------------------------


def test_options_of_some_methods_are_those_that_methods_name() -> None:
    named = {option for method in METHODS.values() for option in method.card.options} - {"seed"}
    assert named <= set(of_some_methods())
    assert users_of("pool") == ["fd"] and users_of("variant") == ["fd", "fedrolex", "heterofl", "fjord"]
    assert {tuple(users_of(key)) for key in ("schedule", "patience", "head_fraction", "fill", "averaging")} == {
        ("slt",)
    }


def test_the_machine_is_no_part_of_what_a_run_is() -> None:
    apart = {"workers", "engine", "ray_address", "ray_gpus", "checkpoint_every", "task_timeout"}
    assert set(KNOWN) - RunConfig.kept() == apart and not apart & set(RunConfig().to_json())


def test_python_documents_its_options() -> None:
    for key, one in RunOptions.described().items():
        assert key in ("rounds", "devices") or f"\n    {key}: {one.known.help}" in (run.__doc__ or "")
