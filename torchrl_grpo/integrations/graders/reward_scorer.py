"""The process of a reward model: it scores the conversations that wait for it in batches."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from torchrl_grpo.host.extras import load_extra
from torchrl_grpo.integrations.graders.reward_model import MAX_REQUEST_BYTES, is_own

_LENGTH_STEP = 32
_MAX_BATCH_TOKENS = 8192
"""Tokens of a batch, padding included."""
_MAX_SCORES = 2**16
"""Scores that the process remembers; the oldest are forgotten."""

Row = Sequence[int]
"""Tokens of a conversation."""


class RewardScorer:
    """Scores conversations in batches of similar length.

    A conversation is padded to a length that depends only on its own. So on a CPU its score by a
    decoder does not depend on its batch, to the bit; other models and devices round differently. A
    model whose scores change with padding scores one conversation at a time.

    Args:
        model: name on the hub, or folder.
        device: device of the model.

    Attributes:
        pads: whether padding changes no score.

    Raises:
        ValueError: the model has several outputs.
    """

    def __init__(self, model: str, device: str) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()  # a reward worker shares the run's terminal
        self.name, self.device = model, device
        classifier = AutoModelForSequenceClassification.from_pretrained(model, use_safetensors=True)
        self._classifier: Any = classifier.eval().to(device)
        self._config = classifier.config.get_text_config()
        if classifier.config.num_labels != 1:
            raise ValueError(
                f"model={model} of the reward reward_model must have one output, but it has "
                f"{classifier.config.num_labels}: use a reward model, with num_labels=1."
            )
        self._limit: int = max(0, getattr(self._config, "max_position_embeddings", None) or 0)
        self._pad = self._config.pad_token_id
        self._eps = torch.finfo(classifier.dtype).eps
        self.pads = self._check_padding()

    def tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of a conversation.

        Raises:
            ValueError: there are none, or too many for the model, or its chat template leaves out a
                message.
        """
        tokens = conversation_tokens(messages, self.name)
        limit = self._limit or len(tokens)
        if not 0 < len(tokens) <= limit:
            raise ValueError(
                f"a conversation for the reward model {self.name} must have at most {limit} tokens, "
                f"but it has {len(tokens)}: use a smaller max_new_tokens, or another model."
            )
        return tokens

    def batches(self, rows: Sequence[Row]) -> list[list[int]]:
        """Return the indices of rows to score together, the shortest rows first."""
        if not self.pads:
            return [[index] for index in range(len(rows))]
        shapes = [(self._padded(len(row)), self._padded(len(row)) == len(row)) for row in rows]
        batches = []
        for (length, _), indices in groupby(
            sorted(range(len(rows)), key=shapes.__getitem__), shapes.__getitem__
        ):
            members, size = list(indices), max(1, _MAX_BATCH_TOKENS // length)
            batches += [members[i : i + size] for i in range(0, len(members), size)]
        return batches

    def score(self, rows: Sequence[Row]) -> list[float | Exception]:
        """Return the logit of each row of a batch, or its error. If the batch fails, its rows are
        scored one by one.
        """
        length = max(map(len, rows))
        try:
            return [*self._logits(rows, self._padded(length) if self.pads else length)]
        except Exception:
            if rows[1:]:
                return [result for row in rows for result in self.score([row])]
        try:
            return [*self._logits(rows, length)]
        except Exception as error:
            return [error]

    def _padded(self, length: int) -> int:
        """Return the length of a padded row. There is at least one pad, because models compute rows
        without padding differently.
        """
        padded = (length // _LENGTH_STEP + 1) * _LENGTH_STEP
        return min(padded, self._limit or padded)

    def _logits(self, rows: Sequence[Row], length: int) -> list[float]:
        import torch

        pad = self._pad
        if pad is None:  # the classifier reads the last token that is not a pad
            used = set().union(*rows)
            pad = next(token for token in range(len(used) + 1) if token not in used)
            self._config.pad_token_id = pad if length > min(map(len, rows)) else None
        ids = torch.full((len(rows), length), pad)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
            mask[number, : len(row)] = 1
        with torch.inference_mode():
            logits = self._classifier(
                input_ids=ids.to(self.device), attention_mask=mask.to(self.device)
            ).logits
        return logits.flatten().tolist()

    def _check_padding(self) -> bool:
        """Return whether padded rows get the scores that they have alone."""
        tokens = [token for token in range(self._config.vocab_size) if token != self._pad]
        rows = [(tokens * _LENGTH_STEP)[:size] for size in (3, _LENGTH_STEP - 2)]
        try:
            together = self._logits(rows, self._padded(len(rows[1])))
            alone = [self._logits([row], len(row))[0] for row in rows]
        except Exception:
            return False
        tolerance = self._eps**0.5
        return all(
            abs(a - b) <= tolerance * (1 + abs(b)) for a, b in zip(together, alone, strict=True)
        )


class _Server:
    """Answers requests: a number and a conversation as a line of JSON, in any order."""

    def __init__(self, model: str, device: str) -> None:
        self._loading = asyncio.ensure_future(asyncio.to_thread(RewardScorer, model, device))
        self._scores: dict[bytes, asyncio.Future[float]] = {}
        self._waiting: list[tuple[bytes, Row]] = []
        self._scoring: asyncio.Future[None] | None = None
        self._clients = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a client; end the process after its last client."""
        self._clients += 1
        tasks = set()
        try:
            while is_own(writer.get_extra_info("socket")) and (line := await reader.readline()):
                tasks.add(task := asyncio.ensure_future(self._answer(line, writer)))
                task.add_done_callback(tasks.discard)
        except (OSError, ValueError):  # the client died, or sent too long a line
            pass
        writer.close()
        self._clients -= 1
        if not self._clients:
            os._exit(0)

    async def _answer(self, line: bytes, writer: asyncio.StreamWriter) -> None:
        number, messages = json.loads(line)
        answer: list[Any] = [0.0, None, None]
        try:
            scorer = await asyncio.shield(self._loading)
            if messages is not None:
                answer[0] = await self._score(scorer, scorer.tokens(messages))
        except Exception as error:
            answer = [None, type(error).__name__, f"{error}" or repr(error)]
        writer.write(f"{json.dumps([number, *answer])}\n".encode())

    async def _score(self, scorer: RewardScorer, tokens: Row) -> float:
        """Return the score of a conversation; equal ones are scored once."""
        key = hashlib.sha256(repr(tokens).encode()).digest()
        if key not in self._scores:
            self._scores[key] = asyncio.get_running_loop().create_future()
            self._waiting.append((key, tokens))
            if self._scoring is None:
                self._scoring = asyncio.ensure_future(self._score_waiting(scorer))
        future = self._scores[key]
        try:
            return await asyncio.shield(future)
        except Exception:
            self._scores.pop(key, None)
            raise

    async def _score_waiting(self, scorer: RewardScorer) -> None:
        """Score all that waits, then all that came meanwhile."""
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            for indices in scorer.batches([row for _, row in waiting]):
                batch = [waiting[index] for index in indices]
                results = await asyncio.to_thread(scorer.score, [row for _, row in batch])
                for (key, _), result in zip(batch, results, strict=True):
                    if isinstance(result, Exception):
                        self._scores[key].set_exception(result)
                    else:
                        self._scores[key].set_result(result)
            for key in list(self._scores)[: max(0, len(self._scores) - _MAX_SCORES)]:
                if self._scores[key].done():
                    del self._scores[key]
        self._scoring = None


def serve(fd: int, model: str, device: str) -> None:
    """Run the process until its last client disconnects.

    Args:
        fd: listening socket, to which the process that started this one has already connected.
        model: see ``RewardScorer``.
        device: see ``RewardScorer``.
    """

    async def run() -> None:
        server = await asyncio.start_unix_server(
            _Server(model, device).serve, sock=socket.socket(fileno=fd), limit=MAX_REQUEST_BYTES
        )
        await server.serve_forever()

    asyncio.run(run())


def check_reward_model(messages: Sequence[Mapping[str, Any]], model: str, **_: Any) -> None:
    """Check that a reward model's chat template writes a prompt and a response. Only its tokenizer
    is read.

    Raises:
        ValueError: it leaves out a message, or there is no tokenizer.
    """
    try:
        conversation_tokens([*messages, {"role": "assistant", "content": "?"}], model)
    except OSError as error:
        raise ValueError(
            f"model={model} of the reward reward_model must have a tokenizer that can be read, but "
            f"it cannot ({str(error).partition(chr(10))[0]:.200}): fix the name."
        ) from error


def conversation_tokens(messages: Sequence[Mapping[str, Any]], model: str) -> list[int]:
    """Return a conversation's tokens for a reward model.

    Raises:
        ValueError: the model's chat template leaves out a message.
    """
    tokenizer, chats = _reader(model)
    if chats is None:
        text = "\n\n".join(str(message["content"]) for message in messages)
        return list(tokenizer(text, split_special_tokens=True)["input_ids"])
    try:
        return list(chats.tokens(messages))
    except ValueError as error:
        message = str(error).replace("model.chat_template=", "its chat template ")
        raise ValueError(f"model={model} of the reward reward_model: {message}") from error


@cache
def _reader(model: str) -> tuple[Any, Any]:
    """Return a reward model's tokenizer, and its encoder of chats if it has a template."""
    from transformers import AutoTokenizer

    from torchrl_grpo.chat.template import ChatEncoder

    if not Path(model).exists():
        load_extra("check_hub")(model, "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    return tokenizer, ChatEncoder(tokenizer, {}) if tokenizer.chat_template else None
