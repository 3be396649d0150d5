"""Settings of evaluation and logging."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from torchrl_grpo import checks
from torchrl_grpo.checks import MIN_TEMPERATURE
from torchrl_grpo.config.data import DatasetConfig
from torchrl_grpo.config.fields import choice, limited
from torchrl_grpo.config.rule import Rule, read_with


@dataclass
class EvaluationConfig:
    """Accuracy on the test split: pass@1 greedy, pass@k and avg@k sampled."""

    frequency: int = limited(50, ge=0)
    """Steps between two greedy evaluations; 0 evaluates only before and after the run."""
    num_prompts: int = limited(200, ge=0)
    """Test problems to use, the same ones in each evaluation and run; 0 turns evaluation off."""
    k: int = limited(8, ge=0, le=1024)
    """Samples per problem before and after the run, for pass@k and avg@k (the share of correct ones,
    with a 95% confidence interval), from 2 to 1,024; 0 omits both.
    """
    temperature: float | None = limited(None, ge=MIN_TEMPERATURE)
    """Temperature of the samples for pass@k, at least 0.01; null is inference_model.temperature."""
    top_p: float = limited(1.0, gt=0, le=1)
    """pass@k: sample from the most likely tokens that hold this share of the probability; 1 uses
    all.
    """
    top_k: int = limited(0, ge=0)
    """pass@k: sample from this many most likely tokens; 0 uses all."""
    min_p: float = limited(0.0, ge=0, lt=1)
    """pass@k: sample from tokens with at least this share of the most likely one's probability."""
    datasets: list[DatasetConfig] | None = None
    """Further test sets, of num_prompts problems each: [{dataset: aime.jsonl, columns: {prompt: q},
    reward: math}]. Each takes the keys from dataset to reward, and name, for its metrics. The
    data's test split is used or, if there is none, all of it; the reward is by default env.reward.
    """


@dataclass
class ServiceConfig:
    """Settings shared by all logging services."""

    mode: str = choice(checks.ServiceMode, "disabled")
    """disabled, offline (files in the run's folder) or online."""
    project: str = "torchrl-grpo"
    """Project name."""
    name: str | None = None
    """Run name; by default the run folder's."""
    group: str | None = None
    """Name shared by runs that belong together, such as the seeds of one setting."""


@dataclass
class WandbConfig(ServiceConfig):
    """Weights & Biases."""

    entity: str | None = None
    """User or team that owns the project; null takes it from the key."""
    tags: list[str] = field(default_factory=list)
    """Tags of the run."""


@dataclass
class MLflowConfig(ServiceConfig):
    """MLflow: the project is an experiment, and the group a tag of the run."""

    mode: str = choice(checks.ServiceMode, "disabled")
    """disabled, offline (a database in the run's folder) or online (at the address in
    MLFLOW_TRACKING_URI).
    """


@dataclass
class TrackioConfig(ServiceConfig):
    """Trackio: a few letters are appended to the name of a run."""

    mode: str = choice(checks.TrackioMode, "disabled")
    """disabled, or offline: into the folder on this machine that trackio show reads (TRACKIO_DIR).
    """


@dataclass
class PrometheusConfig:
    """Prometheus, which reads the latest metrics at /metrics while the run lasts."""

    port: int | None = limited(None, ge=1, le=65535)
    """Port to serve them on; null serves none."""
    host: str = "127.0.0.1"
    """Address to listen on; with 0.0.0.0 every machine that reaches the port may read them."""


@dataclass
class LoggingConfig:
    """Records and logs in addition to metrics.jsonl."""

    page: bool = False
    """Serve a dashboard during the run; its address is printed. For a finished run:
    ``python -m torchrl_grpo view DIR``.
    """
    tensorboard: bool = True
    """Write TensorBoard files, if the extra ``report`` is installed."""
    sample_frequency: int = limited(50, ge=1)
    """Steps between two sets of logged samples, at least 1."""
    sample_rows: Any = 32
    """Rows per such step in samples.jsonl, rounded up to whole groups; all is the whole batch and,
    in evaluations, includes the tokens of all test problems instead of the first 20."""
    profile_steps: list[int] = field(default_factory=list)
    """Steps to profile, such as [3,4]; they are slower. trace.json.gz in the run's folder shows
    operators, kernels and timeline in https://ui.perfetto.dev (docs/metrics.md)."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    mlflow: MLflowConfig = field(default_factory=MLflowConfig)
    trackio: TrackioConfig = field(default_factory=TrackioConfig)
    prometheus: PrometheusConfig = field(default_factory=PrometheusConfig)
    trackers: list[dict[str, Any]] = field(default_factory=list)
    """Trackers of your own, [{_target_: file.py:Class}], or names that installed packages register,
    with arguments next to their _target_ (docs/extending.md)."""

    @property
    def services(self) -> dict[str, dict[str, Any]]:
        """Settings of the services that are on, by name."""
        nodes = {name: asdict(getattr(self, name)) for name in ("wandb", "mlflow", "trackio")}
        services = {name: node for name, node in nodes.items() if node["mode"] != "disabled"}
        if self.prometheus.port is not None:
            services["prometheus"] = {**asdict(self.prometheus), "name": None}
        return services | {f"trackers[{i}]": node for i, node in enumerate(self.trackers)}

    @property
    def train_rows(self) -> int | None:
        """Responses of a batch that become rows of samples.jsonl; None for all."""
        return None if self.sample_rows == "all" else self.sample_rows

    @property
    def test_rows(self) -> int | None:
        """Test problems for which an evaluation adds a row; None for all."""
        return None if self.sample_rows == "all" else 20


RULES = (
    Rule(
        "logging.profile_steps",
        "must be numbers of steps, counted from 1",
        "for example, [3,4]",
        bad=lambda steps: min(steps, default=1) < 1,
    ),
    Rule(
        "logging.sample_rows",
        "must be all, or a whole number of at least 1",
        "for example, all",
        bad=lambda rows: rows != "all" and not (isinstance(rows, int) and rows > 0),
    ),
    Rule(
        "evaluation.k",
        "must be 0 or at least 2 (pass@1 is measured greedy)",
        "for example, evaluation.k=8",
        bad=lambda k: k == 1,
    ),
)
UNREAD = (
    *read_with(
        "evaluation.k",
        range(2, 2**31),
        "8",
        "evaluation.temperature",
        "evaluation.top_p",
        "evaluation.top_k",
        "evaluation.min_p",
    ),
    *read_with("evaluation.num_prompts", range(1, 2**31), "200", "evaluation.datasets"),
)
