"""Upload of a model to the Hugging Face hub, through huggingface_hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi


def create_repository(name: str) -> None:
    """Create a model's repository, unless it exists.

    Raises:
        ValueError: the user may not, or the hub cannot be reached.
    """
    try:
        HfApi().create_repo(name, exist_ok=True)
    except Exception as error:  # the name, the network, the token: of any type
        raise ValueError(
            f"--push={name} must be a repository on the Hugging Face hub that you may write to, "
            f"but {_reason(error)}: check the name, HF_TOKEN (or hf auth login) and HF_HUB_OFFLINE."
        ) from error


def upload(folder: Path, name: str) -> str:
    """Upload a folder as one commit of a model's repository; return its address.

    Raises:
        ValueError: it could not be uploaded.
    """
    try:
        commit = HfApi().upload_folder(
            repo_id=name, folder_path=folder, commit_message="Upload of torchrl_grpo"
        )
    except Exception as error:  # the network, the hub's storage: of any type
        raise ValueError(
            f"--push={name} must take {folder}, but {_reason(error)}: try again with "
            f"hf upload {name} {folder}."
        ) from error
    return str(commit.repo_url)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text:.300}"
