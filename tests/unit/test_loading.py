"""Loading: names, tokenizers, vocabularies, LoRA, gradient checkpointing."""

from __future__ import annotations

import copy
import json
import math
import ssl
import sys
import urllib.error
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    GenerationConfig,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tests.support.configs import compose_config
from tests.support.families import make_family
from tests.support.models import make_lora, make_tiny_model
from tests.support.ports import free_port
from torchrl_grpo.compat.transformers import attention_of
from torchrl_grpo.config import ConfigError
from torchrl_grpo.extras.hints import hub
from torchrl_grpo.extras.hints.models import check_models
from torchrl_grpo.generation import SamplingParams
from torchrl_grpo.models import loading
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.tasks.dataset import DatasetTask
from torchrl_grpo.weights import named_adapters


def test_an_unreachable_model_is_one_clear_error() -> None:
    with pytest.raises(
        ValueError,
        match=r"model\.name=nobody/nothing .*model\.name=starter",
    ):
        loading.load_config("nobody/nothing")
    with pytest.raises(ValueError, match=r"its tokenizer could not be loaded"):
        loading.load_tokenizer("nobody/nothing")


@pytest.mark.parametrize("name", ["models/llamma", "lama"])
def test_a_misspelled_folder_is_named_before_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("models/llama", "models/other", "llama"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    meant = Path(name).parent / "llama"
    with pytest.raises(
        ValueError, match=rf"model\.name={name} must .* hub .*: did you mean {meant}\?"
    ):
        loading.load_config(name)


def test_a_folder_of_adapters_is_told_from_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(
        ValueError,
        match=rf"with a complete model, .* model\.name=org/base .* train_model\.lora\.path={tmp_path}",
    ):
        loading.load_config(str(tmp_path))


def test_a_saved_model_loads_as_it_was(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = make_tiny_model()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = loading.load_model(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    assert not loaded.training
    tokens = torch.randint(0, 261, (1, 9))
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)
    assert loading.load_tokenizer(str(tmp_path)).chat_template == tokenizer.chat_template
    assert loading.load_config(str(tmp_path)).vocab_size == 261


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


def test_other_flash_kernels_are_sdpa_to_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    activated, attention = list[str](), torch.nn.attention
    monkeypatch.setattr(attention, "activate_flash_attention_impl", activated.append, raising=False)
    pretend_gpu(monkeypatch, (9, 0))
    make_tiny_model().save_pretrained(tmp_path)
    model = loading.load_model(
        str(tmp_path),
        dtype=torch.float32,
        device=torch.device("cpu"),
        attn_implementation="FA3",
    )
    planned: Any = loading.on_meta(model.config, "FA4")
    assert activated == ["FA3", "FA4"]
    assert [attention_of(each.config) for each in (model, planned)] == ["sdpa", "sdpa"]


@pytest.mark.parametrize(
    ("name", "capability", "problem"),
    [
        ("FA3", (10, 0), r"capability 9\.0 to 9\.x"),
        ("FA4", (8, 9), r"capability 9\.0 to 10\.x"),
        ("FA3", (9, 0), ""),
        ("FA4", (10, 0), ""),
    ],
)
def test_flash_kernels_are_refused_without_gpu_or_module(
    name: str, capability: tuple[int, int], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, capability)
    for module in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, None)
    message = rf"model\.attn_implementation={name} .*{problem}.*: use sdpa or eager"
    with pytest.raises(ValueError, match=message):
        loading.on_meta(make_tiny_model().config, name)


def test_parameters_are_counted_without_weights() -> None:
    model = make_tiny_model()
    assert loading.config_shape(model.config).parameters == sum(
        parameter.numel() for parameter in model.parameters()
    )


def test_missing_pad_token_and_template_are_filled_in_and_said(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(loading.torchrl_logger, "info", messages.append)
    monkeypatch.setattr(loading.torchrl_logger, "warning", messages.append)
    bare = copy.deepcopy(tokenizer)
    bare.pad_token, bare.chat_template = None, None
    ready = loading.prepare_tokenizer(bare, "bare")
    assert len(messages) == 2
    assert "no pad token: using '<|end|>'" in messages[0]
    assert "no chat template: prompts are the plain text" in messages[1]
    assert ready.pad_token_id == ready.eos_token_id
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    assert (
        ready.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        == "Be brief.\n\n1+1?\n\n"
    )


def test_the_plain_template_begins_with_the_models_first_token(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    bare = copy.deepcopy(tokenizer)
    bare.chat_template, bare.bos_token = None, "<|system|>"
    ready = loading.prepare_tokenizer(bare, "bare")
    assert (
        ready.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
        == "<|system|>hi\n\n"
    )


def test_a_given_template_is_used_and_a_file_is_read(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    template = "{{ messages[0]['content'] }}!"
    (tmp_path / "chat.jinja").write_text(template)
    for value in (template, str(tmp_path / "chat.jinja")):
        ready = loading.prepare_tokenizer(copy.deepcopy(tokenizer), "x", value)
        assert (
            ready.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"
        )


def test_adapters_of_modules_that_are_not_there_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"target_modules=\['foo'\] must name .*: use \[all-linear\]"
    ):
        loading.add_lora(make_tiny_model(), r=2, alpha=4, target_modules=["foo"])


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("qwen2", "embed_tokens"),  # tied to the head
        ("qwen2", "lm_head"),
        ("gpt2", "wte"),
        ("zamba2", "q_proj"),  # of blocks that share their weights
    ],
)
def test_adapters_that_a_user_of_the_weight_would_ignore_are_refused(
    kind: str, target: str
) -> None:
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2}
    more: dict[str, dict[str, Any]] = {
        "qwen2": {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True},
        "gpt2": {"n_head": 2},
        "zamba2": {
            "layers_block_type": ["hybrid", "hybrid", "mamba"],
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "n_mamba_heads": 2,
            "num_mem_blocks": 1,
        },
    }
    config = AutoConfig.for_model(kind, **sizes | more[kind])
    with pytest.raises(ValueError, match=r"train_model\.lora\.target_modules=.*users"):
        loading.config_shape(config, r=2, alpha=4, target_modules=[target])


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj"], "layers_to_transform": 0},
        {"target_modules": ["q_proj", "down_proj"], "rank_pattern": {"q_proj": 2}},
    ],
)
def test_training_continues_with_saved_adapters(settings: dict[str, Any], tmp_path: Path) -> None:
    saved = make_lora(use_rslora=True, alpha_pattern={"down_proj": 3}, **settings)
    saved.save_pretrained(tmp_path)
    model = loading.add_lora(make_tiny_model(), path=str(tmp_path))
    for mine, theirs in zip(named_adapters(model), named_adapters(saved), strict=True):
        assert mine[0] == theirs[0] and mine[1].scaling == theirs[1].scaling
        assert torch.equal(mine[1].a, theirs[1].a) and torch.equal(mine[1].b, theirs[1].b)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained and all(".lora_" in name for name in trained)


def change_settings(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("break_it", "why"),
    [
        (lambda folder: change_settings(folder, init_lora_weights="pissa"), "weights=pissa"),
        (lambda folder: change_settings(folder, peft_type="IA3"), "peft_type=IA3"),
        (lambda folder: change_settings(folder, r="x"), "r=x"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "peft's format.*No such file"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "28 tensors are missing"),
        (lambda folder: change_tensors(folder, lambda t: t.popitem()), "1 tensors are missing"),
        (
            lambda folder: change_tensors(
                folder, lambda t: t.update({"base.bias": t.popitem()[1]})
            ),
            r"2 tensors are missing.*base\.bias",
        ),
        (lambda folder: change_settings(folder, r=3), "of another shape"),
        (lambda folder: change_settings(folder, target_modules=["c_attn"]), "c_attn.*not found"),
        (lambda folder: change_settings(folder, lora_alpha="x"), "unsupported operand"),
        (
            lambda folder: change_tensors(
                folder, lambda t: next(iter(t.values())).fill_(torch.nan)
            ),
            "1 tensors are .*not finite",
        ),
    ],
)
def test_adapters_of_another_kind_or_model_are_refused(
    break_it: Callable[[Path], Any], why: str, tmp_path: Path
) -> None:
    """Before weights load, because the shapes of the run are counted first."""
    make_lora().save_pretrained(tmp_path)
    break_it(tmp_path)
    config = make_tiny_model().config
    with pytest.raises(ValueError, match=rf"train_model\.lora\.path={tmp_path} must .*{why}"):
        loading.config_shape(config, path=str(tmp_path))


def test_adapters_of_an_embedding_that_is_not_tied_are_accepted() -> None:
    config = AutoConfig.for_model("qwen2", vocab_size=40, hidden_size=32, num_hidden_layers=1)
    count = loading.config_shape(config, r=2, alpha=4, target_modules=["embed_tokens"]).adapted
    assert count == 40 + 32


def test_a_tokenizer_without_end_of_sequence_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    bare = copy.deepcopy(tokenizer)
    bare.eos_token = None
    with pytest.raises(ValueError, match=r"eos_token is None: .*set eos_token"):
        loading.prepare_tokenizer(bare, "bare")


def test_a_tokenizer_larger_than_the_model_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    loading.check_vocabulary(make_tiny_model(vocab_size=300).config, tokenizer, "ok")
    with pytest.raises(ValueError, match=r"model has 100 .*ids up to 260"):
        loading.check_vocabulary(make_tiny_model(vocab_size=100).config, tokenizer, "bad")


def test_an_added_token_without_an_embedding_is_refused_only_if_used(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    stray = copy.deepcopy(tokenizer)
    config = make_tiny_model().config
    stray.add_tokens(["<image_soft_token>"], special_tokens=True)  # like Gemma 3's tokenizer
    assert len(stray) == config.vocab_size + 1
    loading.check_vocabulary(config, stray, "gemma-3-1b")
    for change in ({"pad_token": "<image_soft_token>"}, {"chat_template": "<image_soft_token>0"}):
        used = copy.deepcopy(stray)
        for name, value in change.items():
            setattr(used, name, value)
        with pytest.raises(ValueError, match=r"model has 261 .*ids up to 261"):
            loading.check_vocabulary(config, used, "bad")


def test_stop_tokens_are_eos_generation_config_and_end_of_turn(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    assert loading.stop_token_ids(tokenizer) == (1,)
    other = copy.deepcopy(tokenizer)
    other.eos_token = "<|pad|>"  # a base model's eos often differs from its template's end of turn
    assert loading.stop_token_ids(other) == (0, 1)
    assert loading.stop_token_ids(tokenizer, GenerationConfig(eos_token_id=[1, 7])) == (1, 7)


@pytest.mark.parametrize("family", ["qwen2", "opt"])
def test_gradient_checkpointing_keeps_dropout_off(family: str) -> None:
    """Hugging Face disables checkpointing in eval mode, so this counts how often a layer runs; OPT's
    layer itself calls ``dropout(training=self.training)``.
    """
    tokens = torch.arange(3, 33).view(2, 15)
    mask = torch.ones_like(tokens, dtype=torch.bool)

    def run(checkpointing: bool) -> tuple[int, torch.Tensor, dict[str, torch.Tensor]]:
        model: Any = make_tiny_model(attention_dropout=0.5)
        if family == "opt":
            model = make_family("opt", dropout=0.5)
        if checkpointing:
            assert loading.enable_gradient_checkpointing(model) == 2
        calls = list[int]()
        layer = next(module for name, module in model.named_modules() if name.endswith("self_attn"))
        layer.register_forward_pre_hook(lambda *_: calls.append(1))
        scorer = TokenScorer(model)
        calls.clear()
        scores, _ = scorer.score(tokens, mask)
        scores.sum().backward()
        count = len(calls)
        assert torch.equal(scores, scorer.score(tokens, mask)[0])
        with torch.no_grad():
            torch.testing.assert_close(scorer.score(tokens, mask)[0], scores)
        return count, scores, {name: p.grad for name, p in model.named_parameters()}

    plain_calls, plain_scores, plain = run(False)
    calls, scores, grads = run(True)
    assert (plain_calls, calls) == (1, 2)
    torch.testing.assert_close(scores, plain_scores)
    for name, value in plain.items():
        torch.testing.assert_close(grads[name], value)


def test_gradient_checkpointing_works_with_lora() -> None:
    model = loading.add_lora(make_tiny_model(attention_dropout=0.5), r=2, alpha=4)
    assert loading.enable_gradient_checkpointing(model) == 2
    scorer = TokenScorer(model)
    tokens = torch.randint(0, 261, (2, 8))
    mask = torch.ones(2, 8, dtype=torch.bool)
    first, _ = scorer.score(tokens, mask)
    first.sum().backward()
    gradients = [parameter.grad for name, parameter in model.named_parameters() if "lora_B" in name]
    assert gradients and all(
        gradient is not None and gradient.abs().max() > 0 for gradient in gradients
    )
    torch.testing.assert_close(scorer.score(tokens, mask)[0], first)  # dropout is off


def load(folder: Path) -> PreTrainedModel:
    return loading.load_model(str(folder), dtype=torch.float32, device=torch.device("cpu"))


def test_weights_that_are_not_all_there_are_refused(tmp_path: Path) -> None:
    make_tiny_model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)

    def refused(weights: dict[str, torch.Tensor], message: str) -> None:
        save_file(weights, file, {"format": "pt"})
        with pytest.raises(
            ValueError,
            match=r"model\.name=.* 26 weights of Qwen2ForCausalLM, .*" + message,
        ):
            load(tmp_path)

    refused(
        {k: v for k, v in whole.items() if ".layers.1." not in k},
        r"12 are not in its files \(model\.layers\.1\.input",
    )
    short = {
        k: v[:, :5].contiguous() if "layers.1.mlp.down_proj" in k else v for k, v in whole.items()
    }
    refused(
        short,
        r"1 are of a different shape there \(model\.layers\.1\.mlp\.down_proj\.weight\): download",
    )
    whole["model.layers.0.mlp.up_proj.weight"][3, 4] = torch.nan
    whole["model.norm.weight"][0] = torch.inf
    refused(
        whole, r"2 are not finite \(model\.layers\.0\.mlp\.up_proj\.weight, model\.norm\.weight\)"
    )


@pytest.mark.parametrize("size", [50_000, 3])
def test_a_truncated_file_of_weights_is_one_clear_error(size: int, tmp_path: Path) -> None:
    make_tiny_model().save_pretrained(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(size)
    with pytest.raises(
        ValueError,
        match=r"model\.name=.* \(Error while deserializing",
    ):
        load(tmp_path)


def test_a_tied_head_may_be_missing_and_other_parts_may_be_there(tmp_path: Path) -> None:
    make_tiny_model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    assert "lm_head.weight" not in weights
    save_file(weights | {"visual.weight": torch.zeros(3)}, file, {"format": "pt"})
    assert load(tmp_path).lm_head.weight.isfinite().all()


def test_a_head_of_its_own_in_a_model_with_a_tied_head_is_refused(tmp_path: Path) -> None:
    """Transformers would train such a head, and vLLM would never receive it."""
    make_tiny_model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    head = weights["model.embed_tokens.weight"].clone()
    save_file({**weights, "lm_head.weight": head}, file, {"format": "pt"})
    load(tmp_path)
    save_file({**weights, "lm_head.weight": head + 1}, file, {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"model\.name=.*\(lm_head\.weight\).*tie_word_embeddings=false"
    ):
        load(tmp_path)


def test_mistral_s_own_tokenizer_format_is_left_aside(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """With mistral_common installed, transformers would load ``tekken.json`` for any Mistral model
    that has one.
    """
    pytest.importorskip("mistral_common")
    tokenizer.save_pretrained(tmp_path)
    MistralConfig(vocab_size=261).save_pretrained(tmp_path)
    (tmp_path / "tekken.json").write_text("{}")
    loaded = loading.load_tokenizer(str(tmp_path), chat_template="{{ messages[0]['content'] }}")
    assert loaded("hi")["input_ids"] == tokenizer("hi")["input_ids"]
    assert loaded.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


REMOTE_CODE = """
from transformers import PretrainedConfig, Qwen2Config, Qwen2ForCausalLM
class MineConfig(Qwen2Config):
    model_type = "mine"
class MineForCausalLM(Qwen2ForCausalLM):
    config_class = MineConfig
"""


def test_remote_code_runs_where_it_is_trusted_and_asks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a terminal was asked"))
    make_tiny_model().save_pretrained(tmp_path)
    (tmp_path / "mine.py").write_text(REMOTE_CODE)
    config = json.loads((tmp_path / "config.json").read_text())
    auto_map = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}
    config |= {"model_type": "mine", "architectures": ["MineForCausalLM"], "auto_map": auto_map}
    (tmp_path / "config.json").write_text(json.dumps(config))
    mine = loading.load_config(str(tmp_path), trust_remote_code=True)
    model = loading.load_model(
        str(tmp_path), dtype=torch.float32, device=torch.device("cpu"), trust_remote_code=True
    )
    assert type(model).__name__ == "MineForCausalLM"
    count = loading.config_shape(mine, trust_remote_code=True).parameters
    assert count == sum(parameter.numel() for parameter in model.parameters())
    with pytest.raises(ValueError, match="its config could not be loaded"):
        loading.load_config(str(tmp_path))


@pytest.mark.parametrize("temperature", [math.nan, math.inf, 1e-30, -0.5])
def test_a_temperature_that_breaks_the_logits_is_refused(temperature: float) -> None:
    with pytest.raises(
        ValueError,
        match=rf"temperature .*0\.01, got {temperature}: use",
    ):
        SamplingParams(4, temperature=temperature)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("/nope", "/ has no such folder: check the path"),
        ("./ther", "TMP has no such folder (did you mean there?)"),
        ("./runs/mine", "TMP has no such folder"),
        ("there/mine/model", "TMP/there has no such folder"),
        ("~/mine/model", "a shell does not expand ~ after a ="),
        ("file.gguf", "it is a file"),
        ("Qwen 2.5", "TMP has no such folder"),
    ],
)
def test_a_path_without_a_folder_is_said_to_be_none(
    name: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "file.gguf").touch()
    with pytest.raises(ValueError, match=r"^model\.name=.* must be a folder") as error:
        loading.load_config(name)
    assert f"{name} must" in str(error.value) and wrong.replace("TMP", str(tmp_path)) in str(
        error.value
    )
    assert "alphanumeric" not in str(error.value) and "Repo id" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("run", "use run/checkpoints/model."),
        ("run/checkpoints", "use run/checkpoints/model."),
        ("run/checkpoints/checkpoint_000002", "use run/checkpoints/model."),
        ("ended_early", "python -m torchrl_grpo export ended_early writes its model."),
        ("ended_early/checkpoints/checkpoint_000001", "python -m torchrl_grpo export"),
        ("trainer", "use trainer/checkpoint-20."),
    ],
)
def test_a_folder_of_a_run_names_the_model_to_use(
    name: str, use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in (
        "run/metrics.jsonl",
        "run/checkpoints/model/config.json",
        "run/checkpoints/checkpoint_000002/manifest.json",
        "ended_early/metrics.jsonl",
        "ended_early/checkpoints/checkpoint_000001/manifest.json",
        "trainer/checkpoint-10/config.json",
        "trainer/checkpoint-20/config.json",
    ):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).touch()
    with pytest.raises(ValueError) as error:
        loading.load_config(name)
    assert f"model.name={name} must be a folder with a complete model" in str(error.value)
    assert use in str(error.value)


@pytest.mark.parametrize("models", ["/no/m,starter", "starter,/no/m"])
def test_the_names_of_all_teachers_are_checked(models: str) -> None:
    first, second = models.split(",")
    entries = f"[{{model: {first}, datasets: [a]}}, {{model: {second}, datasets: [b]}}]"
    with pytest.raises(ConfigError, match=r"teacher\.model=/no/m must be a folder"):
        check_models(compose_config("algo=distill", f"teachers={entries}"))


def test_a_name_like_one_in_the_cache_is_suggested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--Qwen--Qwen2.5-0.5B-Instruct").mkdir()
    for name, close in {
        "Qwen/Qwen2.5-0.5B-Instrct": "Qwen/Qwen2.5-0.5B-Instruct",
        "starer": "starter",
    }.items():
        with pytest.raises(ValueError, match=rf"did you mean {close}\?"):
            loading.load_config(name)


def test_an_unreachable_hub_is_tried_once_and_then_only_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A port of this machine that nobody listens to stands in for a machine without a network."""
    port = free_port()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    hub.unreachable.cache_clear()
    snapshot = tmp_path / "models--org--cached" / "snapshots" / "abc"
    make_tiny_model().save_pretrained(snapshot)
    (tmp_path / "models--org--cached" / "refs").mkdir()
    (tmp_path / "models--org--cached" / "refs" / "main").write_text("abc")
    assert loading.load_config("org/cached").vocab_size == 261
    with pytest.raises(ValueError, match=r"org/other .*not in the cache, and .* cannot be reached"):
        loading.load_config("org/other")
    with pytest.raises(ValueError, match=r"env\.dataset=org/data .*cannot be reached"):
        DatasetTask("org/data").problems("train")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    (tmp_path / "Org___my_data-1").mkdir()  # as the datasets library names it
    hub.check_hub("Org/MyData-1", "dataset")
    [line] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert f"127.0.0.1:{port} cannot be reached (Connection refused)" in line.getMessage()
    assert constants.HF_HUB_OFFLINE and datasets.config.HF_HUB_OFFLINE
    hub.unreachable.cache_clear()


def test_a_hub_that_answers_or_refuses_its_certificate_is_in_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(error: Exception | None) -> str | None:
        def open_url(*_: object, **__: object) -> object:
            if error is not None:
                raise error
            return nullcontext()

        monkeypatch.setattr("urllib.request.urlopen", open_url)
        hub.unreachable.cache_clear()
        return hub.unreachable()

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    certificate = urllib.error.URLError(ssl.SSLCertVerificationError("self-signed"))
    status = urllib.error.HTTPError("url", 503, "busy", {}, None)  # type: ignore[arg-type]
    assert [answer(error) for error in (None, certificate, status)] == [None] * 3
    assert "cannot be reached (timed out)" in (answer(TimeoutError("timed out")) or "")
    hub.unreachable.cache_clear()


def test_further_arguments_change_the_model_on_every_rank(tmp_path: Path) -> None:
    make_tiny_model().save_pretrained(tmp_path)
    arguments = {"attention_dropout": 0.25, "disable_mmap": True}
    for device in ("cpu", "meta"):
        model = loading.load_model(
            str(tmp_path), dtype=torch.float32, device=torch.device(device), arguments=arguments
        )
        assert model.config.attention_dropout == 0.25
    assert loading.load_config(str(tmp_path), arguments=arguments).attention_dropout == 0.25
