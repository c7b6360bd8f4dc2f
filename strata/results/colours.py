"""A method has one colour wherever it is drawn: in experiments, comparisons and reports."""

from __future__ import annotations

METHODS = {
    "slt": "#e07a10", "small": "#2f7ab8", "fd": "#1d9a85", "fedrolex": "#8a63c7",
    "heterofl": "#cf4d76", "fjord": "#a8861f", "fedavg": "#64708a",
}  # fmt: skip
CYCLE = (*METHODS.values(), "#4aa3d8", "#93a52c", "#b5603c")
