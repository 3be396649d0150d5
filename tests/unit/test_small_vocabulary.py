"""A tokenizer and a model of ten tokens, through a whole run; and prompts without any character
that a tokenizer knows.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.support.configs import compose_config
from tests.support.models import make_tiny_model
from torchrl_grpo.assembly.prepare import prepare
from torchrl_grpo.assembly.run import build
from torchrl_grpo.config import ConfigError

SMALL = (
    "env.num_envs=16",
    "env.repeats=4",
    "train.total_dialog_turns=32",
    "evaluation.num_prompts=8",
    "evaluation.k=2",
    "inference_model.max_new_tokens=8",
    "logging.tensorboard=false",
)


def save(folder: Path, characters: str) -> str:
    """Save a model and a tokenizer of these characters and an end token."""
    vocabulary = {text: number for number, text in enumerate(["<eos>", *characters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>"
    )
    make_tiny_model(vocab_size=len(vocabulary), eos_token_id=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_a_model_of_ten_tokens_trains_and_is_evaluated(tmp_path: Path) -> None:
    model = save(tmp_path / "model", "1234567+=")
    run = build(
        compose_config(*SMALL, f"model.name={model}", "inference_model.stop=['=']"),
        tmp_path / "run",
    )
    try:
        assert run.fit()["steps"] == 2
    finally:
        run.close()
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert 0 < rows[1]["train/entropy"] < math.log(10)
    assert rows[1]["train/kl_k3_to_inference"] < 1e-8
    assert rows[1]["train/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    samples = [
        json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    ]
    assert set("".join(sample["response"] for sample in samples)) <= set("1234567+=")


def test_prompts_without_a_token_are_dropped_and_counted(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(
            json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in ("12", "abc", "a1", "x")
        )
    )
    arguments = (
        f"env.dataset={data}",
        "env.reward=number",
        "evaluation.num_prompts=0",
        "evaluation.k=0",
        "env.reward_workers=0",
    )
    model = save(tmp_path / "model", "123456789")
    config = compose_config(*SMALL, f"model.name={model}", *arguments)
    prompts = prepare(config).train_env.prompts
    assert (prompts.num_dropped, prompts.usable) == (2, [0, 2])
    assert [tokens.tolist() for tokens in prompts.first(2)] == [[1, 2], [1]]


@pytest.mark.slow
def test_a_tokenizer_that_knows_no_character_of_the_prompts_is_refused(tmp_path: Path) -> None:
    config = compose_config(*SMALL, f"model.name={save(tmp_path / 'model', 'ZXYWVUQJK')}")
    with pytest.raises(ConfigError, match=r"prompt has 1 to .* a tokenizer"):
        prepare(config)
