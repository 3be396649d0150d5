"""Exports the trained model for ``from_pretrained``."""

from __future__ import annotations

import json
import shutil
from collections import deque
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils import cached_file

from torchrl_grpo.errors import DiskFullError, NotSavedError
from torchrl_grpo.host.files import is_full
from torchrl_grpo.host.text import size
from torchrl_grpo.models.loading import base_model_of
from torchrl_grpo.models.sharding import is_writer
from torchrl_grpo.weights import named_adapter_weights, named_weights
from torchrl_grpo.weights.named import NamedTensors

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
"""Files that a vision-language model's processor of images is loaded from."""
_IF_ANY: dict[str, Any] = {
    "local_files_only": True,
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_connection_errors": False,
}
ACCURACY = "eval/pass@1"
"""Metric of a checkpoint's quality."""
INVALID = "eval/invalid_fraction"
"""Fraction of the rewards that the metric excludes as invalid."""
_FILE_BYTES = 4 << 30
"""Maximum size of a file of weights, unless a single weight is larger. Writing takes this memory.
"""


def export_model(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    target: Path,
    card: str,
    *,
    adapters: bool = False,
) -> Path:
    """Write a model, its tokenizer and its card into a folder, replacing its contents.

    The weights are gathered and written file by file.

    ``AutoModelForCausalLM.from_pretrained`` (with images ``AutoModelForImageTextToText``) and vLLM
    load the folder without conversion. All ranks of a sharded model must call this; rank 0 writes.

    Args:
        model: the trained model; its adapters are merged.
        tokenizer: tokenizer of the model.
        target: folder to write.
        card: text of its ``README.md``.
        adapters: whether to write only LoRA's adapters, in the form that peft loads, instead of the
            whole model.

    Raises:
        NotSavedError: there is no room for the model (``DiskFullError``), or the folder is not
            writable. Its previous contents stay.
    """
    named = named_adapter_weights(model) if adapters else named_weights(model)
    if not is_writer(model):
        deque(named, maxlen=0)
        return target
    base = base_model_of(model)
    staging, old = (target.with_name(f"{target.name}.{end}") for end in ("tmp", "old"))
    for folder in (staging, old):
        shutil.rmtree(folder, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        if adapters:
            model.save_pretrained(
                staging, state_dict={name: weight.cpu().contiguous() for name, weight in named}
            )
        else:
            check_room(staging, exported_bytes(base), "the model")
            base.save_pretrained(
                staging, state_dict={}, save_original_format=False
            )  # all but the weights
            _write_weights(staging, named)
        tokenizer.save_pretrained(staging)
        for name in PROCESSOR_FILES if base.name_or_path else ():
            file = cached_file(base.name_or_path, name, **_IF_ANY)
            if file is not None:
                shutil.copyfile(file, staging / name)
        (staging / "README.md").write_text(card, encoding="utf-8")
    except BaseException as error:
        if isinstance(error, Exception):
            deque(named, maxlen=0)  # the other ranks only take part in gathering
        shutil.rmtree(staging, ignore_errors=True)
        raise not_saved(error, "the model", target.parent) from None
    if target.exists():
        target.rename(old)
    staging.rename(target)
    shutil.rmtree(old, ignore_errors=True)
    return target


def exported_bytes(model: Any) -> int:
    """Return the size of a model's exported weights, in bytes: dequantized, without adapters."""
    return sum(
        getattr(weight, "dense_bytes", weight.nbytes)
        for name, weight in model.named_parameters()
        if ".lora_" not in name
    )


def _write_weights(folder: Path, named: NamedTensors) -> None:
    """Write weights under the names that ``from_pretrained`` looks for. One file at a time is held
    in memory.
    """
    for empty in folder.glob("*.safetensors"):
        empty.unlink()
    files: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = used = 0

    def write() -> None:
        save_file(pending, folder / f"{len(files)}.part", {"format": "pt"})
        files.append([*pending])
        pending.clear()

    for name, weight in named:
        if pending and used + weight.nbytes > _FILE_BYTES:
            write()
            used = 0
        pending[name] = weight.cpu().contiguous()
        used, total = used + weight.nbytes, total + weight.nbytes
    write()
    several = len(files) > 1
    file_of = dict[str, str]()
    for index, names in enumerate(files):
        target = (
            f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
            if several
            else "model.safetensors"
        )
        (folder / f"{index}.part").rename(folder / target)
        file_of |= dict.fromkeys(names, target)
    if several:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": file_of}, indent=2)
        (folder / "model.safetensors.index.json").write_text(text + "\n", encoding="utf-8")


def not_saved(error: BaseException, what: str, folder: Path) -> BaseException:
    """Return the error to raise if a file is not written: ``DiskFullError``, ``NotSavedError`` or,
    if it is about something else, the error itself.
    """
    if is_full(error):
        return DiskFullError(f"there is no room for {what} in {folder}")
    if isinstance(error, OSError):
        return NotSavedError(f"{what} cannot be written in {folder} ({error.strerror})")
    return error


def check_room(directory: Path, needed: int, what: str) -> None:
    """Check that a file fits on a disk.

    Raises:
        DiskFullError: the file does not fit.
    """
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise DiskFullError(
            f"there is no room for {what} in {directory}: it takes {size(needed)}, and "
            f"{size(free)} are free"
        )
