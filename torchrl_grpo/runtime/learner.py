"""``RayLearner``: the driver's handle on the training ranks, with the methods of ``Learner`` that
``fit`` uses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torchrl import torchrl_logger
from transformers import PreTrainedTokenizerBase

from torchrl_grpo.errors import LearnerLostError, NonFiniteError, NotSavedError, WaitedTooLongError
from torchrl_grpo.learner.checkpoint import Checkpointer
from torchrl_grpo.learner.learner import Learner
from torchrl_grpo.runtime.actors import make_rank, own_address, start_actor
from torchrl_grpo.runtime.workers import cause_of, is_loss
from torchrl_grpo.weights.rendezvous import open_store

_TICK_S = 1.0
_HEARD_S = 10.0
"""Seconds to wait for the other ranks after the first failure of one."""
_LEFT_S = 60.0
"""Seconds to wait for a checkpoint at the end of a run whose ranks may hang."""
_ROLE = "LearnerActor"
_HARMLESS = (NotSavedError, NonFiniteError)
"""Errors that leave ``resumable`` unchanged."""


class RayLearner:
    """Learners as Ray actors, one per training rank.

    A run cannot survive the death of a rank, because each of the others has only a part of the
    model and would wait for it forever. Every method but ``close`` then raises
    ``LearnerLostError``, which names the last checkpoint, or ``WaitedTooLongError`` if the ranks do
    not answer.

    Attributes:
        version: number of batches trained so far.
        resumable: whether training is between two batches, not in the middle of one, and no rank
            has been lost.
        pids: process id of each rank.
        ranks: actor of each rank.

    Args:
        factory: makes a rank's learner in its process, from the mesh of all ranks, or from None for
            one rank.

    Keyword Args:
        options: Ray's options for the actor of each rank.
        tensor_parallel_size: number of ranks that compute each layer together.
        replicas: number of sharded copies of the model.
        actor_timeout_s: maximum wait for any call, and the timeout of the process group.
        resumed_from: checkpoint that the factory restores.
    """

    def __init__(
        self,
        factory: Callable[[DeviceMesh | None], Learner],
        *,
        options: Sequence[Mapping[str, Any]],
        tensor_parallel_size: int = 1,
        replicas: int = 1,
        actor_timeout_s: float = 1800.0,
        resumed_from: Path | None = None,
    ) -> None:
        self.version = 0
        self.resumable = True
        self.pids: list[int] = []
        self.actor_timeout_s = actor_timeout_s
        self._last_checkpoint = resumed_from
        self._saving: Path | None = None
        self._answers = True
        self._store: TCPStore | None = None  # through which the ranks find each other
        make = partial(
            make_rank,
            factory,
            world_size=len(options),
            tensor_parallel_size=tensor_parallel_size,
            replicas=replicas,
        )
        self.ranks = [
            start_actor(_ROLE, partial(make, rank), rank_options)
            for rank, rank_options in enumerate(options)
        ]

    def start(self) -> None:
        """Make the learners of all ranks.

        Raises:
            Exception: any error of the factory.
        """
        address = None
        if len(self.ranks) > 1:
            host = own_address()
            self._store = open_store(host, self.actor_timeout_s)
            address = host, self._store.port
        setup = [rank.setup.remote(self.actor_timeout_s, address) for rank in self.ranks]
        self.pids = self._ask("load the model", setup)
        self.version = self._ask_first("say its version", "version")

    def train_groups(self, *groups: Any) -> dict[str, float]:
        """See ``Learner.train_groups``; the groups are references."""
        self.resumable = False
        steps = [_call(rank, "train_fetched", *groups) for rank in self.ranks]
        try:
            [metrics, *_] = self._ask("train a batch", steps)
        except KeyboardInterrupt:
            torchrl_logger.warning("The ranks finish their step first, so the run can be saved.")
            self._ask("train a batch", steps)
            self._trained()
            raise
        self._trained()
        return metrics

    def _trained(self) -> None:
        self.version += 1
        self.resumable = True

    def weights(self) -> Any:
        """Return a reference to the current version's ``WeightHandle``, valid until ``release``."""
        return self._send("weights")

    def resend(self, version: int, reason: str) -> Any:
        """Return a reference to another handle of a version, because the first one was refused.
        Does not wait.
        """
        torchrl_logger.warning(
            f"From version {version} on, the weights go through the object store: {reason}."
        )
        return (
            self.ranks[0].call_and_keep.options(num_returns=2).remote("resend", version, reason)[1]
        )

    def reference_weights(self) -> Any:
        """Return a reference to the weights for a reference model, which keeps them alive."""
        return self._send("reference_weights")

    def _send(self, method: str) -> Any:
        answers = [rank.call_and_keep.options(num_returns=2).remote(method) for rank in self.ranks]
        self._ask("gather the weights", [done for done, _ in answers])
        return answers[0][1]

    def release(self, version: int) -> None:
        """Free the weights of a version that no engine will read anymore. Does not wait."""
        if self.ranks:
            _call(self.ranks[0], "release", version)

    def save(self, checkpointer: Checkpointer, source: dict[str, Any]) -> Path:
        """See ``Learner.save``."""
        self._saving = self._ask_all("save", "save", checkpointer, source)
        if len(self.ranks) == 1:
            self._last_checkpoint, self._saving = self._saving, None
            return self._last_checkpoint
        return self._saving

    def finish_save(self) -> None:
        """See ``Learner.finish_save``. Does not wait for ranks that no longer answer."""
        if self._saving is None or not self._answers:
            return
        saving, self._saving = self._saving, None
        self._ask_all(
            "write a checkpoint", "finish_save", timeout_s=None if self.resumable else _LEFT_S
        )
        self._last_checkpoint = saving

    def sizes(self) -> tuple[int, int]:
        """See ``Learner.sizes``."""
        return self._ask_first("measure the model", "sizes")

    def export(
        self, checkpointer: Checkpointer, tokenizer: PreTrainedTokenizerBase, ended: bool = True
    ) -> Path:
        """See ``Learner.export``; rank 0 writes the files."""
        return self._ask_all("export", "export", checkpointer, tokenizer, ended)

    def samples(self, max_rows: int | None) -> list[dict[str, Any]]:
        """See ``Learner.samples``."""
        return self._ask_first("show samples", "samples", max_rows)

    def close(self) -> None:
        """Stop the ranks. May be called again."""
        import ray

        for rank in self.ranks:
            ray.kill(rank)
        self.ranks = []
        self._store = None

    def _ask_first(self, what: str, method: str, *arguments: Any) -> Any:
        """Call a method of rank 0 only. Return its result."""
        return self._ask(what, [_call(self.ranks[0], method, *arguments)])[0]

    def _ask_all(
        self, what: str, method: str, *arguments: Any, timeout_s: float | None = None
    ) -> Any:
        """Call a method of all ranks. Return rank 0's result."""
        calls = [_call(rank, method, *arguments) for rank in self.ranks]
        return self._ask(what, calls, timeout_s)[0]

    def _ask(self, what: str, references: list[Any], timeout_s: float | None = None) -> list[Any]:
        """Return the results of the ranks. The first failure ends the wait, because the other ranks
        may be waiting for the failed one.
        """
        import ray

        limit = (
            f"{self.actor_timeout_s:g} s (ray.actor_timeout_s)"
            if timeout_s is None
            else f"{timeout_s:g} s"
        )
        deadline = time.monotonic() + (self.actor_timeout_s if timeout_s is None else timeout_s)
        pending = list(references)
        while pending:
            done, pending = ray.wait(pending, timeout=_TICK_S)
            try:
                for reference in done:
                    ray.get(reference)
            except Exception as first:
                error = _root_cause(first, references)
                if not isinstance(cause_of(error), _HARMLESS):
                    self.resumable = False
                if not is_loss(error):
                    raise cause_of(error) from None
                self._answers = False
                raise LearnerLostError(
                    f"a training rank died when the ranks had to {what} (version "
                    f"{self.version}): {self.last_saved()}."
                ) from error
            if pending and time.monotonic() > deadline:
                self.resumable = self._answers = False
                raise WaitedTooLongError(
                    f"waited {limit} for the training ranks to {what} (version {self.version}): "
                    f"{self.last_saved()}."
                )
        return ray.get(references)

    def last_saved(self) -> str:
        """Describe how to resume from the last checkpoint."""
        saved = self._saving if self._saving and self._saving.exists() else self._last_checkpoint
        return f"continue with train.resume={saved}" if saved else "no checkpoint was written yet"


def _call(rank: Any, method: str, *arguments: Any) -> Any:
    """Call a method of a rank's learner, which appears in the name of its process. Return a
    reference to the result.
    """
    return rank.call.options(name=f"{_ROLE}.{method}").remote(method, *arguments)


def _root_cause(first: Exception, references: Sequence[Any]) -> Exception:
    """Return the error of a lost rank if it caused this error: other ranks may first report a
    broken connection.
    """
    import ray

    if is_loss(first):
        return first
    done, _ = ray.wait(list(references), num_returns=len(references), timeout=_HEARD_S)
    for reference in done:
        try:
            ray.get(reference)
        except Exception as error:
            if is_loss(error):
                return error
    return first
