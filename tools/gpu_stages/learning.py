"""Run the default job on two-digit addition, and record its accuracy."""

from __future__ import annotations

import subprocess
import sys
from tempfile import TemporaryDirectory

from gpu_stages.common import ROOT, Stage
from torchrl_grpo.host.files import read_jsonl

OPTIONS = ("logging.tensorboard=false", "inference_model.backend=transformers")
FEW = ("train.total_dialog_turns=256", "evaluation.num_prompts=16")


def main() -> None:
    """Run the stage."""
    stage = Stage()
    with stage.part("grpo_arithmetic") as figures, TemporaryDirectory() as folder:
        options = [*OPTIONS, *(FEW if stage.is_rehearsal else ()), f"hydra.run.dir={folder}"]
        script = str(ROOT / "sota/grpo/grpo.py")
        command = [sys.executable, script, "--config-name", "grpo_arithmetic", *options]
        code = subprocess.run(command).returncode
        rows = read_jsonl(f"{folder}/metrics.jsonl")
        figures["steps"] = rows[-1]["step"]
        figures["step_s"] = rows[-1].get("time/step_s")
        scores = {key: [row[key] for row in rows if key in row] for key in rows[0] if "eval" in key}
        figures |= {f"{key}, first and last": (row[0], row[-1]) for key, row in scores.items()}
        if code != 0:
            raise RuntimeError(f"the run ended with {code}")
    stage.end()


if __name__ == "__main__":
    main()
