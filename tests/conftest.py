"""Shared fixtures: a tiny random Qwen2 model and a byte-level tokenizer, built here so that no test
downloads anything.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import random
import runpy
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # pytest-xdist already runs one process per core
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = (
    "0"  # otherwise torch compiles and runs programs to detect the CPU's vector extensions
)
os.environ.setdefault(
    "TORCHRL_GRPO_QUICK_IMPORTS", "1"
)  # Ray actors must be able to import the modules next to a script

import pytest
from hypothesis import settings

from tests.support import cpu
from tests.support.guarded import go_on_guarded

if TYPE_CHECKING:  # the xdist controller imports this file too and needs neither
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

if sys.platform == "linux" and "PYTEST_XDIST_WORKER" not in os.environ:
    go_on_guarded()

# Examples are the same in every run; `make test-nightly` draws new ones each time.
settings.register_profile("few", max_examples=40, deadline=None, derandomize=True)
settings.register_profile("many", max_examples=400, deadline=None)
settings.load_profile("few")

# A shell ignores these in what it runs in the background or under nohup.
for number in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(number) == signal.SIG_IGN:
        is_interrupt = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)

SEED = 7

SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% if tools %}<|tools|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu", metavar="FILE", help="record the CPU seconds of each test file")


def pytest_configure(config: pytest.Config) -> None:
    cpu.register(config)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 256 bytes and 5 special tokens, which round-trips every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

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
def encode(tokenizer: PreTrainedTokenizerFast) -> Callable[[str], list[int]]:
    """Return a function that gives the tokens of a text."""
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.fixture
def tiny_model() -> Qwen2ForCausalLM:
    """Return a fresh tiny random model in float32 and eval mode."""
    from tests.support.models import make_tiny_model

    return make_tiny_model()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give workers and programs minutes where a run gives them seconds, for a busy machine."""
    from torchrl_grpo.integrations.graders import code
    from torchrl_grpo.reward_pool import pool, slot

    for module in (pool, slot):
        monkeypatch.setattr(module, "EXIT_S", 60.0)
    monkeypatch.setattr(code, "_STARVED", 100)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Halve the import time of collection, the way ``torchrl_grpo.host.startup`` does.

    TorchRL imports vLLM for a wrapper of its own, and imports create a million objects, hardly any
    of which are garbage.
    """
    if session.config.getoption("numprocesses", None):  # the xdist controller
        return (yield)
    gc.disable()
    sys.modules["vllm"] = None  # type: ignore[assignment]
    try:
        import_module("torchrl.collectors")
    finally:
        del sys.modules["vllm"]
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """Let a test draw the same numbers whether or not its fixtures had to be made."""
    seed_all()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with the requirements that its folder's name implies, and sort the files."""
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in ("vllm", "ray", "gpu"):
            item.add_marker(folder)
        if item.get_closest_marker("vllm") and find_spec("vllm") is None:
            item.add_marker(pytest.mark.skip(reason="vllm is not installed"))
    # A parallel run ends sooner when long units start first. The cluster that tests share would
    # be in the way of runs that start their own.
    units = [unit_of(item.nodeid) for item in items]
    seconds: dict[str, float] = defaultdict(float)
    for path, limit in cpu.limits().items():
        seconds[unit_of(f"tests/{path}")] += limit
    order = sorted(
        range(len(items)),
        key=lambda i: (-seconds[units[i]], units[i], "ray_cluster" in items[i].fixturenames, i),
    )
    items[:] = [items[i] for i in order]


def unit_of(nodeid: str) -> str:
    """Return what one worker of a parallel run plays: a file, or a folder whose files share what
    is slow to start.
    """
    path = nodeid.partition("::")[0]
    return path.rpartition("/")[0] if path.startswith(("tests/ray/", "tests/vllm/")) else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule units instead of files."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    return Units(config, log)


def seed_all() -> None:
    """Seed what code without a generator of its own draws from."""
    import numpy as np
    import torch

    random.seed(SEED)
    np.random.seed(SEED)
    if torch.cuda.is_initialized():
        torch.manual_seed(SEED)
    torch.default_generator.manual_seed(SEED)  # manual_seed() looks for all kinds of devices


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give each test, and the fixtures that it is the first to need, the same random numbers in any
    order. Let Ray and vLLM start processes that already have the imports, see
    ``tests.support.forks``.
    """
    seed_all()
    if sys.platform == "linux" and {"vllm", "ray"} & {mark.name for mark in item.iter_markers()}:
        from tests.support import forks

        forks.start()


@pytest.fixture(scope="session", autouse=True)
def no_curves() -> Iterator[tuple[Callable[..., None], Callable[..., str]]]:
    """Write reports without curves: drawing them takes half the time of a run of a few steps.
    Returns the functions that draw.
    """
    from torchrl_grpo.extras.report.curves import panel_svg, save_png

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchrl_grpo.extras.report.curves.save_png", lambda *_: None)
        patch.setattr("torchrl_grpo.extras.report.curves.panel_svg", lambda *_: "")
        yield save_png, panel_svg


@pytest.fixture(scope="session", autouse=True)
def same_prompts() -> None:
    """Let all runs of the embedded task share one selection of prompts."""
    from tests.support import known_prompts

    known_prompts.keep()


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch, no_curves: tuple[Any, Any]) -> None:
    """Draw the curves of reports in this test."""
    save_png, panel_svg = no_curves
    monkeypatch.setattr("torchrl_grpo.extras.report.curves.save_png", save_png)
    monkeypatch.setattr("torchrl_grpo.extras.report.curves.panel_svg", panel_svg)


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Return a function that runs a script in this process, like ``run``, and returns its exit
    status.
    """
    from tests.support.configs import last_of_each

    handlers = logging.root.handlers[:]
    level = logging.root.level
    interrupt = signal.getsignal(signal.SIGINT)

    def run_here(script: Path, *arguments: str) -> int:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(script), *last_of_each(arguments)])
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    yield run_here
    signal.signal(signal.SIGINT, interrupt)  # a script's own would end this process without a word
    logging.root.handlers[:] = (
        handlers  # Hydra's handlers are bound to a stream that is closed after this test
    )
    logging.root.setLevel(level)
