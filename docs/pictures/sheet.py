"""A small SVG writer. Colours follow the reader's light or dark setting; every sheet has its own ground, so that it
can be read on any page."""

from __future__ import annotations

from html import escape
from pathlib import Path

STYLE = """
  .ground{fill:#faf9f6} .ink{fill:#1f2733} .grey{fill:#68727f} .line{stroke:#8b94a1;fill:none} .grid{stroke:#e3e1da}
  .frozen{fill:#3d4a63} .trained{fill:#ef8a17} .head{fill:#7cc4b3} .ghost{fill:#e9e7e1} .card{fill:#fff;stroke:#d8d5cc}
  .weights{fill:#3d4a63} .gradients{fill:#b3a1d6} .activations{fill:#7cc4b3} .on-dark{fill:#fff} .on-light{fill:#1f2733}
  .tip{fill:#8b94a1} .accent{fill:#b85f00} .budget{stroke:#ef8a17} .full-line{stroke:#3d4a63;fill:none}
  .part-line{stroke:#1f8a78;fill:none} .part-area{fill:#7cc4b3;opacity:.45} .full-area{fill:#3d4a63;opacity:.13}
  .full-ink{fill:#3d4a63} .part-ink{fill:#14705f}
  @media (prefers-color-scheme: dark){
  .ground{fill:#1e2330} .ink{fill:#e8eaf0} .grey{fill:#a3acbd} .line{stroke:#7d8799} .grid{stroke:#333a4a}
  .frozen{fill:#7f8fb0} .head{fill:#5db3a0} .ghost{fill:#2b3242} .card{fill:#262c3b;stroke:#3b4456}
  .weights{fill:#7f8fb0} .gradients{fill:#a08bce} .activations{fill:#5db3a0} .on-dark{fill:#10141d} .tip{fill:#7d8799}
  .accent{fill:#f5a347} .full-line{stroke:#9fadca} .part-line{stroke:#7fd6c2} .full-area{fill:#9fadca;opacity:.16}
  .full-ink{fill:#b4c0da} .part-ink{fill:#8edccb}}
  text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
""".strip()


class Sheet:
    def __init__(self, width: int, height: int, says: str) -> None:
        """`says`: what the picture shows, for those who cannot see it."""
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            f"<title>{escape(says)}</title>",
            f"<style>\n{STYLE}\n</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>',
        ]
        self.rect(0, 0, width, height, "ground", 10)

    def rect(self, x: float, y: float, width: float, height: float, kind: str, round: float = 0) -> None:
        corner = f' rx="{round:g}"' if round else ""
        self.parts.append(
            f'<rect class="{kind}" x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}"{corner}/>'
        )

    def text(
        self, x: float, y: float, words: str, kind: str = "ink", size: float = 13, at: str = "start", bold: bool = False
    ) -> None:
        anchor = "" if at == "start" else f' text-anchor="{at}"'
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text class="{kind}" x="{x:.4g}" y="{y:.4g}" font-size="{size:g}"{anchor}{weight}>{escape(words)}</text>'
        )

    def lines(self, x: float, y: float, words: str, kind: str = "grey", size: float = 12, at: str = "start") -> None:
        for number, line in enumerate(words.split("\n")):
            self.text(x, y + number * size * 1.4, line, kind, size, at)

    def path(self, d: str, kind: str, width: float = 1.5, tip: bool = False, dashes: str = "") -> None:
        end = ' marker-end="url(#tip)"' if tip else ""
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self.parts.append(f'<path class="{kind}" d="{d}" stroke-width="{width:g}"{dashed}{end}/>')

    def arrow(self, *points: tuple[float, float]) -> None:
        self.path("M" + "L".join(f"{x:.4g} {y:.4g}" for x, y in points), "line", tip=True)

    def legend(self, x: float, y: float, *entries: tuple[str, str]) -> None:
        for kind, words in entries:
            self.rect(x, y - 10, 12, 12, kind, 2)
            self.text(x + 18, y, words, size=12.5)
            x += 18 + 6.6 * len(words) + 24

    def save(self, path: Path) -> None:
        path.write_text("\n".join([*self.parts, "</svg>\n"]), encoding="utf-8")
