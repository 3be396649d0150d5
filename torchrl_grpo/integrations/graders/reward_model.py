"""A reward model: a Hugging Face sequence classifier with one output, on its own device."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl_grpo.host.extras import load_extra

_lock = threading.Lock()
_loaded: dict[tuple[str, str], tuple[Any, Any]] = {}


def reward_model(
    messages: Sequence[Mapping[str, Any]], *, model: str, device: str = "cpu"
) -> float:
    """Return the logit of a reward model for a conversation.

    Each process loads the model once, for the first response. The model's input is the conversation
    in its own chat template; without one, the texts of the messages, separated by empty lines.

    Args:
        messages: the conversation, ending with the response.
        model: name on the hub, or folder.
        device: device of the model, such as ``cuda:3``; the run does not reserve it.

    Raises:
        ValueError: the model has several outputs, or the conversation is too long for it.
    """
    import torch

    from torchrl_grpo.chat.template import ChatEncoder

    tokenizer, classifier = _load(model, device)
    if tokenizer.chat_template:
        tokens = ChatEncoder(tokenizer, {}).tokens(messages)
    else:
        text = "\n\n".join(str(message["content"]) for message in messages)
        tokens = tokenizer(text, split_special_tokens=True)["input_ids"]
    length = len(tokens)
    limit = getattr(classifier.config, "max_position_embeddings", None) or length
    if not 0 < length <= limit:
        raise ValueError(
            f"a conversation for the reward model {model} must have at most {limit} tokens, but it "
            f"has {length}: use a smaller max_new_tokens, or another model."
        )
    with torch.inference_mode():
        return float(classifier(input_ids=torch.tensor([tokens], device=device)).logits)


def _load(model: str, device: str) -> tuple[Any, Any]:
    with _lock:
        if (model, device) not in _loaded:
            from transformers import AutoModelForSequenceClassification, AutoTokenizer
            from transformers.utils import logging as transformers_logging

            if not Path(model).exists():
                load_extra("check_hub")(model, "model")
            transformers_logging.disable_progress_bar()  # a reward worker shares the run's terminal
            classifier = AutoModelForSequenceClassification.from_pretrained(
                model, use_safetensors=True
            )
            classifier = classifier.eval().to(device)
            if classifier.config.num_labels != 1:
                raise ValueError(
                    f"model={model} of the reward reward_model must have one output, but it has "
                    f"{classifier.config.num_labels}: use a reward model, with num_labels=1."
                )
            _loaded[model, device] = AutoTokenizer.from_pretrained(model), classifier
        return _loaded[model, device]
