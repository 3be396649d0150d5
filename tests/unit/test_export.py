"""``python -m torchrl_grpo export``: a checkpoint's model is the one that the run itself would
export.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, constants
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import torchrl_grpo.extras.export.export
import torchrl_grpo.learner.export
from tests.support.configs import composed
from tests.support.hub import TOKEN, Hub, serving_hub
from tests.support.runs import LORA, SMALL, at, differences, run, state_of, steps
from torchrl_grpo.assembly.run import build
from torchrl_grpo.config import from_hydra
from torchrl_grpo.errors import DiskFullError
from torchrl_grpo.extras.export.card import model_card
from torchrl_grpo.extras.export.command import main
from torchrl_grpo.host.checkpoint_files import saved_config
from torchrl_grpo.learner.export import export_model
from torchrl_grpo.starter import starter_path

TESTED = ("evaluation.num_prompts=4", "evaluation.k=0")


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    run(folder, *LORA, *TESTED, steps(1))
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def assert_same(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], atol: float = 0.0
) -> None:
    assert one.keys() == other.keys()
    assert max((one[name] - other[name]).abs().max().item() for name in one) <= atol


@pytest.mark.nightly
@pytest.mark.slow
def test_export_prints_the_folder_and_nothing_else(lora_run: Path, tmp_path: Path) -> None:
    """Messages that torchao, PyTorch and transformers print at import, and progress bars, must not
    appear.
    """
    command = [
        sys.executable,
        "-m",
        "torchrl_grpo",
        "export",
        str(lora_run),
        "--output",
        str(tmp_path / "made"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    of_torch = "No CUDA runtime is found, using CUDA_HOME="  # PyTorch's CUDA build, where there is a toolkit and no GPU
    errors = [line for line in done.stderr.splitlines() if not line.startswith(of_torch)]
    assert (done.stdout, errors) == (f"{tmp_path / 'made'}\n", [])


@pytest.mark.slow
def test_the_export_of_a_checkpoint_is_that_of_the_run(tmp_path: Path) -> None:
    run(tmp_path, steps(1))
    main([str(tmp_path)])
    exported = tmp_path / "checkpoints" / "checkpoint_000001_model"
    assert_same(weights(exported), weights(tmp_path / "checkpoints" / "model"))
    assert AutoTokenizer.from_pretrained(exported).chat_template
    assert {path.name for path in exported.iterdir()} == {
        path.name for path in (exported.parent / "model").iterdir()
    }


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1])
def test_a_live_run_is_exported_from_its_next_checkpoint(
    after: int, lora_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run keeps one checkpoint, and writes the next one before or after this one is read."""
    shutil.copytree(lora_run, tmp_path / "run")
    real = torchrl_grpo.extras.export.export.read_checkpoint
    calls = list[Path]()

    def read_checkpoint(path: Path) -> dict[str, Any]:
        calls.append(path)
        content = real(path) if after and len(calls) == 1 else {}
        if len(calls) == 1:
            path.rename(at(tmp_path / "run", 2))
        return content or real(path)

    monkeypatch.setattr(torchrl_grpo.extras.export.export, "read_checkpoint", read_checkpoint)
    main([str(tmp_path / "run"), "--output", str(tmp_path / "model")])
    assert calls == [at(tmp_path / "run", 1), at(tmp_path / "run", 2)]
    assert_same(weights(tmp_path / "model"), weights(lora_run / "checkpoints" / "model"))


@pytest.mark.slow
def test_adapters_are_merged_or_written_alone(lora_run: Path, tmp_path: Path) -> None:
    expected = weights(lora_run / "checkpoints" / "model")
    main([str(at(lora_run, 1)), "--output", str(tmp_path / "merged")])
    assert_same(weights(tmp_path / "merged"), expected)
    main([str(lora_run), "--output", str(tmp_path / "adapters"), "--adapters"])
    assert not (tmp_path / "adapters" / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(starter_path())
    merged = PeftModel.from_pretrained(base, str(tmp_path / "adapters")).merge_and_unload()
    assert_same(merged.state_dict(), expected, atol=1e-6)


@pytest.mark.slow
def test_resume_and_export_do_not_need_the_adapters_folder(tmp_path: Path) -> None:
    """A run began with the adapters of a folder, which is gone."""
    settings = {"r": 3, "rank_pattern": {"q_proj": 2}, "target_modules": ["q_proj", "v_proj"]}
    base = AutoModelForCausalLM.from_pretrained(starter_path())
    get_peft_model(base, LoraConfig(**settings)).save_pretrained(tmp_path / "adapters")
    options = (*LORA, f"train_model.lora.path={tmp_path / 'adapters'}", steps(2))
    run(tmp_path / "run", *options, "train.checkpoint_frequency=1")
    shutil.rmtree(tmp_path / "adapters")
    overrides = (*SMALL, *options, f"train.resume={at(tmp_path / 'run', 1)}")
    saved = partial(saved_config, directory=tmp_path)
    config = from_hydra(composed("grpo_arithmetic", overrides), overrides, saved)
    with closing(build(config, tmp_path / "resumed")) as resumed:
        resumed.fit()
    states = [state_of(at(tmp_path / name, 2)) for name in ("run", "resumed")]
    assert differences(*states) == []
    main([str(at(tmp_path / "resumed", 2)), "--output", str(tmp_path / "exported")])
    assert_same(weights(tmp_path / "exported"), weights(tmp_path / "run" / "checkpoints" / "model"))


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), LORA])
def test_models_are_written_beside_checkpoints(overrides: tuple[str, ...], tmp_path: Path) -> None:
    run(tmp_path, *overrides, *TESTED, steps(4), "train.checkpoint_frequency=2", "train.export_frequency=2",
        "evaluation.frequency=2")  # fmt: skip
    models = sorted((tmp_path / "checkpoints").glob("model*"))
    assert [path.name for path in models] == [
        "model",
        "model_000002",
    ]  # the run exports its last step itself
    main(
        [
            str(at(tmp_path, 2)),
            "--output",
            str(tmp_path / "made"),
            *(["--adapters"] if overrides else []),
        ]
    )
    names = {path.name for path in (tmp_path / "made").iterdir()}
    assert names == {path.name for path in models[1].iterdir()}
    for file in names - {"tokenizer.json"}:
        assert (models[1] / file).read_bytes() == (tmp_path / "made" / file).read_bytes(), file


@pytest.mark.slow
def test_the_card_names_base_data_accuracy_and_config(lora_run: Path, tmp_path: Path) -> None:
    main([str(lora_run), "--output", str(tmp_path / "made")])
    card = (tmp_path / "made" / "README.md").read_text()
    assert (
        "| base model | starter |\n| training data | arithmetic |\n| steps | 1 |\n| pass@1 | "
        in card
    )
    assert '"lr": 0.01' in card
    assert card == (lora_run / "checkpoints" / "model" / "README.md").read_text()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Yield a hub that huggingface_hub contacts: the real client, over HTTP."""
    with serving_hub() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield served


@pytest.mark.slow
def test_a_pushed_model_is_the_exported_one_with_its_card(
    hub: Hub, lora_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ([], ["--adapters"]):
        name = f"someone/model{len(option)}"
        target = tmp_path / name
        main([str(lora_run), "--output", str(target), "--push", name, *option])
        assert capsys.readouterr().out == f"{target}\n{hub.address}/{name}\n"
        files = {path.name: path.read_bytes() for path in target.iterdir()}
        pushed = hub.models[name]
        assert {path: pushed[path] for path in files} == files
        card = ModelCard(pushed["README.md"].decode())
        assert card.data.library_name == ("peft" if option else "transformers")
        assert (card.data.base_model, card.data.datasets) == (None, None)  # neither is on a hub
        assert "grpo" in card.data.tags
        [result] = card.data.eval_results
        assert (result.dataset_type, result.metric_name) == ("arithmetic", "pass@1")
        assert 0 <= result.metric_value <= 1
        assert f'model="{name}"' in card.text and "<details>" in card.text


def test_a_card_names_what_the_hub_has() -> None:
    config = {
        "env": {"dataset": "gsm8k", "task": {}, "system_prompt": 'Say "so".'},
        "model": {"name": "Qwen/Qwen2.5-0.5B@main"},
    }
    metrics = {"eval/pass@1": 0.5, "eval/pass@8": math.nan, "eval/reward_mean": 0.5}
    card = ModelCard(model_card(config, 3, metrics, adapters=True))
    assert (card.data.base_model, card.data.datasets) == ("Qwen/Qwen2.5-0.5B", ["openai/gsm8k"])
    assert [(result.metric_name, result.metric_value) for result in card.data.eval_results] == [
        ("pass@1", 0.5)
    ]
    assert '{"role": "system", "content": "Say \\"so\\"."}' in card.text


@pytest.mark.slow
@pytest.mark.parametrize("option", [[], ["--adapters"]])
def test_the_example_of_a_card_runs(
    option: list[str], lora_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main([str(lora_run), "--output", str(tmp_path / "made"), *option])
    monkeypatch.chdir(tmp_path / "made")
    text = Path("README.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    assert len(code.splitlines()) <= 6
    lines: list[str] = []
    exec(code.replace("512", "4").replace("25?", "25=?"), {"print": lines.append})
    assert len(lines) == 1


def test_a_push_without_rights_is_refused_before_the_export(
    hub: Hub,
    lora_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    for name in ("someone/model", "not a name"):
        with pytest.raises(SystemExit) as ended:
            main([str(lora_run), "--output", str(tmp_path / "made"), "--push", name])
        assert ended.value.code == 2
        assert f"--push={name} must be" in capsys.readouterr().err
    assert not (tmp_path / "made").exists() and hub.models == {}


def test_what_cannot_be_exported_is_one_line(
    lora_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        (
            [str(tmp_path / "none")],
            "must be a checkpoint, or a run's folder that has one, but it does not exist",
        ),
        ([str(lora_run), "--output", str(tmp_path)], "must not exist yet"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


def test_a_large_model_is_written_file_by_file(
    tiny_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = max(weight.nbytes for weight in tiny_model.parameters())
    monkeypatch.setattr(torchrl_grpo.learner.export, "_FILE_BYTES", largest)
    folder = export_model(tiny_model, tokenizer, tmp_path / "model", "card")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    assert (
        len(files) > 2
        and max(sum(w.nbytes for w in held.values()) for held in files.values()) <= largest
    )
    assert index["weight_map"] == {name: file for file, held in files.items() for name in held}
    assert index["metadata"]["total_size"] == sum(
        weight.nbytes for weight in tiny_model.parameters()
    )
    assert not list(folder.glob("*.part"))
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert_same(loaded.state_dict(), tiny_model.state_dict())


def test_all_weights_are_gathered_when_the_first_file_finds_no_room(
    tiny_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the other ranks of a sharded model would wait forever."""
    gathered = list[str]()

    def named_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in tiny_model.named_parameters():
            gathered.append(name)
            yield name, weight.detach()

    def save_file(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torchrl_grpo.learner.export, "named_weights", named_weights)
    monkeypatch.setattr(torchrl_grpo.learner.export, "save_file", save_file)
    monkeypatch.setattr(torchrl_grpo.learner.export, "_FILE_BYTES", 1)
    with pytest.raises(DiskFullError, match="there is no room for the model in"):
        export_model(tiny_model, tokenizer, tmp_path / "model", "card")
    assert gathered == [name for name, _ in tiny_model.named_parameters()]
    assert not list(tmp_path.iterdir())
