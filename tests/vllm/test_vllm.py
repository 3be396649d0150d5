"""The real vLLM engine: its samples, its log-probs after weight updates, and its shutdown.

Two engines are started: one for the module, and one in a script of its own that is then killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import torchrl_grpo.generation.vllm as vllm_module
from tests.support.dialogs import log_prob_gap, tokens_between_turns
from tests.support.echo import EchoTask, add
from tests.support.envs import END
from tests.support.finished import assert_each_response_is_told_when_it_ends
from tests.support.models import make_llama, make_tiny_model, response_log_probs
from tests.support.processes import alive, shared_memory, socket_files, worker_processes
from tests.support.prompts import LONG_PROMPTS
from tests.support.stops import assert_stop_strings_end_responses
from tests.support.transferring import TRANSFERS, Receiver
from tests.support.weights import mismatch
from torchrl_grpo import keys
from torchrl_grpo.collectors import RolloutCollector
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.generation.vllm import VLLMEngine, engine_arguments
from torchrl_grpo.integrations.agents import WithAgent
from torchrl_grpo.integrations.agents.programs import Function
from torchrl_grpo.models.rows import Rows
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.starter import starter_path
from torchrl_grpo.tasks.conversations import WithRetry, WithTools
from torchrl_grpo.tools import Toolbox, ToolCall
from torchrl_grpo.weights import named_weights

CONTEXT = 512


ROUNDING = 1e-4


def make_model(seed: int = 0, **overrides: object) -> torch.nn.Module:
    """Return a model with head size 32, the smallest that vLLM runs on a CPU."""
    return make_tiny_model(seed, **({"hidden_size": 128, "initializer_range": 0.1} | overrides))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMEngine]:
    folder = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    environ = dict(os.environ)
    threads = torch.get_num_threads()
    set_threads = torch.set_num_threads
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_module, "WORKER_EXTENSION", "tests.support.transfers.Extension")
        engine = VLLMEngine(
            str(folder),
            max_model_len=CONTEXT,
            enforce_eager=True,
            kv_cache_gib=0.25,
            enable_sleep=True,
        )
    assert dict(os.environ) == environ
    assert (torch.get_num_threads(), torch.set_num_threads) == (threads, set_threads)
    assert not torch.distributed.is_initialized()
    yield engine
    engine.close()


class TestEngine:
    def test_log_probs_are_the_trainer_s_after_each_of_six_updates(self, engine):
        models = [make_model(seed) for seed in range(1, 7)]
        gaps, stale = [], []
        for version, model in enumerate(models, start=1):
            engine.update_weights(named_weights(model), version)
            assert engine.policy_version == version
            for temperature in (1.0, 0.7):
                params = SamplingParams(max_new_tokens=24, temperature=temperature)
                groups = engine.generate(LONG_PROMPTS, 8, params)
                assert [len(group) for group in groups] == [8, 8]
                for prompt, group in zip(LONG_PROMPTS, groups, strict=True):
                    full = [torch.cat([prompt, done.tokens]) for done in group]
                    sampled = torch.cat([done.log_probs for done in group])
                    for which, rows in ((model, gaps), (models[version - 2], stale)):
                        expected = response_log_probs(which, temperature)(
                            full, [len(prompt)] * len(full)
                        )
                        rows.append((sampled - torch.cat(expected)).abs().max().item())
        print(
            f"largest |engine - HF| over {len(gaps)} groups: {max(gaps):.2e}; against stale weights: {min(stale):.2f}"
        )
        assert max(gaps) < ROUNDING
        assert min(stale) > 0.5

    def test_each_response_is_told_when_it_ends(self, engine):
        engine.seed(0)
        assert_each_response_is_told_when_it_ends(engine, LONG_PROMPTS, tuple(range(2, 30)))

    def test_stop_strings_end_responses(self, engine):
        assert_stop_strings_end_responses(engine, LONG_PROMPTS)

    def test_log_probs_of_dialogs_with_tools_are_of_one_forward_pass(self, engine, tokenizer):
        """Each of three turns is followed by a tool or the user, and the engine has the earlier
        turns in its cache.
        """

        def calls(text: str) -> list[ToolCall]:
            return [ToolCall("add", {"a": len(text), "b": 1})] if len(text) % 2 else []

        model = make_model(3)
        engine.update_weights(named_weights(model), 3)
        engine.seed(0)
        task = WithRetry(WithTools(EchoTask(), Toolbox([add], calls)), "Wrong. Try again.")
        env = LLMEnv(task, tokenizer, num_envs=8, repeats=4, max_turns=3)
        policy = GenerationPolicy(engine, SamplingParams(16, stop_token_ids=(END, *range(40, 70))))
        batch = RolloutCollector(env, policy).rollout()
        between = tokens_between_turns(batch)
        assert (
            len(set(between)) > 3 and max(between) > 30
        )  # tools and users replied, twice in some dialogs
        assert log_prob_gap(batch, model) < ROUNDING

    def test_log_probs_of_an_agent_that_compacts_are_the_model_s(self, engine, tokenizer):
        pytest.importorskip("openai")

        async def play(client, problem):
            chat = [{"role": "user", "content": problem["prompt"]}]
            answer = await client.chat.completions.create(model="policy", messages=chat)
            chat += [answer.choices[0].message, {"role": "user", "content": "again"}]
            await client.chat.completions.create(model="policy", messages=chat, max_tokens=5)
            await client.chat.completions.create(model="policy", messages=chat[-1:], stop="e")
            return 1.0

        model = make_model(3)
        engine.update_weights(named_weights(model), 3)
        env = LLMEnv(
            WithAgent(EchoTask(), Function(play)), tokenizer, num_envs=8, repeats=4, max_turns=3
        )
        policy = GenerationPolicy(engine, SamplingParams(16, stop_token_ids=(END, *range(40, 70))))
        batch = RolloutCollector(env, policy).rollout()
        assert [int(row[keys.DONE]) for row in batch.unbind(0)] == [0, 1] * 8
        assert batch[keys.REWARD_VALID].all()
        assert batch[keys.REWARD].sum() == 8
        assert log_prob_gap(batch, model) < ROUNDING

    def test_log_probs_after_top_p_and_top_k_are_of_what_is_left(self, engine):
        model = make_model(1)
        engine.update_weights(named_weights(model), 1)
        prompt = LONG_PROMPTS[0][:20]
        for done in engine.generate([prompt], 8, SamplingParams(max_new_tokens=16, top_k=3))[0]:
            logits = (
                model(torch.cat([prompt, done.tokens])[None])
                .logits[0, len(prompt) - 1 : -1]
                .double()
            )
            top = logits.topk(3)
            assert (top.indices == done.tokens[:, None]).any(1).all()
            expected = top.values.log_softmax(-1)[top.indices == done.tokens[:, None]]
            torch.testing.assert_close(
                done.log_probs.double(), expected.detach(), rtol=0, atol=ROUNDING
            )
        for done in engine.generate([prompt], 8, SamplingParams(max_new_tokens=16, top_p=0.5))[0]:
            logits = (
                model(torch.cat([prompt, done.tokens])[None])
                .logits[0, len(prompt) - 1 : -1]
                .double()
            )
            probs, order = logits.softmax(-1).sort(descending=True)
            kept = torch.where(probs.cumsum(-1) - probs < 0.5, probs, 0)
            expected = (kept / kept.sum(-1, keepdim=True)).log()[order == done.tokens[:, None]]
            torch.testing.assert_close(
                done.log_probs.double(), expected.detach(), rtol=0, atol=ROUNDING
            )

    def test_trainer_and_engine_have_the_log_probs_of_the_kept_tokens(self, engine):
        model = make_model(1)
        engine.update_weights(named_weights(model), 1)
        params = SamplingParams(
            16, temperature=0.8, top_k=12, top_p=0.9, min_p=0.01, return_kept=True,
            return_kept_log_probs=True,
        )  # fmt: skip
        prompts = [LONG_PROMPTS[0][:20], LONG_PROMPTS[1][:9]]
        scorer = TokenScorer(model, temperature=0.8)
        narrower = 0
        for prompt, group in zip(prompts, engine.generate(prompts, 4, params), strict=True):
            for done in group:
                tokens = torch.cat([prompt, done.tokens])[None]
                assert done.kept.shape == (len(done.tokens), 12)
                mask = torch.arange(tokens.shape[1])[None] >= len(prompt)
                layout = scorer.layout(Rows.from_padded(tokens, mask))
                scores = scorer.score_rows(layout, {keys.KEPT: done.kept})["log_prob"].detach()
                torch.testing.assert_close(scores, done.log_probs, rtol=0, atol=ROUNDING)
                logits = model(tokens).logits[0, len(prompt) - 1 : -1].detach()
                parts = (done.kept.tolist(), done.kept_log_probs, logits)
                for ids, of_kept, row in zip(*parts, strict=True):
                    kept = [token for token in ids if token >= 0]
                    best = row.topk(len(kept))
                    assert kept == best.indices.tolist()
                    expected = (best.values / 0.8).log_softmax(-1)
                    log_probs = of_kept[: len(kept)]
                    torch.testing.assert_close(log_probs, expected, rtol=0, atol=ROUNDING)
                    assert of_kept[len(kept) :].isneginf().all()
                    narrower += len(kept) < 12
        assert narrower  # by top_p or min_p

    def test_greedy_takes_the_argmax_with_log_probs_of_temperature_one(self, engine):
        model = make_model(2)
        engine.update_weights(named_weights(model), 2)
        prompt = LONG_PROMPTS[1][:30]
        (group,) = engine.generate(
            [prompt], 4, SamplingParams(max_new_tokens=12, temperature=0, top_k=2)
        )
        assert len(group) == 4
        for done in group:
            log_probs = (
                model(torch.cat([prompt, done.tokens])[None])
                .logits[0, len(prompt) - 1 : -1]
                .log_softmax(-1)
            )
            best = log_probs.max(-1)
            assert torch.equal(done.tokens, best.indices)
            torch.testing.assert_close(done.log_probs, best.values.detach(), rtol=0, atol=ROUNDING)
        assert group[0].tokens.data_ptr() != group[1].tokens.data_ptr()

    def test_stop_token_ends_a_response_and_is_part_of_it(self, engine):
        stops = tuple(range(5, 100))
        params = SamplingParams(max_new_tokens=20, stop_token_ids=stops)
        group = [done for group in engine.generate(LONG_PROMPTS, 16, params) for done in group]
        assert any(done.finish_reason == "stop" for done in group)
        for done in group:
            hits = torch.isin(done.tokens, torch.tensor(stops))
            assert not hits[:-1].any()
            assert hits[-1] == (done.finish_reason == "stop")
            assert done.finish_reason == "stop" or len(done.tokens) == 20
            assert done.tokens.dtype == torch.int64 and done.log_probs.dtype == torch.float32
            assert done.tokens.shape == done.log_probs.shape

    def test_eos_of_the_checkpoint_ends_a_response_only_when_asked_to(self, engine):
        weights = dict(named_weights(make_model(1)))
        head = (
            weights["model.embed_tokens.weight"] * 0
        )  # all logits 0: each of 261 tokens is as likely as eos (1)
        engine.update_weights((weights | {"model.embed_tokens.weight": head}).items(), 3)
        group = [
            d
            for g in engine.generate(LONG_PROMPTS, 32, SamplingParams(max_new_tokens=40))
            for d in g
        ]
        assert all(len(done.tokens) == 40 and done.finish_reason == "length" for done in group)
        assert any((done.tokens == 1).any() for done in group)
        for done in group:
            torch.testing.assert_close(
                done.log_probs, torch.full((40,), 1 / 261).log(), rtol=0, atol=1e-5
            )

    def test_the_context_cuts_a_response_and_refuses_a_full_prompt(self, engine):
        prompt = torch.arange(CONTEXT - 3) % 200 + 5
        (group,) = engine.generate([prompt], 2, SamplingParams(max_new_tokens=50))
        assert [(len(done.tokens), done.finish_reason) for done in group] == [(3, "length")] * 2
        with pytest.raises(
            ValueError,
            match=r"context of 512 tokens, .* 512",
        ):
            engine.generate([torch.arange(CONTEXT) % 200], 2, SamplingParams(max_new_tokens=1))
        assert engine.generate([], 2, SamplingParams(max_new_tokens=1)) == []

    def test_seed_and_state_repeat_the_draws(self, engine):
        params = SamplingParams(max_new_tokens=16)

        def draw() -> list[list[int]]:
            return [
                done.tokens.tolist() for done in engine.generate([LONG_PROMPTS[0]], 8, params)[0]
            ]

        engine.seed(7)
        first = draw()
        state = engine.state_dict()
        second = draw()
        engine.load_state_dict(state)
        assert draw() == second != first
        engine.seed(7)
        assert draw() == first

    def test_bad_update_is_refused_and_leaves_weights_and_version(self, engine):
        model = make_model(4)
        engine.update_weights(named_weights(model), 4)
        other = dict(named_weights(make_model(5)))
        norm = other["model.norm.weight"]
        missing = {name: weight for name, weight in other.items() if name != "model.norm.weight"}
        for weights, message in [
            (missing, r"the 26 of Qwen2ForCausalLM.*1 missing \(model\.norm\.weight\)"),
            (other | {"model.extra": norm}, r"1 unknown \(model\.extra\)"),
            (
                other | {"model.norm.weight": norm[1:]},
                r"model\.norm\.weight \(127,\) instead of \(128,\)",
            ),
        ]:
            with pytest.raises(RuntimeError, match=message):
                engine.update_weights(weights.items(), 5)
            assert engine.policy_version == 4
        params = SamplingParams(max_new_tokens=8)
        assert mismatch(engine, response_log_probs(model), LONG_PROMPTS, params)[1] < ROUNDING

    def test_the_caller_may_change_its_tensors_once_the_update_returned(self, engine):
        model, copy = make_model(6), make_model(6)
        engine.update_weights(named_weights(copy), 6)
        with torch.no_grad():
            for weight in copy.parameters():
                weight.zero_()
        params = SamplingParams(max_new_tokens=8)
        assert mismatch(engine, response_log_probs(model), LONG_PROMPTS, params)[1] < ROUNDING

    @pytest.mark.parametrize("name", TRANSFERS)
    def test_weights_come_a_fast_way_or_through_the_host(self, name, engine, tmp_path, monkeypatch):
        receiver = Receiver(engine, make_model, tmp_path, monkeypatch, ROUNDING)
        receiver.forget()
        TRANSFERS[name](receiver)

    def test_its_processes_have_no_queue_or_socket_that_a_kill_could_leave(self, engine):
        named, nameless = shared_memory()
        assert named == [] and nameless
        assert socket_files() == []

    def test_close_ends_every_process_and_may_be_called_again(
        self, engine
    ):  # must be the last test: it closes the shared engine
        assert worker_processes()
        engine.close()
        engine.close()
        assert worker_processes() == []
        with pytest.raises(RuntimeError, match="closed"):
            engine.generate(LONG_PROMPTS, 1, SamplingParams(max_new_tokens=1))
        with pytest.raises(RuntimeError, match="closed"):
            engine.update_weights([], 9)


def test_on_an_accelerator_a_head_of_16_bits_gives_float32(monkeypatch):
    from vllm.platforms import current_platform

    for on_cpu, dtype, expected in (
        (True, "bfloat16", None),
        (False, "float32", None),
        (False, "bfloat16", "float32"),
    ):
        monkeypatch.setattr(type(current_platform), "is_cpu", lambda self, on_cpu=on_cpu: on_cpu)
        _, arguments = engine_arguments(str(starter_path()), {"dtype": dtype})
        assert arguments.get("hf_overrides", {}).get("head_dtype") == expected


def test_a_head_size_vllm_cannot_run_is_refused_before_it_starts(tmp_path):
    make_tiny_model().save_pretrained(tmp_path)  # head size 8
    with pytest.raises(ValueError, match=r"head sizes .* this model has 8"):
        VLLMEngine(str(tmp_path))
    assert worker_processes() == []


SCRIPT = """
import json, sys, torch
from tests.support.models import make_llama, response_log_probs
from tests.support.prompts import LONG_PROMPTS
from tests.support.weights import mismatch
from torchrl_grpo.collectors import RolloutCollector
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.generation.vllm import VLLMEngine
from torchrl_grpo.tasks.conversations import WithRetry, WithTools
from torchrl_grpo.tools import ToolCall, Toolbox
from torchrl_grpo.weights import named_weights

if __name__ == "__main__":
    import psutil
    engine = VLLMEngine(sys.argv[1], max_model_len=256, enforce_eager=True, kv_cache_gib=0.25)
    model = make_llama(1)
    engine.update_weights(named_weights(model), 1)
    gap = mismatch(engine, response_log_probs(model), LONG_PROMPTS, SamplingParams(max_new_tokens=16))
    pids = [child.pid for child in psutil.Process().children(recursive=True)]
    print(json.dumps({"gap": gap[1], "pids": pids}), flush=True)
    sys.stdin.read()
"""


@pytest.mark.nightly
def test_llama_runs_with_vllm_use_v1_0_and_a_kill_leaves_no_process(tmp_path: Path):
    make_llama(0).save_pretrained(tmp_path / "model")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = str(Path(__file__).resolve().parents[2])
    environ = os.environ | {"VLLM_USE_V1": "0", "PYTHONPATH": root}
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "model")],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith("{")), None)
        assert line is not None, "the script ended without a result"
        result = json.loads(line)
        process.kill()
    assert result["gap"] < ROUNDING
    assert alive(result["pids"]) == []
