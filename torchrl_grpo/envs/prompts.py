"""``Prompts``: the problems of a split as token prompts. It does not draw problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrl import torchrl_logger
from transformers import PreTrainedTokenizerBase

from torchrl_grpo.chat.template import ChatEncoder
from torchrl_grpo.images import ImageFile, Prompt, images_in
from torchrl_grpo.images.encoder import ImageEncoder
from torchrl_grpo.tasks.base import Message, Problem, Split, Task
from torchrl_grpo.tools import tool_message

USER: list[Message] = [{"role": "user", "content": "?"}]
"""A chat, to try what the chat template writes."""


class Prompts:
    """Prompts of problems, rendered with the chat template and cached as tokens.

    Args:
        task: source of the problems.
        tokenizer: a tokenizer with a chat template.
        split: ``"train"`` or ``"test"``.
        max_prompt_tokens: maximum length of a prompt. Problems with longer prompts, or with empty
            ones, are dropped and counted in ``num_dropped``. None keeps all.
        template_arguments: arguments for the chat template.
        image_encoder: encodes the images of problems; None refuses them.

    Attributes:
        problems: all problems of the split.
        usable: indices of the problems whose prompts are short enough.
        image_encoder: encodes the images of problems; None for models that read only text.

    Raises:
        ValueError: no problem is left, or the chat template leaves out a part of a prompt, or the
            task's tools.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        split: Split,
        max_prompt_tokens: int | None,
        template_arguments: Mapping[str, Any],
        image_encoder: ImageEncoder | None = None,
    ) -> None:
        self.task = task
        self._chats = ChatEncoder(tokenizer, template_arguments)
        self.problems: Sequence[Problem] = task.problems(split)
        self.image_encoder = image_encoder
        self._tokens: dict[int, Tensor] = {}
        self._latest: tuple[int, Tensor | Prompt] | None = None  # of a group in progress
        self._warned = split != "train"  # warn about the training split only
        if task.tools:
            self.of_chat(USER, task.tools)
        self.usable = self._select(max_prompt_tokens)
        self.num_dropped = len(self.problems) - len(self.usable)
        if self.num_dropped:
            torchrl_logger.info(
                f"Dropped {self.num_dropped} of {len(self.problems)} {split} prompts of "
                f"{task.name!r} that are longer than max_prompt_tokens={max_prompt_tokens} or "
                "empty."
            )
        if not self.usable:
            raise ValueError(
                f"split={split!r} of task {task.name!r} must have a problem whose prompt has 1 to "
                f"max_prompt_tokens={max_prompt_tokens} tokens, but none of its "
                f"{len(self.problems)} problems does: use a larger max_prompt_tokens, a "
                "context that leaves a prompt more room, or a tokenizer that knows the "
                "characters of the prompts."
            )

    def _select(self, max_tokens: int | None) -> list[int]:
        """Return the indices of problems whose prompts fit; without a limit, without tokenizing."""
        everything = list(range(len(self.problems)))
        if max_tokens is None:
            return everything
        encoded = self._chats.encode([self._render(problem) for problem in self.problems])
        lengths = list(map(len, encoded))
        if self.image_encoder is not None:
            chats = map(self.task.messages, self.problems)
            lengths = [
                self.image_encoder.expanded_length(ids, images_in(chat))
                for ids, chat in zip(encoded, chats, strict=True)
            ]
        return [i for i in everything if 1 <= lengths[i] <= max_tokens]

    def _make(self, problem: Problem) -> Tensor | Prompt:
        """Return the prompt of a problem, [T] int64 if it has no images."""
        [ids] = self._chats.encode([self._render(problem)])
        return self.with_images(ids, self.task.messages(problem))

    def with_images(self, ids: list[int], chat: Sequence[Message]) -> Tensor | Prompt:
        """Return the tokens of a chat, including its images."""
        files = images_in(chat)
        if self.image_encoder is None:
            if files:
                raise ValueError(
                    "model.name must be a vision-language model for prompts with images, but it "
                    "reads only text: use a Qwen2.5-VL model, for example."
                )
            return torch.tensor(ids, dtype=torch.int64)
        return self.image_encoder.expand(ids, files)

    def reads_images(self, role: str) -> bool:
        """Return whether the model reads images in a role's messages, and the chat template writes
        them.
        """
        if self.image_encoder is None:
            return False
        content = [{"type": "image", "image": ImageFile(b"")}]
        chat: list[Message] = [{"role": "user", "content": content}]
        if role == "tool":
            turns = ({"role": kind, "content": "?"} for kind in ("user", "assistant"))
            chat = [*turns, tool_message("?", content)]
        try:
            self.image_encoder.places(self._chats.tokens(chat), 1)
        except ValueError:
            return False
        return True

    def _render(self, problem: Problem) -> str:
        tools = list(self.task.tools_for(problem)) or None
        text = self._chats.render(
            self.task.messages(problem), tools=tools, add_generation_prompt=True
        )
        if not self._warned and self._chats.spells_control(text):
            self._warned = True
            torchrl_logger.warning(
                f"A prompt of {self.task.name!r} contains the text of a control token, which is "
                "tokenized as plain text: only the chat template writes control tokens. Its "
                f"query: {problem.query!r:.200}"
            )
        return text

    def of_chat(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> Tensor | Prompt:
        """Return the prompt of a chat, [T] int64 if it has no images.

        Raises:
            ValueError: the chat template rejects the chat, or leaves out a part of it.
        """
        text = self._chats.render(messages, tools=list(tools) or None, add_generation_prompt=True)
        return self.with_images(self._chats.encode([text])[0], messages)

    def __len__(self) -> int:
        """Return the number of problems that can be drawn."""
        return len(self.usable)

    def of_problem(self, index: int, problem: Problem) -> Tensor | Prompt:
        """Return the prompt of the problem with this index, [T] int64 if it has no images, from a
        cache if possible. Of the prompts with images, only the latest is kept.
        """
        if index in self._tokens:
            return self._tokens[index]
        latest = self._latest
        if latest is not None and latest[0] == index:
            return latest[1]
        prompt = self._make(problem)
        if isinstance(prompt, Tensor):
            self._tokens[index] = prompt
        else:
            self._latest = index, prompt
        return prompt

    def first_with_images(self) -> Prompt | None:
        """Return the prompt of the first problem with images; None without one."""
        for index in self.usable if self.image_encoder is not None else ():
            problem = self.problems[index]
            if images_in(self.task.messages(problem)):
                prompt = self.of_problem(index, problem)
                assert isinstance(prompt, Prompt)
                return prompt
        return None

    def first(self, count: int) -> list[Tensor | Prompt]:
        """Return the prompts of the split's first ``count`` problems, without affecting the
        drawing.
        """
        return [self.of_problem(index, self.problems[index]) for index in self.usable[:count]]
