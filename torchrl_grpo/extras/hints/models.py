"""Hints for ``model.name``: a run, a checkpoint or adapters in place of a model, or a misspelled
name. Imports no torch, so that errors come before that slow import.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchrl_grpo.checks import STARTERS
from torchrl_grpo.config import ConfigError, GRPOConfig
from torchrl_grpo.extras.hints.hub import cached_models, check_hub
from torchrl_grpo.host.checkpoint_files import checkpoints_in, is_checkpoint
from torchrl_grpo.host.files import METRICS_FILE


def check_models(config: GRPOConfig) -> None:
    """Check the names of the models of a run.

    Raises:
        ConfigError: there is no such model.
    """
    fields = [("model.name", config.model.source)]
    for index in range(config.num_teachers):
        fields.append(("teacher.model", config.of_teacher(index).teacher_source or ""))
    for field, name in fields:
        with _naming(field):
            check_model_name(name)


@contextmanager
def _naming(field: str) -> Iterator[None]:
    """Turn an error about a model into one about another key."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error).replace("model.name=", f"{field}=", 1)) from error


def check_model_name(name: str) -> None:
    """Check that a name is a folder with a model, or a name on the hub that can be reached.

    Args:
        name: ``model.name``, with ``@`` and a revision or without.

    Raises:
        ValueError: it is neither; the message says what to use instead.
    """
    path = Path(name)
    if name in STARTERS:
        return
    if path.is_dir():
        if not (path / "config.json").is_file() and (fix := _instead_of(path)):
            raise ValueError(
                f"model.name={name} must be a folder with a complete model, but {fix}."
            )
        return
    hub_name = name.partition("@")[0]
    if not path.exists() and _is_hub_name(hub_name):
        try:
            check_hub(hub_name, "model")
        except OSError as error:
            raise ValueError(explain_model_error(name, "config", error)) from error
        return
    wrong = "it is a file"
    if not path.exists():
        parent = next(parent for parent in path.absolute().parents if parent.exists())
        close = _close_folder(path)
        wrong = f"{parent} has no such folder" + (f" (did you mean {close}?)" if close else "")
        if name.startswith("~"):
            wrong = "a shell does not expand ~ after a ="
    raise ValueError(
        f"model.name={name} must be a folder with a model, or a name on the Hugging Face hub such "
        f"as OWNER/NAME, but {wrong}: check the path, or use model.name=starter, which is included "
        "with the package."
    )


def _is_hub_name(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _instead_of(folder: Path) -> str:
    """Return what a folder without a model has, and what to use; empty if unknown."""
    if (folder / "adapter_config.json").is_file():
        try:
            base = json.loads((folder / "adapter_config.json").read_bytes())
            name = base["base_model_name_or_path"]
        except (OSError, ValueError, TypeError, KeyError):
            name = "BASE"
        return (
            f"it has only adapters of {name}: to train them on, use model.name={name} "
            f"train_model.lora.enabled=true train_model.lora.path={folder}"
        )
    is_own = is_checkpoint(folder) or (folder / METRICS_FILE).is_file() or checkpoints_in(folder)
    places = (folder / "checkpoints", folder, folder.parent if is_checkpoint(folder) else folder)
    models = [place / "model" for place in places if (place / "model" / "config.json").is_file()]
    models += sorted(path.parent for path in folder.glob("*/config.json"))[-1:]
    what = "it is a run's" if is_own else "its config.json is elsewhere"
    if models:
        return f"{what}: use {models[0]}"
    if is_own:
        return f"{what}: python -m torchrl_grpo export {folder} writes its model"
    return ""


def _close_folder(path: Path) -> Path | None:
    """Return the folder next to a missing one with the most similar name."""
    if not path.parent.is_dir():
        return None
    names = [other.name for other in path.parent.iterdir() if other.is_dir()]
    close = difflib.get_close_matches(path.name, names, 1)
    return path.parent / close[0] if close else None


def explain_model_error(name: str, what: str, error: Exception) -> str:
    """Return the error for a model that could be loaded only in part.

    Args:
        name: ``model.name``.
        what: the part.
        error: why.
    """
    first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    known = difflib.get_close_matches(name, [*STARTERS, *cached_models()], 1, 0.8)
    close = known[0] if known else _close_folder(Path(name))
    if Path(name).exists() or close is None:
        fix = (
            "check the name, the files, the network and HF_HUB_OFFLINE, log in for a gated model, or "
            "use model.name=starter, which is included in the package."
        )
    else:
        fix = f"did you mean {close}?"
    return (
        f"model.name={name} must be a folder or a model on the Hugging Face hub that can be reached, "
        f"but its {what} could not be loaded ({first_line}): {fix}"
    )
