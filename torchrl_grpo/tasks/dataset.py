"""Problems from a data set: any file, folder or hub data set with prompts in its rows.

It has no scorer: a reward (``env.reward``) or a subclass scores it. ``gsm8k``, ``math`` and
``ifeval`` are presets.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from typing import Any, ClassVar

from torchrl_grpo.checks import did_you_mean
from torchrl_grpo.images import ImageFile, place_images, text_of
from torchrl_grpo.tasks.base import Message, Problem, ProblemSequence, Split, Task, check_split
from torchrl_grpo.tasks.fields import (
    checked_chat,
    checked_demonstration,
    checked_images,
    checked_messages,
    checked_text,
    checked_tools,
    fill_template,
    first_turn,
)
from torchrl_grpo.tasks.sources import (
    Files,
    Hub,
    Row,
    Table,
    UnknownSplitError,
    data_name,
    find_source,
)

PROMPT_COLUMNS = ("prompt", "question", "problem", "query", "instruction")
ANSWER_COLUMNS = ("answer", "solution", "ground_truth", "target")
"""Default answer columns, used if exactly one of them exists."""
TOOLS_COLUMN = "tools"
"""Column with the JSON schemas of tools that a demonstration calls."""

_log = logging.getLogger(__name__)


class DatasetProblems(ProblemSequence):
    """The problems of a split.

    Args:
        table: the rows.
        task: converts rows to problems.
    """

    def __init__(self, table: Table, task: DatasetTask) -> None:
        self._table = table
        self._task = task

    def __len__(self) -> int:
        return len(self._table)

    def make(self, index: int) -> Problem:
        return self._make(index, self._table[index])

    def __iter__(self) -> Iterator[Problem]:
        return starmap(self._make, enumerate(self._table))

    def _make(self, index: int, row: Row) -> Problem:
        """Return the problem of a row, with images whose errors name the row."""
        problem = self._task.make_problem(row)
        origin = f"an image of {self._table.where(index)}"
        images = (replace(image, origin=origin) for image in problem.images)
        return replace(problem, images=tuple(images))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class DatasetTask(Task):
    """Problems from the rows of a data set.

    The test split is a split of the data, or ``test_fraction`` of the train split: a hash of the
    prompt decides, so that it is the same in every run and equal prompts are in one split. A split
    is read and checked at its first use.

    Args:
        dataset: a file (jsonl, json, csv, parquet), a folder of such files, or a name on the
            Hugging Face hub.

    Keyword Args:
        dataset_config: on the hub, the configuration.
        revision: on the hub, the branch, tag or commit.
        train_split: name of the train split; by default ``train``.
        test_split: name of the test split; by default ``test``, if there is one.
        test_fraction: share of the train split that is the test split.
        max_samples: number of rows to read from the start of each split.
        prompt_column: column of text or lists of chat messages; by default one of
            ``PROMPT_COLUMNS``.
        answer_column: column that the reward compares with; by default one of ``ANSWER_COLUMNS``,
            if there is one.
        images_column: column of the images of the prompt: paths relative to the data's file or
            folder, bytes, images of the data set, or lists of these. They are at the parts
            ``{"type": "image"}`` of chat messages, at the places of ``<image>`` in texts or,
            without these, before the user's text.
        completion_column: column of the responses to learn in supervised training: text, or lists
            of chat messages.
        messages_column: column of whole chats, instead of prompt and completion; the prompt ends
            before the assistant's first turn.
        prompt_template: the user message, see ``fill_template``; by default only the prompt.
        system_prompt: the system message, which replaces one in the data.
        field: prefix of the options in messages.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "data.csv"
    >>> _ = path.write_text("question,answer\\n1+1?,2\\n1+2?,3\\n")
    >>> task = DatasetTask(str(path), prompt_template="{question} Answer with a number.")
    >>> task.messages(task.problems("train")[1])
    [{'role': 'user', 'content': '1+2? Answer with a number.'}]
    """

    reward: ClassVar[Any] = None
    """Reward when ``env.reward`` is not set."""
    drops_shared = False
    """Whether train problems that are also in the test split are dropped; otherwise they are an
    error.
    """

    def __init__(
        self,
        dataset: str,
        *,
        dataset_config: str | None = None,
        revision: str | None = None,
        train_split: str | None = None,
        test_split: str | None = None,
        test_fraction: float | None = None,
        max_samples: int | None = None,
        prompt_column: str | None = None,
        answer_column: str | None = None,
        images_column: str | None = None,
        completion_column: str | None = None,
        messages_column: str | None = None,
        prompt_template: str | None = None,
        system_prompt: str | None = None,
        field: str = "env",
    ) -> None:
        if test_fraction is not None and (test_split is not None or not 0 < test_fraction < 1):
            raise ValueError(
                f"{field}.test_fraction={test_fraction} must be between 0 and 1, and left out with "
                f"{field}.test_split: for example, {field}.test_fraction=0.1."
            )
        self.name = data_name(dataset)
        self.dataset = dataset
        self.dataset_config = dataset_config
        self.revision = revision
        self.train_split = train_split or "train"
        self.test_split = test_split
        self.test_fraction = test_fraction
        self.max_samples = max_samples
        self.prompt_column = messages_column or prompt_column
        self.answer_column = answer_column
        self.images_column = images_column
        self.completion_column = messages_column or completion_column
        self.messages_column = messages_column
        self.prompt_template = prompt_template
        self.system_prompt = system_prompt
        self.field = field
        self._images: Files | Hub | None = None
        """Source of the images that rows have only the path of."""
        self._problems: dict[Split, DatasetProblems] = {}
        self._read: dict[str, tuple[Table, list[bytes]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the data: processes that score problems receive them."""
        return {**self.__dict__, "_problems": {}, "_read": {}}

    @property
    def _what(self) -> str:
        return f"{self.field}.dataset={self.dataset}"

    def _source(self) -> Files | Hub:
        return find_source(self.dataset, self.dataset_config, self.revision, self._what)

    def problems(self, split: Split) -> Sequence[Problem]:
        """Return the problems of a split, in the order of the rows.

        Raises:
            ValueError: the data is missing, a row is malformed, or the split has no problems or
                some of the other split's.
        """
        check_split(split)
        if split not in self._problems:
            self._problems[split] = DatasetProblems(self._select(split), self)
            if len(self._problems) == 2:
                self._read.clear()
        return self._problems[split]

    def messages(self, problem: Problem) -> list[Message]:
        """Return the system prompt, if there is one, and the user message or the data's chat."""
        chat = self._chat(problem)
        if self.system_prompt is None:
            return chat
        return [
            {"role": "system", "content": self.system_prompt},
            *(message for message in chat if message["role"] != "system"),
        ]

    def read_answer(self, row: Row, column: str) -> Any:
        """Return the answer in the reward's format.

        Args:
            row: row of the data.
            column: column of the answer.

        Raises:
            ValueError: the answer cannot be read; the message says what the row must have.
        """
        return row[column]

    def make_problem(self, row: Row) -> Problem:
        """Convert a row to a problem, with all its columns in ``extra``.

        Raises:
            ValueError: the row cannot be used; the message says what it must have.
        """
        prompts, answers = self.prompt_column, self.answer_column
        if prompts is None:
            query = fill_template(self.prompt_template or "", row)
        elif isinstance(row[prompts], list):
            chat = checked_chat(
                self._prompt(row),
                prompts,
                self.prompt_template,
                has_images=self.images_column is not None,
            )
            query = text_of(chat[-1]["content"])
        else:
            query = checked_text(row, prompts)
        images: list[ImageFile] = []
        if self.images_column is not None:
            value = row[self.images_column]
            if self._images is None:
                self._images = self._source()
            images = checked_images(value, self.images_column, self._images)
            is_list = isinstance(value, list)
            row = {**row, self.images_column: images if is_list else next(iter(images), None)}
        answer = self.read_answer(row, answers) if answers else None
        return Problem(query, answer, extra=row, images=tuple(images))

    def demonstration(self, problem: Problem) -> list[Message]:
        column = self.completion_column
        if column is None:
            return super().demonstration(problem)
        value = problem.extra[column]
        has_images = self.images_column is not None
        if not isinstance(value, list):
            value = [{"role": "assistant", "content": checked_text(problem.extra, column)}]
        elif self.messages_column:
            value = self._with_images(problem) if has_images else value
            value = value[first_turn(value) :]
        return checked_demonstration(value, column, has_images=has_images)

    def tools_for(self, problem: Problem) -> Sequence[Mapping[str, Any]]:
        """Return the column ``tools`` of a row with a demonstration."""
        if self.completion_column is None:
            return self.tools
        return checked_tools(problem.extra.get(TOOLS_COLUMN), TOOLS_COLUMN) or self.tools

    def _prompt(self, row: Row) -> Any:
        """Return the prompt in a row; for a whole chat, the messages before the assistant's first
        turn.
        """
        value = row[self.prompt_column or ""]
        if self.messages_column and isinstance(value, list):
            return value[: first_turn(value)]
        return value

    def _chat(self, problem: Problem, *, filled: bool = True) -> list[Message]:
        """Return the prompt without the options' system prompt; ``filled``: whether to fill in the
        template, if there is one.
        """
        row = problem.extra
        text = problem.query
        if self.prompt_column is not None:
            prompt = self._prompt(row) if self.prompt_column in row else text
            if isinstance(prompt, list):
                if self.images_column is None:
                    return checked_messages(prompt, self.prompt_column)
                chat = self._with_images(problem)
                return chat[: first_turn(chat)] if self.messages_column else chat
            if self.prompt_template is not None and filled:
                text = fill_template(self.prompt_template, {**row, self.prompt_column: prompt})
        chat = [{"role": "user", "content": text}]
        return chat if self.images_column is None else place_images(chat, problem.images)

    def _with_images(self, problem: Problem) -> list[Message]:
        """Return the chat in a row, a prompt or a whole one, with its images."""
        column = self.prompt_column or ""
        chat = checked_messages(problem.extra[column], column, has_images=True)
        return place_images(chat, problem.images)

    def _find_columns(self, names: Sequence[str]) -> None:
        """Find the columns of prompt and answer if the options do not name them. A template can
        replace the prompt.
        """
        configured = {
            "messages": self.messages_column,
            "prompt": self.prompt_column,
            "answer": self.answer_column,
            "images": self.images_column,
            "completion": self.completion_column,
        }
        for key, name in configured.items():
            if name is not None and name not in names:
                option = f"{self.field}.columns.{key}"
                fix = did_you_mean(name, names, f"use one of them as {option}.")
                raise ValueError(
                    f"{option}={name} must be a column of {self.dataset}, which has "
                    f"{sorted(names)}: {fix}"
                )
        prompts = [name for name in PROMPT_COLUMNS if name in names]
        if self.prompt_column is None and len(prompts) == 1:
            self.prompt_column = prompts[0]
        elif self.prompt_column is None and self.prompt_template is None:
            likely = prompts or [
                name for name in names if any(known in name.lower() for known in PROMPT_COLUMNS)
            ]
            fix = "set it to one of them"
            if likely:
                fix = f"for example, {self.field}.columns.prompt={likely[0]}"
            raise ValueError(
                f"{self.field}.columns.prompt must name the column with the prompts of "
                f"{self.dataset}, which has {sorted(names)}: {fix}, or write the prompt as "
                f"{self.field}.prompt_template."
            )
        answers = [name for name in ANSWER_COLUMNS if name in names and name != self.prompt_column]
        if len(answers) > 1 and self.completion_column in answers:
            answers.remove(self.completion_column)
        if self.answer_column is None and len(answers) > 1:
            raise ValueError(
                f"{self.field}.columns.answer must name one of {answers}, which {self.dataset} "
                f"has: for example, {self.field}.columns.answer={answers[0]}."
            )
        self.answer_column = self.answer_column or (answers[0] if answers else None)
        if (configured["prompt"], configured["answer"]) != (self.prompt_column, self.answer_column):
            _log.info(
                f"{self._what}: using the column {self.prompt_column} for prompts and "
                f"{self.answer_column} for answers; set {self.field}.columns.prompt and "
                f"{self.field}.columns.answer to use others."
            )

    def _select(self, split: Split) -> Table:
        """Return the rows of a split, after the checks that need both splits."""
        if self.test_fraction is not None:
            table, prompts = self._checked(self.train_split, "train")
            bound = self.test_fraction * 2**64
            in_test = [int.from_bytes(prompt[:8], "big") < bound for prompt in prompts]
            indices = [i for i, test in enumerate(in_test) if test == (split == "test")]
            if not indices:
                raise ValueError(
                    f"{self.field}.test_fraction={self.test_fraction} must leave problems in both "
                    f"splits, but the {split} split has 0 of {len(prompts)} rows: add rows, or use "
                    "a value nearer to 0.5."
                )
            return table.select(indices)
        names: dict[Split, str] = {"train": self.train_split, "test": self.test_split or "test"}
        other: Split = "test" if split == "train" else "train"
        table, prompts = self._checked(names[split], split)
        others: set[bytes] = set()
        with suppress(UnknownSplitError):
            # Then the run only evaluates, on all rows of a file.
            is_same = self.field == "env" and names[other] == names[split]
            if not is_same and (
                other in self._problems or (self.drops_shared and split == "train")
            ):
                others.update(self._checked(names[other], other)[1])
        shared = [i for i, prompt in enumerate(prompts) if prompt in others]
        if shared and not self.drops_shared:
            first = self.make_problem(table[shared[0]]).query
            raise ValueError(
                f"{self._what} must have no problem in both splits, but {len(shared)} of "
                f"{names['test']!r} and {names['train']!r} are the same, the first at "
                f"{table.where(shared[0])}: {first[:80]!r}. Remove them from one split, or use "
                f"{self.field}.test_fraction=0.1 without {self.field}.test_split."
            )
        if shared and split == "train":
            _log.info(
                f"{self._what}: dropped {len(shared)} training problems that are also in the test "
                "split."
            )
            return table.select(sorted(set(range(len(prompts))).difference(shared)))
        return table

    def _checked(self, name: str, split: Split) -> tuple[Table, list[bytes]]:
        """Return the checked rows of a split, and a hash of the prompt of each."""
        if name in self._read:
            return self._read[name]
        source = self._images = self._source()
        try:
            table = source.read(name, self.max_samples)
        except UnknownSplitError as error:
            fix = f"{self.field}.{split}_split=NAME"
            if split == "test":
                fix += (
                    f" or {self.field}.test_fraction=0.1, or evaluation.num_prompts=0 for no "
                    "evaluation"
                )
            raise UnknownSplitError(f"{error}: {source.fix}set {fix}.") from error
        if not len(table):
            raise ValueError(
                f"{self._what} must have problems, but the {name} split has 0: add rows."
            )
        self._find_columns(table.data.column_names)
        columns = {self.prompt_column, self.completion_column, TOOLS_COLUMN}
        table = replace(table, aligned=frozenset(columns))
        if self.images_column is not None:
            table = table.with_files(self.images_column)
        prompts = []
        unanswered = 0
        for index, row in enumerate(table):
            try:
                problem = self.make_problem(row)
                # The first 8 bytes decide the split, so that a problem is in the same split with
                # every template.
                chats = [self._chat(problem, filled=filled) for filled in (False, True)]
                if self.completion_column is not None and split == "train":
                    self.demonstration(problem)
                    self.tools_for(problem)
            except RecursionError as error:
                raise ValueError(
                    f"{table.where(index)} must not be nested so deeply: flatten it."
                ) from error
            except ValueError as error:
                raise ValueError(f"{table.where(index)} {error}") from error
            unanswered += self.answer_column is not None and problem.answer is None
            texts = (json.dumps(chat, default=lambda image: image.hash) for chat in chats)
            prompts.append(b"".join(hashlib.sha256(text.encode()).digest()[:8] for text in texts))
        if unanswered:
            _log.warning(
                f"{self._what}: {unanswered} of the {len(table)} rows of {name} have no value in "
                f"the column {self.answer_column}; their answer is None."
            )
        self._read[name] = table, prompts
        return table, prompts


class PresetTask(DatasetTask):
    """A data set with a known location, columns, prompt and answers.

    Args:
        dataset_path: a file or folder with its data; None for the hub.
        **options: options of ``DatasetTask`` that differ from the defaults.
    """

    hub_name: str
    hub_config: str | None = None
    title: str
    files: str
    """Files that a folder must have, as named in errors."""
    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, dataset_path: str | None = None, **options: Any) -> None:
        overrides = {key: value for key, value in options.items() if value is not None}
        if "test_split" in overrides or "test_fraction" in overrides:
            overrides = {"test_split": None, "test_fraction": None, **overrides}
        super().__init__(dataset_path or self.hub_name, **{**self.defaults, **overrides})
        self.dataset_path = dataset_path
        self.name = type(self).name

    @property
    def _what(self) -> str:
        if self.dataset_path is not None:
            return f"{self.field}.dataset_path={self.dataset_path!r}"
        return f"{self.field}.dataset={self.name} without {self.field}.dataset_path"

    def _source(self) -> Files | Hub:
        if self.dataset_path is not None:
            return Files(
                Path(self.dataset_path).expanduser(), self._what, f"a folder with {self.files}"
            )
        fix = f"set {self.field}.dataset_path to a folder with {self.title}'s {self.files}"
        return Hub(
            self.hub_name, self.dataset_config or self.hub_config, self.revision, self._what, fix
        )
