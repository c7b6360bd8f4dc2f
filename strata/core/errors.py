"""The two ways a command ends without a result: the user asked for something impossible to read, or to fit."""

from __future__ import annotations


class BadInput(Exception):
    """One clear sentence: what was wrong and what would be right. Exit code 2."""


class Infeasible(Exception):
    """No configuration fits the budget. Exit code 3."""
