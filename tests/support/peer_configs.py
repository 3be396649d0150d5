"""Configs of other libraries, written with the keys and values of published ones that
docs/migrate.md names.
"""

from __future__ import annotations

TRL = {
    "grpo_2048.py": """
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
BATCH = 2 * 2
def reward_score(environments, **kwargs):
    return [env.score for env in environments]
def main():
    raise RuntimeError("this file must never be run")
    trainer = GRPOTrainer(
        model="Qwen/Qwen3-4B", train_dataset=make(), reward_funcs=reward_score, environment_factory=Game,
        peft_config=LoraConfig(),
        args=GRPOConfig(
            chat_template_kwargs={"enable_thinking": False}, max_completion_length=2048, logging_steps=1,
            per_device_train_batch_size=BATCH, gradient_accumulation_steps=2, report_to="trackio",
            log_completions=True, num_completions_to_print=2, trackio_space_id="trl-2048"),
    )
main()
""",
    "nemo_gym.yaml": """
{model_name: Qwen/Qwen2.5-1.5B-Instruct, dataset_path: train.jsonl, eval_dataset_path: validation.jsonl,
gym_configs: [a.yaml, b.yaml], output_dir: outputs/nemo_gym, task: workplace, report_to: none,
project_name: trl-nemo-gym, log_completions: true, num_completions_to_print: 2, learning_rate: 1.0e-5,
  max_steps: 1000,
num_generations: 16, per_device_train_batch_size: 1, per_device_eval_batch_size: 1, gradient_accumulation_steps: 256,
max_completion_length: 10000, warmup_steps: 3, lr_scheduler_type: linear, optim: adamw_torch_fused,
  weight_decay: 0.01,
vllm_importance_sampling_correction: true, temperature: 1.0, top_p: 0.999, save_steps: 10, eval_strategy: steps,
eval_steps: 10}
""",
    "open_r1_demo.yaml": """
{model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct, model_revision: main, torch_dtype: bfloat16,
attn_implementation: flash_attention_2, dataset_name: AI-MO/NuminaMath-TIR, dataset_configs: [all], num_processes: 7,
bf16: true, use_vllm: true, vllm_device: auto, vllm_gpu_memory_utilization: 0.7, do_eval: true, eval_strategy: steps,
eval_steps: 100, gradient_accumulation_steps: 16, gradient_checkpointing: true,
gradient_checkpointing_kwargs: {use_reentrant: false}, hub_strategy: every_save, learning_rate: 2.0e-05,
log_completions: true, lr_scheduler_type: cosine, max_prompt_length: 512, max_completion_length: 1024, max_steps: -1,
num_generations: 7, num_train_epochs: 1, output_dir: data/out, overwrite_output_dir: true,
per_device_eval_batch_size: 32, per_device_train_batch_size: 16, push_to_hub: true, report_to: [wandb],
  save_strategy: epoch,
save_total_limit: 1, seed: 42, warmup_ratio: 0.1}
""",
    "gspo.json": """
{"model_name_or_path": "Qwen/Qwen3-0.6B", "output_dir": "gspo", "learning_rate": 1e-5, "torch_dtype": "bfloat16",
"max_prompt_length": 2048, "max_completion_length": 1024, "use_peft": true,
"lora_target_modules": ["q_proj", "v_proj"], "log_completions": true, "per_device_train_batch_size": 8,
  "num_generations": 8,
"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4, "beta": 0.0, "loss_type": "grpo",
  "gradient_accumulation_steps": 2,
"steps_per_generation": 8}
""",
}

VERL = {
    "run_qwen2-7b_math.sh": r"""
a=$HOME/data/gsm8k
train="['$a/train.parquet', '$HOME/data/math/train.parquet']"
test="['$a/test.parquet', '$HOME/data/math/test.parquet']"
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files="$train" data.val_files="$test" \
  data.train_batch_size=1024 data.max_prompt_length=1024 data.max_response_length=1024 data.truncation='error' \
  data.filter_overlong_prompts=True actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \
  actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
  actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0 \
  actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.actor.fsdp_config.param_offload=False \
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=False actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5 \
  actor_rollout_ref.ref.fsdp_config.param_offload=True algorithm.use_kl_in_reward=False trainer.critic_warmup=0 \
  trainer.logger=['console','wandb'] trainer.project_name='verl_grpo_example_gsm8k_math' \
  trainer.experiment_name='qwen2_7b_function_rm' trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 \
  trainer.test_freq=5 trainer.total_epochs=15 $@
""",
    "run_qwen2_5-3b_gsm8k_grpo_lora.sh": r"""
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=$HOME/data/gsm8k/train.parquet \
  data.val_files=$HOME/data/gsm8k/test.parquet data.train_batch_size=16 data.max_prompt_length=512 \
  data.max_response_length=1024 data.shuffle=False data.prompt_key=messages \
  actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct actor_rollout_ref.model.use_shm=True \
  actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.lora_alpha=32 \
  actor_rollout_ref.actor.optim.lr=3e-6 actor_rollout_ref.actor.ppo_mini_batch_size=16 \
  actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 actor_rollout_ref.rollout.load_format=safetensors \
  actor_rollout_ref.rollout.layered_summon=True trainer.n_gpus_per_node=2 trainer.nnodes=1 trainer.save_freq=20 \
  trainer.test_freq=5 trainer.total_epochs=15 $@
""",
    "run_dapo_qwen2.5_32b.sh": r"""
#!/usr/bin/env bash
set -euxo pipefail
overlong_buffer_len=$((1024 * 4)) # comments end here
train_prompt_bsz=512
gen_prompt_bsz=$((train_prompt_bsz * 3))
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 20))
RAY_DATA_HOME=${RAY_DATA_HOME:-"${HOME}/verl"}
MODEL_PATH=${MODEL_PATH:-"${RAY_DATA_HOME}/models/Qwen2.5-32B"}
ray job submit --no-wait -- python3 -m recipe.dapo.src.main_dapo \
  data.train_files="${TRAIN_FILE:-"${RAY_DATA_HOME}/data/dapo-math-17k.parquet"}" \
  data.val_files="${RAY_DATA_HOME}/data/aime-2024.parquet" data.prompt_key=prompt data.truncation='left' \
  data.max_prompt_length=${max_prompt_length} data.max_response_length=${max_response_length} \
  data.gen_batch_size=${gen_prompt_bsz} data.train_batch_size=${train_prompt_bsz} actor_rollout_ref.rollout.n=16 \
  algorithm.adv_estimator=grpo algorithm.kl_ctrl.kl_coef=0.0 actor_rollout_ref.actor.kl_loss_coef=0.0 \
  actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \
  algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=10 \
  algorithm.filter_groups.metric=acc actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((max_prompt_length + max_response_length)) \
  actor_rollout_ref.model.path="${MODEL_PATH}" +actor_rollout_ref.model.override_config.attention_dropout=0. \
  actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
  actor_rollout_ref.actor.optim.weight_decay=0.1 actor_rollout_ref.actor.ppo_mini_batch_size=32 \
  actor_rollout_ref.actor.fsdp_config.param_offload=True actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
  actor_rollout_ref.actor.grad_clip=1.0 actor_rollout_ref.actor.use_token_level_loss=True \
  actor_rollout_ref.actor.ulysses_sequence_parallel_size=8 actor_rollout_ref.rollout.gpu_memory_utilization=0.80 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.temperature=1.0 \
  actor_rollout_ref.rollout.top_p=1.0 actor_rollout_ref.rollout.top_k="-1" \
  actor_rollout_ref.rollout.val_kwargs.temperature=1.0 actor_rollout_ref.rollout.val_kwargs.do_sample=True \
  actor_rollout_ref.rollout.val_kwargs.n=1 reward_model.reward_manager=dapo \
  custom_reward_function.overlong_buffer.enable=True \
  custom_reward_function.overlong_buffer.len=${overlong_buffer_len} \
  custom_reward_function.overlong_buffer.penalty_factor=1.0 trainer.logger=['console','wandb'] \
  trainer.project_name=DAPO trainer.experiment_name=DAPO-Qwen2.5-32B trainer.n_gpus_per_node=8 trainer.nnodes=16 \
  +trainer.val_before_train=True trainer.test_freq=5 trainer.save_freq=5 trainer.total_epochs=1 trainer.resume_mode=auto
""",
    "run_qwen3_4b_fsdp.sh": r"""
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
TRAIN_FILE=${TRAIN_FILE:-$HOME/data/gsm8k/train.parquet}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-8}
case "${DEVICE}" in
    npu) NGPUS_PER_NODE=16 ;;
    *) echo "no" >&2; exit 1 ;;
esac
DATA=(
    algorithm.adv_estimator=grpo
    data.train_files=${TRAIN_FILE}
    data.val_files=${TEST_FILE:-$HOME/data/gsm8k/test.parquet}
    data.train_batch_size=${TRAIN_BATCH_SIZE:-512}
    data.max_prompt_length=1024
    data.max_response_length=1024
)
ACTOR=(
    actor_rollout_ref.model.path=${MODEL_PATH:-Qwen/Qwen3-4B}
    actor_rollout_ref.actor.optim.lr=${ACTOR_LR:-1e-6}
    actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=3000
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.n=${ROLLOUT_N:-5}
    trainer.logger='["console","wandb"]'
    trainer.n_gpus_per_node=${NGPUS_PER_NODE}
    trainer.nnodes=1
    trainer.total_training_steps=100
)
python3 -m verl.trainer.main_ppo "${DATA[@]}" "${ACTOR[@]}" "$@"
""",
}

_AREAL = """
{{experiment_name: gsm8k, trial_name: trial0, seed: 1, enable_offload: false, total_train_epochs: 10,
tokenizer_path: "${{actor.path}}", allocation_mode: "{allocation}", cluster: {{n_nodes: 1, n_gpus_per_node: 8}},
scheduler: {{type: null}}, rollout: {{experiment_name: "${{experiment_name}}", max_concurrent_rollouts: 256,
queue_size: null, consumer_batch_size: "${{train_dataset.batch_size}}", max_head_offpolicyness: 2{lora}}},
gconfig: {{n_samples: 4, min_new_tokens: 0, max_new_tokens: {tokens}, greedy: false, temperature: 1.0}},
actor: {{path: {model}, init_from_scratch: false, disable_dropout: true, gradient_checkpointing: true,
  dtype: bfloat16, mb_spec: {{max_tokens_per_mb: 10240}}, optimizer: {{type: adam, lr: {lr}, weight_decay: 0.017,
  beta1: 0.9,
  beta2: 0.999, eps: 1e-8, lr_scheduler_type: constant, gradient_clipping: 1.0, warmup_steps_proportion: 0.001}},
  {clip}, reward_scaling: 10.0, reward_bias: -0.5, kl_ctl: 0.0, ppo_n_minibatches: 1, recompute_logprob: true,
  use_decoupled_loss: true, behav_imp_weight_cap: 5.0,
  reward_norm: {{mean_level: group, std_level: {std}, group_size: "${{gconfig.n_samples}}"}},
  adv_norm: {{mean_level: batch, std_level: batch}}, weight_update_mode: xccl{adapters}}},
ref: {{path: "${{actor.path}}", dtype: "${{actor.dtype}}"}},
sglang: {{context_length: 32768, mem_fraction_static: 0.8}},
vllm: {{model: "${{actor.path}}", max_model_len: 32768, gpu_memory_utilization: 0.8{eager}}},
train_dataset: {{batch_size: 256, shuffle: true, num_workers: 4, path: openai/gsm8k, type: rl, max_length: 1024}},
valid_dataset: {{batch_size: 256, path: openai/gsm8k, type: rl}}, saver: {{freq_epochs: 1, freq_steps: null}},
evaluator: {{freq_epochs: 1, freq_steps: null, freq_secs: null}}, stats_logger: {{wandb: {{mode: disabled}}}}}}
"""


def _areal(**changes: str) -> str:
    plain = {
        "allocation": "sglang:d4p1t1+d4p1t1", "lora": "", "tokens": "1024", "model": "Qwen/Qwen2.5-1.5B-Instruct",
        "lr": "1.70e-5", "clip": "eps_clip: 0.4", "std": "group", "adapters": "", "eager": "",
    }  # fmt: skip
    return _AREAL.format(**{**plain, **changes})


AREAL = {
    "gsm8k_grpo.yaml": _areal(),
    "gsm8k_drgrpo.yaml": _areal(std="null"),
    "gsm8k_dapo_dynamic_bs.yaml": _areal(
        allocation="sglang:d4+fsdp:d4",
        tokens="4096",
        model="Qwen/Qwen2.5-1.5B",
        clip="eps_clip: 0.2, eps_clip_higher: 0.28, overlong_reward_penalty: true, overlong_tokens: 512, "
        "overlong_penalty_factor: 1.0",
    ),
    "gsm8k_grpo_lora_vllm.yaml": _areal(
        allocation="vllm:d4p1t1+d4p1t1",
        lora=", use_lora: true",
        lr="1.70e-4",
        model="./model/Qwen3-0.6B",
        adapters=', use_lora: "${rollout.use_lora}", peft_type: lora, lora_rank: 16, lora_alpha: 16, '
        "target_modules: [all-linear]",
        eager=", enforce_eager: true",
    ),
}

PRIME_RL = {
    "reverse_text.toml": """
max_steps = 20
seq_len = 2048
ckpt = {}
inference = {}
deployment = { num_train_gpus = 1, num_infer_gpus = 1 }
model.name = "PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT"
wandb = { project = "reverse-text", name = "reverse-text" }
trainer.optim.lr = 3e-6
[orchestrator]
batch_size = 128
group_size = 16
renderer.name = "prime-qwen3"
train.sampling.max_completion_tokens = 128
[[orchestrator.train.env]]
name = "reverse-text"
taskset.id = "reverse-text"
""",
    "alphabet_sort.toml": """
max_steps = 200
seq_len = 2048
ckpt = {}
inference = {}
model.name = "Qwen/Qwen3-4B-Instruct-2507"
trainer = { model = { impl = "auto", ac = { freq = 1 }, lora = { rank = 32, alpha = 64 } }, optim = { lr = 1e-5 } }
[orchestrator]
batch_size = 256
group_size = 16
train.sampling.max_completion_tokens = 768
[[orchestrator.train.env]]
taskset = { id = "alphabet-sort", min_turns = 3, max_turns = 5 }
""",
    "hendrycks_sanity.toml": """
max_steps = 5000
deployment = { num_train_gpus = 4, num_infer_gpus = 4 }
model.name = "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
trainer.model.seq_len = 16384
inference.model.max_model_len = 8192
[orchestrator]
batch_size = 512
group_size = 8
seq_len = 8192
eval.interval = 50
[[orchestrator.train.env]]
taskset = { id = "math-env", dataset_name = "mikasenghaas/Sanity-Test-R1D-1.5B" }
[[orchestrator.eval.env]]
taskset = { id = "aime24" }
group_size = 32
""",
    "qwen3_30b_math.toml": """
seq_len = 32768
log.level = "debug"
model.name = "Qwen/Qwen3-30B-A3B-Thinking-2507"
weight_broadcast.type = "nccl"
deployment = { type = "multi_node", num_train_nodes = 2, num_infer_nodes = 2 }
slurm.job_name = "math-qwen30b"
ckpt.interval = 100
inference.parallel.tp = 8
[trainer]
model = { impl = "custom", attn = "flash_attention_3", ep = 8, compile = {}, ac = { freq = 1 } }
optim = { type = "adamw", lr = 1e-6 }
[orchestrator]
batch_size = 512
group_size = 16
oversampling_factor = 2
max_off_policy_steps = 8
train.sampling.max_completion_tokens = 32768
eval.interval = 25
[[orchestrator.train.env]]
name = "math"
env.taskset = { id = "i3_math_v1" }
""",
}

_TORCHRL = """
{{defaults: [{{mode: "{mode}"}}, _self_], env: {{dataset: {data}, num_envs: {rows}, repeats: 16,
  reasoning: false, max_steps: 2}}, model: {{name: {model}, compile: false}}, train: {{exp_name: grpo,
  mixed_precision: true, total_dialog_turns: {total},
  packing: false, dialog_turns_per_batch: {batch}, gradient_accumulation_steps: 8, checkpoint_frequency: 100,
  optim_batch_size: {step}, {kl}, logging_frequency: 10, empty_replay_buffer: true}},
train_model: {{gradient_checkpointing: true, num_devices: {devices},
  lora: {{enabled: {lora}, r: 8, alpha: 16, dropout: 0.1}}, quantization: {{enabled: false}},
  attn_implementation: sdpa, torch_dtype: bfloat16}},
inference_model: {{num_devices: {engines}, quantization: {{enabled: false}}, attn_implementation: sdpa,
  torch_dtype: bfloat16, gpu_memory_utilization: 0.9, temperature: 1.0, top_p: {top_p}, max_tokens: {tokens},
  include_stop_str_in_output: true, enforce_eager: false}}, ref_model: {{gradient_checkpointing: false,
  num_devices: {engines},
  torch_dtype: bfloat16}},
optimizer: {{name: AdamW, lr: {lr}, clip_grad_norm: {clip}, weight_decay: {decay}}},
ray: {{init_config: {{num_cpus: 96}}}}, logging: {{experiment_name: null, checkpoint_frequency: 10}},
  hydra: {{run: {{dir: "outputs/${{now:%Y-%m-%d}}"}}}}}}
"""
_TO_ENGINE = (
    "kl_coef_in_loss: true, use_kl_to_ref: false, kl_to_ref_coeff: 0.0, kl_to_inference_coeff: 1e-2, "
    "entropy_coeff: 1e-4"
)


def _torchrl(**changes: str) -> str:
    plain = {
        "mode": "${mode:async}", "data": "gsm8k", "rows": "32", "model": "Qwen/Qwen2.5-3B", "total": "100_000",
        "batch": "32", "step": "32", "kl": _TO_ENGINE, "devices": "1", "lora": "true", "engines": "1", "top_p": "1.0",
        "tokens": "1024", "lr": "1e-5", "clip": "1.0", "decay": "0.0",
    }  # fmt: skip
    return _TORCHRL.format(**{**plain, **changes})


TORCHRL = {
    "grpo_gsm8k.yaml": _torchrl(),
    "grpo_countdown.yaml": _torchrl(data="countdown", tokens="512"),
    "grpo_ifeval.yaml": _torchrl(
        data="ifeval", rows="16", model="Qwen/Qwen2.5-7b", batch="64", step="16", devices="4", engines="2",
        top_p="0.95", tokens="2048", clip="10.0", kl="kl_coef_in_loss: false, use_kl_to_ref: true, "
        "kl_to_ref_coeff: 1.0, kl_to_inference_coeff: 0.0, entropy_coeff: 0.001",
    ),
    "grpo_math_7b_sync.yaml": _torchrl(
        mode="sync", data="math", model="Qwen/Qwen2.5-7B", total="200_000", step="64", devices="2", lora="false",
        tokens="2048", lr="5e-6", decay="0.01",
    ),
}  # fmt: skip

PUBLISHED = {**TRL, **VERL, **AREAL, **PRIME_RL, **TORCHRL}
"""Twenty files of five libraries."""
