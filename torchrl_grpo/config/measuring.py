"""What the config says about how a run is measured, and what it writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchrl_grpo import choices
from torchrl_grpo.checks import MIN_TEMPERATURE
from torchrl_grpo.config.data import DatasetConfig
from torchrl_grpo.config.fields import choice, limited


@dataclass
class EvaluationConfig:
    """Accuracy on the test split: pass@1 greedy, pass@k sampled."""

    frequency: int = limited(50, ge=0)
    """Steps between two greedy evaluations; 0 evaluates before and after the run only."""
    num_prompts: int = limited(200, ge=0)
    """Test problems to use, the same ones in each evaluation and run; 0 switches evaluation off."""
    k: int = limited(8, ge=0, le=1024)
    """Samples a problem for pass@k before and after the run, from 2 to 1,024; 0 leaves it out."""
    temperature: float | None = limited(None, ge=MIN_TEMPERATURE)
    """Temperature of the samples for pass@k, at least 0.01; null is inference_model.temperature."""
    datasets: list[DatasetConfig] | None = None
    """Further test sets, of num_prompts problems each: [{dataset: aime.jsonl, columns: {prompt: q}, reward: math}].
    Each takes the keys from dataset to reward, and name, what its metrics are called. It is the data's test split or,
    where there is none, all of it; the reward is by default env.reward."""


@dataclass
class WandbConfig:
    """Weights & Biases."""

    mode: str = choice(choices.WandbMode, "disabled")
    """disabled, offline or online."""
    project: str = "torchrl-grpo"
    """Project name."""
    name: str | None = None
    """Run name; by default the run folder's."""


@dataclass
class LoggingConfig:
    """What is written beside metrics.jsonl."""

    page: bool = False
    """Whether a page on the run is served while it goes on; its address is printed. For a run that has ended:
    python -m torchrl_grpo.view DIR."""
    tensorboard: bool = True
    """Whether TensorBoard files are written."""
    sample_frequency: int = limited(50, ge=1)
    """Steps between two tables of samples, at least 1."""
    sample_rows: Any = 4
    """Rows that such a step adds to samples.jsonl, one of each group first; all is the whole batch, and in evaluations
    all test problems in place of 20."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
