"""Loading: names, tokenizers, vocabularies, LoRA, gradient checkpointing."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast

from tests.support.models import make_tiny_model
from torchrl_grpo.models import loading
from torchrl_grpo.models.scoring import TokenScorer


def test_an_unreachable_model_is_one_clear_error() -> None:
    with pytest.raises(
        ValueError, match=r"model\.name=nobody/nothing must be a folder or a model.*model\.name=starter"
    ):
        loading.load_config("nobody/nothing")
    with pytest.raises(ValueError, match=r"its tokenizer could not be loaded"):
        loading.load_tokenizer("nobody/nothing")


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


def test_parameters_are_counted_without_weights() -> None:
    model = make_tiny_model()
    assert loading.count_parameters(model.config) == sum(parameter.numel() for parameter in model.parameters())


def test_missing_pad_token_and_template_are_filled_in_and_said(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(loading.torchrl_logger, "info", said.append)
    monkeypatch.setattr(loading.torchrl_logger, "warning", said.append)
    bare = copy.deepcopy(tokenizer)
    bare.pad_token, bare.chat_template = None, None
    ready = loading.prepare_tokenizer(bare, "bare")
    assert len(said) == 2
    assert "no pad token: '<|end|>' is used" in said[0]
    assert "no chat template: prompts are the plain text" in said[1]
    assert ready.pad_token_id == ready.eos_token_id
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    assert ready.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == "Be brief.\n\n1+1?\n\n"


def test_the_plain_template_begins_with_the_models_first_token(tokenizer: PreTrainedTokenizerFast) -> None:
    bare = copy.deepcopy(tokenizer)
    bare.chat_template, bare.bos_token = None, "<|system|>"
    ready = loading.prepare_tokenizer(bare, "bare")
    assert ready.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<|system|>hi\n\n"


def test_a_given_template_is_used_and_a_file_is_read(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    template = "{{ messages[0]['content'] }}!"
    (tmp_path / "chat.jinja").write_text(template)
    for given in (template, str(tmp_path / "chat.jinja")):
        ready = loading.prepare_tokenizer(copy.deepcopy(tokenizer), "x", given)
        assert ready.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"


def test_adapters_of_modules_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match=r"train_model\.lora\.target_modules=\['foo'\] must name modules of the model"):
        loading.add_lora(make_tiny_model(), r=2, alpha=4, target_modules=["foo"])


def test_a_tokenizer_without_end_of_sequence_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    bare = copy.deepcopy(tokenizer)
    bare.eos_token = None
    with pytest.raises(ValueError, match="eos_token is None: responses could never end; set eos_token"):
        loading.prepare_tokenizer(bare, "bare")


def test_a_tokenizer_larger_than_the_model_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    loading.check_vocabulary(make_tiny_model(vocab_size=300).config, tokenizer, "ok")
    with pytest.raises(ValueError, match="has 100 entries and the tokenizer's 261"):
        loading.check_vocabulary(make_tiny_model(vocab_size=100).config, tokenizer, "bad")


def test_stop_tokens_are_eos_generation_config_and_end_of_turn(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    assert loading.stop_token_ids(tokenizer) == (1,)
    other = copy.deepcopy(tokenizer)
    other.eos_token = "<|pad|>"  # a base model's eos is often not what its template ends a turn with
    assert loading.stop_token_ids(other) == (0, 1)
    assert loading.stop_token_ids(tokenizer, GenerationConfig(eos_token_id=[1, 7])) == (1, 7)


def test_gradient_checkpointing_in_eval_mode_keeps_dropout_off() -> None:
    """Hugging Face switches it off in eval mode; this counts how often a layer really runs."""
    tokens, mask = torch.randint(0, 261, (2, 8)), torch.ones(2, 8, dtype=torch.bool)

    def run(checkpointing: bool) -> tuple[int, dict[str, torch.Tensor]]:
        model = make_tiny_model(attention_dropout=0.5)
        if checkpointing:
            assert loading.enable_gradient_checkpointing(model) == 2
        calls = 0

        def count(*_: object) -> None:
            nonlocal calls
            calls += 1

        model.model.layers[0].self_attn.register_forward_pre_hook(count)
        TokenScorer(model).score(tokens, mask)[0].sum().backward()
        return calls, {name: parameter.grad for name, parameter in model.named_parameters()}

    plain_calls, plain = run(False)
    calls, grads = run(True)
    assert (plain_calls, calls) == (1, 2)
    for name, value in plain.items():
        torch.testing.assert_close(grads[name], value)


def test_gradient_checkpointing_works_with_lora() -> None:
    model = loading.add_lora(make_tiny_model(attention_dropout=0.5), r=2, alpha=4)
    assert loading.enable_gradient_checkpointing(model) == 2
    scorer = TokenScorer(model)
    tokens, mask = torch.randint(0, 261, (2, 8)), torch.ones(2, 8, dtype=torch.bool)
    first, _ = scorer.score(tokens, mask)
    first.sum().backward()
    gradients = [parameter.grad for name, parameter in model.named_parameters() if "lora_B" in name]
    assert gradients and all(gradient is not None and gradient.abs().max() > 0 for gradient in gradients)
    torch.testing.assert_close(scorer.score(tokens, mask)[0], first)  # dropout is off
