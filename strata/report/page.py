"""The page: one HTML file with its style, its scripts (Plotly once) and its data inside; it loads nothing."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from strata.core.errors import BadInput

INSTALL = "pip install strata-fl[report]"


def plotly_script() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise BadInput(f"the page needs plotly, which is not installed: {INSTALL}") from None
    script: str = get_plotlyjs()
    return script.replace("</script", "<\\/script")


def page(contents: Mapping[str, Any], plotly: str | None = None) -> str:
    """`contents` as strata.report.contents makes them."""
    parts = {
        "title": html.escape(str(contents["title"])),
        "css": _file("page.css"),
        "js": _file("page.js"),
        "data": embedded(contents),
        "plotly": plotly_script() if plotly is None else plotly,
    }
    out: list[str] = []
    for piece in _file("page.html").split("@@"):  # text, name, text, name, ...: data that holds @@ is safe
        out.append(parts[piece] if len(out) % 2 else piece)
    return "".join(out)


def embedded(value: Any) -> str:
    """JSON that can stand in a <script>: nothing in it can end the element or open a comment."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _file(name: str) -> str:
    return resources.files("strata.report").joinpath(name).read_text(encoding="utf-8")
