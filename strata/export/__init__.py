"""Steps of a plan as programs for devices without Python and torch (docs/pocket.md). ExecuTorch is an extra: it is
loaded where a step is exported, and nowhere else."""
