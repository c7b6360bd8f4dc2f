"""Finished and running runs as a page, tables and figures."""

from strata.report.folder import write_report
from strata.results.reading import RecordedRun, find_runs, read_run

__all__ = ["RecordedRun", "find_runs", "read_run", "write_report"]
