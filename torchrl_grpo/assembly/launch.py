"""``launch``: start a run from a validated config, for the commands and ``torchrl_grpo.train``.

Slow imports come after all checks that work without them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_grpo.config import GRPOConfig, check_script, starting
from torchrl_grpo.host import startup
from torchrl_grpo.host.extras import load_extra

if TYPE_CHECKING:
    from torchrl_grpo.loop import Observer


def launch(
    config: GRPOConfig,
    directory: Path,
    *,
    asynchronous: bool,
    observers: Sequence[Observer] = (),
) -> dict[str, Any] | None:
    """Build the run that a config describes, train, and always close it.

    Args:
        config: validated.
        directory: folder of the run.
        asynchronous: whether sampling and training overlap.
        observers: see ``Run.fit``.

    Returns:
        the run's summary; None for a dry run.

    Raises:
        ConfigError: a rule is broken.
        SystemExit: a dry run found problems.
    """
    check_script(config, asynchronous)
    startup.begin()
    task = None
    if not config.dry_run:  # a dry run makes these checks itself
        load_extra("check_models")(config)
        startup.say("reading data")
        from torchrl_grpo.assembly.tasks import read_task

        task = read_task(config)
    # These imports take seconds, so the checks above report mistakes first.
    with starting(config):
        from torchrl_grpo.assembly.run import build

    if config.dry_run:
        examine = load_extra("dry_run")
        if not examine(config, directory, asynchronous=asynchronous):
            sys.exit(1)
        return None
    with (
        _log_to_files(),
        closing(build(config, directory, asynchronous=asynchronous, task=task)) as run,
    ):
        return run.fit(observers)


@contextmanager
def _log_to_files() -> Iterator[None]:
    """Write TorchRL's log lines to Hydra's log file too: its logger does not propagate them."""
    from torchrl import torchrl_logger

    files = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.FileHandler)
    ]
    for handler in files:
        handler.handleError = _ignore_full_disk  # type: ignore[method-assign]
        torchrl_logger.addHandler(handler)
    try:
        yield
    finally:
        for handler in files:
            torchrl_logger.removeHandler(handler)


def _ignore_full_disk(record: logging.LogRecord) -> None:
    """Ignore a log line that does not fit on a full disk; the terminal has it."""
