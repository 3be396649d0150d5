"""The pages that list things list all of them: ``docs/config.md`` each config key, ``docs/metrics.md`` each metric."""

from __future__ import annotations

import importlib.util
import re

from tests.support.configs import ROOT, compose_config
from tests.support.documentation import undocumented
from tests.support.models import make_tiny_model
from tests.support.tasks import make_queue, next_batch
from torchrl_grpo.assembly.algorithm import make_loss
from torchrl_grpo.models import TokenScorer
from torchrl_grpo.objectives import GRPOLoss


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
    names = [*(f"train/{name}" for name in loss.out_keys), *dynamic]
    assert undocumented([dict.fromkeys(names)]) == set()


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
    ]
    for key, argument, *outputs in rows:
        settings = {"policy.kl_coef": 0.0, f"policy.{key}": 0.25}
        if key == "teacher_coef":
            settings |= {"policy.teacher_divergence": "reverse", "teacher.model": "starter"}
        loss = make_loss(
            compose_config(*(f"{name}={value}" for name, value in settings.items())), actor
        )
        assert getattr(loss, argument) == 0.25
        assert set(outputs) <= set(loss.out_keys)
        assert [
            name for name in loss.out_keys if name.startswith("loss_") and name != "loss_objective"
        ] == outputs[:1]


def test_the_page_of_config_keys_is_up_to_date() -> None:
    path = ROOT / "tools" / "make_config_docs.py"
    spec = importlib.util.spec_from_file_location("make_config_docs", path)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    is_current = tool.page() == tool.PAGE.read_text(encoding="utf-8")
    assert is_current, (
        "docs/config.md is not that of the config's dataclasses: run `python tools/make_config_docs.py`"
    )
