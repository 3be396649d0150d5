"""Errors that end a run with a message and no traceback. Imports nothing."""

from __future__ import annotations


class ConfigError(ValueError):
    """A config value breaks a rule. The message names field, rule, value and fix."""


class RunLostError(RuntimeError):
    """The run cannot continue, for a known reason. The message is for the user; a traceback would
    add nothing.
    """


class WorkersLostError(RunLostError):
    """Rollout or reference actors died, and could not be replaced or died again."""


class LearnerLostError(RunLostError):
    """A rank of the learner died: the run has ended, and can only be resumed from a checkpoint."""


class WaitedTooLongError(RunLostError, TimeoutError):
    """A wait exceeded its limit; the message says what it waited for."""


class TransferRefusedError(RuntimeError):
    """An engine cannot receive weights by the current kind of transfer; use another one."""


class ReceiptError(RunLostError):
    """An engine does not have the weights that the trainer sent; the message names the tensors."""


class NonFiniteError(RunLostError):
    """Losses, gradients or weights are not finite, so training cannot continue."""


class NoSignalError(RunLostError):
    """Several steps in a row had nothing to train on."""


class MemoryShortError(RunLostError):
    """A device ran out of memory; the message names options that save some."""


class NotSavedError(RunLostError):
    """A checkpoint or a model cannot be written."""


class DiskFullError(NotSavedError):
    """The disk is too full for a file of the run."""


STALLED_STATUS = 75
"""Exit status of a stalled run: EX_TEMPFAIL of sysexits.h, a failure after which a retry makes
sense.
"""


class StalledError(BaseException):
    """The run makes no progress. Not an ``Exception``, because code that isolates scorers must not
    catch it.
    """


INVALID_CAUSES = ("exception", "not_finite", "none", "timeout", "crash", "lost", "import")
"""Causes of invalid rewards, as in metric names; ``none``: no reward applies; ``lost``: the process
with the dialog's state died; ``import``: a program needs a package that its sandbox lacks.
"""


class InvalidRewardError(ValueError):
    """A scorer returned no valid reward.

    Args:
        message: what is wrong, and how to fix it.
        cause: one of ``INVALID_CAUSES``; any other word counts as ``exception``.
    """

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message, cause)
        self.cause = cause

    def __str__(self) -> str:
        return str(self.args[0])
