"""Write the model of a checkpoint in the format of Hugging Face's ``from_pretrained`` and vLLM."""

from __future__ import annotations

from pathlib import Path

import torch

from torchrl_grpo.assembly.roles import make_model
from torchrl_grpo.config.resumed import from_saved
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.extras.export.card import model_card
from torchrl_grpo.host.checkpoint_files import newest, read_manifest
from torchrl_grpo.host.folders import check_own_files
from torchrl_grpo.images.families import family_of
from torchrl_grpo.learner.checkpoint import read_checkpoint
from torchrl_grpo.learner.export import export_model
from torchrl_grpo.learner.resume import refusing
from torchrl_grpo.learner.shards import read_parts
from torchrl_grpo.models import loading


def export(
    checkpoint: str,
    output: Path | None = None,
    *,
    adapters: bool = False,
    trust_remote_code: bool = False,
    hub_name: str = ".",
) -> Path:
    """Write the model of a checkpoint; return the folder.

    Args:
        checkpoint: a checkpoint, or the folder of a run.
        output: the folder to write, which must not exist; by default the checkpoint's path with
            ``_model`` appended.
        adapters: whether to write only LoRA's adapters.
        trust_remote_code: whether code from the base model's repository may run, and the checkpoint
            may name code and other files; its own config does not decide that.
        hub_name: name in the card's example, for a folder that is uploaded.

    Raises:
        ConfigError: there is no such checkpoint, the output folder exists or would be outside the
            run's, or there are no adapters.
    """
    if output is None and Path(checkpoint).is_dir():
        check_own_files(Path(checkpoint))
    newest_checkpoint = newest(
        checkpoint, Path(), lambda path: (read_checkpoint(path), read_manifest(path)["metrics"])
    )
    assert newest_checkpoint is not None  # only auto may find nothing
    path, (state, metrics) = newest_checkpoint
    config = from_saved(state["config"], path, trusted=trust_remote_code)
    config.model.trust_remote_code = trust_remote_code
    target = path.with_name(f"{path.name}_model") if output is None else output
    if target.exists():
        raise ConfigError(f"--output={target} must not exist yet, but it does: use another folder.")
    if adapters and not config.train_model.lora.enabled:
        raise ConfigError(
            f"--adapters needs a checkpoint with LoRA, but {path} has none: leave it out."
        )
    name = config.model.source
    model = make_model(config, torch.device("cpu"))
    with refusing(path):
        read_parts(path, model, None, {})
    tokenizer = loading.load_tokenizer(
        name, chat_template=config.model.chat_template, trust_remote_code=trust_remote_code
    )
    return export_model(
        model,
        tokenizer,
        target,
        model_card(
            state["config"],
            state["step"],
            metrics,
            adapters=adapters,
            reads_images=family_of(loading.base_model_of(model).config) is not None,
            name=hub_name,
        ),
        adapters=adapters,
    )
