"""What was learned of operators outlives the process, and a file that is no good counts as none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strata.execution import learned, memory
from strata.execution.execution import Execution
from strata.execution.lessons import LearnedResult, Lesson, Lessons, _path
from strata.graph import ChannelGraph

aten = torch.ops.aten
LESSON = Lesson(
    (LearnedResult((2, 3), None, 4, None, True), LearnedResult((2,), (3,), 8, 0, False)),
    True, 24, (0,), (1,), 16, (None, LearnedResult((2, 3), (1, 2), 4, None, True)), 48,
)  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def saved(*keys: tuple[Any, ...]) -> Path:
    lessons = Lessons()
    for key in keys:
        lessons.add(key, LESSON)
    lessons.save()
    path = _path()
    assert path is not None
    return path


def test_a_lesson_comes_back_as_it_was() -> None:
    key = (aten.cumsum.default, "structure", ((2, 3), None, torch.float32, True))
    assert Lessons().find(key) is None
    path = saved(key)
    assert Lessons().find(key) == LESSON
    assert Lessons().find((*key[:2], ((2, 4), None, torch.float32, True))) is None
    content = path.read_bytes().split(b"\n", 1)[1]
    assert list(json.loads(content)) == ["aten.cumsum.default structure ((2, 3), None, torch.float32, True)"]


def test_processes_add_to_each_other() -> None:
    first, second = Lessons(), Lessons()
    assert first.find((aten.sin.default,)) is second.find((aten.cos.default,)) is None  # both have read the file
    first.add((aten.sin.default,), LESSON)
    second.add((aten.cos.default,), LESSON)
    first.save()
    second.save()
    third = Lessons()
    assert third.find((aten.sin.default,)) == third.find((aten.cos.default,)) == LESSON


def test_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata.execution.lessons.MOST", 2)
    saved(*((aten.sin.default, n) for n in range(3)))
    assert [Lessons().find((aten.sin.default, n)) is None for n in range(3)] == [True, False, False]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"aten.sin.default": [1, 2]}', b'{"aten.sin.default": 3}', b"{"])
def test_a_file_that_is_no_good_counts_as_none(content: bytes) -> None:
    from strata.core import cache

    path = saved((aten.sin.default,))
    cache.write(path, content)
    assert Lessons().find((aten.sin.default,)) is None
    path.write_bytes(b"no checksum")
    assert Lessons().find((aten.sin.default,)) is None


@torch.library.custom_op("strata_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


def test_the_users_own_operators_are_learned_anew_each_time(home: Path) -> None:
    """Under the same name there may be other code tomorrow."""
    key = (torch.ops.strata_tests.twice.default, "structure")
    lessons = Lessons()
    lessons.add(key, LESSON)
    lessons.save()
    assert lessons.find(key) == LESSON and Lessons().find(key) is None
    assert not list(home.rglob("*.json"))


class Cumulative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.classifier = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.conv(x).cumsum(2).mean((2, 3)))


def test_the_second_start_learns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = ChannelGraph(Cumulative(), (3, 8, 8))
    first = Lessons()
    monkeypatch.setattr(learned, "_LESSONS", first)
    expected = memory(graph, graph.full(), Execution(4))
    first.save()

    def must_not(*_: object) -> Lesson:
        raise AssertionError("learned again")

    monkeypatch.setattr(learned, "_LESSONS", Lessons())
    monkeypatch.setattr(learned, "_learn", must_not)
    assert memory(graph, graph.full(), Execution(4)) == expected
    with pytest.raises(AssertionError, match="learned again"):
        memory(graph, graph.full(), Execution(5))


def test_without_a_home_there_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STRATA_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    lessons = Lessons()
    lessons.add((aten.sin.default,), LESSON)
    lessons.save()
    assert lessons.find((aten.sin.default,)) == LESSON and Lessons().find((aten.sin.default,)) is None
