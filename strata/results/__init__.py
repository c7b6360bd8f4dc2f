"""Finished runs as values: read, averaged over seeds, written as tables, drawn."""
