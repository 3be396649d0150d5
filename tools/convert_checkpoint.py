"""Convert a checkpoint file of an older version to a checkpoint folder next to it.

python tools/convert_checkpoint.py outputs/DATE/TIME/checkpoints/checkpoint_000100.pt
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
import sys
from pathlib import Path
from typing import Any

import torch

from torchrl_grpo.host.checkpoint_files import STATE, sizes_and_sha256, write_manifest
from torchrl_grpo.learner.checkpoint import check_stored
from torchrl_grpo.learner.shards import write_parts
from torchrl_grpo.models.sharding import WEIGHTS, exact_floats

TRAILER = struct.Struct("<Q32s8s")
"""End of the file: the manifest's length, the SHA-256 of everything before that, and a marker."""
MARK = b"grpo-ck1"


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest at the end of a file, after a check of its checksum."""
    end = path.stat().st_size - TRAILER.size
    with path.open("rb") as file:
        file.seek(max(end, 0))
        length, digest, mark = TRAILER.unpack(file.read())
        if mark != MARK:
            raise ValueError(f"{path} must be a checkpoint of an older version, but is not")
        file.seek(0)
        sha256 = hashlib.sha256()
        left = end + 8
        while left:
            chunk = file.read(min(left, 1 << 24))
            sha256.update(chunk)
            left -= len(chunk)
        if sha256.digest() != digest:
            raise ValueError(f"{path} must be whole, but is damaged: use an earlier checkpoint")
        file.seek(end - length)
        manifest: dict[str, Any] = json.loads(file.read(length))
    del manifest["sha256"]
    return manifest


def convert(path: Path) -> Path:
    """Write the folder of a checkpoint and return it; the file stays."""
    manifest = read_manifest(path)
    if manifest["config"]["optimizer"]["name"] == "adamw_8bit":
        import torchao.optim  # noqa: F401  allows torch.load to read its types
    check_stored(path)
    state = torch.load(path, map_location="cpu", weights_only=True)
    trainer = state["trainer"]
    tensors = {WEIGHTS + name: weight for name, weight in trainer.pop("model").items()}
    for name, values in trainer["optimizer"].get("state", {}).items():
        for kind in ("exp_avg", "exp_avg_sq"):
            moment = values.pop(kind)
            quantized = hasattr(moment, "codes")
            tensors[f"moments/{kind}/{name}"] = exact_floats(moment) if quantized else moment
    folder = path.with_suffix("")
    staging = path.with_suffix(".tmp")
    staging.mkdir()
    write_parts(staging, tensors, None)
    torch.save(state, staging / STATE)
    write_manifest(staging, manifest, sizes_and_sha256([*staging.iterdir()]))
    return staging.rename(folder)


def main() -> None:
    """Convert each file that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    for path in parser.parse_args().files:
        try:
            print(convert(path))
        except (ValueError, OSError, RuntimeError, struct.error) as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
