"""Compare agents with the same dialogs as a task: seconds per step of 64 episodes at 30M
parameters, and memory over many episodes.

    python benchmarks/bench_agents.py
    python benchmarks/bench_agents.py --rounds 3 --episodes 256

A dialog has two turns of the policy, about 32 tokens each. The task answers the first turn itself;
the agent asks for each with ``openai.AsyncOpenAI``. Both are played in one reward worker, with the
same seeds, so that they give the same tokens; the rounds of both alternate. It takes about 4
minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from machine import report, surroundings
from shapes import MODELS
from tensordict import TensorDictBase
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from torchrl_grpo import keys
from torchrl_grpo.collectors import RolloutCollector
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.generation.transformers import TransformersEngine
from torchrl_grpo.host.processes import descendants
from torchrl_grpo.integrations.agents import WithAgent
from torchrl_grpo.integrations.agents.programs import Function
from torchrl_grpo.learner.step import PolicyTrainer
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.objectives import GRPOLoss
from torchrl_grpo.reward_pool import RewardPool
from torchrl_grpo.tasks.base import Problem, Score, Split, Task
from torchrl_grpo.transforms import GroupAdvantage

PACKAGES = ("torch", "transformers", "tensordict", "torchrl", "openai")
ROWS, REPEATS = 64, 8
HEADS = {"tiny": (3, 1), "small": (8, 2)}
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} end {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


class Words(Task):
    """Two turns; the reward is the share of words with an even number in the second one."""

    name = "words"

    def problems(self, split: Split) -> list[Problem]:
        return [
            Problem(" ".join(f"w{place}" for place in range(start, start + 32)), None)
            for start in range(40, 90)
        ]

    def next_turn(self, problem: Problem, responses: Sequence[str]) -> str | None:
        return "w7 w8 w9" if len(responses) == 1 else None

    def score(self, problem: Problem, responses: Sequence[str]) -> Score:
        return Score(reward(responses[-1]), False)


def reward(text: str) -> float:
    """Return the share of words with an even number."""
    words = [word for word in text.split() if word[:1] == "w"]
    return sum(int(word[1:]) % 2 == 0 for word in words) / max(1, len(words))


async def play(client: Any, problem: dict[str, Any]) -> float:
    """Play the same dialog as an agent."""
    chat = list(problem["messages"])
    first = await client.chat.completions.create(model="policy", messages=chat)
    if first.choices[0].finish_reason == "length":
        return reward(first.choices[0].message.content or "")
    chat += [first.choices[0].message, {"role": "user", "content": "w7 w8 w9"}]
    second = await client.chat.completions.create(model="policy", messages=chat)
    return reward(second.choices[0].message.content or "")


def make_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each word and a few for the chat template."""
    names = ["[UNK]", "user", "assistant", "end"]
    words = Tokenizer(
        models.WordLevel(
            {name: i for i, name in enumerate([*names, *(f"w{i}" for i in range(4, size))])}
        )
    )
    words.model.unk_token = "[UNK]"
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", chat_template=TEMPLATE
    )


def make(size: str, task: Task, pool: RewardPool) -> tuple[RolloutCollector, Qwen2ForCausalLM]:
    """Return a collector of ``ROWS`` dialogs, whose turns have 32 tokens on average, at most 63."""
    torch.manual_seed(0)
    heads, kv_heads = HEADS[size]
    config = Qwen2Config(
        **MODELS[size],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config).eval()
    engine = TransformersEngine(model)
    engine.seed(0)
    ends = tuple(range(4, 4 + MODELS[size]["vocab_size"] // 32))
    policy = GenerationPolicy(engine, SamplingParams(63, stop_token_ids=ends))
    env = LLMEnv(
        task,
        make_tokenizer(MODELS[size]["vocab_size"]),
        num_envs=ROWS,
        repeats=REPEATS,
        max_turns=2,
        reward_pool=pool,
    )
    return RolloutCollector(env, policy), model


def same(one: TensorDictBase, two: TensorDictBase) -> bool:
    """Return whether two batches have the same tokens and rewards."""
    rows = zip(one.unbind(0), two.unbind(0), strict=True)
    return all(
        torch.equal(a[key], b[key])
        for a, b in rows
        for key in (keys.FULL, keys.LOG_PROBS, keys.REWARD)
    )


def cpu_seconds(pool: RewardPool) -> float:
    """Return the CPU time of this process and of a pool's workers, which other work on the machine
    hardly changes.
    """
    below = [pid for worker in pool.pids() for pid in descendants(worker)]
    ticks = [
        Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in below
    ]
    return time.process_time() + sum(int(tick) for one in ticks for tick in one) / os.sysconf(
        "SC_CLK_TCK"
    )


def measure(rounds: int) -> dict[str, Any]:
    """Return wall and CPU seconds of rollouts and training steps."""
    tasks = {"task": Words(), "agent": WithAgent(Words(), Function(play))}
    seconds: dict[str, list[float]] = {name: [] for name in (*tasks, "train")}
    cpu: dict[str, list[float]] = {name: [] for name in (*tasks, "train")}
    with (
        RewardPool(tasks["task"], 1, timeout_s=60) as one,
        RewardPool(tasks["agent"], 1, timeout_s=60) as other,
    ):
        pools = dict(zip(tasks, (one, other), strict=True))
        players = {name: make("small", tasks[name], pool) for name, pool in pools.items()}
        model = players["task"][1]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        trainer = PolicyTrainer(
            GRPOLoss(TokenScorer(model)), model, optimizer, optim_batch_size=ROWS
        )
        equal = True
        for number in range(rounds + 1):  # the first one starts the workers
            batches = {}
            for name, (collector, _) in players.items():
                start, used = time.perf_counter(), cpu_seconds(pools[name])
                batches[name] = collector.rollout()
                seconds[name].append(time.perf_counter() - start)
                cpu[name].append(cpu_seconds(pools[name]) - used)
            equal = equal and same(batches["task"], batches["agent"])
            start, used = time.perf_counter(), time.process_time()
            trainer.train_batch(GroupAdvantage(REPEATS)(batches["task"]))
            seconds["train"].append(time.perf_counter() - start)
            cpu["train"].append(time.process_time() - used)
            print(number, {name: round(values[-1], 3) for name, values in cpu.items()}, flush=True)
    shown = {}
    for clock, of_rounds in (("seconds", seconds), ("cpu_seconds", cpu)):
        median = {name: statistics.median(values[1:]) for name, values in of_rounds.items()}
        overhead = (median["agent"] - median["task"]) / (median["task"] + median["train"])
        rounded = {
            name: [round(value, 3) for value in values[1:]] for name, values in of_rounds.items()
        }
        shown[clock] = {"rounds": rounded, "median": median, "overhead_of_step": overhead}
    return {"episodes": ROWS, "requests": 2 * ROWS, "same_tokens_and_rewards": equal} | shown


def memory(episodes: int) -> dict[str, Any]:
    """Return the MiB of the reward worker over many episodes."""
    task = WithAgent(Words(), Function(play))
    mib, seconds = {}, time.perf_counter()
    with RewardPool(task, 1, timeout_s=60) as pool:
        collector, _ = make("tiny", task, pool)
        for done in range(ROWS, episodes + ROWS, ROWS):
            collector.rollout()
            worker = descendants(pool.pids()[0])[0]
            status = Path(f"/proc/{worker}/status").read_text()
            mib[done] = int(status.partition("VmRSS:")[2].split()[0]) / 1024
    shown = [size for size in mib if size in (ROWS, 256, 512, 1024, max(mib))]
    return {
        "worker_mib": {str(size): mib[size] for size in shown},
        "episodes_per_s": max(mib) / (time.perf_counter() - seconds),
    }


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(
        description="Compare the cost of an agent with that of the same dialogs as a task."
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--episodes", type=int, default=2048)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    report(
        surroundings(PACKAGES) | {"step": measure(args.rounds), "memory": memory(args.episodes)},
        args.out,
    )


if __name__ == "__main__":
    main()
