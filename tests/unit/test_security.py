"""Secrets are never written, and what others made (models, data, checkpoints, templates) runs nothing here."""

from __future__ import annotations

import ast
import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch

from tests.support.configs import ROOT, compose_config
from tests.support.models import make_tiny_model
from tests.support.runs import at, changed, run, steps
from torchrl_grpo.assembly.blueprint import prepare
from torchrl_grpo.assembly.tasks import make_task
from torchrl_grpo.config import ConfigError, check_command_line
from torchrl_grpo.models import loading
from torchrl_grpo.scripts import export
from torchrl_grpo.starter import starter_path

SYNC = ROOT / "sota" / "grpo" / "grpo.py"
KEY = "sk-abcdefghijklmnop0123456789"
TOKEN = "hf_" + "Ab3" * 12
SCRIPT = ("--config-name", "grpo_arithmetic", "evaluation.num_prompts=0", "logging.tensorboard=false")


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


@pytest.fixture
def canary(tmp_path: Path) -> Any:
    """A path that must not exist at the end."""
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
        ("env.reward={fn: judge, url: 'http://localhost/v1', model: m, api_key: secretword}", "secretword"),
        ("+env.task={_target_: my.Task, options: {'hf_token': 'secretword'}}", "secretword"),
    ],
)
def test_a_secret_in_an_override_is_refused_and_not_repeated(override: str, secret: str) -> None:
    with pytest.raises(ConfigError, match=r"must not be a key, token or password, .* put it into an environment") as e:
        check_command_line([override])
    assert secret not in str(e.value)


@pytest.mark.parametrize("key", ["api_key", "access_token", "password", "auth"])
def test_a_secret_in_a_nested_option_or_a_variable_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert run_here(SYNC, *SCRIPT, f"hydra.run.dir={tmp_path}/run", f"logging.wandb.name={TOKEN}") == 2
    out, err = capfd.readouterr()
    assert "error: logging.wandb.name must not be a key" in err and TOKEN not in out + err
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and TOKEN in path.read_text("utf-8", "ignore")]


# Models


def test_a_pickled_model_is_refused_and_not_unpickled(tmp_path: Path, canary: Path) -> None:
    folder = starter_copy(tmp_path / "model", "*.safetensors*")
    torch.save({"model.embed_tokens.weight": Payload(canary)}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"its weights could not be loaded"):
        loading.load_model(str(folder), dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("what", ["config.json", "tokenizer_config.json"])
def test_code_in_a_model_folder_does_not_run_unless_asked_for(what: str, tmp_path: Path, canary: Path) -> None:
    folder = starter_copy(tmp_path / "model")
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(canary)!r})\nclass Evil: ...\n")
    given = json.loads((folder / what).read_text())
    given |= {"model_type": "evil"} if what == "config.json" else {"tokenizer_class": "Evil"}
    classes = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}
    (folder / what).write_text(json.dumps(given | {"auto_map": classes}))
    refused = pytest.raises(ConfigError, match="could not be loaded") if what == "config.json" else nullcontext()
    with refused:  # a tokenizer's files are enough to make it without its class
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
    with pytest.raises(ConfigError, match=r"model\.chat_template=.*SecurityError: access to attribute '__\w+__'"):
        prepare(compose_config(f"model.chat_template={json.dumps(template.replace('CANARY', str(canary)))}"))


def test_a_revision_pins_config_tokenizer_and_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub, commits = tmp_path / "hub", {"main": "a" * 40, "v1": "b" * 40}
    for number, (branch, commit) in enumerate(commits.items()):
        repository = hub / "models--me--mine"
        folder = starter_copy(repository / "snapshots" / commit, "*.safetensors*", "config.json")
        make_tiny_model(number).save_pretrained(folder)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / branch).write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
    model = compose_config("model.name=me/mine", "model.revision=v1").model
    assert model.source == "me/mine@v1"
    assert Path(loading.resolve_name(model.source)).name == "b" * 40  # what trainer, tokenizer and engine are given
    got = loading.CheckpointModel(model.source, torch.float32)()
    expected = make_tiny_model(1)
    assert all(torch.equal(a, b) for a, b in zip(got.parameters(), expected.parameters(), strict=True))
    assert loading.load_config(model.source).vocab_size == 261
    with pytest.raises(ValueError, match=r"model\.name=me/mine@v2 must be a folder or a model on the .* hub"):
        loading.load_config("me/mine@v2")


def test_a_revision_of_a_model_that_is_here_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^model\.revision=v1 is for a model on the hub, and model\.name=starter"):
        compose_config("model.revision=v1")


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


def test_a_pickle_in_a_checkpoint_is_refused_and_not_unpickled(finished: Path, tmp_path: Path, canary: Path) -> None:
    hostile = changed(finished, tmp_path / "checkpoint_000001.pt", trainer=Payload(canary))
    config = compose_config()
    config = replace(config, train=replace(config.train, resume=str(hostile)))
    with pytest.raises(SystemExit), pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        export.main([str(hostile)])
    with pytest.raises(ValueError, match="must be a whole checkpoint"):
        run(tmp_path / "run", f"train.resume={hostile}", steps(2))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("env", "reward"), "{folder}/evil.py:score"),
        (("policy", "loss", "_target_"), "evil.Loss"),
        (("env", "task"), {"_target_": "evil.Task"}),
        (("env", "tools"), ["{folder}/evil.py:tool"]),
        (("env", "transforms"), [{"_target_": "evil.Transform"}]),
        (("model", "trust_remote_code"), True),
    ],
)
def test_a_checkpoint_alone_does_not_decide_what_code_runs(
    path: tuple[str, ...], value: Any, finished: Path, tmp_path: Path, canary: Path, run_here: Callable[..., int],
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "evil.py").write_text(f"import os\nos.mkdir({str(canary)!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = torch.load(finished, weights_only=True)["config"]
    node = config
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = json.loads(json.dumps(value).replace("{folder}", str(tmp_path)))
    hostile = changed(finished, tmp_path / "checkpoint_000001.pt", config=config)
    assert run_here(SYNC, *SCRIPT, f"train.resume={hostile}", f"hydra.run.dir={tmp_path}/run") == 2
    error = capfd.readouterr().err
    assert f"error: {'.'.join(path)}" in error and "must be on the command line too" in error


def test_an_export_runs_no_code_of_the_base_model_by_itself(finished: Path, tmp_path: Path, canary: Path) -> None:
    folder = starter_copy(tmp_path / "model")
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(canary)!r})\n")
    given = json.loads((folder / "config.json").read_text())
    given |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
    (folder / "config.json").write_text(json.dumps(given))
    config = torch.load(finished, weights_only=True)["config"]
    config["model"] |= {"name": str(folder), "trust_remote_code": True}
    hostile = changed(finished, tmp_path / "checkpoint_000001.pt", config=config)
    with pytest.raises(ValueError, match=r"could not be loaded"):
        export.export(str(hostile), tmp_path / "out")


def test_nothing_unpickles_a_file() -> None:
    """``torch.load`` reads weights alone; what is unpickled comes from the process that started a reward worker."""
    unpickling: list[str] = []
    for path in (ROOT / "torchrl_grpo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            name = ast.unparse(node.func)
            if name in ("torch.load", "pickle.load", "pickle.loads", "np.load", "yaml.load", "joblib.load"):
                safe = any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords)
                safe |= [ast.unparse(word) for word in node.args[1:]] == ["_PlainLoader"]  # a SafeLoader
                unpickling += [] if safe else [f"{path.name}: {name}"]
            unpickling += [f"{path.name}: {name}"] if name.endswith("connection.recv") else []
    assert unpickling == ["pool.py: pickle.loads", "pool.py: connection.recv"]
