"""The only training loop."""

from torchrl_grpo.loop.fit import fit

__all__ = ["fit"]
