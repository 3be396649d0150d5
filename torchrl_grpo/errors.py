"""Errors that end a run with their message and without a traceback. Imports nothing."""

from __future__ import annotations


class ConfigError(ValueError):
    """A config value breaks a rule. The message names field, rule, value and fix."""


class RunLostError(RuntimeError):
    """The run cannot continue, for a known reason: the message is for the user, and a traceback
    would add nothing.
    """


class WorkersLostError(RunLostError):
    """Rollout or reference actors are lost and could not be replaced, or each replacement is lost
    too.
    """


class LearnerLostError(RunLostError):
    """A rank of the learner died: the run has ended, and can only be resumed from a checkpoint."""


class WaitedTooLongError(RunLostError, TimeoutError):
    """A wait exceeded its limit; the message says what it was for."""


class TransferRefusedError(RuntimeError):
    """An engine cannot take new weights by the path they were sent; they must be sent another way."""


class NonFiniteError(RunLostError):
    """Losses, gradients or weights are not finite, so training cannot continue."""


class NoSignalError(RunLostError):
    """Several steps in a row had nothing to train on."""


class MemoryShortError(RunLostError):
    """A device ran out of memory; the message says what would save some."""


class NotSavedError(RunLostError):
    """A checkpoint or a model cannot be written."""


class DiskFullError(NotSavedError):
    """There is no room for a file of the run."""


STALLED_STATUS = 75
"""Exit status of a stalled run: that of sysexits.h for a failure after which a retry makes sense.
"""


class StalledError(BaseException):
    """The run makes no progress. Not an ``Exception``: code that isolates errors of scorers must
    not catch it.
    """


INVALID_CAUSES = ("exception", "not_finite", "none", "timeout", "crash", "lost", "import")
"""Causes of invalid rewards, as in metric names; ``none``: no reward applies, ``lost``: the process
that kept the dialog ended, ``import``: a program needs a package that its sandbox lacks."""


class InvalidRewardError(ValueError):
    """A scorer returned no valid reward.

    Args:
        message: what, and how to fix it.
        cause: one of ``INVALID_CAUSES``; any other word counts as ``exception``.
    """

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message, cause)
        self.cause = cause

    def __str__(self) -> str:
        return str(self.args[0])
