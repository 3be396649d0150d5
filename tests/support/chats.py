"""Chat templates of several model families, written from their documentation, each with a small
tokenizer of the family's kind that is trained here and has the family's control tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "Add the two numbers and give the sum. The tool's result is 12; try again, the answer is wrong.",
    "system user assistant tool ipython model function results [INST] [/INST] <|im_start|> <end_of_turn> <think>",
    '{"name": "add", "arguments": {"a": 1, "b": 2}, "content": "5\\n"} def f(x):\n    return x < 3\n\n',
]

GENERATE = "{% if add_generation_prompt %}"

LLAMA_3 = (
    "{{ bos_token }}{% set first = messages[0] if messages[0].role == 'system' %}"
    "{% set rest = messages[1:] if first else messages %}<|start_header_id|>system<|end_header_id|>\n\n"
    "{% if tools %}Environment: ipython\n{% endif %}Cutting Knowledge Date: December 2023\n\n"
    "{{ first.content | trim if first else '' }}<|eot_id|>"
    "{% for m in rest %}{% if tools and m.role == 'user' and loop.first %}"
    "<|start_header_id|>user<|end_header_id|>\n\n{% for t in tools %}{{ t | tojson(indent=4) }}\n\n{% endfor %}"
    "{{ m.content | trim }}<|eot_id|>"
    "{% elif m.role in ('tool', 'ipython') %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{% if m.content is mapping or m.content is iterable %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}"
    "<|eot_id|>{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endif %}{% endfor %}"
    + GENERATE
    + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
QWEN_2 = (
    "{% set first = messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.' %}"
    "<|im_start|>system\n{{ first }}{% if tools %}{{ '\n\n' }}# Tools\n\n<tools>{% for t in tools %}\n{{ t | tojson }}"
    "{% endfor %}\n</tools>\n\nCall one within <tool_call></tool_call>.{% endif %}<|im_end|>\n"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif not (loop.first and m.role == 'system') %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}" + GENERATE + "<|im_start|>assistant\n{% endif %}"
)
QWEN_3 = (
    "{% if tools %}<|im_start|>system\n# Tools\n\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools>"
    "<|im_end|>\n{% endif %}{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' and not ("
    "m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif m.role == 'assistant' %}{% set said = m.content %}{% set thought = '' %}{% if '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ said }}<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    + GENERATE
    + "<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
MISTRAL = (
    "{% set first = messages[0].content if messages[0].role == 'system' %}"
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {% if loop.last and first %}{{ first }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% for m in (messages[1:] if first else messages) %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n{{ first if loop.first }}{{ m.content | trim }}"
    "<end_of_turn>\n{% endfor %}" + GENERATE + "<start_of_turn>model\n{% endif %}"
)
PHI_3 = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}<|{{ m.role }}|>\n{{ m.content }}<|end|>"
    "{{ '\n' }}{% else %}<|user|>\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
PHI_4 = (
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}<|im_sep|>{{ m.content }}<|im_end|>"
    "{% endfor %}" + GENERATE + "<|im_start|>assistant<|im_sep|>{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}<\uff5cUser\uff5c>{{ m.content }}"
    "{% elif m.role == 'tool' %}<\uff5ctool\u2581output\u2581begin\uff5c>{{ m.content }}"
    "<\uff5ctool\u2581output\u2581end\uff5c>"
    "{% else %}<\uff5cAssistant\uff5c>{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}{% endfor %}"
    + GENERATE
    + "<\uff5cAssistant\uff5c><think>\n{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.content }}\n{% endfor %}"


@dataclass(frozen=True)
class Family:
    """Chat template and tokens of a model family.

    Attributes:
        template: chat template.
        kind: type of the tokenizer: ``bytes`` (byte-level BPE), ``pieces`` (SentencePiece's BPE,
            with a space in front of a text), ``spaces`` (the same without that space) or
            ``unigram``.
        special: control tokens; the first one ends a sequence, the last one begins it if ``bos``.
        added: added tokens that are not marked as special.
        roles: tokens in ``added`` that the template writes around messages.
        bos: whether a sequence begins with the last of ``special``.
        strips: whether control tokens absorb the spaces after them, as Phi's do.
    """

    template: str
    kind: str
    special: tuple[str, ...]
    added: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    bos: bool = False
    strips: bool = False

    @property
    def control(self) -> tuple[str, ...]:
        return self.special + self.roles


THINK = ("<think>", "</think>")
CALLS = ("<tool_call>", "</tool_call>")
CHATML = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
RESPONSE = ("<tool_response>", "</tool_response>")
DEEP = tuple(
    f"<\uff5c{name}\uff5c>"
    for name in ("User", "Assistant", "tool\u2581output\u2581begin", "tool\u2581output\u2581end")
)
HEADERS = (
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
    "<|begin_of_text|>",
)
INST = (
    "[INST]",
    "[/INST]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
)

CHATS = {
    "llama-3.1": Family(LLAMA_3, "bytes", HEADERS, bos=True),
    "qwen-2.5": Family(QWEN_2, "bytes", CHATML, CALLS),
    "qwen-3": Family(QWEN_3, "bytes", CHATML, CALLS + THINK + RESPONSE, RESPONSE),
    "mistral": Family(MISTRAL, "pieces", ("</s>", *INST, "<unk>", "<s>"), bos=True),
    "mistral-nemo": Family(MISTRAL, "bytes", ("</s>", *INST, "<unk>", "<s>"), bos=True),
    "gemma": Family(
        GEMMA, "spaces", ("<eos>", "<start_of_turn>", "<end_of_turn>", "<unk>", "<bos>"), ("\n\n", "<h1>"), bos=True
    ),
    "phi-3": Family(
        PHI_3, "pieces", ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|endoftext|>"), strips=True
    ),
    "phi-4": Family(PHI_4, "bytes", (*CHATML, "<|im_sep|>"), strips=True),
    "deepseek-r1": Family(
        DEEPSEEK, "bytes", ("<\uff5cend\u2581of\u2581sentence\uff5c>", "<\uff5cbegin\u2581of\u2581sentence\uff5c>"),
        THINK + DEEP, DEEP, bos=True,
    ),
    "unigram": Family(PLAIN, "unigram", ("</s>", "<s>")),
}  # fmt: skip


@cache
def make_chat_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of a few hundred tokens with the family's control tokens and template."""
    family = CHATS[name]
    backend = _backend(family)
    backend.add_special_tokens(
        [
            AddedToken(text, rstrip=family.strips, special=True, normalized=False)
            for text in family.special
        ]
    )
    backend.add_tokens([AddedToken(text, normalized=False) for text in family.added])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=family.special[0],
        pad_token=family.special[0],
        bos_token=family.special[-1] if family.bos else None,
    )
    tokenizer.chat_template = family.template
    return tokenizer


def _backend(family: Family) -> Tokenizer:
    if family.kind == "unigram":
        backend = Tokenizer(models.Unigram())
        backend.normalizer = normalizers.NFKC()
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
        letters = sorted({*"".join(TEXTS), *map(chr, range(32, 127))})
        unigrams = trainers.UnigramTrainer(
            vocab_size=300,
            special_tokens=["<unk>", *family.special],
            unk_token="<unk>",
            initial_alphabet=letters,
        )
        backend.train_from_iterator(TEXTS, unigrams)
        return backend
    pieces: dict[str, Any] = (
        {} if family.kind == "bytes" else {"byte_fallback": True, "unk_token": "<unk>"}
    )
    backend = Tokenizer(models.BPE(**pieces))
    if family.kind == "bytes":
        words = pre_tokenizers.Split(
            Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"), "isolated"
        )
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        backend.decoder = decoders.ByteLevel()
        first = []
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        spaces = normalizers.Replace(" ", "\u2581")
        prefix = [normalizers.Prepend("\u2581")] if family.kind == "pieces" else []
        backend.normalizer = normalizers.Sequence([*prefix, spaces])
        plain = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence(plain)
        first, alphabet = (
            ["<unk>", *family.special, *(f"<0x{byte:02X}>" for byte in range(256))],
            [],
        )
    trainer = trainers.BpeTrainer(
        vocab_size=len(first) + len(alphabet) + 150, special_tokens=first, initial_alphabet=alphabet
    )
    backend.train_from_iterator(TEXTS, trainer)
    if family.kind == "bytes":
        return backend
    state = json.loads(
        backend.to_str()
    )  # the tokenizer's trainer made "<0x00>" an added token, which text could spell
    state["added_tokens"] = [
        token for token in state["added_tokens"] if not token["content"].startswith("<0x")
    ]
    return Tokenizer.from_str(json.dumps(state))
