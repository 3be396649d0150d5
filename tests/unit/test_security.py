"""Secrets are never written, and foreign models, data, checkpoints and templates run no code."""

from __future__ import annotations

import ast
import copy
import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from hydra.utils import get_class

from tests.support.configs import ROOT, compose_config, composed
from tests.support.models import make_tiny_model
from tests.support.runs import at, changed, reseal, run, state_in, steps
from torchrl_grpo import objectives, transforms
from torchrl_grpo.assembly.prepare import prepare
from torchrl_grpo.assembly.tasks import make_task
from torchrl_grpo.config import ConfigError, GRPOConfig, check_command_line, from_hydra, plain
from torchrl_grpo.config.schema import ADVANTAGES, FIELDS, LOSSES
from torchrl_grpo.config.security import FROM_COMMAND_LINE, OWN_REWARDS
from torchrl_grpo.extras.export.command import main
from torchrl_grpo.extras.export.export import export
from torchrl_grpo.models import loading
from torchrl_grpo.rewards import BUILTINS
from torchrl_grpo.starter import starter_path

SYNC = ROOT / "sota" / "grpo" / "grpo.py"
KEY = "sk-abcdefghijklmnop0123456789"
TOKEN = "hf_" + "Ab3" * 12
SCRIPT = (
    "--config-name",
    "grpo_arithmetic",
    "evaluation.num_prompts=0",
    "logging.tensorboard=false",
)


class Payload:
    """Create a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


@pytest.fixture
def canary(tmp_path: Path) -> Any:
    """Return a path that must not exist at the end."""
    path = tmp_path / "canary"
    yield path
    assert not path.exists()


def starter_copy(folder: Path, *without: str) -> Path:
    return Path(shutil.copytree(starter_path(), folder, ignore=shutil.ignore_patterns(*without)))


# Secrets


@pytest.mark.parametrize(
    ("override", "secret"),
    [
        (f"+logging.wandb.api_key={'0123456789abcdef' * 2}01234567", "0123456789"),
        (f"logging.wandb.name={'0123456789abcdef' * 2}01234567", "0123456789"),
        (f"+model.token={TOKEN}", TOKEN),
        ("+hf_token=short", "short"),
        (f"env.system_prompt='my key is {KEY}'", KEY),
        (f"env.reward={{fn: judge, url: 'http://localhost/v1', model: m, api_key: {KEY}}}", KEY),
        ("env.reward={fn: judge, url: 'https://me:secretword@host/v1', model: m}", "secretword"),
        (
            "env.reward={fn: judge, url: 'http://localhost/v1', model: m, api_key: secretword}",
            "secretword",
        ),
        ("+env.task={_target_: my.Task, options: {'hf_token': 'secretword'}}", "secretword"),
    ],
)
def test_a_secret_in_an_override_is_refused_and_not_repeated(override: str, secret: str) -> None:
    with pytest.raises(ConfigError, match=r"key, token or password, .* environment") as e:
        check_command_line([override])
    assert secret not in str(e.value)


@pytest.mark.parametrize("key", ["api_key", "access_token", "password", "auth"])
def test_a_secret_in_a_nested_option_or_a_variable_is_refused(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "plainword")
    reward = f"env.reward={{fn: judge, url: 'http://localhost/v1', model: m, {key}: '${{oc.env:MY_KEY}}'}}"
    with pytest.raises(ConfigError, match=rf"^env\.reward\.{key} must not be") as error:
        compose_config(reward)
    assert "plainword" not in str(error.value)


@pytest.mark.parametrize(
    "override",
    [
        "train.micro_batch_tokens=4096",
        f"env.revision={'0123456789abcdef' * 2}01234567",
        "env.reward={fn: judge, url: 'http://localhost:8000/v1', model: m, api_key_env: MY_KEY}",
        "policy.advantage_level=token",
        "env.reward={fn: judge, url: 'http://localhost:8000/v1', model: m, password: null}",
        "env.prompt_template='{question} The password: it is the answer.'",
        "env.system_prompt='the password is the sum of all digits'",
    ],
)
def test_what_only_sounds_like_a_secret_is_taken(override: str) -> None:
    check_command_line([override])


def test_a_script_that_is_given_a_secret_writes_nothing(
    run_here: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        run_here(SYNC, *SCRIPT, f"hydra.run.dir={tmp_path}/run", f"logging.wandb.name={TOKEN}") == 2
    )
    out, err = capfd.readouterr()
    assert "error: logging.wandb.name must not be a key" in err and TOKEN not in out + err
    assert not [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and TOKEN in path.read_text("utf-8", "ignore")
    ]


# Models


def test_a_pickled_model_is_refused_and_not_unpickled(tmp_path: Path, canary: Path) -> None:
    folder = starter_copy(tmp_path / "model", "*.safetensors*")
    torch.save({"model.embed_tokens.weight": Payload(canary)}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"its weights could not be loaded"):
        loading.load_model(str(folder), dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["config.json", "tokenizer_config.json"])
def test_code_in_a_model_folder_does_not_run_unless_asked_for(
    what: str, tmp_path: Path, canary: Path
) -> None:
    folder = starter_copy(tmp_path / "model")
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(canary)!r})\nclass Evil: ...\n")
    config = json.loads((folder / what).read_text())
    config |= {"model_type": "evil"} if what == "config.json" else {"tokenizer_class": "Evil"}
    classes = {
        "AutoConfig": "evil.Evil",
        "AutoModelForCausalLM": "evil.Evil",
        "AutoTokenizer": ["evil.Evil", None],
    }
    (folder / what).write_text(json.dumps(config | {"auto_map": classes}))
    refused = (
        pytest.raises(ConfigError, match="could not be loaded")
        if what == "config.json"
        else nullcontext()
    )
    with refused:  # a tokenizer's files are enough to load it without its class
        prepare(compose_config(f"model.name={folder}"))


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.mkdir('CANARY') }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
    ],
)
def test_a_hostile_chat_template_is_refused(template: str, canary: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"model\.chat_template=.*SecurityError: access to attribute '__\w+__'"
    ):
        prepare(
            compose_config(
                f"model.chat_template={json.dumps(template.replace('CANARY', str(canary)))}"
            )
        )


def test_a_revision_pins_config_tokenizer_and_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = tmp_path / "hub"
    commits = {"main": "a" * 40, "v1": "b" * 40}
    for number, (branch, commit) in enumerate(commits.items()):
        repository = hub / "models--me--mine"
        folder = starter_copy(repository / "snapshots" / commit, "*.safetensors*", "config.json")
        make_tiny_model(number).save_pretrained(folder)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / branch).write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
    model = compose_config("model.name=me/mine", "model.revision=v1").model
    assert model.source == "me/mine@v1"
    assert (
        Path(loading.resolve_name(model.source)).name == "b" * 40
    )  # arguments of trainer, tokenizer and engine
    got = loading.load_model(model.source, dtype=torch.float32, device=torch.device("cpu"))
    expected = make_tiny_model(1)
    assert all(
        torch.equal(a, b) for a, b in zip(got.parameters(), expected.parameters(), strict=True)
    )
    assert loading.load_config(model.source).vocab_size == 261
    with pytest.raises(ValueError, match=r"model\.name=me/mine@v2 must be"):
        loading.load_config("me/mine@v2")


# Data


def test_a_loading_script_beside_the_data_does_not_run(tmp_path: Path, canary: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("data.py", "__init__.py", "conftest.py", "train.py"):
        (folder / name).write_text(f"import os\nos.mkdir({str(canary)!r})\n")
    for override in (f"env.dataset={folder}", f"env.dataset={folder / 'data.py'}"):
        with pytest.raises(ConfigError):
            prepare(compose_config(override, "env.reward=math", name="grpo_gsm8k"))
    (folder / "train.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n' * 4)
    config = compose_config(f"env.dataset={folder}", "env.reward=math", name="grpo_gsm8k")
    assert len(make_task(config.env).problems("train")) == 4


# Checkpoints


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    run(folder, steps(1))
    return at(folder, 1)


@pytest.mark.slow
def test_a_pickle_in_a_checkpoint_is_refused_and_not_unpickled(
    finished: Path, tmp_path: Path, canary: Path
) -> None:
    hostile = changed(finished, tmp_path / "checkpoint_000001", trainer=Payload(canary))
    config = compose_config()
    config = replace(config, train=replace(config.train, resume=str(hostile)))
    with pytest.raises(SystemExit), pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        main([str(hostile)])
    with pytest.raises(ValueError, match="must be a complete checkpoint"):
        run(tmp_path / "run", f"train.resume={hostile}", steps(2))


def with_options(config: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a config with other options, by dotted name."""
    config = copy.deepcopy(config)
    for name, value in options.items():
        *groups, last = name.split(".")
        node = config
        for group in groups:
            node = node[group]
        node[last] = value
    return config


def resealed(finished: Path, folder: Path, config: Any) -> Path:
    return changed(finished, folder / "checkpoint_000001", config=config)


def resumed_config(saved: Any, *overrides: str) -> GRPOConfig:
    """Return the config of a run that resumes a checkpoint with this one."""
    cfg = composed("grpo_arithmetic", ("train.resume=folder", *overrides))
    return from_hydra(cfg, overrides, lambda _: (Path("folder/checkpoint_000001"), saved))


def refusal(options: dict[str, Any], *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        resumed_config(with_options(plain(compose_config()), options), *overrides)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("env.reward", "{folder}/evil.py:score"),
        ("env.reward", [{"fn": "evil:score", "weight": 1}]),
        ("env.datasets", [{"dataset": "arithmetic", "reward": "evil:score"}]),
        ("evaluation.datasets", [{"dataset": "arithmetic", "reward": "evil:score"}]),
        ("env.tool_parser", "evil:calls"),
        ("env.environment", {"easy": "evil:Easy"}),
        ("env.agent", "evil:play"),
        ("env.task", {"_target_": "evil.Task"}),
        ("env.task", "verifiers:evil"),
        ("env.dataset_options", {"taskset": {"task": {"stops": {"early": {"fn": "evil.py:stop"}}}}}),
        ("env.task", {"_target_": None, "policy": {"_target_": "evil.Task"}}),
        ("env.tools", ["{folder}/evil.py:tool"]),
        ("env.transforms", [{"_target_": "evil.Transform"}]),
        ("teacher.prompt", "evil:prompt"),
        ("model.trust_remote_code", True),
        ("model.attn_implementation", "somebody/kernel"),
        ("train_model.model_kwargs", {"use_kernels": True}),
        ("train_model.lora.settings", {"target_modules": "(a|a)+!"}),
        ("inference_model.engine_kwargs", {"trust_remote_code": True}),
        ("policy.loss", {"_target_": "evil.Loss"}),
        ("policy.loss", {"_target_": "torchrl_grpo.objectives.grpo.torch.load", "f": "{folder}/evil.pt"}),
        ("policy.loss", {"_target_": "torchrl_grpo.objectives.GRPOLoss", "evil": {"_target_": "evil.score"}}),
        ("policy.loss", {"_target_": "torchrl_grpo.objectives.GRPOLoss", "evil": [{"_target_": "evil.score"}]}),
        ("policy.loss", {"_target_": "torchrl_grpo.objectives.GRPOLoss", "_args_": ["evil"]}),
        ("policy.advantage", {"_target_": "torchrl_grpo.transforms.advantage.torch.hub.load", "source": "local"}),
        ("policy.advantage", {"_target_": "torchrl_grpo.objectives.GRPOLoss"}),
    ],
)  # fmt: skip
def test_a_checkpoint_alone_does_not_decide_what_code_runs(name: str, value: Any) -> None:
    error = refusal({name: value})
    assert error.startswith(name) and "must be on the command line too" in error


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("inference_model.address", ["http://127.0.0.1:9"]),
        ("inference_model.weights_folder", "/tmp"),
        ("teacher.address", ["http://127.0.0.1:9"]),
        ("ray.address", "127.0.0.1:9"),
        ("env.environment", "openenv:http://127.0.0.1:9"),
        (
            "env.reward",
            {"fn": "judge", "url": "http://127.0.0.1:9", "model": "m", "api_key_env": "HOME"},
        ),
        (
            "env.datasets",
            [{"dataset": "arithmetic", "reward": [{"fn": "judge", "url": "http://127.0.0.1:9"}]}],
        ),
        ("logging.wandb.mode", "online"),
        ("logging.mlflow.mode", "online"),
        ("logging.trackio.mode", "offline"),
        ("model.chat_template", "/etc/hostname"),
    ],
)
def test_a_checkpoint_alone_names_no_address_or_file(name: str, value: Any) -> None:
    error = refusal({name: value})
    assert error.startswith(name) and "must be on the command line too" in error


@pytest.mark.parametrize(
    "options", [{"env.reward": "code"}, {"env.tools": ["python"], "env.max_turns": 2}]
)
def test_a_checkpoint_alone_does_not_run_programs_that_its_model_writes(
    options: dict[str, Any],
) -> None:
    assert "must be on the command line too" in refusal(options)


@pytest.mark.parametrize(
    "options",
    [
        {
            "logging.wandb.group": "${train.resume}/../evil.py:score",
            "env.reward": "${logging.wandb.group}",
        },
        {"logging.wandb.group": "evil:score", "env.reward": "${logging.wandb.group}"},
        {"env.system_prompt": "${oc.env:HOME}"},
        {"policy.loss": {"_target_": "torchrl_grpo.objectives.${model.name}"}},
        {"policy.loss": {"_target_": "torchrl_grpo.objectives.GRPOLoss", "${oc.env:HOME}": 1}},
        {"env.columns.prompt": "???"},
    ],
)
def test_a_checkpoint_with_a_reference_in_its_config_is_refused(options: dict[str, Any]) -> None:
    error = refusal(options)
    assert any(error.startswith(name) for name in options) and os.environ["HOME"] not in error


@pytest.mark.slow
def test_what_an_override_takes_from_a_checkpoint_is_refused_too() -> None:
    error = refusal({"logging.wandb.group": "evil:score"}, "env.reward=${logging.wandb.group}")
    assert error.startswith("env.reward=evil:score must be on the command line too")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env": []}, "EnvConfig"),
        ({"env.num_envs": "many"}, "env.num_envs"),
        ({"env.num_envs": 10**30}, "env.num_envs"),
        ({"unknown": {"b": 1}}, "unknown"),
        ({"policy.loss": None}, "policy.loss"),
        ({"env.task": 5}, "env.task"),
        ({"env.reward": {"fn": 5}}, "env.reward"),
        ({"env.datasets": [[]]}, "datasets"),
        ({"logging.wandb.mode": "on\x1b[2Jline"}, "logging.wandb.mode"),
        ({"env.tools": ["a\x1b[2J"]}, r"env.tools=[a\x1b[2J]"),
    ],
)
def test_a_checkpoint_with_something_else_as_its_config_is_refused(
    options: dict[str, Any], message: str
) -> None:
    assert message in refusal(options)


@pytest.mark.slow
@pytest.mark.parametrize("config", [[], None, "env"])
def test_a_checkpoint_without_a_config_is_refused(
    config: Any,
    finished: Path,
    tmp_path: Path,
    run_here: Callable[..., int],
    capfd: pytest.CaptureFixture[str],
) -> None:
    hostile = resealed(finished, tmp_path, config)
    assert run_here(SYNC, *SCRIPT, f"train.resume={hostile}", f"hydra.run.dir={tmp_path}/run") == 2
    assert "error: train.resume=" in capfd.readouterr().err
    with pytest.raises(ConfigError, match="complete checkpoint"):
        export(str(hostile), tmp_path / "out")


@pytest.mark.slow
def test_a_refusal_has_no_control_characters_of_a_checkpoint(
    finished: Path, tmp_path: Path, run_here: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    config = with_options(plain(compose_config()), {"logging.wandb.mode": "on\x1b[2Jline"})
    hostile = resealed(finished, tmp_path, config)
    assert run_here(SYNC, *SCRIPT, f"train.resume={hostile}", f"hydra.run.dir={tmp_path}/run") == 2
    error = capfd.readouterr().err
    assert r"logging.wandb.mode=on\x1b[2Jline" in error and "\x1b[2J" not in error


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"logging.wandb.group": "{folder}/evil.py:score", "env.reward": "${logging.wandb.group}"},
        {
            "policy.loss": {
                "_target_": "torchrl_grpo.objectives.grpo.torch.load", "f": "{folder}/x", "weights_only": False,
            }
        },
    ],
)  # fmt: skip
def test_a_foreign_folder_runs_nothing(
    options: dict[str, Any],
    finished: Path,
    tmp_path: Path,
    canary: Path,
    run_here: Callable[..., int],
) -> None:
    (tmp_path / "evil.py").write_text(
        f"import os\nos.mkdir({str(canary)!r})\ndef score(response): return 1.0\n"
    )
    torch.save(Payload(canary), tmp_path / "x")
    config = with_options(state_in(finished)["config"], options)
    hostile = resealed(
        finished, tmp_path, json.loads(json.dumps(config).replace("{folder}", str(tmp_path)))
    )
    assert run_here(SYNC, f"train.resume={hostile}", f"hydra.run.dir={tmp_path}/run", steps(2)) == 2


@pytest.mark.slow
def test_a_foreign_folder_gets_no_key(
    finished: Path, tmp_path: Path, run_here: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secretword")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        options = {"inference_model.backend": "server", "inference_model.address": [address]}
        config = with_options(state_in(finished)["config"], options)
        hostile = resealed(finished, tmp_path, config)
        assert (
            run_here(SYNC, f"train.resume={hostile}", f"hydra.run.dir={tmp_path}/run", steps(2))
            == 2
        )
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_code_that_the_command_line_names_is_used() -> None:
    saved = with_options(
        plain(compose_config()), {"env.reward": "mine.py:score", "env.tools": ["python"]}
    )
    overrides = ("env.reward=mine.py:score", "env.tools=[python]", "env.max_turns=2")
    config = resumed_config(saved, *overrides)
    assert (config.env.reward, config.env.tools) == ("mine.py:score", ["python"])


def test_what_the_optimizer_trains_stays_the_same() -> None:
    assert refusal({}, "train_model.train_vision=true").startswith("train_model.train_vision=true")


@pytest.mark.slow
def test_a_literal_dollar_on_the_command_line_is_taken_on_resume() -> None:
    saved = with_options(plain(compose_config()), {"inference_model.stop": ["${dollars}"]})
    config = resumed_config(saved, r"inference_model.stop=['\${dollars}']")
    assert config.inference_model.stop == ["${dollars}"]


def test_an_option_that_could_name_code_an_address_or_a_file_is_known() -> None:
    """Any new option that may hold text must be sorted: it is either checked, or known to be only
    text.
    """
    types = {name: str(item.type) for name, item in FIELDS.items()}
    free = {name for name, kind in types.items() if re.search("str|Any|dict|Dataset", kind)}
    free -= {name for name in free if "choices" in FIELDS[name].metadata}
    assert free - FROM_COMMAND_LINE.keys() == TEXT


def test_a_checkpoint_may_name_the_public_classes_and_rewards() -> None:
    losses = {
        name
        for name in objectives.__all__
        if issubclass(getattr(objectives, name), objectives.GRPOLoss)
    }
    assert {f"torchrl_grpo.objectives.{name}" for name in losses} == set(LOSSES)
    assert BUILTINS.keys() - {"code", "judge", "judge_ranking", "rubric"} == OWN_REWARDS
    assert get_class(ADVANTAGES[0]) is transforms.GroupAdvantage and len(ADVANTAGES) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"model.name": "${oc.env:HOME}"},
        {"train_model.model_kwargs": {"trust_remote_code": True}},
        {"model.attn_implementation": "somebody/kernel"},
        {"model.chat_template": "/etc/hostname"},
        {"train_model.lora.settings": {"r": 2, "rank_pattern": {"(a|a)+!": 1}}},
        {"train_model.lora.settings": {"r": 99999}},
    ],
)
def test_an_export_uses_no_code_or_file_that_a_checkpoint_names(
    options: dict[str, Any], finished: Path, tmp_path: Path
) -> None:
    config = with_options(plain(compose_config()), options)
    with pytest.raises(ConfigError, match=next(iter(options))) as error:
        export(str(resealed(finished, tmp_path, config)), tmp_path / "out")
    assert os.environ["HOME"] not in str(error.value).replace(str(tmp_path), "")
    assert not (tmp_path / "out").exists()


def test_the_config_beside_the_state_is_not_used(finished: Path, tmp_path: Path) -> None:
    """The manifest's config is the one that was checked."""
    config = state_in(finished)["config"]
    other = config | {"model": config["model"] | {"name": "/nowhere"}}
    hostile = changed(finished, tmp_path / "checkpoint_000001", config=other)
    reseal(hostile, config=config)
    assert (export(str(hostile), tmp_path / "out") / "config.json").is_file()


@pytest.mark.slow
def test_an_export_runs_no_code_of_the_base_model_by_itself(
    finished: Path, tmp_path: Path, canary: Path
) -> None:
    folder = starter_copy(tmp_path / "model")
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(canary)!r})\n")
    model_config = json.loads((folder / "config.json").read_text())
    model_config |= {
        "model_type": "evil",
        "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"},
    }
    (folder / "config.json").write_text(json.dumps(model_config))
    config = state_in(finished)["config"]
    config["model"] |= {"name": str(folder), "trust_remote_code": True}
    hostile = changed(finished, tmp_path / "checkpoint_000001", config=config)
    with pytest.raises(ValueError, match=r"could not be loaded"):
        export(str(hostile), tmp_path / "out")


TEXT = {
    "train_model.compile",  # true, false or auto, by a rule
    "model.name", "model.revision", "teacher.model", "env.dataset", "env.dataset_path", "env.dataset_config",
    "env.revision", "env.train_split", "env.test_split", "env.columns.prompt", "env.columns.answer",
    "env.columns.images", "env.columns.completion", "env.columns.messages",
    "env.prompt_template", "env.system_prompt", "env.retry_prompt",
    "env.chat_template_kwargs", "inference_model.stop", "train_model.lora.target_modules",
    "train_model.lora.path", "train.keep_checkpoints",
    "train_model.num_devices", "inference_model.num_devices", "ref_model.num_devices", "teacher.num_devices",
    "policy.clip_epsilon", "policy.rejection",
    "logging.sample_rows", "train.resume", "logging.wandb.project", "logging.wandb.name",
    "logging.wandb.group", "logging.wandb.tags", "logging.mlflow.project", "logging.mlflow.name",
    "logging.mlflow.group", "logging.trackio.project", "logging.trackio.name", "logging.trackio.group",
}  # fmt: skip
"""Options of text that name models and data, or are only text."""


@pytest.mark.slow
def test_nothing_unpickles_a_file() -> None:
    """``torch.load`` reads weights only, and pickles come from the process that started a reward
    worker.
    """
    unpickling: list[str] = []
    for path in (ROOT / "torchrl_grpo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            name = ast.unparse(node.func)
            if name in (
                "torch.load",
                "pickle.load",
                "pickle.loads",
                "np.load",
                "yaml.load",
                "joblib.load",
            ):
                safe = any(
                    word.arg == "weights_only" and ast.unparse(word.value) == "True"
                    for word in node.keywords
                )
                safe |= [ast.unparse(word) for word in node.args[1:]] == [
                    "_PlainLoader"
                ]  # a SafeLoader
                unpickling += [] if safe else [f"{path.name}: {name}"]
            unpickling += [f"{path.name}: {name}"] if name.endswith("connection.recv") else []
    assert unpickling == ["protocol.py: pickle.loads", "protocol.py: connection.recv"]
