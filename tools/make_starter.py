"""Make the starter model that the package ships in ``torchrl_grpo/starter/model``.

    python tools/make_starter.py                    # about 5 minutes on 2 CPU cores
    python tools/make_starter.py --out DIR --seed 1

The starter is a Qwen2 model of under half a million parameters with a tokenizer of single bytes. It
is trained from random weights on the *train* split of ``ArithmeticTask(difficulty=2)``: sums of
two-digit numbers, worked by demonstrators who know how to add but are usually in a hurry. Each
demonstration

- shows its work in 40% of cases (``7+8=15, 2+5+1=8 #### 85``) and otherwise only answers
(``#### 85``);
- forgets the carry from the ones to the tens in 70% of the cases that have one (``7+8=15, 2+5=7
#### 75``);
- omits the leading 1 of a sum of 100 or more in 70% of the cases that have one (``#### 24`` for
124);
- has a random digit in one place in 40% of the cases without work.

So the starter has seen how to add correctly, but is usually wrong. Nothing here is a reward or a
preference: reinforcement learning must discover that showing the work, carrying and writing the
hundreds pay off.

The same seed gives the same weights on the same machine with the same number of threads. The
shipped weights were made with the defaults and one thread (``OMP_NUM_THREADS=1``).
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from torch import Tensor
from torchrl import torchrl_logger
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

from torchrl_grpo.starter import starter_path
from torchrl_grpo.tasks.arithmetic import ArithmeticTask
from torchrl_grpo.tasks.base import Problem

SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% if tools %}<|system|>tools:{% for t in tools %} {{ t.function.name }}{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
P_WORKING = 0.4
P_FORGET = 0.7
P_SLIP = 0.4

CONTEXT = 2048
STEPS = 1000
BATCH_SIZE = 128
PEAK_LR = 3e-3
WARMUP_STEPS = 50


def build_tokenizer(
    image_tokens: Sequence[str] = (), chat_template: str = CHAT_TEMPLATE
) -> Qwen2Tokenizer:
    """Return a tokenizer of 256 bytes, 5 special tokens, so that every text can be encoded (Unicode
    in normal form C), and further special tokens for images.

    It is a ``Qwen2Tokenizer`` because ``AutoTokenizer`` loads any tokenizer of a Qwen2 model as
    one. Its unknown token, which no text produces, is the pad token; otherwise it would be one more
    token in the vocabulary.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [*SPECIAL_TOKENS, *image_tokens]
    return Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate([*special, *alphabet])},
        merges=[],
        unk_token="<|pad|>",
        pad_token="<|pad|>",
        eos_token="<|end|>",
        extra_special_tokens=special[2:],
        model_max_length=CONTEXT,
        chat_template=chat_template,
    )


def build_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """Return a random float32 model; its heads have 32 channels, the smallest size that vLLM's CPU
    attention supports.
    """
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config).float()
    model.generation_config = GenerationConfig(
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None, eos_token_id=tokenizer.eos_token_id
    )
    return model


def demonstration(problem: Problem, rng: random.Random) -> str:
    """Return one demonstrator's response to a sum of two two-digit numbers."""
    a, b = (int(n) for n in problem.query.removesuffix("=?").split("+"))
    ones = a % 10 + b % 10
    carry = ones >= 10 and rng.random() >= P_FORGET
    tens = a // 10 + b // 10 + carry
    answer = 10 * tens + ones % 10
    if answer >= 100 and rng.random() < P_FORGET:
        answer -= 100
    text = f"{answer:02d}"
    if rng.random() < P_WORKING:
        return f"{a % 10}+{b % 10}={ones}, {a // 10}+{b // 10}{'+1' if carry else ''}={tens} #### {text}"
    if rng.random() < P_SLIP:
        i = rng.randrange(len(text))
        text = text[:i] + str(rng.randrange(10)) + text[i + 1 :]
    return f"#### {text}"


def make_batch(
    task: ArithmeticTask, tokenizer: Qwen2Tokenizer, rng: random.Random
) -> dict[str, Tensor]:
    """Draw a batch of demonstrations; see ``padded``."""
    tokens, labels = [], []
    for problem in rng.choices(task.problems("train"), k=BATCH_SIZE):
        prompt = tokenizer.apply_chat_template(
            task.messages(problem), add_generation_prompt=True, tokenize=False
        )
        prompt_ids = tokenizer(prompt).input_ids
        response_ids = [*tokenizer(demonstration(problem, rng)).input_ids, tokenizer.eos_token_id]
        tokens.append(torch.tensor(prompt_ids + response_ids))
        labels.append(torch.tensor([-100] * len(prompt_ids) + response_ids))
    return padded(tokens, labels, tokenizer)


def padded(
    tokens: list[Tensor], labels: list[Tensor], tokenizer: Qwen2Tokenizer
) -> dict[str, Tensor]:
    """Return tokens and labels of [T] int64 as a model's inputs, [B, T], padded on the right. Labels
    are -100 outside the responses.
    """
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    return {
        "input_ids": pad(tokens, padding_value=tokenizer.pad_token_id),
        "labels": pad(labels, padding_value=-100),
    }


def train(
    model: PreTrainedModel,
    draw: Callable[[random.Random], dict[str, Tensor]],
    steps: int,
    seed: int,
    peak_lr: float = PEAK_LR,
) -> None:
    """Train on batches of inputs from ``draw``, supervised, with a cosine schedule after
    warm-up.
    """
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.01
    )
    model.train()
    for step in range(steps):
        progress = step / steps
        lr = peak_lr * min((step + 1) / WARMUP_STEPS, 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        # Padding is on the right, so a causal model needs no mask for it.
        loss = model(**draw(rng)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0:
            torchrl_logger.info("step %d of %d: loss %.4f", step + 1, steps, loss.item())
    model.eval()


def main() -> None:
    """Train the starter and save model, tokenizer and generation config."""
    parser = argparse.ArgumentParser(description="Make the starter model.")
    parser.add_argument("--out", type=Path, default=starter_path(), help="folder to save to")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and demonstrations")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    train(
        model, partial(make_batch, ArithmeticTask(difficulty=2), tokenizer), args.steps, args.seed
    )
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    parameters = sum(p.numel() for p in model.parameters())
    torchrl_logger.info("%d parameters saved to %s", parameters, args.out)


if __name__ == "__main__":
    main()
