"""Configs of five other libraries as command lines of ours: each passes our own checks, and names
what it cannot express.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support import peer_configs, trl_fields
from tests.support.configs import ROOT, compose_config
from torchrl_grpo.config import GRPOConfig, check_command_line, leaves
from torchrl_grpo.config.rules import check_script
from torchrl_grpo.extras.migrate.command import main, report
from torchrl_grpo.extras.migrate.readers import Settings, read
from torchrl_grpo.extras.migrate.scripts import Unknown, read_python, read_shell
from torchrl_grpo.extras.migrate.tables import BASE, NAMES, SET_ME, TRL, read_table
from torchrl_grpo.extras.migrate.translation import Translation, translate


def output_of(folder: Path, name: str, text: str, *options: str) -> str:
    """Return the output of the command for a file."""
    (folder / name).write_text(text)
    out = io.StringIO()
    main([str(folder / name), *options], out, 100)
    return out.getvalue()


def words_of(printed: str) -> list[str]:
    """Return the words of the printed command line, after ``python``."""
    return shlex.split(printed.partition("\n\n")[0].replace("\\\n", ""))[1:]


def composed(printed: str) -> GRPOConfig:
    """Return the composed config of a printed command line, except for keys to be set by hand, as
    its script checks it.
    """
    script, *overrides = words_of(printed)
    group = next(
        (
            word.removeprefix("env.repeats=")
            for word in overrides
            if word.startswith("env.repeats=")
        ),
        "8",
    )
    by_hand = {
        "env.num_envs": 2 if group == "1" else 8 if group == SET_ME else group,
        "train_model.lora.enabled": "true",
        "algo": "distill",
        "teacher.model": "t",
        "teacher.prompt": "feedback",
    }
    overrides = [
        f"{key}={by_hand[key]}" if value == SET_ME and key in by_hand else f"{key}={value}"
        for key, _, value in (word.partition("=") for word in overrides)
    ]
    overrides = [word for word in overrides if SET_ME not in word]
    check_command_line(overrides)
    config = compose_config(*overrides, name="grpo_gsm8k")
    check_script(config, script.endswith("grpo-async.py"))
    return config


def translated(folder: Path, name: str, text: str, devices: int | None = None) -> Translation:
    (folder / name).write_text(text)
    return translate(read(folder / name), name, devices)


EXPECTED: dict[str, tuple[int, int, int, str, dict[str, Any]]] = {
    # sequences per batch, per optimizer step, per group; script; some of the keys
    "grpo_2048.py": (8, 8, 8, "grpo.py", {"train.total_epochs": 3, "train_model.lora.r": 8}),
    "nemo_gym.yaml": (
        256,
        256,
        16,
        "grpo.py",
        {"train.total_dialog_turns": 256_000, "optimizer.warmup_steps": 3},
    ),
    "open_r1_demo.yaml": (
        1792,
        1792,
        7,
        "grpo.py",
        {"policy.behaviour_cap": 3.0, "optimizer.schedule": "cosine"},
    ),
    "gspo.json": (
        64,
        16,
        8,
        "grpo.py",
        {"policy.clip_epsilon": [3e-4, 4e-4], "policy.ratio_level": "sequence"},
    ),
    "run_qwen2-7b_math.sh": (
        5120,
        1280,
        5,
        "grpo.py",
        {"policy.dual_clip": 3.0, "train.total_epochs": 15},
    ),
    "run_qwen2_5-3b_gsm8k_grpo_lora.sh": (
        80,
        80,
        5,
        "grpo.py",
        {"train_model.lora.r": 64, "optimizer.lr": 3e-6},
    ),
    "run_dapo_qwen2.5_32b.sh": (
        8192,
        512,
        16,
        "grpo.py",
        {
            "policy.clip_epsilon": [0.2, 0.28],
            "policy.overlong_buffer": 0.2,
            "optimizer.warmup_steps": 160,
        },
    ),
    "run_qwen3_4b_fsdp.sh": (2560, 1280, 5, "grpo.py", {"train.total_dialog_turns": 256_000}),
    "gsm8k_grpo.yaml": (
        1024,
        1024,
        4,
        "grpo-async.py",
        {"policy.reward_bias": -5.0, "policy.advantage_whiten": True},
    ),
    "gsm8k_drgrpo.yaml": (
        1024,
        1024,
        4,
        "grpo-async.py",
        {"policy.advantage_std": "none", "train.max_staleness": 2},
    ),
    "gsm8k_dapo_dynamic_bs.yaml": (
        1024,
        1024,
        4,
        "grpo-async.py",
        {"policy.overlong_buffer": 0.125},
    ),
    "gsm8k_grpo_lora_vllm.yaml": (1024, 1024, 4, "grpo-async.py", {"optimizer.lr": 1.7e-4}),
    "reverse_text.toml": (128, 128, 16, "grpo-async.py", {"train.total_dialog_turns": 2560}),
    "alphabet_sort.toml": (256, 256, 16, "grpo-async.py", {"train_model.lora.alpha": 64}),
    "hendrycks_sanity.toml": (
        512,
        512,
        8,
        "grpo-async.py",
        {"inference_model.max_new_tokens": 8192 - 1024},
    ),
    "qwen3_30b_math.toml": (512, 512, 16, "grpo-async.py", {"inference_model.num_devices": 16}),
    "grpo_gsm8k.yaml": (32, 32, 16, "grpo-async.py", {"policy.kl_to_behaviour_coef": 0.01}),
    "grpo_countdown.yaml": (32, 32, 16, "grpo-async.py", {"train.checkpoint_frequency": 100}),
    "grpo_ifeval.yaml": (
        64,
        16,
        16,
        "grpo-async.py",
        {"policy.kl_coef": 1.0, "policy.kl_in_reward": True},
    ),
    "grpo_math_7b_sync.yaml": (64, 64, 16, "grpo.py", {"optimizer.weight_decay": 0.01}),
}


def test_every_published_config_is_here() -> None:
    assert set(EXPECTED) == set(peer_configs.PUBLISHED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_published_config_becomes_a_command_line_that_passes(name: str, tmp_path: Path) -> None:
    """Whatever the file counts, batches are in sequences."""
    text = peer_configs.PUBLISHED[name]
    printed = output_of(tmp_path, name, text)
    config, (batch, step, group, script, some) = composed(printed), EXPECTED[name]
    values = {key: value for key, _, value in leaves(config)}
    sizes = (config.dialog_turns_per_batch, config.optim_batch_size, config.env.repeats)
    assert sizes == (batch, step, group)
    assert words_of(printed)[0] == f"sota/grpo/{script}"
    assert {key: values[key] for key in some} == some
    for key, value in translated(tmp_path, name, text).overrides.items():
        if key in values and value != SET_ME and key not in ("env.datasets", "env.reward"):
            assert values[key] == value, key


def test_what_is_so_anyway_is_what_our_config_says() -> None:
    values = {key: value for key, _, value in leaves(compose_config(name="grpo_gsm8k"))}
    values |= {"policy.loss._target_": values["policy.loss"]["_target_"], "algo": "grpo"}
    assert {key: value for key, value in BASE.items() if not key.startswith("+")} == {
        key: values[key] for key in BASE if not key.startswith("+")
    }


def test_each_key_of_ours_in_a_table_is_one_that_can_be_printed() -> None:
    for name in NAMES:
        table = read_table(name)
        named = {row.ours for row in table.rows.values() if row.ours} | set(table.always)
        for row in table.rows.values():
            for value in (row.values or {}).values():
                named |= set(value) if isinstance(value, dict) else set()
        assert {key for key in named if not key.startswith("@")} <= set(BASE), name
        conditions = {
            text.partition("=")[0].removesuffix("!")
            for row in table.rows.values()
            for text in (row.when, row.also_when, row.said_when)
            if text
        }
        assert conditions <= set(table.rows), name


def trl(lines: str) -> str:
    return f"num_generations: 8\nper_device_train_batch_size: 8\n{lines}"


def verl(words: str) -> str:
    return (
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=4 data.train_batch_size=8 "
        f"{words} actor_rollout_ref.actor.ppo_mini_batch_size=8"
    )


def areal(settings: str) -> str:
    return (
        f"{{gconfig: {{n_samples: 4}}, train_dataset: {{path: d}}, actor: {{path: m, {settings}}}}}"
    )


def prime(lines: str) -> str:
    return f"[orchestrator]\ngroup_size = 4\n{lines}\n"


def script(trainer: str) -> str:
    """Return a Python script of TRL."""
    return f"NAME = 'a/b'\nloaded, _ = X.from_pretrained('a/b')\n{trainer}\n"


FORMS = {
    trl: "trl.yaml",
    verl: "verl.sh",
    areal: "areal.yaml",
    prime: "rl.toml",
    script: "train.py",
}
ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
FILES = "data.train_files=a/train.parquet data.val_files=a/test.parquet"
CORRECTION = "algorithm.rollout_correction."
LOSS = "policy.loss._target_"
OURS = "torchrl_grpo.objectives."
MASK = {"policy.behaviour_weight": "mask"}
TRUNCATE = {"policy.behaviour_weight": "truncate"}
LORA = "made = None\nif args.lora:\n    made = LoraConfig(r=4)\nGRPOTrainer('m', len, GRPOConfig(), peft_config="
QLORA = {"train_model.lora.enabled": True, "train_model.quantization": "nf4"}
LORA_4 = {"train_model.lora.enabled": True, "train_model.lora.r": 4}
LORA_OPEN = {"train_model.lora.enabled": SET_ME, "train_model.lora.r": 4}
DISAGGREGATED = (
    "[deployment]\ntype = 'multi_node'\nnum_train_nodes = 1\nnum_infer_replicas = 2\n"
    "[inference.deployment]\ntype = 'disaggregated'\nprefill_nodes_per_replica = 4\n"
    "num_prefill_replicas = 3\ndecode_nodes_per_replica = 2"
)

# A file, and keys of ours with their values; None: not printed
KEPT: list[tuple[Callable[[str], str], str, dict[str, Any]]] = [
    # losses
    (trl, "loss_type: grpo\nbeta: 0.04", {"policy.aggregation": None, LOSS: None, "policy.kl_coef": 0.04}),
    (trl, "loss_type: dapo\nbeta: 0.04", {"policy.aggregation": "token_mean", LOSS: None, "policy.kl_coef": 0.04}),
    (trl, "loss_type: dr_grpo", {"policy.aggregation": "constant", LOSS: None}),
    (trl, "loss_type: sapo", {"policy.aggregation": None, LOSS: f"{OURS}SAPOLoss"}),
    (trl, "loss_type: cispo\nepsilon_high: 5.0", {"policy.clip_epsilon": [1.0, 4.0], LOSS: f"{OURS}CISPOLoss"}),
    (trl, "loss_type: vespo\nvespo_k_pos: 1.5", {LOSS: f"{OURS}VESPOLoss", "+policy.loss.k_positive": 1.5}),
    (verl, f"{ACTOR}policy_loss.loss_mode=geo_mean", {LOSS: f"{OURS}GMPOLoss"}),
    (verl, f"{ACTOR}policy_loss.loss_mode=cispo", {LOSS: f"{OURS}CISPOLoss"}),
    (verl, f"{ACTOR}policy_loss.loss_mode=sapo {ACTOR}tau_pos=1.0 {ACTOR}tau_neg=1.2",
     {LOSS: f"{OURS}SAPOLoss", "+policy.loss.tau_positive": 1.0, "+policy.loss.tau_negative": 1.2}),
    (areal, "use_sapo_loss: true, sapo_tau_neg: 1.2",
     {LOSS: f"{OURS}SAPOLoss", "+policy.loss.tau_positive": 1.0, "+policy.loss.tau_negative": 1.2}),
    (verl, f"{ACTOR}policy_loss.loss_mode=clip_cov {ACTOR}policy_loss.clip_cov_ratio=0.001 "
     f"{ACTOR}policy_loss.clip_cov_lb=2.0 {ACTOR}policy_loss.kl_cov_ratio=0.5",
     {LOSS: f"{OURS}ClipCovLoss", "+policy.loss.covariance_share": 0.001, "+policy.loss.covariance_low": 2.0,
      "+policy.loss.penalty": None, "policy.dual_clip": None}),
    (verl, f"{ACTOR}policy_loss.loss_mode=kl_cov {ACTOR}policy_loss.kl_cov_ratio=0.5",  # 0.1 is verl's default
     {LOSS: f"{OURS}KLCovLoss", "+policy.loss.covariance_share": 0.5, "+policy.loss.penalty": 0.1,
      "+policy.loss.covariance_low": None}),
    (trl, "use_peft: true\nload_in_4bit: true\nbnb_4bit_quant_type: nf4", QLORA),
    (trl, "load_in_4bit: true", {"train_model.quantization": None}),
    (script, "bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4')\n"
     "m = AutoModelForCausalLM.from_pretrained('m', quantization_config=bits)\n"
     "GRPOTrainer(m, len, GRPOConfig(), peft_config=LoraConfig(r=4))", QLORA | {"train_model.lora.r": 4}),
    (script, "m, tokenizer = FastLanguageModel.from_pretrained(model_name='m', load_in_4bit=True)\n"
     "n = FastLanguageModel.get_peft_model(m, r=4, lora_alpha=8, random_state=3407)\nGRPOTrainer(n, len, GRPOConfig())",
     QLORA | {"train_model.lora.r": 4, "train_model.lora.alpha": 8, "model.name": "m"}),
    (trl, "epsilon: 10.0", {"policy.clip_epsilon": [1.0, 10.0]}),
    (verl, f"{ACTOR}clip_ratio_low=10", {"policy.clip_epsilon": [1.0, 0.2]}),
    # KL
    (trl, "beta: 0.0", {"policy.kl_bias_correction": None}),
    (trl, "beta: 0.1", {"policy.kl_bias_correction": True}),
    (trl, "beta: 0.1\nuse_bias_correction_kl: false", {"policy.kl_bias_correction": None}),
    (verl, f"{ACTOR}use_kl_loss=False", {"policy.kl_coef": 0.0}),
    (verl, "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.02",
     {"policy.kl_coef": 0.02, "policy.kl_in_reward": True}),
    (verl, f"{ACTOR}use_kl_loss=True {ACTOR}kl_loss_coef=0.01 {ACTOR}kl_loss_type=low_var_kl",
     {"policy.kl_coef": 0.01, "policy.kl_estimator": None, "policy.kl_in_reward": None}),
    (verl, f"{ACTOR}use_kl_loss=True {ACTOR}kl_loss_type=kl", {"policy.kl_estimator": "k1"}),
    (verl, f"{ACTOR}use_kl_loss=True {ACTOR}kl_loss_type=mse", {"policy.kl_estimator": "k2"}),
    (prime, "[trainer.loss]\nkl_tau = 0.25",  # of a squared log-ratio, which is twice our k2
     {"policy.kl_to_behaviour_coef": 0.5, "policy.kl_estimator": "k2"}),
    (trl, "beta: 0.1\nsync_ref_model: true\nref_model_sync_steps: 4",
     {"ref_model.decay": 0.4, "ref_model.refresh_every": 4}),
    # corrections for the engine's probabilities and for stale tokens
    (trl, "off_policy_mask_threshold: 0.5", {"+policy.rejection.off_policy": 0.5}),
    (trl, "use_vllm: true\nvllm_importance_sampling_clip_min: 0.5", {"policy.behaviour_floor": 0.5}),
    (verl, f"{CORRECTION}rollout_rs=seq_mean_k1,token_k3,seq_sum_k1 {CORRECTION}rollout_rs_threshold=0.5_4,0.1,2",
     {"+policy.rejection.token_k3": 0.1, "+policy.rejection.sequence_ratio": [0.5, 2.0],
      "+policy.rejection.geometric": [0.25, 2.0]}),
    (areal, "use_decoupled_loss: true, rejection_sampling: {upper: 5.0}", MASK | {"policy.behaviour_cap": None}),
    (areal, "use_decoupled_loss: true, rejection_sampling: {level: sequence, action: clamp, upper: 3.0}",
     TRUNCATE | {"policy.behaviour_cap": 3.0, "policy.behaviour_level": None}),  # a geometric mean there
    (areal, "use_decoupled_loss: true, behave_imp_weight_cap: 4.0", MASK | {"policy.behaviour_cap": 4.0}),
    (areal, "use_decoupled_loss: true, behave_imp_weight_cap: 4.0, behave_imp_weight_mode: token_truncate",
     TRUNCATE | {"policy.behaviour_cap": 4.0}),
    (areal, "use_decoupled_loss: true, behave_imp_weight_mode: disabled, behave_imp_weight_cap: 4.0",
     {"policy.behaviour_weight": None, "policy.behaviour_cap": None}),
    (areal, "use_decoupled_loss: true, rejection_sampling: {metric: kl_k2, upper: 0.5}",
     MASK | {"policy.behaviour_cap": 1e9}),
    (areal, "use_decoupled_loss: true, rejection_sampling: {metric: kl_k2, action: clamp, upper: 0.5}",
     TRUNCATE | {"policy.behaviour_cap": 0.5}),
    (areal, "use_decoupled_loss: true, rejection_sampling: null", {"policy.behaviour_weight": None}),
    (areal, "use_decoupled_loss: true, eps_clip: 0.2", {"policy.behaviour_weight": None}),
    # entropy and advantages
    (trl, "use_adaptive_entropy: true\nentropy_coef: 0.01\nentropy_coef_delta: 0.002\ntop_entropy_quantile: 0.2\n"
     "entropy_coef_max: 0.5",
     {"policy.top_entropy_quantile": 0.2, "policy.entropy_coef": 0.01, "policy.entropy_target": 0.2,  # TRL's default
      "policy.entropy_coef_delta": 0.002, "policy.entropy_coef_max": 0.5, "policy.proximal": "recomputed"}),
    (trl, "entropy_target: 0.5", {"policy.entropy_target": None}),
    (verl, "algorithm.adv_estimator=opo",
     {"policy.advantage_mean": "length_weighted", "policy.advantage_std": "none"}),
    # sampling
    (trl, "top_p: 0.9\ntop_k: 30", {"inference_model.top_k": 30, "inference_model.top_p": 0.9}),
    (trl, "min_p: 0.1", {"inference_model.top_k": 100, "inference_model.min_p": 0.1}),
    (trl, "top_p: 1.0\ntop_k: 0", {"inference_model.top_k": None, "inference_model.top_p": None}),
    (verl, f"{FILES} {ROLLOUT}val_kwargs.n=4 {ROLLOUT}val_kwargs.top_p=0.7 {ROLLOUT}val_kwargs.top_k=20 "
     f"{ROLLOUT}top_p=0.8 trainer.test_freq=5",
     {"inference_model.top_k": 100, "inference_model.top_p": 0.8, "evaluation.top_k": 20, "evaluation.top_p": 0.7}),
    (verl, f"{ROLLOUT}val_kwargs.top_p=0.7 {ROLLOUT}val_kwargs.n=1",  # nothing reads it
     {"inference_model.top_k": None, "inference_model.top_p": None, "evaluation.top_p": None}),
    # batches, steps, checkpoints
    (trl, "steps_per_generation: 4\nnum_iterations: 2\nmax_steps: 80\nsave_steps: 20",
     # 8 optimizer steps a batch: 80 steps are 10 batches, a checkpoint after each 20 is one after each 2 or 3
     {"env.num_envs": 32, "train.optim_batch_size": 8, "train.epochs": 2, "train.total_dialog_turns": 320,
      "train.checkpoint_frequency": 2}),
    (trl, "dataset_name: a/b\nmax_steps: 200\nsave_steps: 0.05", {"train.checkpoint_frequency": 10}),
    (trl, "dataset_name: a/b\nnum_train_epochs: 2\nsave_steps: 0.05", {"train.checkpoint_frequency": SET_ME}),
    (trl, "save_strategy: epoch", {"train.checkpoint_frequency": SET_ME}),
    (trl, "save_strategy: no", {"train.checkpoint_frequency": 0}),
    (trl, "dataset_name: a/b\neval_strategy: no", {"evaluation.num_prompts": 0, "evaluation.frequency": None}),
    (trl, "dataset_name: a/b\nmax_steps: 200\neval_strategy: steps\neval_steps: 0.1", {"evaluation.frequency": 20}),
    (trl, "dataset_name: a/b\neval_strategy: steps\nlogging_steps: 5", {"evaluation.frequency": 5}),
    (trl, "dataset_name: a/b\neval_strategy: epoch", {"evaluation.frequency": SET_ME}),
    (trl, "dataset_name: a/b\nmax_steps: 200\nwarmup_ratio: 0.1", {"optimizer.warmup_steps": 20}),
    (trl, "dataset_name: a/b\nmax_steps: 200\nwarmup_steps: 0.1", {"optimizer.warmup_steps": 20}),
    (trl, "dataset_name: a/b\nnum_train_epochs: 2\nwarmup_ratio: 0.1", {"optimizer.warmup_steps": SET_ME}),
    (areal, "a: 1}, saver: {freq_steps: 20}, evaluator: {freq_steps: 20",
     {"train.checkpoint_frequency": 20, "evaluation.frequency": 20}),
    (areal, "a: 1}, saver: {freq_epochs: 1}, evaluator: {freq_epochs: 1",
     {"train.checkpoint_frequency": SET_ME, "evaluation.frequency": SET_ME}),
    (areal, "a: 1}, saver: {freq_epochs: null}, evaluator: {freq_epochs: null",
     {"train.checkpoint_frequency": 0, "evaluation.frequency": None}),
    # devices
    (prime, "", {"train_model.num_devices": None, "inference_model.num_devices": None}),
    (prime, "[deployment]\nnum_train_gpus = 2\nnum_infer_gpus = 6",
     {"train_model.num_devices": 2, "inference_model.num_devices": 6}),
    (prime, "[deployment]\ntype = 'multi_node'\nnum_train_nodes = 2\nnum_infer_nodes = 3\nnum_infer_replicas = 4",
     {"train_model.num_devices": 16, "inference_model.num_devices": 96}),
    (prime, "[deployment]\ntype = 'multi_node'\nnum_train_nodes = 2\ngpus_per_node = 4\nnum_infer_nodes = 3",
     {"train_model.num_devices": 8, "inference_model.num_devices": 12}),
    (prime, "[deployment]\ntype = 'multi_node'\nnum_train_nodes = 2",
     {"train_model.num_devices": 16, "inference_model.num_devices": SET_ME}),
    (prime, DISAGGREGATED, {"train_model.num_devices": 8, "inference_model.num_devices": 2 * 14 * 8}),
    (prime, "[deployment]\nnum_infer_gpus = 4\n[inference.vllm]\ntensor_parallel_size = 2\n"
     "gpu_memory_utilization = 0.5\nmax_model_len = 4096\nenforce_eager = true",
     {"inference_model.num_devices": 4, "inference_model.tensor_parallel_size": 2,
      "inference_model.gpu_memory_utilization": 0.5, "inference_model.max_model_len": 4096,
      "inference_model.enforce_eager": True}),
    (areal, "backend: 'fsdp:d8'}, rollout: {backend: 'vllm:d2p1t2'",
     {"train_model.num_devices": 8, "inference_model.num_devices": 4, "inference_model.tensor_parallel_size": 2}),
    # models, adapters, data, rewards
    (trl, "model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct\ndataset_name: openai/gsm8k",  # ours by default
     {"model.name": "Qwen/Qwen2.5-0.5B-Instruct", "env.dataset": "gsm8k"}),
    (verl, "actor_rollout_ref.model.path=$MODEL/x", {"model.name": SET_ME}),
    (verl, "actor_rollout_ref.model.path=${HOME}/x", {"model.name": "$HOME/x"}),
    (script, "GRPOTrainer(model='a/b', args=GRPOConfig())", {"model.name": "a/b"}),
    (script, "GRPOTrainer(model=NAME, args=GRPOConfig())", {"model.name": "a/b"}),
    (script, "GRPOTrainer(model=Auto.from_pretrained('a/b', dtype='auto'), args=GRPOConfig())", {"model.name": "a/b"}),
    (script, "GRPOTrainer(model=loaded, args=GRPOConfig())", {"model.name": "a/b"}),
    (script, "GRPOTrainer(model=get_peft_model(loaded, LoraConfig(r=4)), args=GRPOConfig())", {"model.name": "a/b"}),
    (script, "GRPOTrainer(model=sys.argv[1], args=GRPOConfig())", {"model.name": SET_ME}),
    (script, f"{LORA}LoraConfig(r=4))", LORA_4),
    (script, f"{LORA}None)", {"train_model.lora.enabled": None, "train_model.lora.r": None}),
    (script, f"{LORA}LoraConfig(r=4) if args.lora else None)", LORA_OPEN),
    (script, f"{LORA}made)", LORA_OPEN),
    (script, f"{LORA}get_peft_config(args))", LORA_OPEN),
    (script, "GRPOTrainer('m', [], GRPOConfig(learning_rate=1e-6))", {"env.dataset": SET_ME, "env.reward": SET_ME}),
    (verl, "data.train_files=[]", {"env.dataset": SET_ME, "env.reward": SET_ME}),
    (script, "train = load_dataset('json', data_files='rows.jsonl', split='train').map(ask)\n"
     "test = load_dataset('other/data', split='test')\n"
     "GRPOTrainer('m', len, GRPOConfig(num_generations=8), train_dataset=train, eval_dataset=test)",
     {"env.dataset": "rows.jsonl"}),
    (script, "load_dataset('a', split='train')\nload_dataset('b', split='train')\nGRPOConfig(num_generations=8)",
     {"env.dataset": SET_ME}),
    (trl, "reward_funcs: [accuracy, cosine, accuracy_reward, mine.score]\nreward_weights: [1, 0.5, 1, 1]",
     {"env.reward": ["open_r1.rewards:accuracy_reward", {"fn": SET_ME, "weight": 0.5},
                     "trl.rewards:accuracy_reward", "mine:score"]}),
    (verl, f"{ACTOR}megatron.param_offload=True", {"train_model.cpu_offload": True}),
    (verl, "actor_rollout_ref.model.lora.rank=8 actor_rollout_ref.model.lora.alpha=16", {"train_model.lora.r": 8}),
    (verl, f"{FILES} reward_model.enable=True reward_model.model.path=m",
     {"env.reward": [{"fn": "reward_model", "model": "m"}]}),
    (verl, f"{FILES} custom_reward_function.path=r.py custom_reward_function.reward_kwargs.scale=2",
     {"env.reward": [{"fn": "r.py:compute_score", "scale": 2}]}),
    (verl, "+data.apply_chat_template_kwargs.thinking=False", {"env.chat_template_kwargs": {"thinking": False}}),
    (verl, "data.image_key=pictures", {"env.columns.images": "pictures"}),
    (verl, f"+{ROLLOUT}engine_kwargs.vllm.kv_cache_dtype=fp8",
     {"inference_model.engine_kwargs": {"kv_cache_dtype": "fp8"}}),
    (verl, "trainer.experiment_name=a-${NAME} trainer.logger=wandb", {"logging.wandb.name": SET_ME}),
    (prime, "[wandb]\nname = 'one'\nentity = 'us'\ngroup = 'seeds'\ntags = ['a', 'b']",
     {"logging.wandb.mode": "online", "logging.wandb.name": "one", "logging.wandb.entity": "us",
      "logging.wandb.group": "seeds", "logging.wandb.tags": ["a", "b"]}),
    # teachers
    (prime, "[orchestrator.algo]\ntype = 'opd'\nteacher = {name = 't', base_url = 'http://x:1/v1'}",
     {"algo": "distill", "teacher.model": "t", "teacher.address": ["http://x:1/v1"]}),
    (prime, "[orchestrator.algo]\ntype = 'opsd'\ndemo_key = 'd'",
     {"algo": "distill", "teacher.model": "policy", "teacher.prompt": "solution", "env.columns.completion": "d"}),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "ours"), KEPT)
def test_settings_are_kept_or_to_be_set(
    form: Callable[[str], str], text: str, ours: dict[str, Any], tmp_path: Path
) -> None:
    translation = translated(tmp_path, FORMS[form], form(text))
    assert {key: translation.overrides.get(key) for key in ours} == ours
    if any(key.startswith(("teacher", "ref_model")) for key in ours):
        composed(report(translation, 100))


# A file, the kind of a note, the key that it is about, and how it begins
NOTED: list[tuple[Callable[[str], str], str, str, str, str]] = [
    (trl, "loss_type: mystical", "lacks", "loss_type", "mystical has no equivalent among grpo, dapo"),
    (trl, "use_peft: true\nload_in_8bit: true", "lacks", "load_in_8bit", "weights have 4 bits"),
    (script, "bits = BitsAndBytesConfig(load_in_4bit=True)\nGRPOTrainer('m', len, GRPOConfig(), "
     "peft_config=LoraConfig(r=4))", "lacks", "bnb_4bit_quant_type", "4-bit weights are nf4"),
    (trl, "repetition_penalty: 2\nmystery: 1", "lacks", "repetition_penalty", ""),
    (trl, "min_p: 0.1", "differs", "inference_model.min_p", ""),
    (verl, f"{CORRECTION}rollout_rs=seq_max_k2 {CORRECTION}rollout_rs_threshold=3",
     "lacks", "policy.rejection of seq_max_k2", ""),
    (verl, f"algorithm.use_kl_in_reward=True {ACTOR}use_kl_loss=True",
     "differs", "algorithm.use_kl_in_reward", "one KL"),
    # gae is verl's default
    (verl, "algorithm.adv_estimator=remax", "lacks", "algorithm.adv_estimator", "remax has no equivalent among grpo, "),
    (verl, "", "lacks", "algorithm.adv_estimator", "gae has no equivalent among grpo, "),
    (areal, "eps_clip: 0.0, m2_threshold: 0.04", "unset", "policy.clip_epsilon", "second moment"),
    (script, "train = load_dataset('json', data_files='rows.jsonl', split='train').map(ask)\n"
     "GRPOTrainer('m', len, GRPOConfig(num_generations=8), train_dataset=train)",
     "lacks", "train_dataset", "the script changes the rows (map, filter, ...)"),
    (script, "GKDTrainer('m', 't', args=GKDConfig())", "lacks", "lmbda",
     "0.5 has no equivalent among 1, 0; our own default is used: a run "),
    # several values where we have one
    (areal, "a: 1}, train_dataset: {path: d, split: [train, extra]", "lacks", "train_dataset.split", ""),
    (trl, "dataset_name: d\ndataset_train_split: [train, extra]", "lacks", "dataset_train_split", ""),
    (script, "d = load_dataset('d', split=['train', 'test'])\nGRPOTrainer('m', len, GRPOConfig(), train_dataset=d)",
     "lacks", "dataset_train_split", ""),
    (trl, "learning_rate: [1e-6, 1e-5]", "lacks", "learning_rate", ""),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "kind", "key", "start"), NOTED)
def test_what_is_not_the_same_is_said(
    form: Callable[[str], str], text: str, kind: str, key: str, start: str, tmp_path: Path
) -> None:
    translation = translated(tmp_path, FORMS[form], form(text))
    assert start in getattr(translation, kind)[key]
    composed(report(translation, 100))


def test_what_cannot_be_read_is_said_and_taken_as_by_default(tmp_path: Path) -> None:
    text = """
actor_rollout_ref:
  actor: {loss_agg_mode: odd, use_fused_kernels: "${oc.select:a.b,false}"}
  rollout:
    name: ???
    n: 5
    temperature: hot
    tensor_model_parallel_size: "${tp}"
  model: {path: ~/models/mine}
data: {train_files: ~/data/gsm8k/train.parquet, val_files: ~/data/gsm8k/test.parquet}
custom_reward_function: {path: my rewards.py, name: score}
algorithm: {adv_estimator: grpo}
trainer: {n_gpus_per_node: 1}
"""
    translation = translated(tmp_path, "verl.yaml", text)
    ending = ("loss_agg_mode", "rollout.temperature", "tensor_model_parallel_size")
    assert [key for key in translation.lacks if key.endswith(ending)] == list(translation.lacks)
    config = composed(output_of(tmp_path, "verl.yaml", text))
    assert (config.policy.aggregation, config.inference_model.temperature) == ("token_mean", 1.0)
    assert (config.inference_model.backend, config.inference_model.tensor_parallel_size) == (
        "vllm",
        1,
    )
    assert (config.model.name, config.env.dataset) == ("$HOME/models/mine", "$HOME/data/gsm8k")
    assert config.env.reward == "my rewards.py:score"


def test_shell_variables_sums_arrays_and_branches_are_read() -> None:
    text = r"""
    n=$((2 * 3)) # not 7
    size=${SIZE:-$((n * 4))}
    A=(a.b=${size} c.d="$HOME/$n")
    if [ x ]; then n=9; fi
    run "${A[@]}" +e.f=[1,$n] g.h='text'
    """
    assert read_shell(text) == {"a.b": 24, "c.d": "$HOME/6", "e.f": [1, 6], "g.h": "text"}


def test_python_is_read_and_not_run(tmp_path: Path) -> None:
    text = "import os\nG = 4\nos._exit(3)\nc = trl.GRPOConfig(num_iterations=G * 2, beta=float('1'), **more)\n"
    unknown = {name: Unknown(name) for name in ("float('1')", "**more")}
    assert read_python(text) == {
        "GRPOConfig": True,
        "num_iterations": 8,
        "beta": unknown["float('1')"],
    } | {"**more": unknown["**more"]}
    assert translated(tmp_path, "train.py", text).overrides["policy.kl_coef"] == SET_ME


def test_rewards_of_a_script_are_named_with_their_weights(tmp_path: Path) -> None:
    text = (
        "from trl.rewards import think_format_reward\nfrom datasets import load_dataset\ndef right(completions): ...\n"
        "data = load_dataset('openai/gsm8k', 'main', split='train')\n"
        "GRPOTrainer(model='m', reward_funcs=[right, think_format_reward], train_dataset=data,\n"
        "    args=GRPOConfig(num_generations=8, reward_weights=[1.0, 0.5]))\n"
    )
    translation = translated(tmp_path, "train.py", text)
    assert translation.overrides["env.reward"] == [
        "train.py:right",
        {"fn": "trl.rewards:think_format_reward", "weight": 0.5},
    ]
    assert (translation.overrides["env.dataset"], translation.overrides["model.name"]) == (
        "gsm8k",
        "m",
    )
    assert composed(output_of(tmp_path, "train.py", text)).env.reward[1]["weight"] == 0.5


def test_a_fully_asynchronous_run_of_verl_has_the_batch_between_two_syncs(tmp_path: Path) -> None:
    words = (
        "python -m verl.experimental.fully_async_policy.fully_async_main data.train_batch_size=0 data.gen_batch_size=1 "
        "actor_rollout_ref.rollout.n=16 actor_rollout_ref.actor.ppo_mini_batch_size=32 trainer.nnodes=1 "
        "trainer.n_gpus_per_node=8 rollout.nnodes=2 rollout.n_gpus_per_node=8 rollout.total_rollout_steps=51200 "
        "rollout.test_freq=10 async_training.staleness_threshold=0.1 async_training.trigger_parameter_sync_step=4 "
        "async_training.require_batches=2 async_training.partial_rollout=True "
        "async_training.use_rollout_log_probs=True algorithm.adv_estimator=grpo data.train_files=a/train.parquet "
        "data.val_files=a/test.parquet"
    )
    translation = translated(tmp_path, "async.sh", words)
    wanted = {
        "env.num_envs": 32 * 2 * 4 * 16, "train.optim_batch_size": 32 * 16, "train.max_staleness": 1,
        "train.total_dialog_turns": 51_200 * 16, "train_model.num_devices": 8, "inference_model.num_devices": 16,
        "evaluation.frequency": 10, "policy.proximal": None,
    }  # fmt: skip
    assert {key: translation.overrides.get(key) for key in wanted} == wanted
    assert translation.asynchronous and "async_training.partial_rollout" in translation.lacks
    composed(report(translation, 100))


@pytest.mark.parametrize(
    ("name", "text", "devices", "wanted"),
    [
        (
            "a.yaml",
            "{gconfig: {n_samples: 4}, actor: {backend: 'fsdp:d2'}, rollout: {backend: 'vllm:d6'}}",
            16,
            (2, 6),
        ),
        ("v.sh", "run actor_rollout_ref.rollout.n=4 trainer.n_gpus_per_node=4", 16, (2, 2)),
        ("v.sh", "run actor_rollout_ref.rollout.n=4", 16, (8, 8)),
        (
            "t.yaml",
            "{num_generations: 8, num_processes: 4, per_device_train_batch_size: 2}",
            16,
            (2, 2),
        ),
        (
            "p.toml",
            "[orchestrator]\ngroup_size = 4\n[deployment]\nnum_infer_gpus = 3",
            16,
            (None, 3),
        ),
        ("p.toml", "[orchestrator]\ngroup_size = 4", 16, (8, 8)),
    ],
)
def test_devices_of_the_file_count_before_those_of_the_command(
    name: str, text: str, devices: int, wanted: tuple[int | None, int], tmp_path: Path
) -> None:
    ours = translated(tmp_path, name, text, devices).overrides
    assert (ours.get("train_model.num_devices"), ours.get("inference_model.num_devices")) == wanted


def test_staleness_decides_the_script(tmp_path: Path) -> None:
    for bound, asynchronous in ((0, False), (4, True)):
        text = f"[orchestrator]\ngroup_size = 4\nmax_off_policy_steps = {bound}\n"
        translation = translated(tmp_path, "rl.toml", text)
        assert (translation.asynchronous, translation.overrides.get("train.max_staleness")) == (
            asynchronous,
            bound or None,
        )


ALIASES = "a0: &a0 [1, 1, 1]\n" + "\n".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)
)
NAMES_OF_NAMES = "a0 = 1\n" + "\n".join(
    f"a{i} = [{', '.join([f'a{i - 1}'] * 9)}]" for i in range(1, 12)
)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("bomb.yaml", ALIASES, "more than 100,000 values"),
        ("loop.yaml", "a: &a\n  b: *a", "inside more than 100"),
        ("bomb.py", f"{NAMES_OF_NAMES}\nGRPOConfig(beta=a11)", "more than 100,000 values"),
        ("minus.py", f"GRPOConfig(beta={50_000 * '-'}1)", "nested too deeply"),
        ("t.yaml", "num_generations: 8\nreward_funcs: [5]", "t.yaml must have values"),
        ("a.yaml", "a: [1", "must be valid .yaml, but it is not: while parsing"),
        ("a.toml", "a = ", "must be valid .toml, but it is not: Invalid value"),
        ("a.py", "GRPOConfig(", "must be valid .py, but it is not: '(' was never closed"),
        ("a.json", "{", "must be valid .json, but it is not: Expecting property name"),
        ("a.sh", "echo 'x", "must be valid .sh, but it is not: No closing quotation"),
        ("a.yaml", "a: 1", "has none of their keys (verl: actor_rollout_ref, "),
        ("b.py", "load_dataset('x')", "has none of their keys"),
        ("b.yaml", "- 1", "has none of their keys"),
        (
            "c.yaml",
            "num_generations: 8\nper_device_train_batch_size: 0",
            "per device=0 must be at least 1",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_in_one_line(
    name: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        output_of(tmp_path, name, text)
    error = capsys.readouterr().err
    assert (
        ended.value.code == 2
        and error.startswith("error: ")
        and error.count("\n") == 1
        and message in error
    )


def test_references_to_references_do_not_grow(tmp_path: Path) -> None:
    lines = [f"a{i}: {10 * f'${{a{i + 1}}}'}" for i in range(9)]
    lines += ["a9: x", "num_generations: ${oc.env:N,[}", "beta: ${a0}", "loss_type: grpo"]
    assert len(output_of(tmp_path, "a.yaml", "\n".join(lines))) < 100_000


def test_a_missing_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["nowhere.yaml"])
    assert (ended.value.code, capsys.readouterr().err) == (
        2,
        "error: FILE=nowhere.yaml must be a file, but it does not exist: pass the path of a script or a config.\n",
    )


def marked(printed: str) -> list[str]:
    """Return the keys of a printed command line that have to be set by hand."""
    return [word.partition("=")[0] for word in words_of(printed)[1:] if SET_ME in word]


def test_a_value_that_the_file_does_not_tell_is_to_be_set_in_the_command(tmp_path: Path) -> None:
    text = (
        "import argparse\nargs = argparse.ArgumentParser().parse_args()\n"
        "config = GRPOConfig(learning_rate=args.lr, num_generations=args.group, **more)\n"
        "GRPOTrainer(model=args.model, reward_funcs=lambda completions: [1.0], args=config, train_dataset=rows)\n"
    )
    printed = output_of(tmp_path, "train.py", text)
    assert marked(printed) == [
        "model.name", "env.dataset", "env.reward", "env.num_envs", "env.repeats", "optimizer.lr",
    ]  # fmt: skip
    translation = translated(tmp_path, "train.py", text)
    assert (
        translation.unset["optimizer.lr"]
        == "learning_rate is args.lr, which only running the file would reveal"
    )
    assert translation.unset["model.name"].startswith("model_name_or_path is args.model")
    assert translation.unset["**more"].startswith("may set any of their keys")


def test_what_is_set_on_a_config_later_counts(tmp_path: Path) -> None:
    text = (
        "more = dict(beta=0.04, max_steps=10)\nconfig = GRPOConfig(num_generations=8, learning_rate=1e-5, **more)\n"
        "config.learning_rate = 2e-6\ntrainer = GRPOTrainer('m', len, config)\ntrainer.args.temperature = 0.7\n"
        "if big:\n    config.max_completion_length = 4096\n"
    )
    translation = translated(tmp_path, "train.py", text)
    wanted = {
        "optimizer.lr": 2e-6,
        "policy.kl_coef": 0.04,
        "inference_model.temperature": 0.7,
        "model.name": "m",
    }
    assert {key: translation.overrides[key] for key in wanted} == wanted
    assert translation.overrides["inference_model.max_new_tokens"] == SET_ME


def test_prompts_of_open_r1_keep_their_system_message_and_column(tmp_path: Path) -> None:
    message = 'Answer in \\boxed{} like "$x$":\nfirst\\'
    text = "num_generations: 8\nmodel_name_or_path: m\ndataset_name: d\ndataset_prompt_column: problem\n"
    printed = output_of(
        tmp_path,
        "r1.yaml",
        text + f"reward_funcs: accuracy\nsystem_prompt: {json.dumps(message)}\n",
    )
    env = composed(printed).env
    assert (env.system_prompt, env.columns.prompt) == (message, "problem")


def test_settings_in_a_shells_variable_or_branch_are_read_or_to_be_set() -> None:
    assert read_shell('A="$A a.b=1 c.d=$Z"\nY=2\nrun $A ${Y} e.f=3') == {
        "a.b": 1,
        "c.d": Unknown("$Z"),
        "e.f": 3,
    }
    branch = 'A="a.b=1"\nif [ $X = y ]; then\n  A="$A c.d=2"\nfi\nrun $A'
    assert read_shell(branch) == {"a.b": 1, "c.d": Unknown("2 in a branch")}


def test_an_overlong_penalty_beside_other_arguments_is_kept(tmp_path: Path) -> None:
    keys = "+reward_model.reward_kwargs."
    words = (
        f"{keys}overlong_buffer_cfg.enable=True {keys}overlong_buffer_cfg.len=128 {keys}strict=True"
    )
    words = verl(f"{words} data.max_response_length=512")
    translation = translated(tmp_path, "verl.sh", words)
    assert translation.overrides["policy.overlong_buffer"] == 0.25
    assert "reward_model.reward_kwargs" in translation.lacks


def test_references_of_a_yaml_are_followed_to_their_defaults(tmp_path: Path) -> None:
    text = (
        "actor_rollout_ref: {model: {path: '${oc.env:MODEL,a/b}'}, rollout: {n: '${oc.select:group,4}'}}\n"
        "data: {apply_chat_template_kwargs: {}}\n"
    )
    ours = translated(tmp_path, "verl.yaml", text).overrides
    assert (ours["model.name"], ours["env.repeats"], "env.chat_template_kwargs" in ours) == (
        "a/b",
        4,
        False,
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_tells_no_value_becomes_a_command_line_that_passes(name: str) -> None:
    rows = [key for key, row in read_table(name).rows.items() if not row.table]
    translation = translate(
        Settings(read_table(name), {key: Unknown(f"${{{key}}}") for key in rows}), "file"
    )
    composed(report(translation, 100))
    notes = " ".join(
        [
            *translation.unset.values(),
            *translation.lacks.values(),
            *translation.lacks,
            *map(str, translation.ignored.values()),
        ]
    )
    assert [key for key in rows if key not in notes] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_choice_of_a_table_becomes_a_command_line_that_passes(name: str) -> None:
    seen = (
        read_table(TRL[-1]).rows if name in TRL[:-1] else {}
    )  # rows of several tables are tested with one of them
    rows = {key: row for key, row in read_table(name).rows.items() if seen.get(key) != row}
    chosen = {key: list(row.values) for key, row in rows.items() if row.values and not row.table}
    for number in range(max(map(len, chosen.values()))):
        values = {key: several[number % len(several)] for key, several in chosen.items()}
        settings = {
            key: {"true": True, "false": False}.get(text, text) for key, text in values.items()
        }
        composed(report(translate(Settings(read_table(name), settings), "file"), 100))


REFUSED = {
    "openrlhf.sh": ("python3 -m openrlhf.cli.train_ppo_ray --pretrain m --n_samples_per_prompt 8",
                    "one of OpenRLHF, which is not supported: see docs/migrate.md"),
    "nemo.yaml": ("{grpo: {num_prompts_per_step: 32}, policy: {model_name: m}}", "one of NeMo-RL, which is not"),
    "skyrl.sh": ("uv run -m skyrl_train.entrypoints.main_base trainer.policy.model.path=m", "one of SkyRL, which"),
    "slime.sh": ("python3 train.py --actor-num-gpus-per-node 8 --rollout-batch-size 32", "one of slime, which is not"),
    "verl_ppo.sh": ("python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=1 algorithm.adv_estimator=gae",
                    "algorithm.adv_estimator=gae it is PPO with a critic"),
    "verl_critic.sh": ("python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=1 critic.model.path=m",
                       "critic.model.path=m it is PPO with a critic"),
    "verl_sft.sh": ("torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=a model.partial_pretrain=m",
                    "model.partial_pretrain=m it is supervised fine-tuning"),
    "verl_gen.yaml": ("{trainer: {n_gpus_per_node: 8}, data: {n_samples: 5}, model: {path: m}}",
                      "data.n_samples=5 it is only generation"),
    "areal_rw.yaml": ("{actor: {path: m}, train_dataset: {type: rw}}", "it is the training of a reward model"),
    "areal_dpo.yaml": ("{actor: {path: m, beta: 0.1}, train_dataset: {type: dpo}}", "it is DPO"),
    "areal_sft.yaml": ("{actor: {path: m}, train_dataset: {type: sft}}", "it is supervised fine-tuning"),
    "areal_ppo.yaml": ("{gconfig: {n_samples: 1}, actor: {path: m}, critic: {path: m}}",
                       "critic.path=m it is PPO with a critic"),
    "areal_infer.yaml": ("{gconfig: {n_samples: 1}, rollout: {backend: 'vllm:d1'}}", "it is only inference"),
    "areal_teacher.yaml": ("{gconfig: {n_samples: 4}, actor: {path: m}, teacher: {path: t}}", "it is distillation"),
    "prime_echo.toml": ("[orchestrator.algo]\ntype = 'echo'\n", "orchestrator.algo.type=echo it is a run of another"),
    "prime_rae.toml": ("[orchestrator.algo]\ntype = 'rae'\n", "orchestrator.algo.type=rae it is a run of another"),
    "prime_mixed.toml": ("[[orchestrator.train.source]]\nname = 'a'\n[orchestrator.train.source.algo]\ntype = 'opd'\n",
                         "orchestrator.train.source[0].algo.type=opd it is"),
    "prime_sft.toml": ("[deployment]\nnum_gpus = 1\n[data]\nname = 'd'\n", "data.name=d it is supervised fine-tuning"),
    "prime_infer.toml": ("[inference.vllm]\nmax_model_len = 9\n[deployment]\ntype = 'x'\n", "inference"),
    "trl_gold.py": ("from trl.experimental.gold import GOLDTrainer\nGOLDTrainer('m', 't')\n",
                    "it is distillation by an experimental trainer"),
    "trl_any.yaml": ("model_name_or_path: m\nper_device_train_batch_size: 4\nlearning_rate: 1e-5\n",
                     "it is a run of any trainer of TRL"),
    "trl_dpo.py": ("from trl import DPOConfig, DPOTrainer\nDPOTrainer('m', args=DPOConfig(beta=0.1))\n", "it is DPO"),
    "trl_reward.yaml": ("model_name_or_path: m\nper_device_train_batch_size: 4\ncenter_rewards_coefficient: 0.1\n",
                        "it is the training of a reward model"),
}  # fmt: skip


SUPERVISED = {
    "algo": "sft",
    "model.name": "m",
    "env.dataset": "a/b",
    "inference_model.backend": "transformers",
}
DISTILLED = {"algo": "distill", "model.name": "m", "teacher.model": "t", "env.repeats": 1}


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        (
            "sft.py",
            "SFTTrainer('m', SFTConfig(per_device_train_batch_size=4, gradient_accumulation_steps=2, max_length=700,\n"
            "    completion_only_loss=True, max_steps=30), train_dataset=load_dataset('a/b', split='train'))",
            {
                **SUPERVISED, "env.columns.completion": "completion", "env.num_envs": 8, "env.repeats": 1,
                "train.total_dialog_turns": 240, "inference_model.max_new_tokens": 700, "env.max_prompt_tokens": None,
                "optimizer.lr": 2e-5, "evaluation.num_prompts": 0, "env.reward": None,
            },
        ),
        (
            "sft.yaml",
            "{model_name_or_path: m, dataset_name: a/b, assistant_only_loss: true, max_length: null, packing: false}",
            {
                **SUPERVISED, "env.columns.messages": "messages", "env.columns.completion": None,
                "inference_model.max_new_tokens": SET_ME, "train.total_epochs": 3,
            },
        ),
        (
            "plain.py",
            "SFTTrainer(model='m', train_dataset=load_dataset('a/b', split='train'))",
            {**SUPERVISED, "env.columns.completion": SET_ME, "inference_model.max_new_tokens": 1024},
        ),
        (
            "distill.yaml",
            "{model_name_or_path: m, teacher_model_name_or_path: t, temperature: 0.7, max_completion_length: 300,\n"
            "teacher_model_init_kwargs: {dtype: bfloat16}, per_device_train_batch_size: 1}",
            {
                **DISTILLED, "teacher.dtype": "bfloat16", "policy.teacher_divergence": "reverse", "env.num_envs": 2,
                "policy.teacher_beta": None, "inference_model.temperature": 0.7, "inference_model.max_new_tokens": 300,
                "train.optim_batch_size": 1, "optimizer.lr": None,
            },
        ),
        (
            "distill.py",
            "DistillationTrainer('m', 't', DistillationConfig(beta=0.25, teacher_model_revision='v2', use_vllm=True))",
            {
                **DISTILLED, "teacher.model": "t@v2", "policy.teacher_divergence": "jsd", "policy.teacher_beta": 0.25,
                "inference_model.backend": None,
            },
        ),
        (
            "gkd.py",
            "GKDTrainer('m', 't', args=GKDConfig(lmbda=1.0, beta=0.0, max_length=1000))",
            {
                **DISTILLED, "policy.teacher_divergence": "forward", "inference_model.temperature": 0.9,
                "inference_model.max_new_tokens": 128, "env.max_prompt_tokens": 872, "optimizer.lr": 2e-5,
            },
        ),
        (
            "gkd.yaml",
            "{model_name_or_path: m, teacher_model_name_or_path: t, lmbda: 0, beta: 0.0, max_length: 600,\n"
            "completion_only_loss: true}",
            {
                **DISTILLED, "algo": "sft", "policy.teacher_coef": 1.0, "policy.reward_coef": 0.0,
                "policy.teacher_divergence": "forward", "env.columns.completion": "completion",
                "inference_model.max_new_tokens": 600,
            },
        ),
        (
            "sdpo.py",
            "def score(completions): ...\n"
            "SDPOTrainer('m', score, SDPOConfig(distillation_weight=0.75, num_generations=4))",
            {
                "algo": None, "teacher.model": "policy", "teacher.weights": "ema", "teacher.decay": 0.95,
                "teacher.prompt": "best_response", "policy.teacher_coef": 0.75, "policy.reward_coef": 0.25,
                "policy.teacher_divergence": None, "env.repeats": 4, "env.reward": "sdpo.py:score",
            },
        ),
        (
            "sdpo.yaml",
            "{model_name_or_path: m, include_environment_feedback: true, distillation_mode: topk_logits,\n"
            "distillation_topk: 20, distillation_alpha: 0.3, teacher_model_kind: live}",
            {
                "teacher.weights": None, "teacher.decay": None, "teacher.prompt": "feedback",
                "policy.teacher_divergence": "jsd", "policy.teacher_beta": 0.3, "policy.teacher_top_k": 20,
                "policy.teacher_coef": 1.0, "policy.reward_coef": 0.0,
            },
        ),
        (
            "sdft.py",
            "SDFTTrainer('m', SDFTConfig(teacher_model_kind='ema', teacher_update_rate=0.01))",
            {
                "algo": "distill", "teacher.model": "policy", "teacher.weights": "ema", "teacher.decay": None,
                "teacher.prompt": SET_ME, "policy.teacher_divergence": "jsd", "policy.teacher_top_k": 100,
            },
        ),
        (
            "async.py",
            "def score(completions): ...\nAsyncGRPOTrainer('m', score, AsyncGRPOConfig(max_staleness=3,\n"
            "    token_budget=99, weight_sync_steps=2, epsilon_high=0.28, max_steps=10,\n"
            "    per_device_train_batch_size=16))",
            {
                "algo": None, "train.max_staleness": 3, "train.micro_batch_tokens": 99, "env.num_envs": 32,
                "train.optim_batch_size": 16, "train.total_dialog_turns": 160, "policy.clip_epsilon": [0.2, 0.28],
                "policy.aggregation": "token_mean", "policy.kl_coef": 0.0, "env.reward": "async.py:score",
                "inference_model.max_new_tokens": 2048, "inference_model.gpu_memory_utilization": None,
            },
        ),
    ],
)  # fmt: skip
def test_other_trainers_of_trl_are_read(
    name: str, text: str, wanted: dict[str, Any], tmp_path: Path
) -> None:
    translation = translated(tmp_path, name, text)
    assert {key: translation.overrides.get(key) for key in wanted} == wanted
    assert translation.asynchronous == (name == "async.py")
    composed(report(translation, 100))


@pytest.mark.parametrize("name", TRL)
def test_every_field_of_a_config_of_trl_has_a_row_or_a_reason(name: str) -> None:
    table = read_table(name)
    fields = (trl_fields.SHARED + trl_fields.CONFIGS[name][1]).split()
    assert [
        field for field in fields if field not in table.rows and table.ignores(field) is None
    ] == []


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.parametrize("name", TRL)
def test_the_fields_are_those_of_the_installed_trl(name: str) -> None:
    import trl
    from trl.experimental import async_grpo, gkd, sdft, sdpo

    named, own = trl_fields.CONFIGS[name]
    config = next(
        getattr(module, named)
        for module in (trl, async_grpo, gkd, sdft, sdpo)
        if hasattr(module, named)
    )
    classes = (config, trl.ModelConfig, trl.ScriptArguments)
    fields = {item.name for config_class in classes for item in dataclasses.fields(config_class)}
    assert fields == set((trl_fields.SHARED + own).split())


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_grpo_run_is_refused_by_name(name: str, tmp_path: Path) -> None:
    text, message = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        translated(tmp_path, name, text)


def test_the_command_needs_neither_torch_nor_hydra(tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text(peer_configs.PRIME_RL["reverse_text.toml"])
    script = (
        "import sys; from torchrl_grpo.extras.migrate.command import main; main([sys.argv[1]]); "
        "assert not {'torch', 'hydra', 'omegaconf'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "rl.toml"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(
        "python sota/grpo/grpo-async.py \\\n    model.name=PrimeIntellect/"
    )


def test_each_library_has_a_page_with_its_tables_as_they_are() -> None:
    pages = _load(ROOT / "tools" / "make_migrate_docs.py").pages()
    old = [path.name for path, text in pages.items() if text != path.read_text(encoding="utf-8")]
    assert old == [], "run `python tools/make_migrate_docs.py`"
    index = (ROOT / "docs" / "migrate.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\(migrate/(\w+\.md)\)", index)) == {path.name for path in pages}


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
