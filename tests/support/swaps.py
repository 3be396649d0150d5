"""One step in the style of TorchRL's ``grpo-sync.py``, in which each part is TorchRL's or ours."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import torch
from tensordict import TensorDictBase, set_list_to_stack
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement, Unbounded
from torchrl.envs import Transform
from torchrl.envs.llm import DatasetChatEnv, RetrieveLogProb
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss as TorchRLGRPOLoss
from torchrl.objectives.llm import MCAdvantage
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_grpo.collectors import RolloutCollector
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation import GenerationPolicy, SamplingParams, TransformersEngine
from torchrl_grpo.models import TokenScorer
from torchrl_grpo.objectives import GRPOLoss
from torchrl_grpo.starter import starter_path
from torchrl_grpo.tasks.arithmetic import INSTRUCTION, ArithmeticTask
from torchrl_grpo.transforms import GroupAdvantage, KLScoring

NAMES = {
    "environment": ("LLMEnv", "DatasetChatEnv"),
    "policy": ("GenerationPolicy", "TransformersWrapper"),
    "collector": ("RolloutCollector", "LLMCollector"),
    "reference": ("KLScoring", "RetrieveLogProb"),
    "advantage": ("GroupAdvantage(token_dim=True)", "MCAdvantage"),
    "loss": ("GRPOLoss", "GRPOLoss"),
}
"""Ours and TorchRL's class of each part."""

TOGETHER: dict[str, tuple[set[str], set[str]]] = {
    "environment": (set(), {"policy", "collector"}),
    "policy": ({"environment"}, {"collector"}),
    "collector": ({"environment", "policy"}, set()),
    "reference": (set(), set()),
    "advantage": (set(), set()),
    "loss": (set(), set()),
    "all": (set(NAMES), set(NAMES)),
}
"""Parts that must be swapped with one: for ours in TorchRL's script, and for TorchRL's in ours."""

G, N, TOKENS = 4, 16, 8


def swapped(part: str, *, into_torchrl: bool) -> set[str]:
    """Return the parts that are ours after a swap."""
    together = TOGETHER[part][not into_torchrl] | ({part} & set(NAMES))
    return together if into_torchrl else set(NAMES) - together


def table() -> str:
    """Return the table of docs/torchrl.md."""
    lines = ["| part | ours in TorchRL's script | TorchRL's in ours |", "|---|---|---|"]
    for part, sides in TOGETHER.items():
        cells = []
        for side, others in enumerate(sides):
            names = [
                f"`{NAMES[other][side].partition('(')[0]}`" for other in NAMES if other in others
            ]
            own = f"`{NAMES[part][side]}`: " if part in NAMES else ""
            cells.append(f"{own}with {', '.join(names)}" if names and own else f"{own}works")
        lines.append(f"| {part} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"


class EvenReward(Transform):
    """Reward the share of even tokens in each response, and end the dialog."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        responses = tensordict.get(("tokens", "response"), as_list=True)
        rewards = torch.stack([(tokens % 2 == 0).float().mean() for tokens in responses])
        next_tensordict.set("reward", rewards.reshape(-1, 1, 1))
        for name in ("done", "terminated"):
            next_tensordict.set(name, torch.ones_like(next_tensordict.get(name)))
        return next_tensordict

    def transform_reward_spec(self, spec: Any) -> Any:
        spec["reward"] = Unbounded((*spec.shape, 1, 1))
        return spec


class Questions:
    """A data loader for TorchRL's ``DatasetChatEnv``."""

    batch_size = 1

    def __iter__(self) -> Iterator[dict[str, list[str]]]:
        for question in cycle(("5+7=?", "23+45=?", "11+9=?")):
            yield {"query": [question + INSTRUCTION]}


def train_step(ours: set[str]) -> float:
    """Sample, score and train one batch with these parts of ours and TorchRL's others.

    Returns:
        The largest gradient of a parameter.
    """
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(starter_path())
    model, reference = (AutoModelForCausalLM.from_pretrained(starter_path()).eval() for _ in "12")
    mode = "tokens" if "environment" in ours else "history"

    def actor(model: Any) -> TransformersWrapper:
        return TransformersWrapper(
            model,
            tokenizer=tokenizer,
            input_mode="tokens",
            generate=False,
            return_log_probs=True,
            pad_model_input=True,
        )

    with set_list_to_stack(True):
        if "environment" in ours:
            env = LLMEnv(ArithmeticTask(), tokenizer, num_envs=N, repeats=G)
        else:
            env = DatasetChatEnv.from_dataloader(
                Questions(), repeats=G, batch_size=(N,), tokenizer=tokenizer, input_mode=mode
            )
            env.append_transform(EvenReward())
        if "policy" in ours:
            params = SamplingParams(TOKENS, stop_token_ids=(tokenizer.eos_token_id,))
            policy: Any = GenerationPolicy(TransformersEngine(model), params)
        else:
            policy = TransformersWrapper(
                model,
                tokenizer=tokenizer,
                input_mode=mode,
                generate=True,
                return_log_probs=True,
                pad_output=False,
                generate_kwargs={"max_new_tokens": TOKENS, "do_sample": True},
            )
        make = RolloutCollector if "collector" in ours else LLMCollector
        collector = make(
            env, policy=policy, dialog_turns_per_batch=N, total_dialog_turns=N, flatten_data=True
        )
        batch = next(iter(collector))
        if "reference" in ours:
            scoring: Any = KLScoring(TokenScorer(reference))
        else:
            scoring = RetrieveLogProb(
                actor(reference), log_probs_full_key=("ref_log_probs", "full"), assistant_only=False
            )
        with torch.no_grad():
            batch = scoring(batch)
        loss = (GRPOLoss if "loss" in ours else TorchRLGRPOLoss)(
            actor(model), kl_to_ref_coeff=0.1, masking_strategy="sft", device=torch.device("cpu")
        )
        if "policy" not in ours:  # TransformersWrapper only writes log-probs of the response
            sampled = RetrieveLogProb(
                actor(model), log_probs_full_key=("log_probs", "full"), assistant_only=False
            )
            with torch.no_grad():
                batch = sampled(batch)
            loss.set_keys(sample_log_prob=("next", "log_probs", "full"))
        key = "group_id" if "environment" in ours else "query"
        advantage = (
            GroupAdvantage(grpo_size=G, prompt_key=key, token_dim=True)
            if "advantage" in ours
            else MCAdvantage(grpo_size=G, prompt_key=key)
        )
        buffer = ReplayBuffer(
            storage=LazyStackStorage(N),
            sampler=SamplerWithoutReplacement(),
            transform=advantage,
            batch_size=N,
        )
        buffer.extend(batch)
        sample = buffer.sample()
        if "advantage" not in ours and "loss" not in ours and sample["advantage"].ndim == 2:
            sample["advantage"] = sample["advantage"].unsqueeze(-1)
        loss(sample).mean(reduce=True).backward()
    return max(p.grad.abs().max().item() for p in model.parameters() if p.grad is not None)
