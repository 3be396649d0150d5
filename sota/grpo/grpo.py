"""Synchronous GRPO on one machine: collect a batch, train on it, send the weights to the engine, repeat.

Launch lines:

    python sota/grpo/grpo.py --config-name grpo_arithmetic
    python sota/grpo/grpo.py --config-name grpo_arithmetic inference_model.backend=vllm
    python sota/grpo/grpo.py env.dataset=gsm8k env.dataset_path=DIR model.name=Qwen/Qwen2.5-0.5B-Instruct
    python sota/grpo/grpo.py --multirun optimizer.lr=1e-4,1e-5 policy.kl_coef=0.01,0.1
    python sota/grpo/grpo.py --cfg job
"""

from __future__ import annotations

from torchrl_grpo.scripts import start_grpo

if __name__ == "__main__":
    start_grpo()  # torchrl_grpo/scripts/grpo.py; the command `grpo` does the same
