"""What a run shows and writes: terminal output, metrics, samples, curves and the report."""

from torchrl_grpo.reporting.metrics import MetricsLogger

__all__ = ["MetricsLogger"]
