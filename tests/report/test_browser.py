"""The page in a real browser. Runs where Debian's Chromium is (apt-get install chromium), is skipped elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.report import figures, find_runs, write_report
from strata.report import server as page_server
from strata.report.page import page
from strata.report.page_data import page_data
from strata.report.server import serving
from tests.report.browser import Browser
from tests.report.made import PLAN, append, finish, make_run

EVIL = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def browser(chromium: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(autouse=True)
def quiet(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test here may leave an error or a warning in the console."""
    browser: Browser = request.getfixturevalue("browser")
    browser.errors.clear()
    browser.requests.clear()
    yield
    assert browser.errors == []


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """SLT unfinished, two seeds of small, and a run that means harm."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 2):
        make_run(folder / f"small-{seed}", seed=seed, dropped={1: [{"id": 1, "reason": EVIL}]})
    make_run(folder / "slt", method="slt", plan=PLAN, rounds=6, done=5)
    make_run(folder / "evil", method=EVIL, partition=EVIL, accuracy=lambda round: None if round else 0.2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "files", lambda made: {})
        write_report([folder], folder / "report", title=EVIL)
    return (folder / "report" / "index.html").as_uri()


DRAWN = """[...document.querySelectorAll(".chart")].map((place) => [place.dataset.chart,
    place.querySelectorAll(".trace path.js-line, .bars path, .heatmaplayer image, .points path").length])"""


@pytest.mark.parametrize(("width", "mobile", "dark"), [(1280, False, False), (390, True, True)])
def test_every_chart_is_drawn_and_fits(browser: Browser, report: str, width: int, mobile: bool, dark: bool) -> None:
    browser.size(width, 900, mobile, dark)
    browser.open(report)
    drawn = dict(browser.run(DRAWN))
    assert set(drawn) == {"bytes", "sent", "accuracy", "steps", "memory", "classes", "failures"}
    assert all(marks > 0 for marks in drawn.values()), drawn
    assert browser.run("document.documentElement.scrollWidth") == width  # nothing to scroll sideways
    assert browser.run("document.documentElement.dataset.theme") == ("dark" if dark else "light")
    painted = """[...document.querySelectorAll("canvas")].every((c) =>
        new Set(new Uint32Array(c.getContext("2d").getImageData(0, 0, c.width, c.height).data.buffer)).size > 3)"""
    assert browser.run(painted) and browser.run("document.querySelectorAll('canvas').length") == 3
    assert all(url.startswith(("file:", "data:")) for url in browser.requests), browser.requests


def test_nothing_a_run_says_is_run(browser: Browser, report: str) -> None:
    browser.open(report)
    assert browser.run("document.title") == EVIL and browser.run("document.querySelector('img')") is None
    assert browser.run("document.querySelector('h1').textContent") == EVIL
    assert EVIL in browser.run("document.querySelector('main').textContent")


def test_axes_hiding_and_rounds_answer(browser: Browser, report: str) -> None:
    browser.size(1280, 900)
    browser.open(report)
    title = "document.querySelector('[data-chart=accuracy] .xtitle').textContent"
    assert browser.run(title) == "round"
    press = "[...document.querySelectorAll('button')].find((b) => b.textContent === %r).click()"
    titles = {"Upload": "uploaded by all devices, KiB", "FLOPs": "training operations of all devices, FLOP",
              "Seconds": "time of the run, s"}  # fmt: skip
    for name, said in titles.items():
        browser.run(press % name)
        browser.wait(f"{title} === '{said}'")
    browser.run(press % "Training loss")
    browser.wait("document.querySelector('[data-chart=accuracy] .ytitle').textContent === 'training loss'")
    browser.run("document.querySelector('.chip').click()")
    browser.wait("document.querySelectorAll('canvas').length === 2")
    browser.run(
        "const s = document.querySelector('input[type=range]'); s.value = 1; s.dispatchEvent(new Event('input'))"
    )
    assert browser.run("document.querySelector('.scrub output').textContent") == "1 of 5"
    browser.run("document.getElementById('theme').click()")
    assert browser.run("document.documentElement.dataset.theme") == "light"
    browser.run("document.getElementById('theme').click()")
    assert browser.run("document.documentElement.dataset.theme") == "dark"
    browser.run("document.getElementById('theme').click()")


def test_labels_that_look_alike_when_short_stay_apart(browser: Browser, tmp_path: Path) -> None:
    methods = [f"a-method-with-a-long-name-{n}-that-ends-alike" for n in (1, 2)]
    for method in methods:
        make_run(tmp_path / method, method=method)
    for seed, done in enumerate((4, 2)):
        make_run(tmp_path / f"b-{seed}", method="b", seed=seed, done=done)
    write_report([tmp_path], tmp_path / "report", with_figures=False)
    browser.size(1280, 900)
    browser.open((tmp_path / "report" / "index.html").as_uri())
    ticks = "[...document.querySelectorAll('[data-chart=%s] .%stick text')].map((t) => t.textContent)"
    assert browser.run(ticks % ("memory", "x")) == ["a-method…at-ends-alike"] * 2 + ["b"]
    assert browser.run(ticks % ("classes", "y")) == ["a-method-w…that-ends-alike"] * 2 + ["b"]
    places = "[...document.querySelectorAll('[data-chart=memory] path.point')].map((p) => p.getAttribute('transform'))"
    assert len(set(browser.run(places))) == 3  # side by side, not on top of each other
    cell = "document.querySelector('[data-chart=classes]').data[0]"
    assert browser.run(f"{cell}.y.length === 3 && {cell}.customdata[1][2][0]") == methods[1]
    under = browser.run("[...document.querySelectorAll('.card .under')].map((one) => one.textContent)")
    assert under[2] == "test accuracy after 4 of 4 rounds, seed 0, which alone of 2 seeds is finished"


def test_a_picture_names_its_own_round(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", method="fd", rounds=9)
    made = page_data(find_runs([run]), None)
    whole = {"frozen": False, "share": 0.5, "kept": [[0, 0.5]]}
    frames = [{"round": at, "device": at, "layers": [whole], "trained": 5, "frozen": 0} for at in (0, 4, 8)]
    made["groups"][0]["parts"] = {"layers": [{"name": "one", "width": 2}], "frames": frames, "parameters": 10,
                                  "exact": True, "rounds": 9, "watched": 0, "thinned": True}  # fmt: skip
    (tmp_path / "page.html").write_text(page(made))
    browser.open((tmp_path / "page.html").as_uri())
    browser.run(
        "const r = document.querySelector('input[type=range]'); r.value = 8; r.dispatchEvent(new Event('input'))"
    )
    assert browser.run("document.querySelector('.net p').textContent").startswith("Round 5: 50 % of 10")


def test_the_live_page_follows_a_run_to_its_end(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_server, "LOOK", 0.1)
    run = make_run(tmp_path / "a", done=1)
    under = "document.querySelector('.card .under').textContent"
    with serving(run) as server:
        browser.open(server.address)
        assert "after 1 of 4 rounds" in browser.run(under)
        append(run, 1, 0.7)
        browser.wait(f"{under}.includes('after 2 of 4 rounds')")
        assert browser.run("document.querySelector('.big').firstChild.textContent") == "70.0"
        asked = [url for url in browser.requests if url.endswith("data.json")]
        append(run, 2, 0.8)
        append(run, 3, 0.9)
        finish(run, "small", 0, 4)
        browser.wait("document.getElementById('live').textContent === 'finished'")
        browser.wait(f"{under}.includes('after 4 of 4 rounds')")
        assert len(asked) <= 3  # one request a change, not a storm
    browser.wait("document.getElementById('live').textContent === 'not connected'")
    assert "after 4 of 4 rounds" in browser.run(under)  # the page stays when the server has gone
    browser.call("Page.navigate", url="about:blank")
    browser.errors[:] = [error for error in browser.errors if "ERR_CONNECTION" not in error
                         and "ERR_INCOMPLETE" not in error]  # fmt: skip
