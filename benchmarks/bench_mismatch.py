"""Measure how much engine and trainer disagree, and which correction still learns.

    python benchmarks/bench_mismatch.py
    python benchmarks/bench_mismatch.py --only learning --engines "4 bits" --seeds 0 --override optimizer.lr=1e-4
    python benchmarks/bench_mismatch.py --plot-only

``precision``: the share of sampled tokens with probabilities that differ by more than a tenth between the trainer and
an engine in bfloat16, with the LM head's product in 16 bits or in float32 on either side. The models are the starter,
and a random one of 30M parameters with logits as spread as a trained model's.

``learning``: short runs of the arithmetic task with each of ``JOBS``, ``ENGINES`` and ``CORRECTIONS``. An engine is
wrong in one controlled way, and returns the log-probs that it sampled with; ``top_p 0.8, raw`` returns those from
before the truncation, as servers do by default. The accuracy is that of the trained weights in float32 with greedy
responses, whatever samples in training. All runs are made in this process; the JSON is updated after each one, so that
``--resume`` continues. At the end the figure of ``docs/corrections.md`` is drawn and its table is printed.

Nothing but the processor time of the runs is timed, so other work on the machine does no harm.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from hydra import compose, initialize_config_dir
from machine import surroundings
from matplotlib.figure import Figure
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from torchrl_grpo.assembly.run import build
from torchrl_grpo.config import GRPOConfig, from_hydra, register
from torchrl_grpo.generation import Completion, SamplingParams, TransformersEngine
from torchrl_grpo.generation import transformers as transformers_engine
from torchrl_grpo.generation.base import OnFinished, greedy
from torchrl_grpo.generation.fused_decoder import FusedDecoder
from torchrl_grpo.generation.sampling import sample
from torchrl_grpo.images import Prompt
from torchrl_grpo.loop import Observer, fit
from torchrl_grpo.models import scoring
from torchrl_grpo.models.head import chunked_log_probs
from torchrl_grpo.models.scoring import TokenScorer, autocast
from torchrl_grpo.starter import starter_path
from torchrl_grpo.weights.handle import WeightHandle

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "torchrl")
INK, GREY, GRID, BLUE = "#333a45", "#8a929e", "#dfe3e8", "#0062b0"
FAR = 0.1
"""Ratios that differ more from 1 are counted, as in TRL's issue 6789."""
RECOMPUTED = {"policy.proximal": "recomputed"}
CORRECTIONS: dict[str, dict[str, str]] = {
    "none": RECOMPUTED,
    "ratio to the engine": {},
    "ratio, dual_clip 3": {"policy.dual_clip": "3"},
    "ratio, token_ratio 2": {"policy.rejection": "{token_ratio:2}"},
    "token truncation, 2": RECOMPUTED
    | {"policy.behaviour_weight": "truncate", "policy.behaviour_cap": "2"},
    "sequence mask, 3": RECOMPUTED
    | {
        "policy.behaviour_weight": "mask",
        "policy.behaviour_level": "sequence",
        "policy.behaviour_cap": "3",
    },
    "decoupled_ppo": {"algo": "decoupled_ppo"},
    "icepop": {"algo": "icepop"},
    "geo_mask": {"algo": "geo_mask"},
    "sequence_k3 0.01": RECOMPUTED | {"policy.rejection": "{sequence_k3:0.01}"},
    "off_policy 0.1": RECOMPUTED | {"policy.rejection": "{off_policy:0.1}"},
    "dppo_tv": {"algo": "dppo_tv"},
    "truncation, dppo_tv": RECOMPUTED
    | {
        "policy.behaviour_weight": "truncate",
        "policy.behaviour_cap": "2",
        "policy.rejection": "{dppo_tv:0.2}",
    },
    "kept tokens": {"inference_model.top_k": "20", "inference_model.top_p": "0.8"},
}
"""Overrides by name, on top of ``SHORT``. The last one truncates, and the trainer knows."""
SHORT = {
    "env.num_envs": "64",
    "train.total_steps": "60",
    "evaluation.frequency": "20",
    "evaluation.num_prompts": "200",
    "evaluation.k": "0",
    "logging.tensorboard": "false",
    "policy.aggregation": "token_mean",
    "policy.advantage_std": "group",
    "policy.kl_coef": "0",
}
JOBS: dict[str, dict[str, str]] = {
    "lr 5e-5": {},
    "lr 2e-4": {"optimizer.lr": "2e-4"},
}


@dataclass(frozen=True)
class Fault:
    """Difference between an engine and the trainer.

    Attributes:
        bits: of the weights of each matrix, in equal levels with a scale for each row; 16 is
            bfloat16, and 32 changes nothing.
        delay: number of weight updates that it is behind.
        noise: standard deviation of normal noise on the logits of each token.
        top_p: truncation of the distribution, unknown to the trainer.
        raw: whether it returns the log-probs from before the truncation.
    """

    bits: int = 32
    delay: int = 0
    noise: float = 0.0
    top_p: float = 1.0
    raw: bool = False

    def rounded(self, weight: Tensor) -> Tensor:
        """Return a weight as the engine has it; biases and norms stay."""
        if self.bits == 32 or weight.dim() < 2:
            return weight
        if self.bits == 16:
            return weight.bfloat16().to(weight.dtype)
        scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-30) / (2 ** (self.bits - 1) - 1)
        return (weight / scale).round() * scale


ENGINES: dict[str, Fault] = {
    "float32": Fault(),
    "bfloat16": Fault(bits=16),
    "8 bits": Fault(bits=8),
    "4 bits": Fault(bits=4),
    "3 bits": Fault(bits=3),
    "noise of 1": Fault(noise=1.0),
    "8 steps old": Fault(delay=8),
    "top_p 0.8": Fault(top_p=0.8),
    "top_p 0.8, raw": Fault(top_p=0.8, raw=True),
}


class FaultyEngine(TransformersEngine):
    """Samples with a ``Fault``, and gives greedy responses without it."""

    fault = Fault()

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        super().__init__(model, **options)
        self.faultless = TransformersEngine(self.model)
        self.noise = torch.Generator()
        self.latest: deque[list[tuple[str, Tensor]]] = deque(maxlen=self.fault.delay + 1)

    def load(self, handle: WeightHandle, version: int) -> None:
        self._load(handle, version)  # here weights that are not the trainer's are no error

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        copies = [(name, weight.detach().clone()) for name, weight in weights]
        self.faultless.update_weights(copies, version)
        self.latest.append(copies)
        rounded = ((name, self.fault.rounded(weight)) for name, weight in self.latest[0])
        super().update_weights(rounded, version)

    def generate(
        self,
        prompts: Sequence[Tensor | Prompt],
        n: int,
        params: SamplingParams,
        on_finished: OnFinished | None = None,
    ) -> list[list[Completion]]:
        if greedy(params):
            return self.faultless.generate(prompts, n, params, on_finished)
        truncated = replace(params, top_p=min(params.top_p, self.fault.top_p))
        with mock.patch.object(transformers_engine, "sample", self.draw):
            return super().generate(prompts, n, truncated, on_finished)

    def draw(self, logits: Tensor, params: SamplingParams, uniform: Tensor) -> tuple[Tensor, ...]:
        if self.fault.noise:
            logits = logits + self.fault.noise * torch.randn(logits.shape, generator=self.noise)
        tokens, log_probs, *others = sample(logits, params, uniform)
        if self.fault.raw:
            log_probs = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        return tokens, log_probs, *others


class Rows(Observer):
    """Observer that keeps the metrics of each step."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}

    def began(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps[step] = dict(metrics)

    stepped = began


def config_of(*settings: Mapping[str, str], overrides: Sequence[str] = ()) -> GRPOConfig:
    """Return the config of the arithmetic task; later settings replace earlier ones."""
    values = {key: value for setting in settings for key, value in setting.items()}
    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "config")):
        own = [f"{key}={value}" for key, value in values.items()]
        return from_hydra(compose("grpo_arithmetic", overrides=[*own, *overrides]))


def train(
    job: str, engine: str, correction: str, seed: int, overrides: Sequence[str]
) -> dict[str, Any]:
    """Return the figures of one run."""
    started = time.process_time()
    config = config_of(
        SHORT, JOBS[job], CORRECTIONS[correction], {"seed": str(seed)}, overrides=overrides
    )
    engine_class = type("Engine", (FaultyEngine,), {"fault": ENGINES[engine]})
    rows = Rows()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        mock.patch.object(transformers_engine, "TransformersEngine", engine_class),
    ):
        run = build(config, folder)
        try:
            # With some engines the first step's KL is more than the loop allows on policy.
            fit(run.learner, run.rollouts, replace(run.schedule, on_policy=False), [rows])
        finally:
            run.close()
    gc.collect()
    steps = [row for step, row in rows.steps.items() if step]
    kl = [row["train/kl_k3_to_inference"] for row in steps]
    mean = {
        name: statistics.fmean(row.get(f"train/{name}", 0.0) for row in steps)
        for name in ("behaviour_capped", "rejected_tokens", "clip_fraction")
    }
    return {
        "accuracy": {
            step: row["eval/pass@1"] for step, row in rows.steps.items() if "eval/pass@1" in row
        },
        "kl_at_first": statistics.fmean(kl[:3]),
        "kl_median": statistics.median(kl),
        "kl_at_last": statistics.fmean(kl[-3:]),
        "reward_after": statistics.fmean(row["rollout/reward_mean"] for row in steps[-10:]),
        "entropy_after": statistics.fmean(row["train/entropy"] for row in steps[-10:]),
        **mean,
        "cpu_s": round(time.process_time() - started, 1),
    }


def learning(args: argparse.Namespace, result: dict[str, Any], write: Callable[[], None]) -> None:
    """Run the cases that the result lacks."""
    runs = result.setdefault("learning", {})
    names = [
        "/".join((job, engine, correction, str(seed)))
        for seed in args.seeds
        for job in args.jobs
        for engine in args.engines
        for correction in args.corrections
    ]
    for name in names:
        if name not in runs:
            job, engine, correction, seed = name.split("/")
            runs[name] = train(job, engine, correction, int(seed), args.override)
            sys.stderr.write(f"{name}: {runs[name]}\n")
            write()


def seeds_of(runs: dict[str, Any], job: str, engine: str, correction: str) -> list[dict[str, Any]]:
    """Return the runs of one cell of the table."""
    return [run for name, run in runs.items() if name.startswith(f"{job}/{engine}/{correction}/")]


def after(run: dict[str, Any]) -> float:
    """Return the accuracy of the trained weights at the end."""
    return list(run["accuracy"].values())[-1]


def table(runs: dict[str, Any]) -> str:
    """Return the comparison as a Markdown table."""
    lines = [
        "| job | engine | correction | test accuracy of each seed | KL at first | later | left out | bounded |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for job in JOBS:
        for engine in ENGINES:
            for correction in CORRECTIONS:
                cell = seeds_of(runs, job, engine, correction)
                if cell:
                    mean = {
                        name: statistics.fmean(run[name] for run in cell)
                        for name in cell[0]
                        if name != "accuracy"
                    }
                    bounded = mean["behaviour_capped"] + mean["clip_fraction"]
                    cells = [
                        job,
                        engine,
                        correction,
                        ", ".join(f"{after(run):.1%}" for run in cell),
                        f"{mean['kl_at_first']:.1e}",
                        f"{mean['kl_median']:.1e}",
                        f"{mean['rejected_tokens']:.1%}",
                        f"{bounded:.2%}",
                    ]
                    lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(runs: dict[str, Any], path: Path) -> None:
    """Write the figure: a panel for each engine with several corrections, a dot for each seed."""
    cells: dict[tuple[str, ...], list[float]] = {}
    for name, run in runs.items():
        cells.setdefault(tuple(name.split("/")[:3]), []).append(100 * after(run))
    counts = Counter((job, engine) for job, engine, _ in cells)
    panels = [(job, engine) for job in JOBS for engine in ENGINES if counts[job, engine] > 3]
    shown = {correction for *panel, correction in cells if tuple(panel) in panels}
    corrections = [name for name in CORRECTIONS if name in shown][::-1]
    size = (2.2 + 3.2 * len(panels), 1.5 + 0.28 * len(corrections))
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    columns = figure.subplots(1, max(1, len(panels)), sharey=True, squeeze=False)[0]
    for axes, (job, engine) in zip(columns, panels, strict=False):
        for row, correction in enumerate(corrections):
            dots = cells.get((job, engine, correction), [])
            axes.plot(dots, [row] * len(dots), "o", color=BLUE, markersize=7, alpha=0.7)
        plain = cells.get((job, "float32", "none"))
        if plain:
            axes.axvspan(min(plain), max(plain), color=GREY, alpha=0.3, linewidth=0)
        axes.set_title(f"{engine}, {job}", loc="left", fontsize=11, fontweight="bold", color=INK)
        axes.set_yticks(range(len(corrections)), corrections)
        axes.set_xlim(-3, 103)
        axes.set_axisbelow(True)
        axes.grid(True, color=GRID, linewidth=0.7)
        axes.tick_params(colors=INK, labelsize=9, length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
    figure.supxlabel("test accuracy after 60 steps (%)", fontsize=10, color=INK)
    figure.suptitle(
        "A dot for each seed. Grey: range of an engine without fault.",
        fontsize=10,
        color=INK,
        x=0.01,
        ha="left",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


def make_model(name: str) -> PreTrainedModel:
    if name == "starter":
        return AutoModelForCausalLM.from_pretrained(starter_path()).float().eval()
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 32000,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
    }
    config = Qwen2Config(
        **sizes, num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=False
    )
    model = Qwen2ForCausalLM(config).float().eval()
    with torch.no_grad():  # 4: an entropy of about 2.5 nats
        spread = model(torch.randint(2, 32000, (2, 64))).logits.std(-1).mean()
        model.lm_head.weight.mul_(4 / spread)
    return model


def make_prompts(name: str, count: int) -> list[Tensor]:
    if name != "starter":
        return list(
            torch.randint(2, 32000, (count, 32), generator=torch.Generator().manual_seed(1))
        )
    tokenizer = AutoTokenizer.from_pretrained(starter_path())
    chats = [[{"role": "user", "content": f"{10 + 7 * i}+{99 - 5 * i}="}] for i in range(count)]
    texts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        for chat in chats
    ]
    return [torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]


def sampled(
    master: PreTrainedModel, prompts: list[Tensor], stop: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return responses of an engine in bfloat16: tokens [B, T], the mask of sampled tokens [B, T],
    and their log-probs.
    """
    engine = TransformersEngine(AutoModelForCausalLM.from_config(master.config).bfloat16())
    engine.update_weights(
        ((key, weight.bfloat16()) for key, weight in master.named_parameters()), 0
    )
    engine.seed(0)
    groups = engine.generate(prompts, 8, SamplingParams(64, stop_token_ids=stop))
    full = [
        torch.cat((p, done.tokens))
        for p, group in zip(prompts, groups, strict=True)
        for done in group
    ]
    log_probs = torch.cat([done.log_probs for group in groups for done in group])
    starts = torch.tensor([len(p) for p in prompts]).repeat_interleave(8)[:, None]
    tokens = torch.nn.utils.rnn.pad_sequence(full, batch_first=True)
    places, lengths = (
        torch.arange(tokens.shape[1]),
        torch.tensor([len(row) for row in full])[:, None],
    )
    return tokens, (places >= starts) & (places < lengths), log_probs


def wide(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the head's product in float32, of 16-bit factors."""
    return torch.nn.functional.linear(
        hidden.float(), weight.float(), None if bias is None else bias.float()
    )


def rounded(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the head's product in 16 bits."""
    return torch.nn.functional.linear(hidden, weight, bias).float()


def scored_by(product: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return log-probs as ``chunked_log_probs`` computes them, with another product."""

    def score(
        hidden: Tensor, weight: Tensor, targets: Tensor, *, bias_V: Tensor | None, **_: Any
    ) -> tuple[Tensor, Tensor]:
        hidden, weight = hidden.bfloat16(), weight.bfloat16()
        rows = []
        with torch.autocast("cpu", enabled=False):
            for some, picked in zip(hidden.split(256), targets.split(256), strict=True):
                log_p = product(some, weight, bias_V).log_softmax(-1)
                rows.append(
                    (log_p.gather(-1, picked[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1))
                )
        return torch.cat([row[0] for row in rows]), torch.cat([row[1] for row in rows])

    return score


TRAINERS = {
    "16 bits": scored_by(rounded),
    "16 bits, the target's in float32": chunked_log_probs,
    "float32": scored_by(wide),
}


def precision(name: str) -> Iterator[dict[str, Any]]:
    """Return the differences of engine and trainer, a row for each pair of heads."""
    master, prompts = make_model(name), make_prompts(name, 16)
    for of_engine, head in (("16 bits", torch.nn.functional.linear), ("float32", wide)):

        def logits(self: FusedDecoder, hidden: Tensor, head: Any = head) -> Tensor:
            return head(hidden, self._lm_head.weight, self._lm_head.bias)

        with mock.patch.object(FusedDecoder, "logits", logits):
            tokens, mask, log_probs = sampled(master, prompts, (1,) if name == "starter" else ())
        scorer = TokenScorer(master)
        for of_trainer, product in TRAINERS.items():
            wanted = mock.patch.object(scoring, "chunked_log_probs", product)
            with wanted, torch.no_grad(), autocast(torch.device("cpu"), torch.bfloat16):
                scores, entropy = scorer.score(tokens, mask)
            ratio = (scores[mask] - log_probs).double().exp()
            yield {
                "model": name, "head of the engine": of_engine, "head of the trainer": of_trainer,
                "tokens": len(ratio), "far": ((ratio - 1).abs() > FAR).double().mean().item(),
                "mean difference": ratio.log().abs().mean().item(), "entropy": entropy[mask].mean().item(),
            }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("precision", "learning"))
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=JOBS)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--corrections", nargs="+", default=list(CORRECTIONS), choices=CORRECTIONS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--override", action="append", default=[], help="of the config; may be repeated"
    )
    parser.add_argument(
        "--resume", action="store_true", help="make only the runs that the output lacks"
    )
    parser.add_argument("--plot-only", action="store_true", help="draw and print what the JSON has")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/mismatch.json")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs/images/corrections.png")
    args = parser.parse_args()
    result: dict[str, Any] = {}
    if (args.resume or args.plot_only) and args.output.exists():
        result = json.loads(args.output.read_text())
    if not args.plot_only:
        result |= surroundings(PACKAGES) | {"override": args.override}

    def write() -> None:
        args.output.write_text(json.dumps(result, indent=1) + "\n")

    if args.only != "learning" and not args.plot_only:
        result["precision"] = [row for name in ("starter", "30M") for row in precision(name)]
        for row in result["precision"]:
            print(row)
        write()
    if args.only != "precision":
        if not args.plot_only:
            learning(args, result, write)
        draw(result["learning"], args.figure)
        print(table(result["learning"]))


if __name__ == "__main__":
    main()
