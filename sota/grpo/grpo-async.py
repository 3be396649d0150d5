"""Asynchronous GRPO on Ray: rollout, reward, reference scoring and training overlap.

Sequences are trained at most ``train.max_staleness`` steps after the weights that sampled them. The config is that of
``grpo.py``.

Launch lines:

    python sota/grpo/grpo-async.py --config-name grpo_arithmetic
    python sota/grpo/grpo-async.py --config-name grpo_arithmetic train.max_staleness=4 inference_model.num_devices=2
    python sota/grpo/grpo-async.py train_model.num_devices=2 ref_model.num_devices=2 inference_model.num_devices=2
    python sota/grpo/grpo-async.py --cfg job
"""

from __future__ import annotations

from torchrl_grpo.scripts import start_grpo_async

if __name__ == "__main__":
    start_grpo_async()  # torchrl_grpo/scripts/grpo.py; the command `grpo-async` does the same
