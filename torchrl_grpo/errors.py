"""Errors that end a run with their message and without a traceback. Nothing is imported here."""

from __future__ import annotations


class ConfigError(ValueError):
    """A config value breaks a rule. The message names field, rule, value and fix."""


class RunLostError(RuntimeError):
    """The run cannot go on, for a known reason: the message is for the user, and a traceback would add nothing."""


class WorkersLostError(RunLostError):
    """Rollout or reference actors are gone and could not be replaced, or each new one is lost in its turn."""


class LearnerLostError(RunLostError):
    """A rank of the learner died: the run has ended, and can only be resumed from a checkpoint."""


class WaitedTooLongError(RunLostError, TimeoutError):
    """Nobody answered in time; the message says what was waited for."""


class TransferRefusedError(RuntimeError):
    """An engine cannot take new weights in the way in which they were sent: they must be sent in another one."""


class NonFiniteError(RunLostError):
    """Losses, gradients or weights are not finite, so training cannot go on."""


class NoSignalError(RunLostError):
    """Step after step had nothing to train on."""


class MemoryShortError(RunLostError):
    """A device has no more memory; the message says what would save some."""


class NotSavedError(RunLostError):
    """A checkpoint or a model cannot be written."""


class DiskFullError(NotSavedError):
    """There is no room for a file of the run."""


class FolderLostError(RunLostError):
    """The run's folder was moved or removed while the run wrote to it."""


STALLED_STATUS = 75
"""Exit status of a run that stood still: that of sysexits.h for what may be tried again."""


class StalledError(BaseException):
    """The run stands still. It is no ``Exception``: what isolates the errors of a scorer must not take it for one."""


INVALID_CAUSES = ("exception", "not_finite", "none", "timeout", "crash", "lost")
"""Why a reward is invalid, as in the names of metrics; ``none`` where no reward applies, ``lost`` where the process
that kept the dialog had ended."""


class InvalidRewardError(ValueError):
    """A scorer gave nothing that is a reward.

    Args:
        message: what, and how to fix it.
        cause: one of ``INVALID_CAUSES``; any other word counts as ``exception``.
    """

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message, cause)
        self.cause = cause

    def __str__(self) -> str:
        return str(self.args[0])
