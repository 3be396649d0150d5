"""The configs of ``docs/recipes.md``: each composes, has room on its GPUs, and passes all checks
that need no weights, on pretended GPUs and with an included model in place of the real one.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.configs import ROOT, compose_config
from torchrl_grpo.assembly import shares as shares_module
from torchrl_grpo.assembly.prepare import prepare
from torchrl_grpo.extras.plan.command import parse, settings_of
from torchrl_grpo.generation import vllm as vllm_module

GPUS = {
    "grpo_gsm8k": 1,
    "grpo_gsm8k_7b_lora": 1,
    "grpo_math_7b": 8,
    "grpo_shapes_qwen2_5_vl": 1,
    "grpo_gsm8k_agent": 1,
}
"""Each config, and on how many GPUs of 80 GB the page says that it runs."""


def rows() -> dict[str, list[str]]:
    """Return the cells of the page's table, by config."""
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE)
    return {name: rest.split(" | ") for name, rest in lines}


def test_the_page_has_each_config_with_its_model_and_gpus() -> None:
    cells = {name: (row[0], row[1]) for name, row in rows().items()}
    models = {name: compose_config(name=name).model.name.partition("/")[2] for name in GPUS}
    assert cells == {name: (models[name], str(number)) for name, number in GPUS.items()}


@pytest.mark.parametrize("name", GPUS)
def test_a_config_has_room_on_its_gpus_when_the_roles_take_turns(name: str) -> None:
    settings = settings_of(compose_config(name=name), parse(["--gpu=h100"]))
    assert settings.in_turns(GPUS[name]) is not None
    needed = settings.memory_in_turns(GPUS[name]) / 1e9
    assert rows()[name][2] == f"{needed:.0f} GB"


@pytest.mark.parametrize("name", GPUS)
def test_a_config_passes_the_checks_of_a_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [torch.device("cuda", index) for index in range(GPUS[name])]
    in_use = {str(gpu): (0, 80 * 10**9) for gpu in gpus}
    monkeypatch.setattr(shares_module, "accelerators_in_use", lambda: in_use)
    monkeypatch.setattr(vllm_module, "require_vllm", lambda **_: None)
    monkeypatch.chdir(ROOT)  # for examples/
    vision = compose_config(name=name).env.dataset == "shapes"
    overrides = [f"model.name={'vision_starter' if vision else 'starter'}"]
    if not vision:
        overrides += [f"env.dataset_path={data_file(name, tmp_path)}"]
        overrides += ["inference_model.max_new_tokens=64", "env.max_prompt_tokens=192"]
    context = prepare(compose_config(*overrides, name=name), gpus, distributed=len(gpus) > 1)
    assert [len(context.plan.train), context.turns] == [len(gpus), True]
    shares_module.check_devices(replace(context, turns=True))


def data_file(name: str, folder: Path) -> Path:
    """Write a few problems in the form of the config's data set."""
    row: dict[str, Any] = {"question": "1 + 1?", "answer": "It is 2.\n#### 2"}
    if "math" in name:
        row = {"problem": "$1 + 1$?", "solution": r"It is $\boxed{2}$.", "level": "Level 1"}
    for split in ("train", "test"):
        lines = [
            json.dumps({key: f"{split} {i} {text}" for key, text in row.items()}) for i in range(70)
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    return folder
