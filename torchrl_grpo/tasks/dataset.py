"""Problems from a data set: any file, folder or data set on the hub with prompts in its rows.

It has no scorer: a reward scores it (``env.reward``), or a subclass. ``gsm8k``, ``math`` and
``ifeval`` are presets.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from torchrl_grpo.tasks.base import Message, Problem, ProblemSequence, Split, Task
from torchrl_grpo.tasks.fields import (
    checked_chat,
    checked_demonstration,
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


class Rows(ProblemSequence):
    """The problems of a split.

    Args:
        table: the rows.
        task: makes a row a problem.
    """

    def __init__(self, table: Table, task: DatasetTask) -> None:
        self._table = table
        self._task = task

    def __len__(self) -> int:
        return len(self._table)

    def make(self, index: int) -> Problem:
        return self._task.make_problem(self._table[index])

    def __iter__(self) -> Iterator[Problem]:
        return map(self._task.make_problem, self._table)

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
        max_samples: most rows of each split that are read, the first ones.
        prompt_column: a text, or a list of chat messages; by default one of ``PROMPT_COLUMNS``.
        answer_column: what the reward compares with; by default one of ``ANSWER_COLUMNS``, or none.
        completion_column: what the policy should answer, for supervised training: a text, or a list
            of chat messages.
        messages_column: a whole chat in place of prompt and completion; the prompt ends before the
            assistant's first turn.
        prompt_template: the user's message, see ``fill_template``; by default the prompt alone.
        system_prompt: the system's message, in place of one in the data.
        field: what messages call the options.

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
        self.completion_column = messages_column or completion_column
        self.messages_column = messages_column
        self.prompt_template = prompt_template
        self.system_prompt = system_prompt
        self.field = field
        self._problems: dict[Split, Rows] = {}
        self._read: dict[str, tuple[Table, list[bytes]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the data: a process that scores a problem gets that problem."""
        return {**self.__dict__, "_problems": {}, "_read": {}}

    @property
    def _what(self) -> str:
        return f"{self.field}.dataset={self.dataset}"

    def _source(self) -> Files | Hub:
        return find_source(self.dataset, self.dataset_config, self.revision, self._what)

    def problems(self, split: Split) -> Sequence[Problem]:
        """Return the problems of a split, in the order of the rows.

        Raises:
            ValueError: the data is not there, a row of it is malformed, or the split has no problem
                or one of the other split.
        """
        if split not in ("train", "test"):
            raise ValueError(f"split must be 'train' or 'test', got {split!r}: use one of the two.")
        if split not in self._problems:
            self._problems[split] = Rows(self._select(split), self)
            if len(self._problems) == 2:
                self._read.clear()
        return self._problems[split]

    def messages(self, problem: Problem) -> list[Message]:
        """Return the system prompt, if there is one, and the user's message or the chat of the
        data.
        """
        chat = self._chat(problem)
        if self.system_prompt is None:
            return chat
        return [
            {"role": "system", "content": self.system_prompt},
            *(message for message in chat if message["role"] != "system"),
        ]

    def read_answer(self, row: Row, column: str) -> Any:
        """Return the answer as the reward wants it.

        Args:
            row: of the data.
            column: of the answer.

        Raises:
            ValueError: it cannot be read; the message says what the row must have.
        """
        return row[column]

    def make_problem(self, row: Row) -> Problem:
        """Convert a row to a problem, with all its columns in ``extra``.

        Raises:
            ValueError: the row cannot serve; the message says what it must have.
        """
        prompts, answers = self.prompt_column, self.answer_column
        if prompts is None:
            query = fill_template(self.prompt_template or "", row)
        elif isinstance(row[prompts], list):
            query = checked_chat(self._prompt(row), prompts, self.prompt_template)[-1]["content"]
        else:
            query = checked_text(row, prompts)
        return Problem(query, self.read_answer(row, answers) if answers else None, extra=row)

    def demonstration(self, problem: Problem) -> list[Message]:
        column = self.completion_column
        if column is None:
            return super().demonstration(problem)
        value = problem.extra[column]
        if not isinstance(value, list):
            value = [{"role": "assistant", "content": checked_text(problem.extra, column)}]
        return checked_demonstration(
            value[first_turn(value) :] if self.messages_column else value, column
        )

    def tools_for(self, problem: Problem) -> Sequence[Mapping[str, Any]]:
        """Return the column ``tools`` of a row with a demonstration."""
        if self.completion_column is None:
            return self.tools
        return checked_tools(problem.extra.get(TOOLS_COLUMN), TOOLS_COLUMN) or self.tools

    def _prompt(self, row: Row) -> Any:
        """Return the prompt in a row: of a whole chat, what comes before the assistant's first
        turn.
        """
        value = row[self.prompt_column or ""]
        if self.messages_column and isinstance(value, list):
            return value[: first_turn(value)]
        return value

    def _chat(self, problem: Problem, *, filled: bool = True) -> list[Message]:
        """Return the prompt without the system prompt of the options; ``filled`` in a template, if
        there is one.
        """
        row, text = problem.extra, problem.query
        if self.prompt_column is not None:
            prompt = self._prompt(row) if self.prompt_column in row else text
            if isinstance(prompt, list):
                return checked_messages(prompt, self.prompt_column)
            if self.prompt_template is not None and filled:
                text = fill_template(self.prompt_template, {**row, self.prompt_column: prompt})
        return [{"role": "user", "content": text}]

    def _find_columns(self, names: Sequence[str]) -> None:
        """Find the columns of prompt and answer that the options do not name; a template can be the
        prompt.
        """
        configured = {
            "messages": self.messages_column,
            "prompt": self.prompt_column,
            "answer": self.answer_column,
            "completion": self.completion_column,
        }
        for key, name in configured.items():
            if name is not None and name not in names:
                close = difflib.get_close_matches(name, names, 1)
                option = f"{self.field}.columns.{key}"
                fix = f"did you mean {close[0]}?" if close else f"use one of them as {option}."
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
            raise ValueError(
                f"{self.field}.columns.prompt must name the column with the prompts of "
                f"{self.dataset}, which has {sorted(names)}: "
                + (
                    f"for example, {self.field}.columns.prompt={likely[0]}"
                    if likely
                    else "set it to one of them"
                )
                + f", or write the prompt as {self.field}.prompt_template."
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
                f"{self._what}: the prompts are in the column {self.prompt_column}, the answers in "
                f"{self.answer_column}; {self.field}.columns.prompt and "
                f"{self.field}.columns.answer name others."
            )

    def _select(self, split: Split) -> Table:
        """Return the rows of a split, after the checks that need both splits."""
        if self.test_fraction is not None:
            table, prompts = self._checked(self.train_split, "train")
            bound = self.test_fraction * 2**64
            in_test = [int.from_bytes(prompt[:8], "big") < bound for prompt in prompts]
            chosen = [i for i, test in enumerate(in_test) if test == (split == "test")]
            if not chosen:
                raise ValueError(
                    f"{self.field}.test_fraction={self.test_fraction} must leave problems in both "
                    f"splits, the {split} split of {len(prompts)} rows has 0: use "
                    f"{self.field}.test_fraction=0.5, or more rows."
                )
            return table.select(chosen)
        names: dict[Split, str] = {"train": self.train_split, "test": self.test_split or "test"}
        other: Split = "test" if split == "train" else "train"
        table, prompts = self._checked(names[split], split)
        others: set[bytes] = set()
        with suppress(UnknownSplitError):
            if other in self._problems or (self.drops_shared and split == "train"):
                others.update(self._checked(names[other], other)[1])
        shared = [i for i, prompt in enumerate(prompts) if prompt in others]
        if shared and not self.drops_shared:
            first = self.make_problem(table[shared[0]]).query
            raise ValueError(
                f"{self._what} must have no problem in both splits, {len(shared)} of "
                f"{names['test']!r} and {names['train']!r} are the same, the first at "
                f"{table.where(shared[0])}: {first[:80]!r}. Remove them from one, or use "
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
        source = self._source()
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
                f"{self._what} must hold problems, the {name} split has 0: give it rows."
            )
        self._find_columns(table.data.column_names)
        prompts = []
        unanswered = 0
        for index, row in enumerate(table):
            try:
                problem = self.make_problem(row)
                # The first 8 bytes decide about the split: the same problem is in the same one with
                # every template.
                chats = [self._chat(problem, filled=filled) for filled in (False, True)]
                if self.completion_column is not None and split == "train":
                    self.demonstration(problem)
                    self.tools_for(problem)
            except RecursionError as error:
                raise ValueError(
                    f"{table.where(index)} must be nested less deeply: flatten it."
                ) from error
            except ValueError as error:
                raise ValueError(f"{table.where(index)} {error}") from error
            unanswered += self.answer_column is not None and problem.answer is None
            prompts.append(
                b"".join(hashlib.sha256(json.dumps(chat).encode()).digest()[:8] for chat in chats)
            )
        if unanswered:
            _log.warning(
                f"{self._what}: {unanswered} of the {len(table)} rows of {name} have nothing in "
                f"the column {self.answer_column}; their answer is None."
            )
        self._read[name] = table, prompts
        return table, prompts


class PresetTask(DatasetTask):
    """A data set with known location, columns, prompt and answers.

    Args:
        dataset_path: a file or folder with its data; None is the hub.
        **options: of ``DatasetTask``, where they are to differ.
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
