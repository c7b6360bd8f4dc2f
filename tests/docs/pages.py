"""Pages and their fenced blocks, with what the page itself says about running them.

In a page, before a block, one comment per line (they show neither on GitHub nor on the site):

    <!-- test: replace "--rounds 500" "--rounds 2" -->   run it smaller (the text must be there)
    <!-- test: exit 3 -->                                the block ends with this exit code
    <!-- test: background until "Uvicorn" -->            goes on until the page ends; wait for this text first
    <!-- test: port 8477 -->                             stands for a free port, here and in the rest of the page
    <!-- test: output -->                                this block is what the block before it prints (… = anything)
    <!-- test: skip REASON -->                           not run, and listed by the test

`bash` and `python` blocks are run, in order, in one empty folder per page; the python ones share a namespace. A block
with a title (```python title="nets.py") is a file: it is written there. All other blocks are only shown.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>.*)$")
COMMENT = re.compile(r"^ *<!-- test: (?P<text>.*?) *-->$")
COMMANDS = ("strata ", "make ", "python ", "pip ", ".venv/bin/", "import ", "from ")

# the newcomer's pages; split from the rest only so that two test processes share the work
FIRST = ("README.md", *(f"docs/{name}.md" for name in ("index", "concepts", "tutorial", "adding-a-method", "faq")))


@dataclass(frozen=True)
class Block:
    page: str
    line: int  # of the opening fence, from 1
    language: str  # "" where the page names none
    title: str | None
    code: str
    skip: str | None = None  # the reason
    replacements: tuple[tuple[str, str], ...] = ()
    exit_code: int = 0
    background: str | None = None  # the text that says it is ready
    is_output: bool = False
    port: str | None = None

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.language in ("bash", "python") and self.skip is None and self.title is None

    @property
    def small(self) -> str:
        """The code as the test runs it."""
        code = self.code
        for old, new in self.replacements:
            assert old in code, f"{self.where}: there is no {old!r} to replace"
            code = code.replace(old, new)
        return code


def all_pages() -> list[str]:
    """README.md and docs/*.md, by their paths from the root."""
    return ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]


def read(page: str) -> list[Block]:
    return parse((ROOT / page).read_text(encoding="utf-8"), page)


def parse(text: str, page: str) -> list[Block]:
    blocks: list[Block] = []
    wishes: list[str] = []  # comments since the last block
    lines = iter(enumerate(text.splitlines(), start=1))
    for number, line in lines:
        if comment := COMMENT.match(line):
            wishes.append(comment["text"])
        elif fence := FENCE.match(line):
            indent, code = len(fence["indent"]), []
            for _, inner in lines:
                if inner.strip() == "```":
                    break
                code.append(inner[indent:])
            else:
                raise AssertionError(f"{page}:{number}: the block never ends")
            blocks.append(_block(page, number, fence["info"].strip(), "\n".join(code) + "\n", wishes))
            wishes = []
        elif wishes and line.strip():
            raise AssertionError(f"{page}:{number}: a test comment stands right before a block, not before {line!r}")
    assert not wishes, f"{page}: a test comment without a block: {wishes}"
    return blocks


def _block(page: str, line: int, info: str, code: str, wishes: list[str]) -> Block:
    language, _, rest = info.partition(" ")
    title = re.search(r'title="([^"]+)"', rest)
    found: dict[str, object] = {}
    replacements: list[tuple[str, str]] = []
    for wish in wishes:
        kind, _, value = wish.partition(" ")
        words = shlex.split(value) if kind != "skip" else []
        if kind == "skip" and value:
            found["skip"] = value
        elif kind == "replace" and len(words) == 2:
            replacements.append((words[0], words[1]))
        elif kind == "exit" and len(words) == 1:
            found["exit_code"] = int(words[0])
        elif kind == "background" and len(words) == 2 and words[0] == "until":
            found["background"] = words[1]
        elif kind == "port" and len(words) == 1:
            found["port"] = words[0]
        elif kind == "output" and not words:
            found["is_output"] = True
        else:
            raise AssertionError(f"{page}:{line}: not a test comment: {wish!r}")
    block = Block(page, line, language, title[1] if title else None, code, replacements=tuple(replacements), **found)  # type: ignore[arg-type]
    assert language or not code.startswith(COMMANDS), f"{block.where}: commands need a language, such as ```bash"
    return block
