"""Real processes whose devices hold text: LoRA's pairs, and upper layers above outputs that devices keep on disk."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
from safetensors.torch import load_file

from strata.execution import Execution, memory
from strata.federation.kept_prefixes import FOLDER
from strata.fleet.protocol.settings import DeviceSettings, RunSettings
from strata.graph import ChannelGraph, Input, InputSpec
from tests.fleet.loopback import end, loopback, wait_for
from tests.fleet.nets import words

MODEL, LENGTH = "tests.fleet.nets:words", 12
WORDS = {"yes": ("fine", "good", "sure"), "no": ("never", "bad", "stop")}


def write_rows(path: Path, count: int, begin: int) -> str:
    rows = []
    for number in range(begin, begin + count):
        label = "yes" if number % 2 else "no"
        rows.append({"text": f"{WORDS[label][number % 3]} {number}", "label": label})
    path.write_text("\n".join(map(json.dumps, rows)))
    return f"text:{path}"


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_devices_with_text_train_pairs_and_upper_layers(tmp_path: Path) -> None:
    import torch

    graph = ChannelGraph(words(2, 257), InputSpec((Input("input_ids", (LENGTH,), torch.int64),)))
    budget = memory(graph, graph.window(2, graph.depth), Execution(8, cache_prefix=2**20)).total
    assert budget < memory(graph, graph.window(1, graph.depth), Execution(8, cache_prefix=2**20)).total
    with loopback(tmp_path / "fleet") as fleet:
        devices = [
            fleet.device(
                DeviceSettings(
                    name,
                    budget=1 << 20,
                    data=write_rows(tmp_path / f"{name}.jsonl", 60, 100 * index),
                    cache=str(tmp_path / name),
                    models=(MODEL,),
                    reading=(("length", LENGTH),),
                )  # fmt: skip
            )
            for index, name in enumerate(("ant", "bee"))
        ]
        request = {
            "model": MODEL, "data": write_rows(tmp_path / "server.jsonl", 200, 1000), "length": LENGTH, "batch": 8,
            "rounds": 3, "per_round": 2, "lr": 0.05, "lr_end": 0.05, "eval_every": 1,
        }  # fmt: skip
        pairs = tmp_path / "pairs"
        asked = {**request, "method": "lora", "rank": 2, "optimizer": "adamw"}
        fleet.finished(fleet.run(RunSettings(asked, str(pairs), minimum=2, wait=300.0)))
        found = records(pairs)
        assert not any(one["dropped"] for one in found) and found[-1]["train_loss"] < found[0]["train_loss"]
        assert found[1]["upload_bytes"] == found[1]["download_bytes"] < found[0]["download_bytes"]
        words(2, 257).load_state_dict(load_file(pairs / "model.safetensors"))

        upper = tmp_path / "upper"
        asked = {**request, "method": "top", "budgets": [budget], "cache_prefix": 2**20}
        fleet.finished(fleet.run(RunSettings(asked, str(upper), minimum=2, wait=300.0)))
        found = records(upper)
        assert not any(one["dropped"] for one in found) and found[-1]["train_loss"] < found[0]["train_loss"]
        assert found[1]["train_flops"] == found[2]["train_flops"] < found[0]["train_flops"]
        assert all(0 < one["disk_bytes"] < 2**20 for one in found)
        kept = [tmp_path / name / FOLDER for name in ("ant", "bee")]
        files = [path for folder in kept for path in folder.rglob("*") if path.is_file()]
        assert len(files) == 2 * (54 + 1), "of each training sample, and how they lie"
        assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
        for process in devices:
            end(process, signal.SIGTERM)
        wait_for(lambda: not any(folder.exists() for folder in kept), "that what was kept is removed")
