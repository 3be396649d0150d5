"""The Hugging Face hub without a network: tried once, then only its cache is used."""

from __future__ import annotations

import functools
import logging
import os
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

_LONGEST_S = 10.0
_OFFLINE = "HF_HUB_OFFLINE is set"
_log = logging.getLogger("torchrl")  # TorchRL's logger: importing that takes seconds


def check_hub(name: str, kind: str) -> None:
    """Check that a repository is in the cache, or that the hub can be reached to download it.

    Without a network, the hub's library is put into its offline mode: it would try each file of a
    cached repository again and again.

    Args:
        name: name on the hub, such as ``openai/gsm8k``.
        kind: ``model`` or ``dataset``.

    Raises:
        ConnectionError: it is not in the cache, and the hub cannot be reached.
    """
    reason = unreachable()
    if reason is None or (reason == _OFFLINE and kind == "dataset"):  # load_dataset says it
        return
    if not _is_cached(name, kind):
        raise ConnectionError(f"{name} is not in the cache, and {reason}")
    _warn_once(reason)


@functools.cache
def _warn_once(reason: str) -> None:
    if reason != _OFFLINE:
        _log.warning(f"{reason}: models and data sets of the hub are read from its cache.")


def _is_cached(name: str, kind: str) -> bool:
    from huggingface_hub import constants

    folders = [Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}"]
    if kind == "dataset":
        from datasets.naming import camelcase_to_snakecase

        cache = os.environ.get("HF_DATASETS_CACHE", Path(constants.HF_HOME) / "datasets")
        *owner, last = name.split("/")
        folders.append(Path(cache) / "___".join([*owner, camelcase_to_snakecase(last)]))
    return any(folder.is_dir() for folder in folders)


def cached_models() -> list[str]:
    """Return the names of the models in the hub's cache."""
    from huggingface_hub import constants

    folders = Path(constants.HF_HUB_CACHE).glob("models--*")
    return [folder.name.removeprefix("models--").replace("--", "/") for folder in folders]


@functools.cache
def unreachable() -> str | None:
    """Return why the hub cannot be reached, after asking once; None if it can."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return _OFFLINE
    proxies = urllib.request.getproxies()
    if any(address.startswith("socks") for address in proxies.values()):
        return None  # urllib knows none
    try:
        request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
        with urllib.request.urlopen(request, timeout=_LONGEST_S):
            return None
    except urllib.error.HTTPError:
        return None  # an answer
    except (OSError, ValueError) as error:
        cause = getattr(error, "reason", error)
        if isinstance(cause, ssl.SSLError):
            return None  # it answers, and the hub's library has certificates of its own
        reason = (
            f"{constants.ENDPOINT} cannot be reached ({getattr(cause, 'strerror', None) or cause})"
        )
    os.environ["HF_HUB_OFFLINE"] = "1"  # for processes that this one starts
    for module in ("huggingface_hub.constants", "datasets.config"):
        if module in sys.modules:
            config: Any = sys.modules[module]
            config.HF_HUB_OFFLINE = True
    return reason
