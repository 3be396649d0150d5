"""Reference pages are complete: ``docs/config.md`` has each config key, ``docs/metrics.md`` each
metric.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
import torch
from tensordict import NestedKey, TensorDictBase, is_leaf_nontensor
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.configs import ROOT, compose_config
from tests.support.documentation import undocumented
from tests.support.models import make_tiny_model
from tests.support.tasks import make_queue, next_batch
from tests.support.tools import load_tool
from torchrl_grpo import keys
from torchrl_grpo.assembly.algorithm import make_loss
from torchrl_grpo.collectors import RolloutCollector
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation import GenerationPolicy, SamplingParams, TransformersEngine
from torchrl_grpo.models import TokenScorer
from torchrl_grpo.objectives import GRPOLoss
from torchrl_grpo.objectives.output import TORCHRL_METRICS
from torchrl_grpo.starter import starter_path
from torchrl_grpo.tasks.arithmetic import ArithmeticTask
from torchrl_grpo.transforms import GroupAdvantage, KLScoring, RewardShaping


def test_a_metric_that_the_page_has_not_is_found() -> None:
    assert undocumented(
        [{"step": 1, "eval/pass@16": 1.0, "eval/pass@": 1.0, "train/nothing": 0.0}]
    ) == {
        "eval/pass@",
        "train/nothing",
    }


def test_every_loss_output_and_dynamic_sampling_count_is_on_the_page() -> None:
    loss = GRPOLoss(
        TokenScorer(make_tiny_model()),
        proximal="recomputed",
        behaviour_weight="mask",
        rejection={"geometric": 2.0},
        kl_to_ref_coeff=0.1,
        kl_to_inference_coeff=0.1,
        entropy_coeff=0.1,
        teacher_coeff=0.1,
        sft_coeff=0.1,
    )
    queue = make_queue(most_played=6)
    dynamic = [name for name in next_batch(queue)[1] if name.startswith("rollout/groups_")]
    assert len(dynamic) == 3
    assert {"behaviour_capped", "loss_entropy", "kl_k3_to_ref"} <= set(loss.out_keys)
    logged = [name for name in loss.out_keys if name not in TORCHRL_METRICS]
    names = [*(f"train/{name}" for name in logged), *dynamic]
    assert undocumented([dict.fromkeys(names)]) == set()


@pytest.mark.slow
def test_the_names_of_the_losss_terms_are_what_the_page_says() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    table = page.partition("| term |")[2].partition("\n\n")[0]
    rows = [re.findall(r"`(\w+)`", line) for line in table.splitlines()[2:]]
    actor = TokenScorer(make_tiny_model())
    assert [key for key, *_ in rows] == [
        "kl_to_behaviour_coef",
        "kl_coef",
        "teacher_coef",
        "sft_coef",
        "entropy_coef",
        "value_coef",
    ]
    for key, argument, *outputs in rows:
        settings = {"policy.kl_coef": 0.0, f"policy.{key}": 0.25}
        if key == "teacher_coef":
            settings |= {"policy.teacher_divergence": "reverse", "teacher.model": "starter"}
        if key == "value_coef":
            settings["policy.advantage_level"] = "token"
        loss = make_loss(
            compose_config(*(f"{name}={value}" for name, value in settings.items())), actor
        )
        assert getattr(loss, argument) == 0.25
        assert set(outputs) <= set(loss.out_keys)
        assert [
            name for name in loss.out_keys if name.startswith("loss_") and name != "loss_objective"
        ] == outputs[:1]


def test_the_page_of_config_keys_is_up_to_date() -> None:
    tool = load_tool("make_config_docs")
    is_current = tool.page() == tool.PAGE.read_text(encoding="utf-8")
    assert is_current, "docs/config.md is out of date: run `python tools/make_config_docs.py`"


def test_the_pages_of_the_reference_are_up_to_date() -> None:
    tool = load_tool("make_reference_docs")
    pages = sorted(tool.PAGES.glob("*.md"))
    old = [path.name for path in pages if tool.page(path) != path.read_text(encoding="utf-8")]
    assert old == [], "run `python tools/make_reference_docs.py`"
    for path in pages:
        assert "\n| `" in path.read_text(encoding="utf-8"), path.name


def key_rows() -> dict[NestedKey, Any]:
    """Return the rows of the table of ``docs/reference/batch.md`` by key."""
    rows = load_tool("make_reference_docs").key_rows()
    return {ast.literal_eval(row.key.strip("`")): row for row in rows}


def played_batch() -> TensorDictBase:
    tokenizer = AutoTokenizer.from_pretrained(starter_path())
    model = AutoModelForCausalLM.from_pretrained(starter_path()).eval()
    params = SamplingParams(max_new_tokens=8, stop_token_ids=(tokenizer.eos_token_id,))
    env = LLMEnv(ArithmeticTask(), tokenizer, num_envs=4, repeats=2)
    return RolloutCollector(env, GenerationPolicy(TransformersEngine(model), params)).rollout()


def test_every_key_of_a_batch_is_in_the_table_with_its_shape_and_type() -> None:
    rows = key_rows()
    assert set(rows) == {value for name, value in vars(keys).items() if name.isupper()}
    batch = played_batch()
    players = {"the environment", "the policy", "the collector"}
    for sequence in batch.unbind(0):
        sizes = {
            "[T]": len(sequence[keys.FULL]),
            "[Tp]": len(sequence[keys.PROMPT]),
            "[Tr]": len(sequence[keys.RESPONSE]),
            "[1]": 1,
        }
        for key in sequence.keys(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor):
            row = rows[key[0] if len(key) == 1 else key] if isinstance(key, tuple) else rows[key]
            assert row.written_by in players, key
            value = sequence.get(key)
            if isinstance(value, Tensor):
                shape, dtype = row.shape.split()
                assert value.shape == (sizes[shape],), key
                assert value.dtype == getattr(torch, dtype), key
            else:
                assert row.shape.startswith("non-tensor"), key


def test_the_table_of_keys_says_who_writes_and_reads_them() -> None:
    rows = key_rows()
    batch = played_batch()
    before = set(batch.keys(include_nested=True))
    scorer = TokenScorer(make_tiny_model(vocab_size=int(batch[0][keys.FULL].max()) + 1))
    for transform in (
        KLScoring(scorer),
        RewardShaping(kl_coef=0.1),
        GroupAdvantage(repeats=2),
    ):
        batch = transform(batch)
        new = {key for key in batch.keys(include_nested=True) if key in rows} - before
        name = type(transform).__name__
        listed = {key for key, row in rows.items() if row.written_by == f"``{name}``"}
        assert new == listed - {keys.TEACHER_LOG_PROBS, keys.VALUE_TARGET}, name
        before |= new
    for key in GRPOLoss(scorer, kl_to_ref_coeff=0.1).required_in_keys:
        assert "the loss" in rows[key].read_by, key
