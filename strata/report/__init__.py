"""Finished and running runs as a page, tables and figures."""

from strata.report.reading import Run, find_runs, read_run
from strata.report.writing import write_report

__all__ = ["Run", "find_runs", "read_run", "write_report"]
