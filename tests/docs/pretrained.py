"""`python tests/docs/pretrained.py FOLDER`: what docs/pretrained.md has beside it, small: the folder of a model that
reads bytes, and a file of texts for it, rows.jsonl."""

from __future__ import annotations

import json
import sys
from pathlib import Path

CONFIG = {
    "model_type": "bert", "vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def main(folder: str) -> None:
    Path(folder).mkdir()
    (Path(folder) / "config.json").write_text(json.dumps(CONFIG))  # weights are not needed to count and to train
    rows = [{"text": f"I lost card {number}", "label": number % 2} for number in range(40)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(sys.argv[1])
