"""Output of a run: terminal, metrics and samples; ``extras/report`` reads it."""
