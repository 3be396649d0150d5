"""Check vLLM's engine, eager and compiled: log-probs against the scorer, updates of the weights with
receipts, sleep, the prefix cache, stop strings, and tokens per second.

Prompts and responses are as many and as long as in the stage ``rollout``. On a CPU, weights go
through shared memory instead of CUDA IPC, and sleep frees nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from bench_rollout import make_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from gpu_stages.common import MEAN_GAP, Stage, log_prob_gaps
from tests.support.weights import Trained
from torchrl_grpo.errors import ReceiptError
from torchrl_grpo.generation import SamplingParams
from torchrl_grpo.generation.base import Completion
from torchrl_grpo.generation.stops import StopStrings
from torchrl_grpo.generation.vllm import LOG_FILE, VLLMEngine
from torchrl_grpo.weights import Transfer, make_sender, named_weights

LIBRARIES = (
    "_C_stable_libtorch",
    "_moe_C_stable_libtorch",
    "cumem_allocator",
    "vllm_flash_attn._vllm_fa3_C",
)
ALTERNATIVES: Mapping[str, tuple[dict[str, Any], dict[str, str]]] = {
    "defaults": ({}, {}),
    "attention in Triton": ({"attention_backend": "TRITON_ATTN"}, {}),
    "the head in the model's dtype": ({"hf_overrides": {"head_dtype": "model"}}, {}),
    "the older model runner": ({}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
}
"""Arguments and environment of an engine, tried in this order until one starts. A second engine
begins with those of the first.
"""
Load = Callable[[PreTrainedModel, int], None]
"""Loads a model's weights into the engine as a version."""
GROUP = 8


def main() -> None:
    """Run the stage."""
    stage = Stage()
    with stage.part("libraries") as figures:
        check_libraries(stage, figures)
    with TemporaryDirectory() as folder:
        first, second = (new_model(stage, seed) for seed in (0, 1))
        first.save_pretrained(folder)
        settings = "defaults"
        for eager in (True, False):
            check = EngineCheck(stage, "eager" if eager else "compiled", first, second, settings)
            check.run(folder, eager)
            settings = check.settings
    stage.end()


def new_model(stage: Stage, seed: int) -> PreTrainedModel:
    """Return a random model that differs with the seed."""
    model = make_model("tiny" if stage.is_rehearsal else "qwen05", stage.dtype, stage.device)
    generator = torch.Generator(stage.device).manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.1 if stage.is_rehearsal else 0.02, generator=generator)
    return model


def check_libraries(stage: Stage, figures: dict[str, Any]) -> None:
    """Load vLLM's libraries, and compare one of its kernels with PyTorch's."""
    figures["vllm"] = import_module("vllm").__version__
    for name in LIBRARIES:
        try:
            import_module(f"vllm.{name}")
            figures[name] = "loaded"
        except ImportError as error:
            figures[name] = str(error)[:200]
    if stage.is_rehearsal:
        return
    rows, weight = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((64, 896), (896,)))
    out = torch.empty_like(rows)
    torch.ops._C.rms_norm(out, rows, weight, 1e-6)
    expected = torch.nn.functional.rms_norm(rows, (896,), weight, 1e-6)
    figures["rms_norm differs by"] = (out - expected).abs().max().item()


class EngineCheck:
    """The parts with one engine.

    Args:
        stage: that they belong to.
        name: of the engine, before the names of its parts.
        first: the model that the engine starts with.
        second: another model of this shape.
        settings: the name in ``ALTERNATIVES`` to begin with; later, those that started.
    """

    def __init__(
        self,
        stage: Stage,
        name: str,
        first: PreTrainedModel,
        second: PreTrainedModel,
        settings: str,
    ) -> None:
        self.settings = settings
        self._stage, self._name = stage, name
        self._first, self._second = first, second
        self._version = 0
        length, self._new = (80, 16) if stage.is_rehearsal else (256, 256)
        generator = torch.Generator().manual_seed(0)
        vocabulary = first.config.vocab_size
        self._prompts = torch.randint(2, vocabulary, (GROUP, length), generator=generator).unbind()

    def run(self, folder: str, eager: bool) -> None:
        """Start the engine, check it and close it."""
        engine: VLLMEngine | None = None
        with self._part("start") as figures:
            engine = self._start(folder, eager, figures)
        if engine is None:
            return
        self._engine = engine
        parts: dict[str, Callable[[dict[str, Any]], None]] = {
            "log-probs": self._log_probs,
            "update": self._update,
            "update by CUDA IPC, same process": self._update_from_here,
            "sleep": self._sleep,
            "prefix cache": self._prefix_cache,
            "stop strings": self._stop_strings,
        }
        if eager:
            parts["update by CUDA IPC, buffers"] = self._update_from_buffers
        for name, check in parts.items():
            with self._part(name) as figures:
                check(figures)
        with self._part("close"):
            engine.close()

    def _part(self, name: str) -> Any:
        return self._stage.part(f"{self._name}: {name}")

    def _start(self, folder: str, eager: bool, figures: dict[str, Any]) -> VLLMEngine:
        """Return an engine with the first settings that start."""
        for name in dict.fromkeys((self.settings, *ALTERNATIVES)):
            arguments, environment = ALTERNATIVES[name]
            start = time.perf_counter()
            try:
                with mock.patch.dict(os.environ, environment):
                    engine = VLLMEngine(
                        folder,
                        dtype=str(self._stage.dtype).removeprefix("torch."),
                        max_model_len=128 if self._stage.is_rehearsal else 1024,
                        enforce_eager=eager,
                        gpu_memory_utilization=0.3,
                        kv_cache_gib=0.25,
                        enable_sleep=True,
                        log_file=str(Path(os.environ["TMPDIR"], LOG_FILE)),
                        engine_kwargs=arguments,
                    )
            except Exception as error:
                figures[f"{name} failed"] = f"{type(error).__name__}: {error}"[:500]
                continue
            figures |= {"settings": name, "start_s": time.perf_counter() - start}
            self.settings = name
            return engine
        raise RuntimeError("the engine started with none of the settings")

    def _groups(self, stop: StopStrings | None = None) -> list[list[Completion]]:
        params = SamplingParams(self._new, stop=stop)
        return self._engine.generate(self._prompts, GROUP, params)

    def _gap(self, model: PreTrainedModel, figures: dict[str, Any]) -> None:
        """Record the distance of new responses' log-probs from those of a model, and raise if it
        is too large.
        """
        gaps = log_prob_gaps(self._stage, model, self._prompts, self._groups())
        figures |= {"mean gap": gaps.mean().item(), "largest gap": gaps.max().item()}
        if not figures["mean gap"] < MEAN_GAP[self._stage.dtype]:
            raise RuntimeError(f"the log-probs are those of other weights: {figures}")

    def _log_probs(self, figures: dict[str, Any]) -> None:
        """Compare log-probs with the scorer's, and measure the throughput."""
        self._gap(self._first, figures)
        tokens = len(self._prompts) * GROUP * self._new
        figures["tokens_per_s"] = tokens / self._stage.seconds(self._groups, 2)

    def _next(self, load: Load, model: PreTrainedModel) -> float:
        """Load a model as the next version; return the seconds."""
        self._version += 1
        start = time.perf_counter()
        load(model, self._version)
        return time.perf_counter() - start

    def _digest(self) -> dict[str, int]:
        digest: dict[str, int] = self._engine._rpc("own")[0]
        return digest

    def _update_each(self, figures: dict[str, Any], load: Load) -> None:
        """Load the second model, the first and the second again; compare the weights with those
        that went through shared memory.
        """
        seconds = []
        for model in (self._second, self._first, self._second):
            seconds.append(self._next(load, model))
            figures["receipts_s"] = self._engine.receipt_s
            received = self._digest()
            self._engine.update_weights(named_weights(model), self._version)
            if received != self._digest():
                raise RuntimeError(f"other weights arrived than those of version {self._version}")
        figures["seconds"] = seconds
        self._gap(self._second, figures)

    def _update(self, figures: dict[str, Any]) -> None:
        """Update through shared memory, and check that the weights change with the model."""
        before = self._digest()
        figures["seconds"] = [
            self._next(self._load, model) for model in (self._first, self._second)
        ]
        if before == self._digest():
            raise RuntimeError("the update left the weights as they were")
        self._gap(self._second, figures)

    def _load(self, model: PreTrainedModel, version: int) -> None:
        self._engine.update_weights(named_weights(model), version)

    def _update_from_here(self, figures: dict[str, Any]) -> None:
        """Update from a trainer in this process."""
        sender = self._make_sender("direct_ipc", "direct")

        def load(model: PreTrainedModel, version: int) -> None:
            self._engine.load(sender.send(Trained(model), version), version)

        self._update_each(figures, load)

    def _update_from_buffers(self, figures: dict[str, Any]) -> None:
        """Update from buffers, as from a trainer in another process."""
        sender = self._make_sender("ipc", "object_store")

        def load(model: PreTrainedModel, version: int) -> None:
            self._engine.load(sender.send(Trained(model), version), version)
            sender.release(version)

        self._update_each(figures, load)
        handle = sender.send(Trained(self._first), self._version + 1)
        name = next(iter(handle.receipt))
        handle.note(receipt={**handle.receipt, name: handle.receipt[name] + 1})
        try:
            self._engine.load(handle, self._version + 1)
        except ReceiptError as error:
            figures["wrong receipt"] = str(error)[:200]
        else:
            raise RuntimeError("weights with another receipt than the sender's were accepted")
        finally:
            sender.release(self._version + 1)
            sender.close()
        self._next(self._load, self._second)

    def _make_sender(self, kind: str, on_cpu: str) -> Any:
        return make_sender(
            Transfer(on_cpu if self._stage.is_rehearsal else kind), dtype=self._stage.dtype
        )

    def _sleep(self, figures: dict[str, Any]) -> None:
        """Sleep with weights that only the engine has (level 1), and with weights that it can read
        again (level 2); check the weights after each.
        """
        sender = self._make_sender("direct_ipc", "direct")

        def load(model: PreTrainedModel, version: int) -> None:
            self._engine.load(sender.send(Trained(model), version), version)

        for level in (1, 2):
            self._next(self._load if level == 1 else load, self._second)
            before, free = self._digest(), self._free_gib()
            for name, method in (("sleep", self._engine.sleep), ("wake", self._engine.wake)):
                start = time.perf_counter()
                method()
                figures[f"level {level}, {name}_s"] = time.perf_counter() - start
                figures[f"level {level}, GiB free after {name}"] = self._free_gib() - free
            freed = figures[f"level {level}, GiB free after sleep"]
            if freed < 1 and not self._stage.is_rehearsal:
                raise RuntimeError(f"sleep of level {level} freed {freed:.2f} GiB")
            if before != self._digest():
                raise RuntimeError(f"other weights after sleep of level {level}")
            self._gap(self._second, figures)

    def _free_gib(self) -> float:
        if self._stage.is_rehearsal:
            return 0.0
        return torch.cuda.mem_get_info()[0] / 2**30

    def _prefix_cache(self, figures: dict[str, Any]) -> None:
        """Count the prompt tokens that a repeated request finds in the cache, before and after an
        update, which must drop them.
        """
        sampling = self._engine._sampling_params(len(self._prompts[0]), 1, SamplingParams(4))
        prompt = import_module("vllm").TokensPrompt(prompt_token_ids=self._prompts[0].tolist())

        def cached() -> int:
            [output] = self._engine._llm.generate([prompt], [sampling], use_tqdm=False)
            return output.num_cached_tokens or 0

        self._next(self._load, self._second)
        figures["cached tokens: first, again"] = first, again = cached(), cached()
        self._next(self._load, self._second)
        figures["cached tokens after an update"] = updated = cached()
        if not first == 0 < again or updated:
            raise RuntimeError(f"the cache does not follow the weights: {figures}")

    def _stop_strings(self, figures: dict[str, Any]) -> None:
        """End responses with each token whose text ends with "7;", a tenth of all."""
        stop = StopStrings(["7;"], word_tokenizer(self._first.config.vocab_size))
        ended = 0
        for done in chain(*self._groups(stop)):
            *before, last = (token % 10 == 7 for token in done.tokens.tolist())
            if any(before) or last != (done.finish_reason == "stop"):
                raise RuntimeError(f"a response goes on after its stop string: {done.tokens}")
            ended += last
        figures["responses ended"] = ended
        if ended < GROUP:
            raise RuntimeError("stop strings end too few responses")


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer in which the text of token 12 is "12;"."""
    words = {f"{token};": token for token in range(vocabulary)}
    backend = Tokenizer(models.WordLevel(words, unk_token="0;"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="0;")


if __name__ == "__main__":
    main()
