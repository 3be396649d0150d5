"""Models whose values depend on the rest of a pass beyond a length: RoPE by the longest sequence, and
sparse attention that chooses its keys.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.configs import compose_config
from torchrl_grpo.assembly.prepare import prepare
from torchrl_grpo.checks import context_length
from torchrl_grpo.config import ConfigError
from torchrl_grpo.generation import SamplingParams, TransformersEngine
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.starter import starter_path

LIMIT = 24
FACTORS = {"short_factor": [1.1] * 8, "long_factor": [2.5] * 8}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": LIMIT, **FACTORS}
SPARSE = {
    "index_topk": LIMIT,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    "phi3": {"original_max_position_embeddings": LIMIT, "rope_parameters": LONGROPE},
    "phimoe": {
        "rope_parameters": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.4},
        "num_local_experts": 2,
    },
    "llama": {
        "max_position_embeddings": LIMIT,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0},
    },
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), SPARSE),
}


def make_model(kind: str) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 60,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "initializer_range": 0.15,
        "pad_token_id": 0,
        "max_position_embeddings": 96,
    }
    own = MODELS[kind]
    rope = {"rope_theta": 10_000.0, **own.get("rope_parameters", {"rope_type": "default"})}
    config = AutoConfig.for_model(kind, **{**sizes, **own, "rope_parameters": rope})
    return AutoModelForCausalLM.from_config(config).float().eval()


def alone(model: Any, tokens: Tensor) -> Tensor:
    """Return the log-probs of Hugging Face's own forward over one sequence."""
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("packs", [True, False])
def test_log_probs_and_gradients_are_those_of_one_sequence_alone(kind: str, packs: bool) -> None:
    model = make_model(kind)
    scorer = TokenScorer(model)
    if not packs:
        model.unpacked_because = "this test pads"
    lengths = (9, LIMIT, 16)
    rows = [torch.randint(1, 60, (length,)) for length in lengths]
    with torch.no_grad():
        alone(model, torch.randint(1, 60, (60,)))  # dynamic keeps what a longer pass left
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = (torch.arange(LIMIT) >= 4) & (torch.arange(LIMIT) < torch.tensor(lengths)[:, None])
    assert scorer.packs(LIMIT) == packs
    scores = scorer.score(tokens, mask)[0]
    scores.sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    for row, score in zip(rows, scores, strict=True):
        expected = alone(model, row)[3:]
        torch.testing.assert_close(score[4 : len(row)], expected, rtol=0, atol=1e-5)
        expected.sum().backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_the_engine_samples_from_one_sequence_alone(kind: str) -> None:
    model = make_model(kind)
    engine = TransformersEngine(model)
    engine.seed(0)
    prompts = [torch.arange(3, 13), torch.arange(3, 3 + LIMIT - 2)]
    groups = engine.generate(prompts, 2, SamplingParams(max_new_tokens=40))
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            assert len(prompt) + len(completion.tokens) == LIMIT
            with torch.no_grad():
                expected = alone(model, torch.cat([prompt, completion.tokens]))
            got = completion.log_probs
            torch.testing.assert_close(got, expected[-len(got) :], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_longer_sequences_are_refused_with_the_key(kind: str) -> None:
    model = make_model(kind)
    assert context_length(model.config) == LIMIT
    long = torch.ones(1, LIMIT + 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"inference_model.max_model_len={LIMIT}"):
        TokenScorer(model).score(long, long.bool())
    with pytest.raises(ValueError, match=f"context of {LIMIT}"):
        TransformersEngine(model).generate([long[0]], 1, SamplingParams(max_new_tokens=1))


@pytest.mark.slow
def test_a_run_has_no_sequence_beyond_the_limit() -> None:
    """It is refused with the key, or its prompts are bounded."""
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 300}
    kwargs = str({"rope_parameters": {**rope, **factors}}).replace("'", "")
    model = f"train_model.model_kwargs={kwargs}"
    for wrong in ("inference_model.max_model_len=301", "inference_model.max_new_tokens=300"):
        with pytest.raises(ConfigError, match=rf"{wrong} must .*300 tokens"):
            prepare(compose_config("env.dataset=arithmetic", model, wrong))
    settings = ["env.dataset=arithmetic", "inference_model.max_new_tokens=100", model]
    assert prepare(compose_config(*settings)).prompt_tokens[1] == 200


@pytest.mark.slow
def test_a_teacher_with_a_smaller_limit_is_refused(tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(starter_path(), teacher)
    config = AutoConfig.from_pretrained(teacher)
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config.max_position_embeddings = 300
    config.save_pretrained(teacher)
    settings = ["algo=distill", "env.dataset=arithmetic", f"teacher.model={teacher}"]
    with pytest.raises(ConfigError, match=r"teacher\.model=.*inference_model\.max_model_len=300"):
        prepare(compose_config(*settings))
    prepare(compose_config(*settings, "inference_model.max_model_len=300"))
