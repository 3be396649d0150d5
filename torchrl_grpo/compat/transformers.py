"""Private names of transformers."""

from __future__ import annotations

import re
from inspect import signature
from typing import Any

from transformers import AutoImageProcessor, PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING


def attention_of(config: PretrainedConfig) -> str:
    """Return the name of a model's attention implementation, such as ``sdpa``."""
    return str(config._attn_implementation)


def load_image_processor(
    path: str, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> Any:
    """Return the processor of a vision-language model, for images only.

    It prepares images with Pillow on every machine: torchvision, which ``AutoProcessor`` prefers
    where it is installed and needs for videos, gives slightly different pixels.

    Raises:
        ValueError: the checkpoint has no settings of a processor.
    """
    kind: Any = PROCESSOR_MAPPING[type(config)]
    names = signature(kind.__init__).parameters.keys() - kind.get_attributes() - {"chat_template"}
    processor = kind.__new__(kind)
    # Otherwise it would refuse to be made without a processor of videos.
    processor.check_argument_for_proper_class = lambda *_: None
    try:
        images = AutoImageProcessor.from_pretrained(path, backend="pil")
        settings, _ = kind.get_processor_dict(path)
        settings = {name: settings[name] for name in names if name in settings}
        parts = dict.fromkeys(kind.get_attributes())
        parts |= {"image_processor": images, "tokenizer": tokenizer}
        processor.__init__(**parts, **settings)
    except (OSError, ValueError, ImportError) as error:
        reason, *_ = re.split(r"\. |\n", str(error).strip())
        raise ValueError(
            f"model.name={path} must have an image processor that can be loaded "
            f"(preprocessor_config.json), but: {reason.rstrip('.')}. Save it with the model, or "
            "install what it needs."
        ) from error
    del processor.check_argument_for_proper_class
    return processor
