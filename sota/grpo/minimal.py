"""GRPO (arXiv 2402.03300) in one file: copy it, and change what you need.

For each problem, sample a group of responses; score each one with a program; make the responses
that beat their group's mean more likely, and the others less likely. There is no value network,
because the group is the baseline, and no copy of the policy that sampled, because the engine
returns its log-probs.

This is what ``grpo.py`` does on one device, without its config, checkpoints, evaluation, and
reports. With the same seed both print the same losses. Here it teaches the included starter model
(428 thousand parameters) to carry:

    python sota/grpo/minimal.py                  # about 30 seconds on 2 CPU cores
    python sota/grpo/minimal.py --steps 10 --seed 1
"""

from __future__ import annotations

import argparse
import copy

import torch
from torchrl.envs import Compose
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_grpo.collectors import RolloutCollector
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation import GenerationPolicy, SamplingParams, TransformersEngine
from torchrl_grpo.models import TokenScorer
from torchrl_grpo.objectives import GRPOLoss
from torchrl_grpo.starter import starter_path
from torchrl_grpo.tasks.arithmetic import ArithmeticTask
from torchrl_grpo.transforms import GroupAdvantage, KLScoring

GROUP_SIZE = 8  # responses to each problem
BATCH_SIZE = 128  # responses of one step: 16 problems
MAX_NEW_TOKENS = 32
LEARNING_RATE = 5e-5
CLIP_EPSILON = 0.2  # the probability ratio is clipped to [1 - 0.2, 1 + 0.2]
KL_COEFFICIENT = 0.01
MAX_GRAD_NORM = 1.0


def train(steps: int, seed: int) -> list[float]:
    """Train the starter model and return the loss of each step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)

    # Three copies of one model: the policy is trained, the engine samples with the policy's latest
    # weights, and the reference model keeps the first ones.
    tokenizer = AutoTokenizer.from_pretrained(starter_path())
    policy = AutoModelForCausalLM.from_pretrained(starter_path()).eval().to(device)
    reference = copy.deepcopy(policy).requires_grad_(False)
    engine = TransformersEngine(copy.deepcopy(policy))

    # The environment draws 16 problems, repeats each of them 8 times, and scores the responses: 1.0
    # if right, else 0.0. The collector plays it with the engine, and adds to each batch reference
    # log-probs [T] and the advantage, (reward - mean of the group) / standard deviation of the group.
    env = LLMEnv(ArithmeticTask(), tokenizer, num_envs=BATCH_SIZE, repeats=GROUP_SIZE)
    params = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, stop_token_ids=(tokenizer.eos_token_id,))
    collector = RolloutCollector(
        env,
        GenerationPolicy(engine, params),
        total_dialog_turns=steps * BATCH_SIZE,
        postproc=Compose(KLScoring(TokenScorer(reference)), GroupAdvantage(repeats=GROUP_SIZE)),
    )
    collector.set_seed(seed)

    # The scorer computes log-probs in chunks of tokens, and each prompt once per group.
    loss_module = GRPOLoss(
        TokenScorer(policy), clip_epsilon=CLIP_EPSILON, kl_to_ref_coeff=KL_COEFFICIENT
    )
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)

    losses = []
    # Sample: each batch has tokens, log-probs, and rewards.
    for step, batch in enumerate(collector, start=1):
        # Train: one optimizer step. All outputs named loss_* are terms of the loss.
        out = loss_module(batch)
        loss = sum(value for name, value in out.items() if name.startswith("loss_"))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()

        # Publish: from now on the engine samples with these weights.
        collector.update_policy_weights_(policy.named_parameters(), step)

        losses.append(loss.item())
        reward, entropy = batch["next", "reward"].mean(), out["entropy"]
        print(f"step {step:3}: reward {reward:.3f}, loss {losses[-1]:+.6f}, entropy {entropy:.3f}")
    collector.shutdown()
    return losses


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps (default: 80)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the problems and the samples (default: 0)"
    )
    options = parser.parse_args()
    train(options.steps, options.seed)


if __name__ == "__main__":
    main()
