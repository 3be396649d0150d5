"""A reward model: a Hugging Face sequence classifier with one output, on its own device."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from torchrl_grpo.host.extras import load_extra

_lock = threading.Lock()
_loaded: dict[tuple[str, str], Any] = {}


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
        ValueError: the model has several outputs, its chat template leaves out a message, or the
            conversation is too long for it.
    """
    import torch

    tokens = _tokens(messages, model)
    classifier = _load(model, device)
    length = len(tokens)
    limit = getattr(classifier.config, "max_position_embeddings", None) or length
    if not 0 < length <= limit:
        raise ValueError(
            f"a conversation for the reward model {model} must have at most {limit} tokens, but it "
            f"has {length}: use a smaller max_new_tokens, or another model."
        )
    with torch.inference_mode():
        return float(classifier(input_ids=torch.tensor([tokens], device=device)).logits)


def check_reward_model(messages: Sequence[Mapping[str, Any]], model: str, **_: Any) -> None:
    """Check that a reward model's chat template writes a prompt and a response. Only its tokenizer
    is read.

    Raises:
        ValueError: it leaves out a message, or there is no tokenizer.
    """
    try:
        _tokens([*messages, {"role": "assistant", "content": "?"}], model)
    except OSError as error:
        raise ValueError(
            f"model={model} of the reward reward_model must have a tokenizer that can be read, but "
            f"it cannot ({str(error).partition(chr(10))[0]:.200}): fix the name."
        ) from error


def _tokens(messages: Sequence[Mapping[str, Any]], model: str) -> list[int]:
    tokenizer, chats = _reader(model)
    if chats is None:
        text = "\n\n".join(str(message["content"]) for message in messages)
        return list(tokenizer(text, split_special_tokens=True)["input_ids"])
    try:
        return list(chats.tokens(messages))
    except ValueError as error:
        message = str(error).replace("model.chat_template=", "its chat template ")
        raise ValueError(f"model={model} of the reward reward_model: {message}") from error


@cache
def _reader(model: str) -> tuple[Any, Any]:
    """Return a reward model's tokenizer, and its encoder of chats if it has a template."""
    from transformers import AutoTokenizer

    from torchrl_grpo.chat.template import ChatEncoder

    if not Path(model).exists():
        load_extra("check_hub")(model, "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    return tokenizer, ChatEncoder(tokenizer, {}) if tokenizer.chat_template else None


def _load(model: str, device: str) -> Any:
    with _lock:
        if (model, device) not in _loaded:
            from transformers import AutoModelForSequenceClassification
            from transformers.utils import logging as transformers_logging

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
            _loaded[model, device] = classifier
        return _loaded[model, device]
