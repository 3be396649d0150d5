"""placeholder"""

from torchrl_grpo.reporting.console import Console


def make_console() -> Console:
    return Console()
