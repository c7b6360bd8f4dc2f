"""Every block of the pages that a newcomer reads first does what the page says. How a page says it: pages.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import FIRST, Block, all_pages, parse, read
from tests.docs.playing import Warm, play

SKIPPED = [block for page in all_pages() for block in read(page) if block.skip is not None]


@pytest.mark.parametrize("page", FIRST)
def test_page(page: str, warm: Warm, tmp_path: Path) -> None:
    play(read(page), tmp_path / "here", warm)


@pytest.mark.parametrize("block", SKIPPED, ids=lambda block: block.where)
def test_skipped_block(block: Block) -> None:
    """So that pytest lists them."""
    pytest.skip(str(block.skip))


def test_skips_are_few() -> None:
    run = [block for page in all_pages() for block in read(page) if block.runs]
    assert len(SKIPPED) * 3 <= len(run)  # most are of docs/fleet.md, whose commands tests/fleet plays


PAGE = """# A page
<!-- test: replace "--rounds 500" "--rounds 2" -->
<!-- test: exit 3 -->
```bash
strata plan --rounds 500
```
- a list
  ```python title="a.py"
  x = 1
  ```

```text
output
```
"""


def test_reading_a_page() -> None:
    command, file, shown = parse(PAGE, "page.md")
    assert (command.line, command.small, command.exit_code, command.runs) == (4, "strata plan --rounds 2\n", 3, True)
    assert (file.title, file.code, file.runs, shown.runs) == ("a.py", "x = 1\n", False, False)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```\nstrata plan\n```", "commands need a language"),
        ("```bash\nstrata plan", "never ends"),
        ("<!-- test: skip -->\n```bash\nx\n```", "not a test comment"),
        ("<!-- test: exit 3 -->\ntext\n```bash\nx\n```", "right before a block"),
        ("```bash\nx\n```\n<!-- test: exit 3 -->", "without a block"),
    ],
)
def test_mistakes_in_a_page(text: str, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        parse(text, "page.md")


def test_a_replacement_must_have_something_to_replace() -> None:
    (block,) = parse('<!-- test: replace "y" "z" -->\n```bash\nx\n```', "page.md")
    with pytest.raises(AssertionError, match="no 'y' to replace"):
        assert block.small


def play_text(text: str, folder: Path, warm: Warm) -> None:
    play(parse(text, "page.md"), folder / "here", warm)


def test_playing_notices_what_goes_wrong(warm: Warm, tmp_path: Path) -> None:
    good = "```bash\nstrata --version | tee version\n```\n<!-- test: output -->\n```text\nstrata 0…\n```\n"
    for number, (more, complaint) in enumerate([
        ("```bash\nstrata plan --no-such-option\n```", "ended with 2"),
        ("```bash\nfalse\ntrue\n```", "ended with 1"),
        ("```bash\necho this\n```\n<!-- test: output -->\n```text\nthat\n```", "not printed"),
        ("```python\nx = 1\n```\n```python\nassert x == 2\n```", "ended with 1"),
        ("```bash\npip install 'strata-fl[nonsense]'\n```", "ended with 1"),
        ("```bash\nmake nonsense\n```", "ended with 2"),
        ('<!-- test: background until "never" -->\n```bash\necho soon over\n```', "ended with 0"),
    ]):  # fmt: skip
        (tmp_path / str(number)).mkdir()
        with pytest.raises(AssertionError, match=complaint):
            play_text(good + more, tmp_path / str(number), warm)


def test_python_blocks_share_a_folder_and_a_namespace(warm: Warm, tmp_path: Path) -> None:
    play_text(
        "```python\nx = 1\n```\n```bash\necho 2 > two\n```\n```python\nassert x + int(open('two').read()) == 3\n```\n"
        '```python title="own.py"\nimport sys\nsys.exit(4 if __name__ == "__main__" else 0)\n```\n'
        "<!-- test: exit 4 -->\n```bash\npython own.py\n```",
        tmp_path, warm,
    )  # fmt: skip
