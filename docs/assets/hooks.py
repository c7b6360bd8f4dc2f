"""For MkDocs: the site also has results/, and links to other files outside docs/ become names instead of dead links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

RESULTS = Path(__file__).parents[2] / "results"
SHOWN = (".md", ".png", ".svg")
OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\(\.\./([^)#]+)[^)]*\)")


def on_files(files: Files, config: Any, **_: Any) -> None:
    for path in sorted(RESULTS.rglob("*")):
        if path.suffix in SHOWN and "runs" not in path.parts:
            files.append(File.generated(config, path.relative_to(RESULTS.parent).as_posix(), abs_src_path=str(path)))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri.startswith("results/"):
        return markdown.replace("](../docs/", "](../")
    markdown = markdown.replace("](../results/", "](results/")
    return OUTSIDE.sub(lambda link: link[1] if link[1] == link[2] else f"{link[1]} (`{link[2]}`)", markdown)
