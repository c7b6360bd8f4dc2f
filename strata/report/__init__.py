"""Finished and running runs as a page, tables and figures."""

from strata.report.writing import write_report
from strata.results.reading import Run, find_runs, read_run

__all__ = ["Run", "find_runs", "read_run", "write_report"]
