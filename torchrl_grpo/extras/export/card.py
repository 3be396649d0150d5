"""The card of an exported model, in the form that the Hugging Face hub reads."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from torchrl_grpo.host.text import accuracy

HUB_NAMES = {
    "gsm8k": "openai/gsm8k",
    "math": "DigitalLearningGmbH/MATH-lighteval",
    "ifeval": "google/IFEval",
}
"""Names on the hub of built-in data sets."""
CARD = """\
---
{header}
---

# A model trained with {method}

| | |
|---|---|
{table}
```python
from transformers import pipeline

generate = pipeline("{task}", model="{name}")
messages = {messages}
print(generate({argument}, max_new_tokens=512)[0]["generated_text"][-1]["content"])
```

<details>
<summary>The run's config</summary>

```json
{config}
```

</details>
"""


def model_card(
    config: Mapping[str, Any],
    step: int,
    metrics: Mapping[str, float],
    *,
    adapters: bool = False,
    reads_images: bool = False,
    name: str = ".",
) -> str:
    """Return the card of a model, whose header the Hugging Face hub reads: its origin, data, config,
    accuracy, and how to use it.

    Args:
        config: the run's config as plain types.
        step: number of steps that trained the model.
        metrics: metrics of the model's evaluation; they may be missing.
        adapters: whether only LoRA's adapters are written.
        reads_images: whether it is a vision-language model.
        name: folder, or name on the hub, of the model in the example.
    """
    env, policy, base = config["env"], config.get("policy", {}), config["model"]["name"]
    task = env["task"].get("_target_") if isinstance(env["task"], Mapping) else env["task"]
    entries = [entry["dataset"] for entry in env.get("datasets") or []]
    data = task or env["dataset"] or ", ".join(entries) or str(env["environment"])
    method = "SFT" if policy.get("demonstrations") else "GRPO"
    scores = {key: value for key, value in metrics.items() if key.startswith("eval/pass@")}
    kind = "image-text-to-text" if reads_images else "text-generation"
    results = [
        EvalResult(
            task_type=kind,
            dataset_type=data,
            dataset_name=data,
            metric_type="pass@k",
            metric_name=key.removeprefix("eval/"),
            metric_value=round(value, 4),
        )
        for key, value in scores.items()
        if value is not None and math.isfinite(value)
    ]
    datasets = [HUB_NAMES.get(entry, entry) for entry in entries or [env["dataset"] or ""]]
    header = ModelCardData(
        base_model=base.partition("@")[0] if _is_on_hub(base) else None,
        library_name="peft" if adapters else "transformers",
        pipeline_tag=kind,
        datasets=[*filter(_is_on_hub, datasets)] or None,
        tags=[method.lower(), "torchrl"],
        model_name=f"{base}, {method}",
        eval_results=results or None,
    )
    rows = {"base model": base, "training data": data, "steps": f"{step:,}"}
    rows |= {key.removeprefix("eval/"): accuracy(metrics, key) for key in scores} or {
        "pass@1": "not measured"
    }
    question: Any = "What is 17 + 25?"
    if reads_images:
        question = [{"type": "image", "url": "picture.png"}, {"type": "text", "text": "How many?"}]
    prompt = {"role": "user", "content": question}
    system = env.get("system_prompt")
    messages = [*([{"role": "system", "content": system}] if system else []), prompt]
    table = "".join(f"| {key} | {value} |\n" for key, value in rows.items())
    return CARD.format(
        header=header.to_yaml(),
        method=method,
        table=table,
        name=name,
        task=kind,
        messages=json.dumps(messages),
        argument="text=messages" if reads_images else "messages",
        config=json.dumps(config, indent=2),
    )


def _is_on_hub(name: str) -> bool:
    return name.count("/") == 1 and not Path(name).exists()
