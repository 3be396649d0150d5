"""Text of ``--help``: the keys that most runs set."""

from __future__ import annotations

HELP = """\
GRPO: reinforcement learning of a language model. Set keys as KEY=VALUE.

  --config-name NAME             start from config/NAME.yaml: grpo_arithmetic, grpo_shapes (included
                                 models, minutes on a CPU), grpo_gsm8k (the default),
                                 grpo_gsm8k_qwen3, grpo_math, grpo_ifeval, grpo_countdown,
                                 distill_gsm8k, sft_gsm8k; for larger models grpo_gsm8k_7b_lora,
                                 grpo_math_7b, grpo_shapes_qwen2_5_vl, grpo_gsm8k_agent
  algo=NAME                      objective of a published algorithm: grpo, dapo, dr_grpo, gspo,
                                 gspo_token, cispo, sapo, gmpo, gpg, vespo, luspo, rloo,
                                 reinforce_pp, ppo, opo, max_rl, pass_at_k, clip_cov, kl_cov,
                                 decoupled_ppo, dppo_tv, geo_mask, icepop, distill, sft
                                 (docs/algorithms.md)
  dry_run=true                   only check the run: mistakes, time, disk and memory

Model
  model.name                     folder, or name on the Hugging Face hub
  train_model.lora.enabled       train LoRA adapters instead of all weights
  train_model.num_devices        GPUs that train; the ranks shard the model
  train_model.gradient_checkpointing  less memory, more time
  inference_model.backend        engine that samples: vllm, transformers or server
  inference_model.num_devices    GPUs that sample
  inference_model.max_new_tokens maximum length of a response
  inference_model.temperature    of the samples

Problems and rewards
  env.dataset                    name, file, folder or name on the hub
  env.columns.prompt             column with the problem; env.columns.answer has its answer
  env.reward                     built-in name, or your own function: my_rewards.py:exact_match
  env.system_prompt              first message of each dialog
  env.tools                      functions that the policy may call: [my_tools.py:calculator]
  env.environment                class that plays the dialogs: my_envs.py:Game
  env.max_turns                  turns of the policy in a dialog
  env.repeats                    responses to a problem, which are compared with each other
  env.num_envs                   trajectories sampled at a time, a multiple of env.repeats

Training
  train.total_steps              steps to train; or train.total_epochs, train.total_dialog_turns
  train.optim_batch_size         trajectories in an optimizer step
  train.micro_batch_tokens       tokens in a forward and backward pass: lower it to save memory
  train.mixed_precision          full, bf16 or fp16
  train.checkpoint_frequency     steps between two checkpoints
  train.resume                   checkpoint or run to resume; auto resumes in its own folder
  optimizer.lr                   learning rate
  optimizer.warmup_steps         optimizer steps until it is reached
  policy.kl_coef                 weight of the KL to the reference model
  policy.clip_epsilon            clip range of the ratio

Evaluation and logs
  evaluation.frequency           steps between two evaluations
  evaluation.num_prompts         test problems; 0 turns evaluation off
  logging.wandb.mode             disabled, offline or online; likewise logging.mlflow.mode
  hydra.run.dir                  folder of the run

All keys with their defaults: docs/config.md, or --cfg job. Several values: --multirun KEY=A,B.
Hydra's options: --hydra-help
"""
