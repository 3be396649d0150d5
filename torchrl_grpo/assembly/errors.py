"""Errors of a run's parts, in the words of its config."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torchrl import torchrl_logger

from torchrl_grpo.errors import ConfigError


@contextmanager
def as_config_errors() -> Iterator[None]:
    """Turn a part's ``ValueError`` into a ``ConfigError``, printed as one line; the traceback goes
    to the debug log.
    """
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        torchrl_logger.debug("refused while building", exc_info=True)
        raise ConfigError(str(error)) from error


@contextmanager
def naming_teacher() -> Iterator[None]:
    """Replace the model's key by the teacher's in errors within the context."""
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error).replace("model.name=", "teacher.model=")) from error
