"""Advises how to split accelerators among the roles, by simulating ``grpo-async.py``.

    python -m torchrl_grpo plan --devices 8 --gpu h100
    python -m torchrl_grpo plan --config-name grpo_math --devices 64 model.name=Qwen/Qwen2.5-7B
    python -m torchrl_grpo plan --devices 1024 --params 32e9 inference_model.tensor_parallel_size=2

Nothing is loaded and no device is needed: the times of the stages are computed from published
figures (hardware.py).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from rich import box
from rich.console import Console
from rich.table import Table

from torchrl_grpo.assembly.estimates import encoder_cache_bytes, step_setup
from torchrl_grpo.checks import STARTERS
from torchrl_grpo.config import ConfigError, GRPOConfig, compose, orderly_exit, staleness_bound
from torchrl_grpo.engines import ENGINES
from torchrl_grpo.extras.plan.hardware import GPUS, Workload, model_shape
from torchrl_grpo.extras.plan.splits import Row, Settings, best_splits, simulate
from torchrl_grpo.models.memory import BYTES
from torchrl_grpo.starter import starter_path

_PROMPT = 256  # tokens, if the config has no limit
_MIN_GAIN = 0.01
_CHANGES = {
    "staleness": "a staleness bound that is higher by one",
    "in_flight": "inference_model.in_flight=keep",
}


def main(
    arguments: Sequence[str] | None = None, file: IO[str] | None = None, width: int | None = None
) -> None:
    """Print the advice for a command line.

    Args:
        arguments: arguments on the command line; by default this process's.
        file: where to print; standard output by default.
        width: number of columns; by default the terminal's.
    """
    options = parse(arguments)
    with orderly_exit():
        config = compose(options.config_name, options.overrides)
        settings = settings_of(config, options)
        rows = best_splits(settings, options.devices)
        # Check that the advice breaks no rule.
        compose(options.config_name, _advice(settings, rows[0], options))
        console = Console(file=file, width=width, highlight=False, soft_wrap=True)
        _show(console, settings, rows, options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line; None for this process's."""
    parser = argparse.ArgumentParser(
        "python -m torchrl_grpo plan",
        description="Advises how to split accelerators over the roles of grpo-async.py.",
    )
    parser.add_argument(
        "--config-name",
        default="grpo_gsm8k",
        metavar="NAME",
        help="as for the scripts (grpo_gsm8k)",
    )
    parser.add_argument("--devices", type=int, default=8, metavar="N", help="accelerators (8)")
    parser.add_argument("--gpu", choices=GPUS, default="h100", help="their kind (h100)")
    parser.add_argument(
        "--params",
        type=_positive,
        metavar="X",
        help="parameters of an unknown model, such as 7e9",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=_positive,
        metavar="X",
        help="mean tokens of a prompt (half of env.max_prompt_tokens)",
    )
    parser.add_argument(
        "--response-tokens",
        type=_positive,
        metavar="X",
        help=(
            "mean tokens of a response: a run's rollout/response_length (half of "
            "inference_model.max_new_tokens)"
        ),
    )
    parser.add_argument(
        "--image-tokens",
        type=_positive,
        default=0.0,
        metavar="X",
        help="number of these that are image tokens, on average (0)",
    )
    parser.add_argument(
        "--reward-s",
        type=_seconds,
        default=0.0,
        metavar="X",
        help="seconds that the rewards of a rollout task take (0)",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="overrides of the config, as for the scripts",
    )
    return parser.parse_intermixed_args(arguments)


def _positive(text: str) -> float:
    value = _seconds(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a number of at least 0")
    return value


def settings_of(config: GRPOConfig, options: argparse.Namespace) -> Settings:
    """Return the settings of a run that determine its speed."""
    env, engine, train = config.env, config.inference_model, config.train
    name = config.model.name
    folder = starter_path(name) if name in STARTERS else Path(name)
    longest = config.max_response_tokens
    kind = ENGINES[engine.backend]
    attaches = config.train_model.lora.enabled and engine.dtype in kind.adapters
    response = options.response_tokens or longest / 2
    if response > longest:
        raise ConfigError(
            f"--response-tokens={response:g} must not exceed the {longest} of "
            f"inference_model.max_new_tokens: use {longest} or less."
        )
    prompt = options.prompt_tokens or (env.max_prompt_tokens or 2 * _PROMPT) / 2
    if options.image_tokens > prompt:
        raise ConfigError(
            f"--image-tokens={options.image_tokens:g} must not exceed the {prompt:g} tokens of a "
            "prompt, which include them: pass more as --prompt-tokens."
        )
    shape = model_shape(name, folder, options.params)
    work = Workload(
        shape=shape,
        group_size=env.repeats,
        prompt=prompt,
        response=response,
        images=options.image_tokens,
        longest=longest,
        groups=config.groups_per_batch,
        passes=train.epochs,
        optim_steps=config.optim_steps_per_batch,
        step=replace(step_setup(config), replicas=1),
        engine_number=BYTES[engine.dtype],
        reference_number=BYTES[config.ref_model.dtype],
        backend=engine.backend,
        recomputes=config.policy.proximal == "recomputed" or config.policy.value_coef > 0,
        scores=config.needs_reference,
        shards_reference=config.ref_model.sharded or "reference" in config.averages,
        broadcast=engine.weight_transfer in ("broadcast", "cuda_ipc"),
        reward_s=options.reward_s,
        encoder_cache=encoder_cache_bytes(config, shape, options.image_tokens),
    )
    return Settings(
        gpu=GPUS[options.gpu],
        work=work,
        max_staleness=staleness_bound(config, True),
        engine_size=engine.devices_per_engine,
        waits=engine.in_flight == "wait" and not (kind.concurrent and attaches),
        rows=env.num_envs,
    )


def _show(
    console: Console, settings: Settings, rows: Sequence[Row], options: argparse.Namespace
) -> None:
    work, best = settings.work, rows[0]
    console.print(
        f"{options.devices:,} x {options.gpu}, {work.shape.parameters / 1e9:.3g}B parameters, "
        f"batches of {work.groups:,} groups of {work.group_size}, prompts of {work.prompt:.0f} "
        f"tokens and responses of {work.response:.0f} on average, staleness "
        f"{settings.max_staleness}. Simulated from published figures: trust the ranking more than "
        "the speeds."
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    for name in (
        "train",
        "ref",
        "inference",
        "steps/h",
        "tokens/s",
        "idle %",
        "bottleneck",
        "GB/device",
    ):
        table.add_column(
            name, justify="right" if name in ("steps/h", "tokens/s") else "left", no_wrap=True
        )
    for row in rows:
        table.add_row(*_cells(settings, row))
    console.print(table)
    console.print(
        "idle % and GB/device: train/ref/inference. Where inference is idle there is room for "
        "more groups."
    )
    helps = [
        f"{_CHANGES.get(name, f'{name} twice as fast')} {gain:+.0%}"
        for name, gain in sorted(best.gains.items(), key=lambda item: -item[1])
        if gain > _MIN_GAIN
    ]
    console.print(
        f"The first split would be faster with: {', '.join(helps) or 'no single change'}."
    )
    split = best.split
    loop = settings.loop(split)
    if work.step.offloads:
        exact, rounded = map(_gigabytes, work.host_memory(split.train))
        console.print(
            f"Each training device offloads {exact} GB to its host (up to {rounded} GB before "
            "torch 2.14)."
        )
    synchronous = simulate(replace(loop, max_staleness=0), settings.costs(split, loop))
    console.print(
        f"The same split with grpo.py (no overlap): {3600 / synchronous.step_s:,.0f} steps/h."
    )
    if (in_turns := settings.in_turns(options.devices)) is not None:
        console.print(
            "grpo.py with train_model.num_devices=all inference_model.num_devices=all, where all "
            f"{options.devices:,} take turns: {3600 / in_turns.step_s:,.0f} steps/h, "
            f"{_gigabytes(settings.memory_in_turns(options.devices))} GB/device."
        )
    if split.devices < options.devices:
        console.print(
            f"{options.devices - split.devices:,} devices are unused, because they would hardly "
            "make it faster: a larger train.dialog_turns_per_batch "
            f"({work.groups * work.group_size:,} here) could use them."
        )
    name = "" if options.config_name == "grpo_gsm8k" else f"--config-name {options.config_name} "
    console.print(
        f"\npython sota/grpo/grpo-async.py {name}{' '.join(_advice(settings, best, options))}"
    )


def _cells(settings: Settings, row: Row) -> list[str]:
    split, result, work = row.split, row.result, settings.work
    has_devices = [True, split.reference > 0, True]
    idle = (1 - result.learner_share, 1 - result.reference_share, 1 - result.sampler_share)
    tokens = work.groups * work.group_size * work.response / result.step_s
    return [
        str(split.train),
        str(split.reference) if split.reference or not settings.has_reference else "train",
        str(split.inference),
        f"{3600 / result.step_s:,.0f}",
        f"{tokens:,.0f}",
        "/".join(
            f"{100 * share:.0f}" if exists else ("-")
            for share, exists in zip(idle, has_devices, strict=True)
        ),
        row.binds,
        "/".join(
            _gigabytes(num_bytes) if exists else "-"
            for num_bytes, exists in zip(settings.memory(split), has_devices, strict=True)
        ),
    ]


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.{0 if num_bytes >= 1e10 else 1}f}"


def _advice(settings: Settings, row: Row, options: argparse.Namespace) -> list[str]:
    """Return the overrides of the split, after those on the command line."""
    split = row.split
    envs = settings.num_envs(split)
    new = {"train_model.num_devices": split.train, "inference_model.num_devices": split.inference}
    new |= {"ref_model.num_devices": split.reference} if split.reference else {}
    new |= {"env.num_envs": envs} if envs != settings.rows else {}
    others = [text for text in options.overrides if text.partition("=")[0] not in new]
    return others + [f"{name}={value}" for name, value in new.items()]
