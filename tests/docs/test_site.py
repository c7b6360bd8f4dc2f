"""The site builds without a warning, asks nobody outside for anything, and its search works from disk."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, all_pages
from tests.report.browser import Browser

# what a browser would fetch by itself; a link that a reader may follow is no asset
ASSET = re.compile(r"""<(?:script|img|iframe|link|source)\b[^>]*?\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""")
CSS_ASSET = re.compile(r"""(?:@import\s*["']|url\(\s*["']?)((?:https?:)?//[^"')\s]+)""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)], cwd=ROOT,
        env={"NO_MKDOCS_2_WARNING": "1", "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def test_nothing_comes_from_outside(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > len(all_pages()) - 2
    found = [(page.name, address) for page in pages for address in ASSET.findall(page.read_text(encoding="utf-8"))]
    sheets = sorted(site.rglob("*.css"))
    found += [(sheet.name, address) for sheet in sheets for address in CSS_ASSET.findall(sheet.read_text())]
    assert found == []


def test_what_counts_as_an_asset() -> None:
    page = '<a href="https://x.org">x</a><script src="https://cdn.org/a.js"></script><link rel=icon href=//b.org/c.css>'
    assert ASSET.findall(page) == ["https://cdn.org/a.js", "//b.org/c.css"]
    assert CSS_ASSET.findall('@import "https://f.org/a"; b{background:url(//c.org/d.png)}') == [
        "https://f.org/a", "//c.org/d.png",
    ]  # fmt: skip


def test_every_page_is_in_the_site_and_no_script_is(site: Path) -> None:
    for page in all_pages()[1:]:
        assert (site / Path(page).name).with_suffix(".html").exists(), page
    assert list(site.rglob("*.py")) == []


def test_pictures_are_those_that_the_script_draws(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "docs/pictures/draw.py", str(tmp_path)], cwd=ROOT, check=True, timeout=300)
    drawn = sorted(tmp_path.iterdir())
    assert len(drawn) == 4
    for picture in drawn:
        assert picture.read_text() == (ROOT / "docs" / "images" / picture.name).read_text(), picture.name


def test_in_a_browser_from_disk(chromium: None, site: Path, tmp_path: Path) -> None:
    browser = Browser(tmp_path)
    try:
        browser.size(1280, 900)
        browser.call("Page.navigate", url=(site / "index.html").as_uri())
        browser.wait(
            "document.readyState === 'complete' && !!document.querySelector('[data-md-component=search-query]')"
        )
        browser.run("""(() => {
            document.querySelector('#__search').click()
            const field = document.querySelector('[data-md-component=search-query]')
            field.focus(); field.value = 'momentum'
            field.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}))
            field.dispatchEvent(new Event('input', {bubbles: true}))
        })()""")
        browser.wait("document.querySelectorAll('.md-search-result__item').length > 1")
        assert [address for address in browser.requests if not address.startswith(("file:", "data:", "blob:"))] == []
        assert browser.run("document.querySelector('article img').naturalWidth") > 0
        assert browser.errors == []
    finally:
        browser.close()
