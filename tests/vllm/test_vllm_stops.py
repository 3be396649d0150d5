"""The entry point of ``vllm.general_plugins``: stop strings in processes that vLLM starts itself."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.support import forks
from tests.support.configs import ROOT

PROGRAM = """
from transformers import AutoTokenizer
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor

load_general_plugins()

from torchrl_grpo.generation.stops import StopStrings
from torchrl_grpo.generation.vllm_stops import watch_for_stops
from torchrl_grpo.starter import starter_path

tokenizer = AutoTokenizer.from_pretrained(starter_path())
tokens = tokenizer("1+2+2=5", add_special_tokens=False)["input_ids"]

def ends(processor, **options):
    params = SamplingParams(max_tokens=9, **options)
    request = EngineCoreRequest(
        request_id="0", prompt_token_ids=tokens, mm_features=None, sampling_params=params, pooling_params=None,
        arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None, external_req_id="0",
    )
    processor.add_request(request, None)
    reader = processor.request_states.pop("0").detokenizer
    for token in tokens:
        if reader.update([token], False):
            break
    return tokenizer.decode(reader.output_token_ids)

other = OutputProcessor(tokenizer, log_stats=False)
print("other", ends(other, extra_args={"stop_strings": ["2+2"]}), ends(other))
ours = OutputProcessor(None, log_stats=False)
for _ in range(2):
    watch_for_stops(ours, {("2+2",): StopStrings(["2+2"], tokenizer)})
print("ours", ends(ours, extra_args={"stop_strings": ["2+2"]}), ends(ours))
"""


IMPORT = """
import sys, torchrl_grpo.generation.vllm_stops
print(*sorted(name for name in sys.modules if name.startswith("torchrl_grpo")))
"""


def test_the_plugin_imports_nothing_else_of_ours() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, cwd=ROOT)
    names = ["torchrl_grpo", "torchrl_grpo.generation", "torchrl_grpo.generation.vllm_stops"]
    assert done.stdout.split() == names, done.stderr


def test_a_process_of_vllm_ends_responses_at_stop_strings(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = tmp_path / "torchrl_grpo-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torchrl_grpo\nVersion: 0\n")
    [(name, value)] = project["entry-points"]["vllm.general_plugins"].items()
    (metadata / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {value}\n")
    environ = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", forks.WITH_VLLM: "1"}
    with forks.Popen(
        [sys.executable, "-c", PROGRAM],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr
    lines = [line.split() for line in stdout.splitlines()]
    assert ["other", "1+2+2", "1+2+2=5"] in lines
    assert ["ours", "1+2+2", "1+2+2=5"] in lines
