"""Record what a run says before it loads weights, and compare it with another commit's.

A refactoring must not change a word. This records the message of each bad input below, the tables of
each device plan on simulated GPUs, and every rule of the config. ``tools/golden.py`` records runs,
and the messages that need only the config.

    python tools/messages.py /tmp/before.json            # at one commit: about a minute of CPU time
    python tools/messages.py /tmp/after.json             # at the other
    python tools/golden.py compare /tmp/before.json /tmp/after.json
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
VLLM = "inference_model.backend=vllm"
FILES = {
    "rows.jsonl": '{"question": "1+1?", "answer": "2"}\n{"question": "2+3?", "answer": "5"}\n',
    "chats.jsonl": '{"prompt": "1+1?", "completion": "2"}\n',
    "empty.jsonl": "",
    "rewards.py": "def good(response, answer):\n    return 1.0\n\n\n"
    "def odd(response, colour):\n    return 1.0\n",
}
ROWS = "env.dataset={folder}/rows.jsonl env.reward={folder}/rewards.py:good"

MISTAKES = [
    "train_model.num_devices=9",
    "inference_model.tensor_parallel_size=3 inference_model.num_devices=4",
    "inference_model.num_devices=2 inference_model.tensor_parallel_size=2 train_model.devices=[5]",
    "env.dataset={folder}/none.jsonl env.reward=gsm8k",
    "model.name={folder}",
    "model.chat_template='{{% for %}}'",
    "train_model.model_kwargs={{nothing: 1}}",
    "teacher.model={folder} policy.teacher_coef=1",
    "optimizer.name=adamw_8bit train_model.cpu_offload=true",
    "train_model.tensor_parallel_size=3",
    "inference_model.max_new_tokens=100000",
    "inference_model.max_model_len=100000",
    "env.max_prompt_tokens=1",
    "+policy.loss.width=2",
    "+policy.advantage.width=2",
    "env.transforms=[{{_target_: nothing.Here}}]",
    "env.num_envs=24 env.repeats=8 inference_model.num_devices=2",
]
"""Mistakes that are found after the config's rules; each pair shows which one is reported first."""

INPUTS = [
    *MISTAKES,
    *(" ".join(pair) for pair in combinations(MISTAKES, 2)),
    ROWS.replace("good", "odd"),
    ROWS.replace("good", "nothing"),
    ROWS.replace("rows", "empty"),
    ROWS + " env.columns.prompt=nothing",
    ROWS + " env.columns.images=question",
    ROWS + " env.prompt_template='{{nothing}}'",
    ROWS + " env.test_split=nothing evaluation.num_prompts=2",
    ROWS + " evaluation.num_prompts=2 evaluation.datasets=[{{dataset: {folder}/chats.jsonl}}]",
    ROWS + " policy.sft_coef=0.1",
    ROWS + " env.reward_combination=gdpo",
    ROWS + " env.tools=[{folder}/rewards.py:nothing] env.max_turns=2",
    ROWS + " env.environment={folder}/rewards.py:good",
    ROWS + " env.max_turns=3",
    "env.dataset={folder}/rows.jsonl",
    "env.datasets=[{{dataset: arithmetic}},{{dataset: arithmetic}}]",
    "env.datasets=[{{dataset: arithmetic, name: a}},{{dataset: shapes, name: b}}]",
    "env.dataset=shapes train_model.cpu_offload=true",
    "env.dataset=shapes train_model.tensor_parallel_size=2 train_model.num_devices=2",
    "env.dataset=shapes env.transforms=[{{_target_: torchrl.envs.StepCounter}}]",
    "env.task._target_=nothing.Here",
    "env.task=verifiers:nothing",
    "env.curriculum=0.5",
    "env.agent={folder}/rewards.py:nothing",
    "algo=sft",
    "algo=distill teacher.model=vision_starter",
    "algo=distill teacher.model=starter teacher.address=[http://localhost:1] inference_model.temperature=1",
    "policy.loss._target_=torchrl_grpo.objectives.SAPOLoss +policy.loss.tau_positive=-1",
    "policy.loss._target_=nothing.Here",
    "policy.advantage._target_=torchrl.envs.StepCounter",
    "train_model.tensor_parallel_size=2 train_model.num_devices=2 train_model.lora.enabled=true",
    "train_model.replicas=2 train_model.num_devices=3",
    "train.resume={folder}",
    "ref_model.devices=[7] policy.kl_coef=0.1",
    "train_model.devices=[0,1] inference_model.devices=[1,2]",
    "train_model.num_devices=all",
    "inference_model.backend=server inference_model.address=[http://localhost:1]",
    "inference_model.in_flight=keep inference_model.backend=vllm",
    "inference_model.weight_transfer=broadcast inference_model.backend=vllm",
    "ray.address=localhost",
]
"""Bad inputs on a machine with 4 GPUs; ``{folder}`` has ``FILES``."""

PLANS: list[tuple[int, float, str]] = [
    (0, 0, ""),
    (0, 0, "train_model.num_devices=2 inference_model.num_devices=2 ref_model.num_devices=2"),
    (1, 1, VLLM),
    (1, 1e-3, VLLM),
    (1, 8e-3, f"{VLLM} policy.kl_coef=0.1"),
    (1, 1, f"{VLLM} algo=distill teacher.model=starter teacher.dtype=bfloat16"),
    (2, 1, f"{VLLM} policy.kl_coef=0.1 inference_model.gpu_memory_utilization=0.001"),
    (2, 1, "train_model.num_devices=all inference_model.num_devices=all"),
    (4, 1, f"{VLLM} inference_model.tensor_parallel_size=2 inference_model.num_devices=2"),
    (4, 4e-3, "train_model.num_devices=2 policy.kl_coef=0.1 ref_model.sharded=true"),
    (4, 1, "train_model.devices=[0,1] inference_model.devices=[0,1] train_model.lora.enabled=true"),
    (8, 1, f"{VLLM} train_model.num_devices=all inference_model.num_devices=3"),
    (
        8,
        1,
        f"{VLLM} algo=distill teacher.model=policy teacher.weights=ema teacher.prompt=best_response",
    ),
    (8, 1, f"{VLLM} env.num_envs=48 inference_model.num_devices=4 policy.kl_coef=0.1"),
    (2, 1, "train.total_dialog_turns=0 evaluation.k=0"),
]
"""Number of GPUs, GB of each, and overrides."""
FIXED = "env.num_envs=16 env.repeats=4 evaluation.num_prompts=8 evaluation.k=4"


class Ready(Exception):
    """Everything is checked, and the models would load now."""


def outcome(folder: Path, text: str, gpus: int, gb: float, script: str = "sync") -> Any:
    """Return what a command line says on a machine with GPUs of some GB: an error or its tables."""
    import torch
    from torchrl import torchrl_logger

    from tests.support.configs import compose_config
    from torchrl_grpo.assembly import run
    from torchrl_grpo.errors import ConfigError
    from torchrl_grpo.generation import vllm
    from torchrl_grpo.reporting.console import Console

    cards = [torch.device("cuda", index) for index in range(gpus)]
    pretended = {
        "available_accelerators": lambda: cards,
        "accelerators_in_use": lambda: {str(card): (0, int(gb * 1e9)) for card in cards},
    }
    tables: dict[str, Any] = {}
    lines: list[str] = []

    def stop(context: Any, transfer: Any, *_: Any) -> None:
        tables["run"] = facts(context, transfer)
        tables["layout"] = "RayLayout" if context.distributed else "LocalLayout"
        raise Ready

    with ExitStack() as stack:
        enter = stack.enter_context
        for name, fake in pretended.items():
            for module in list(sys.modules.values()):
                if getattr(module, "__name__", "").startswith("torchrl_grpo") and hasattr(
                    module, name
                ):
                    enter(mock.patch.object(module, name, fake))
        enter(mock.patch.object(vllm, "require_vllm", lambda **_: None))
        enter(mock.patch.object(run, "make_in_process", stop))
        enter(mock.patch.object(run, "make_on_ray", stop))
        enter(
            mock.patch.object(Console, "table", lambda _, name, rows: tables.update({name: rows}))
        )
        enter(mock.patch.object(Console, "problems", lambda _, *args, **more: None))
        enter(mock.patch.object(torchrl_logger, "warning", lambda text, *_: lines.append(text)))
        target = enter(tempfile.TemporaryDirectory())
        overrides = [*FIXED.split(), "logging.tensorboard=false", *_words(text, folder)]
        try:
            config = compose_config(*_last(overrides))
            run.build(config, target, asynchronous=script == "async")
        except Ready:
            return {"tables": tables, "warnings": lines}
        except ConfigError as error:
            message = str(error)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        return message.replace(str(folder), "FOLDER").replace(target, "TARGET")


def facts(context: Any, transfer: Any) -> Any:
    """Return what is known of a run whose models would load now."""
    from torchrl_grpo.assembly import layouts
    from torchrl_grpo.extras.doctor.doctor import memory_rows

    return {
        "memory": memory_rows(context),
        "stored": layouts._stored_bytes(context, transfer),
        "transfer": [transfer.kind, transfer.together],
        "turns": context.turns,
        "geometry": asdict(context.geometry),
        "lengths": [*context.prompt_tokens],
    }


def _words(text: str, folder: Path) -> list[str]:
    """Return the overrides of a text: a word without ``=`` belongs to the one before it."""
    words: list[str] = []
    for word in text.format(folder=folder).split():
        key, equals, _ = word.partition("=")
        if equals and not set(key) & set("[{:"):
            words.append(word)
        else:
            words[-1] += f" {word}"
    return words


def _last(overrides: list[str]) -> list[str]:
    """Return the last override of each key, in order."""
    return list({word.partition("=")[0]: word for word in overrides}.values())


def rules() -> list[str]:
    """Return all rules of the config, sorted."""
    from torchrl_grpo.config import GRPOConfig, validate  # noqa: F401

    found = {
        f"{rule.key} | {rule.why} | {rule.fix}"
        for rule in gc.get_objects()
        if type(rule).__name__ == "Rule"
    }
    return sorted(found)


def main() -> None:
    """Record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, text in FILES.items():
            (folder / name).write_text(text)
        inputs = {text: outcome(folder, text, 4, 1.0) for text in INPUTS}
        plans = {
            f"{script} {gpus} x {gb:g} GB {text}": outcome(folder, text, gpus, gb, script)
            for gpus, gb, text in PLANS
            for script in ("sync", "async")
        }
    record = {"inputs": inputs, "plans": plans, "rules": rules()}
    options.out.write_text(json.dumps(record, indent=1, default=str))
    accepted = sum(isinstance(value, dict) for value in inputs.values())
    print(
        f"{len(inputs)} inputs ({accepted} accepted), {len(plans)} plans, {len(record['rules'])} rules"
    )


if __name__ == "__main__":
    main()
