"""Tiny random vision-language models with their processors."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDictBase
from transformers import PreTrainedTokenizerBase

from torchrl_grpo import keys
from torchrl_grpo.models import loading
from torchrl_grpo.models.scoring import TokenScorer

TEXT = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
IDEFICS_TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
IDEFICS_TOKENS += [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]


class Kit:
    """Model, tokenizer and image encoder of a family."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.config = loading.load_config(self.path)
        self.tokenizer = loading.load_tokenizer(self.path)
        self.encoder = loading.load_image_encoder(self.path, self.config, self.tokenizer)
        assert self.encoder is not None
        self._model: Any = None

    def model(self) -> Any:
        """Return a model of its own, a copy because loading takes ten times as long."""
        if self._model is None:
            self._model = loading.load_model(
                self.path, dtype=torch.float32, device=torch.device("cpu")
            )
        return copy.deepcopy(self._model)


def check_scores(model: Any, batch: TensorDictBase) -> None:
    """Check that the scorer gives the engine's log-probs, and that the spans of images have their
    tokens.
    """
    with torch.no_grad():
        scored = TokenScorer(model)(batch.clone())
    for row, again in zip(batch.unbind(0), scored.unbind(0), strict=True):
        assert bool(row[keys.REWARD_VALID]), row.get(keys.REWARD_ERROR, None)
        tokens, mask = row[keys.FULL], row[keys.ASSISTANT_MASK]
        for span in row[keys.IMAGES]:
            part = tokens[span.offset : span.end]
            assert torch.equal(part, span.image.tokens)
            assert torch.equal(part == model.config.image_token_id, span.is_embed)
        scores = again[keys.CUR_LOG_PROBS][: len(tokens)][mask]
        torch.testing.assert_close(row[keys.LOG_PROBS][mask], scores, atol=2e-5, rtol=0)


def template(image: str) -> str:
    """A chat template that writes tools, texts, and parts of texts and images."""
    return (
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}<|{{ m['role'] }}|>"
        "{% if m['content'] is string %}{{ m['content'] }}"
        "{% else %}{% for part in m['content'] %}"
        "{% if part['type'] == 'image' %}" + image + "{% else %}{{ part['text'] }}{% endif %}"
        "{% endfor %}{% endif %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


def spread(model: Any, seed: int = 0) -> Any:
    """Scale the weights of a tiny model so that its images matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                scale = parameter[0].numel() ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.eval()


def make_idefics3(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Save an Idefics3 whose images have 4 tokens a tile of 32 x 32 pixels."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import (
        Idefics3ImageProcessorPil,
    )

    tokenizer = _copy(tokenizer, folder, IDEFICS_TOKENS)
    tokenizer.chat_template = template("<image>")
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}, do_image_splitting=True
    )
    Idefics3Processor(images, tokenizer, image_seq_len=4).save_pretrained(folder)
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
    config = Idefics3Config(
        text_config={"model_type": "llama", **TEXT},
        vision_config=vision,
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    spread(Idefics3ForConditionalGeneration(config)).save_pretrained(folder)
    return folder


def make_smolvlm(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Save a SmolVLM, an Idefics3 with another processor."""
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    make_idefics3(folder, tokenizer)
    (folder / "processor_config.json").unlink()
    SmolVLMImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}, do_image_splitting=True
    ).save_pretrained(folder)
    settings = {"processor_class": "SmolVLMProcessor", "image_seq_len": 4}
    (folder / "processor_config.json").write_text(json.dumps(settings))
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] |= {"model_type": "smolvlm_vision"}
    config = SmolVLMConfig.from_dict(config | {"model_type": "smolvlm"})
    spread(SmolVLMForConditionalGeneration(config)).save_pretrained(folder)
    return folder


def make_llava(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Save a LLaVA whose images have 16 tokens."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = _copy(tokenizer, folder, ["<image>"])
    tokenizer.chat_template = template("<image>")
    size = {"height": 32, "width": 32}
    images = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=size)
    LlavaProcessor(
        images,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
        "projection_dim": 32,
    }
    config = LlavaConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "clip_vision_model", **vision},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
    )
    spread(LlavaForConditionalGeneration(config)).save_pretrained(folder)
    return folder


def make_gemma3(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Save a Gemma3 whose images have 4 tokens, which attend to each other, and whose first layer
    has a window.
    """
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    tokens = ["<start_of_image>", "<image_soft_token>", "<end_of_image>"]
    tokenizer = _copy(tokenizer, folder, tokens)
    tokenizer.add_tokens(["\n\n", "\n\n\n"])
    names = dict(zip(("boi_token", "image_token", "eoi_token"), tokens, strict=True))
    tokenizer._set_model_specific_special_tokens(names)
    tokenizer.chat_template = template("\n<start_of_image>")
    size = {"height": 32, "width": 32}
    images = Gemma3ImageProcessorPil(size=size)
    Gemma3Processor(images, tokenizer, image_seq_length=4).save_pretrained(folder)
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
    text = {
        "head_dim": 32,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": False,
    }
    config = Gemma3Config(
        text_config={**TEXT, **text},
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
        boi_token_index=tokenizer.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<end_of_image>"),
        tie_word_embeddings=False,
    )
    spread(Gemma3ForConditionalGeneration(config)).save_pretrained(folder)
    return folder


def make_qwen3_vl(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Save a Qwen3-VL, which adds features after its first layers."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    make_qwen2_5_vl(folder, tokenizer)
    config = json.loads((folder / "config.json").read_text())
    names = [name for name in config if name.endswith("_token_id") and "image" in name]
    names += ["video_token_id", "vision_start_token_id", "vision_end_token_id"]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    config = Qwen3VLConfig(
        text_config={**TEXT, "head_dim": 32, "rope_parameters": rope},
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        tie_word_embeddings=False,
        **{name: config[name] for name in names},
    )
    spread(Qwen3VLForConditionalGeneration(config)).save_pretrained(folder)
    return folder


def make_qwen2_5_vl(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Save a Qwen2.5-VL whose images have one token for 8 x 8 pixels."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = _copy(tokenizer, folder, QWEN_TOKENS)
    tokenizer.chat_template = template("<|vision_start|><|image_pad|><|vision_end|>")
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(
        size={"shortest_edge": 256, "longest_edge": 4096},
        patch_size=4,
        merge_size=2,
        temporal_patch_size=2,
    ).save_pretrained(folder)
    token_id = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config={
            **TEXT,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 6, 6],
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 64,
        },
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    spread(Qwen2_5_VLForConditionalGeneration(config)).save_pretrained(folder)
    return folder


def retie(folder: Path, top: bool, text: bool, *, has_head: bool) -> Path:
    """Set the model's own and its language model's ``tie_word_embeddings``; without a head of its
    own, the model reads its embeddings.
    """
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = top
    config["text_config"]["tie_word_embeddings"] = text
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    state = {name: w for name, w in weights.items() if has_head or "lm_head" not in name}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


def _copy(tokenizer: Any, folder: Path, more: list[str]) -> Any:
    tokenizer.save_pretrained(folder)
    own = type(tokenizer).from_pretrained(folder)
    own.add_special_tokens({"additional_special_tokens": more})
    return own


MAKERS = {
    "gemma3": make_gemma3,
    "idefics3": make_idefics3,
    "llava": make_llava,
    "qwen2_5_vl": make_qwen2_5_vl,
    "qwen3_vl": make_qwen3_vl,
    "smolvlm": make_smolvlm,
}
