"""Fixtures: a tiny random Qwen2 model and a byte-level tokenizer, made here, so that nothing is downloaded."""

from __future__ import annotations

import logging
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.models import make_tiny_model

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the suite runs in as many processes as there are cores
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("TORCHRL_GRPO_QUICK_IMPORTS", "1")  # actors on Ray import what those of a script do

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 256 bytes and 5 special tokens: every text round-trips."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL_TOKENS)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|end|>", unk_token="<|pad|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture
def tiny_model() -> Qwen2ForCausalLM:
    """A fresh tiny random model, float32, eval mode."""
    return make_tiny_model()


# In parallel the suite ends sooner when what takes long starts first: these, then all files with a test that is slow.
LONG = ("ray/test_async_s", "ray/test_ray_source", "ray/test_async", "vllm/", "ray/", "unit/test_fsdp", "unit/test_tut")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks each test with what the name of its folder says that it needs, and sorts the files."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}

    def place(item: pytest.Item) -> tuple[int, bool]:
        path = item.path.relative_to(Path(__file__).parent).as_posix()
        return next((at for at, start in enumerate(LONG) if path.startswith(start)), len(LONG)), item.path not in slow

    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in ("vllm", "ray", "gpu"):
            item.add_marker(folder)
    items.sort(key=place)


@pytest.fixture
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs write their report without its curves, whose drawing takes half the time of a run of a few steps."""
    monkeypatch.setattr("torchrl_grpo.reporting.report.save_png", lambda *_: None)
    monkeypatch.setattr("torchrl_grpo.reporting.report.panel_svg", lambda *_: "")


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Runs a script as ``run`` does, but in this process, where all is imported; gives its exit status."""
    handlers, level = logging.root.handlers[:], logging.root.level

    def run_here(script: Path, *arguments: str) -> int:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    yield run_here
    logging.root.handlers[:] = handlers  # Hydra's are bound to a stream that is closed after this test
    logging.root.setLevel(level)
