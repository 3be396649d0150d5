"""How a run on Ray ends against its will. Nothing is imported here: a script needs these names before all else."""

from __future__ import annotations


class RunLostError(RuntimeError):
    """The run cannot go on, for a known reason: the message is for the user, and a traceback would add nothing."""


class WorkersLostError(RunLostError):
    """Rollout or reference actors are gone and could not be replaced, or each new one is lost in its turn."""


class TrainerLostError(RunLostError):
    """A training rank died: the run has ended, and can go on from a checkpoint alone."""


class WaitedTooLongError(RunLostError, TimeoutError):
    """Nobody answered in time; the message says what was waited for."""
