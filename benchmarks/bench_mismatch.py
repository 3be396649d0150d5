"""Measure how much engine and trainer disagree, and which correction learns best.

    python benchmarks/bench_mismatch.py
    python benchmarks/bench_mismatch.py --only learning --engines float8 --override train.total_dialog_turns=1280

``precision``: the share of sampled tokens with probabilities that differ by more than a tenth between the trainer and
an engine in bfloat16, with the LM head's product in 16 bits or in float32 on either side. The models are the starter,
and a random one of 30M parameters with logits as spread as a trained model's.

``learning``: the default job with each of ``CORRECTIONS`` and with engines that differ more and more from the trainer
in float32: in bfloat16, with matrices rounded to 8 bits (``float8_e4m3fn``, a scale for each), to 4 bits (a scale for
each row), and to powers of the square root of 2, which nobody would sample with. The accuracies are those of the
trained weights, unrounded, as ``from_pretrained`` loads them, and of the rounded ones that sampled. Each run is a
separate process; the JSON is updated after each one, so that ``--resume`` continues.

Nothing is timed, so other work on the machine does no harm.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from hydra import compose, initialize_config_dir
from machine import surroundings
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
from torchrl_grpo.generation import SamplingParams, TransformersEngine
from torchrl_grpo.generation import transformers as transformers_engine
from torchrl_grpo.generation.fused_decoder import FusedDecoder
from torchrl_grpo.models import scoring
from torchrl_grpo.models.head import chunked_log_probs
from torchrl_grpo.models.scoring import TokenScorer, autocast
from torchrl_grpo.reporting.metrics import read_jsonl
from torchrl_grpo.starter import starter_path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "torchrl")
FAR = 0.1
"""Ratios that differ more from 1 are counted, as in TRL's issue 6789."""
CORRECTIONS: dict[str, dict[str, str]] = {
    "ratio to the engine": {"proximal": "behaviour", "behaviour_weight": "none"},
    "sequence mask, 3": {
        "behaviour_weight": "mask",
        "behaviour_level": "sequence",
        "behaviour_cap": "3",
    },
    "token truncation, 2": {
        "behaviour_weight": "truncate",
        "behaviour_level": "token",
        "behaviour_cap": "2",
    },
    "none": {"behaviour_weight": "none"},
}
"""Overrides of ``policy``, with ``proximal=recomputed``."""
ENGINES = ("float32", "bfloat16", "float8", "4 bits", "roots of two")


def in_8_bits(weight: Tensor) -> Tensor:
    """Return a matrix rounded to ``float8_e4m3fn`` with one scale."""
    scale = torch.finfo(torch.float8_e4m3fn).max / weight.abs().max()
    return (weight * scale).to(torch.float8_e4m3fn).to(weight.dtype) / scale


def in_4_bits(weight: Tensor) -> Tensor:
    """Return a matrix rounded to 15 levels, with a scale for each row."""
    scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 7
    return (weight / scale).round() * scale


def in_roots_of_two(weight: Tensor) -> Tensor:
    """Return a matrix rounded to the nearest power of the square root of 2."""
    return weight.sign() * (weight.abs().clamp(min=1e-30).log2() * 2).round().div(2).exp2()


ROUNDED = {"float8": in_8_bits, "4 bits": in_4_bits, "roots of two": in_roots_of_two}


class RoundedEngine(TransformersEngine):
    """Samples with rounded matrices."""

    rounding = staticmethod(in_8_bits)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        matrices = (
            (name, self.rounding(weight) if weight.dim() > 1 else weight)
            for name, weight in weights
        )
        super().update_weights(matrices, version)


def train(engine: str, correction: str, seed: int, overrides: list[str]) -> dict[str, float]:
    """Return the figures of one run, made in this process."""
    register()
    dtype = "bfloat16" if engine == "bfloat16" else "float32"
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "config")):
        own = [f"inference_model.dtype={dtype}", f"seed={seed}", "logging.tensorboard=false"]
        own += [
            f"policy.{key}={value}"
            for key, value in ({"proximal": "recomputed"} | CORRECTIONS[correction]).items()
        ]
        config = from_hydra(compose("grpo_arithmetic", overrides=[*own, *overrides]))
    engine_class: Any = TransformersEngine
    if engine in ROUNDED:
        engine_class = type("Engine", (RoundedEngine,), {"rounding": staticmethod(ROUNDED[engine])})
    with tempfile.TemporaryDirectory() as folder:
        with mock.patch.object(transformers_engine, "TransformersEngine", engine_class):
            rows = rows_of(config, Path(folder))
        plain = replace(
            config,
            model=replace(config.model, name=f"{folder}/checkpoints/model"),
            inference_model=replace(config.inference_model, dtype="float32"),
            train=replace(config.train, total_dialog_turns=0),
        )
        [tested] = rows_of(plain, Path(folder) / "plain")
    accuracy = [row["eval/pass@1"] for row in rows if row.get("eval/pass@1") is not None]
    steps = [row for row in rows if row.get("train/kl_k3_to_inference") is not None]
    return {
        "accuracy_of_trained": tested["eval/pass@1"],
        "accuracy_after": accuracy[-1],
        "accuracy_mean": statistics.fmean(accuracy),
        "reward_after": statistics.fmean(row["rollout/reward_mean"] for row in steps[-10:]),
        "kl_to_engine": statistics.fmean(row["train/kl_k3_to_inference"] for row in steps),
        "capped": statistics.fmean(row.get("train/behaviour_capped") or 0.0 for row in steps),
        "clipped": statistics.fmean(
            row["train/clip_fraction_low"] + row["train/clip_fraction_high"] for row in steps
        ),
    }


def rows_of(config: GRPOConfig, folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of a whole run."""
    run = build(config, folder)
    try:
        run.fit()
    finally:
        run.close()
    return read_jsonl(folder / "metrics.jsonl")


def learning(args: argparse.Namespace, result: dict[str, Any], write: Callable[[], None]) -> None:
    """Run the cases that the result lacks, each in a separate process."""
    results = result.setdefault("learning", {})
    for seed in args.seeds:
        for engine in args.engines:
            for correction in args.corrections:
                name = f"{engine}/{correction}/{seed}"
                if name in results:
                    continue
                command = [*args.prefix, sys.executable, __file__, "--one", name]
                command += [f"--override={override}" for override in args.override]
                process = subprocess.run(command, capture_output=True, text=True, check=False)
                if process.returncode:
                    sys.stderr.write(
                        f"{name} ended with {process.returncode}:\n{(process.stdout + process.stderr)[-2000:]}\n"
                    )
                    continue
                results[name] = json.loads(process.stdout.splitlines()[-1])
                sys.stderr.write(f"{name}: {results[name]}\n")
                write()


def table(results: dict[str, dict[str, float]]) -> str:
    """Return the comparison as a Markdown table."""
    lines = [
        "| engine | correction | test accuracy: mean (range) | of the rounded weights | KL to the engine | bounded |",
        "|---|---|---|---|---|---|",
    ]
    for engine in ENGINES:
        for correction in CORRECTIONS:
            runs = [
                one for name, one in results.items() if name.startswith(f"{engine}/{correction}/")
            ]
            if runs:
                after = [one.get("accuracy_of_trained", one["accuracy_after"]) for one in runs]
                mean = {name: statistics.fmean(one[name] for one in runs) for name in runs[0]}
                bounded = f"{mean['capped'] + mean['clipped']:.2%}"
                cells = [
                    engine,
                    correction,
                    f"{statistics.fmean(after):.1%} ({min(after):.1%} to {max(after):.1%})",
                ]
                cells += [f"{mean['accuracy_after']:.1%}", f"{mean['kl_to_engine']:.1e}", bounded]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


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
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--corrections", nargs="+", default=list(CORRECTIONS), choices=CORRECTIONS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--override", action="append", default=[], help="of the config; may be repeated"
    )
    parser.add_argument(
        "--prefix", nargs="+", default=[], help="a command to run each process with, such as nice"
    )
    parser.add_argument(
        "--resume", action="store_true", help="make only the runs that the output lacks"
    )
    parser.add_argument("--output", type=Path, default=Path("mismatch.json"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        engine, correction, seed = args.one.split("/")
        print(json.dumps(train(engine, correction, int(seed), args.override)))
        return
    result: dict[str, Any] = (
        json.loads(args.output.read_text()) if args.resume and args.output.exists() else {}
    )
    result |= surroundings(PACKAGES)

    def write() -> None:
        args.output.write_text(json.dumps(result, indent=1) + "\n")

    if args.only != "learning":
        result["precision"] = [row for name in ("starter", "30M") for row in precision(name)]
        for row in result["precision"]:
            print(row)
        write()
    if args.only != "precision":
        learning(args, result, write)
        print(table(result["learning"]))


if __name__ == "__main__":
    main()
