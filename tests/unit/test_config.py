"""The config: every rule with its message, and command lines that must compose."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

from tests.support.configs import ROOT, compose_config
from torchrl_grpo.config import (
    ConfigError,
    check_command_line,
    command_line,
    from_hydra,
    orderly_exit,
    register,
    schema,
    validate,
)
from torchrl_grpo.errors import LearnerLostError, WaitedTooLongError, WorkersLostError
from torchrl_grpo.extras.hints.resume import resume_command
from torchrl_grpo.host import interrupts

CONFIGS = sorted(path.stem for path in (ROOT / "config").glob("*.yaml"))


@pytest.mark.slow
def test_defaults_of_every_config_file_are_valid() -> None:
    names = ["grpo_arithmetic", "grpo_countdown", "grpo_gsm8k", "grpo_ifeval", "grpo_math"]
    names += ["grpo_shapes", "distill_gsm8k", "sft_gsm8k", "grpo_gsm8k_qwen3", "grpo_gsm8k_agent"]
    names += ["grpo_gsm8k_7b_lora", "grpo_math_7b", "grpo_shapes_qwen2_5_vl"]
    assert sorted(names) == CONFIGS
    assert [compose_config(name=config).env.dataset for config in CONFIGS] == [
        name.split("_")[1] for name in CONFIGS
    ]


@pytest.mark.slow
def test_configs_of_teaching_put_the_algorithm_over_the_task() -> None:
    distill, sft, thinks = (
        compose_config(name=name) for name in ("distill_gsm8k", "sft_gsm8k", "grpo_gsm8k_qwen3")
    )
    assert (distill.policy.teacher_coef, distill.policy.kl_coef, distill.policy.reward_coef) == (
        1.0,
        0.0,
        0.0,
    )
    assert (sft.policy.demonstrations, sft.env.repeats, sft.env.columns.completion) == (
        True,
        1,
        "answer",
    )
    assert sft.policy.loss["_target_"].endswith("DemonstrationLoss") and sft.train.total_epochs == 3
    assert (thinks.env.chat_template_kwargs, thinks.policy.kl_coef) == (
        {"enable_thinking": True},
        0.001,
    )
    off = compose_config(
        "env.chat_template_kwargs={enable_thinking: false}", name="grpo_gsm8k_qwen3"
    )
    assert off.env.chat_template_kwargs == {"enable_thinking": False}


# The arguments after the script's name, and the message.
MISTAKES = {
    "optimizer.lr=abc": r"optimizer\.lr=abc must have the type float: for example, optimizer\.lr=1e-06",
    "-m optimizer.lr=1e-4,abc": r"optimizer\.lr=abc must have the type float",
    "train.epochs=1.5": r"train\.epochs=1\.5 must have the type int",
    "inference_model.backend=vlm": r"backend=vlm must be one of transformers, vllm, server: did you mean vllm\?",
    "inference_model.backend=null": r"backend=null must be one of transformers, vllm, server: for example",
    "-m inference_model.in_flight=wait,kep": r"in_flight=kep must be one of wait, keep, abort: did you mean keep\?",
    "optimiser.lr=1e-4": r"optimiser\.lr=1e-4 names a config key that does not exist: did you mean optimizer\.lr\?",
    "inference_model.repetition_penalty=1.1": r"repetition_penalty=1\.1 names a .* changes the distribution .*top_k",
    "+inference_model.logit_bias={1:2}": r"logit_bias=.* names a .* changes the distribution",
    "policy.top_p=0.9": r"top_p=0\.9 names a .* that does not exist: did you mean (evaluation|inference_model)\.top_p",
    "optimizer.learning_rate=1": r"learning_rate=1 names a .* that does not exist: did you mean optimizer\.lr\?",
    "--config-name grpo_arith": r"grpo_arith must be one of .*grpo_arithmetic, .*: did you mean grpo_arithmetic\?",
    "--config-name mine": r"--config-name=mine must be .*, or a file in --config-dir: pass your own folder with",
    "env.num_env=8": r"did you mean env\.num_envs\?",
    "++optimizer.lrr=2": r"optimizer\.lrr=2 names a config key that does not exist: did you mean optimizer\.lr\?",
    "ref_model.devices=0": r"ref_model\.devices=0 must .*: for example, ref_model\.devices=null",
    "train_model.devices=[a]": r"train_model\.devices=a must have the type list\[int\] \| None",
    "policy.loss=my.Loss": r"must be a node with _target_: use policy\.loss\._target_=my\.Loss",
    "policy.loss=null": r"policy\.loss=None must be a node .*: use policy\.loss\._target_=torchrl_grpo",
    "lr=1e-4": r"lr=1e-4 names .* that does not exist: did you mean optimizer\.lr or critic\.lr\?",
    "policy.beta=0.1": r"policy\.beta=0\.1 names .*: did you mean policy\.kl_coef\?",
    "num_generations=8": r"num_generations=8 names .*: did you mean env\.repeats\?",
    "train.max_steps=9": r"train\.max_steps=9 names .*: did you mean train\.total_steps or env\.max_steps\?",
    "total_steps=9": r"total_steps=9 names .*: did you mean train\.total_steps\?",
    "top_entropy_quantile=0.2": r"top_entropy_quantile=0\.2 names .*: did you mean policy\.top_entropy_quantile\?",
    "optimizer.lr=1e-4 optimizer.lr=2e-4": r"optimizer\.lr=2e-4 must be the only value .* has 1e-4 too: leave one",
    "algo=dapo policy.kl_coef=0 algo=grpo": r"algo=grpo must be the only value of algo, which has dapo too",
    "seed=1 -m +seed=2,3": r"seed=2,3 must be the only value of seed, which has 1 too",
    "train.total_steps=3 train.total_epochs=2": r"total_epochs=2 and train\.total_steps=3 exclude each other",
    "train.total_steps=0": r"train\.total_steps=0 must be at least 1",
    "policy=dapo": r"policy=dapo must not have a value, because policy is a group of keys: use algo=dapo\.",
    "env.dataset=null": r"env\.dataset=null must be a data set: use env\.dataset=arithmetic, a file, a folder or",
    "env.datasets=[{dataset:gsm8k,wieght:2}]": r"wieght in env\.datasets names .*: did you mean weight\?",
    "env.datasets=gsm8k": r"env\.datasets must be a list of data sets, got gsm8k",
    "train_model.lora.target_modules=3": r"must have .*: for example, train_model\.lora\.target_modules=\[all-linear\]",
    "logging.report=false": r"logging\.report=false names .*: did you mean logging\.p",
    "inference_model.check_sync=true": r"check_sync=true names .* that does not exist: .* receipt .*kl_k3_to_inference",
    "xyzzy=1": r"xyzzy=1 names a config key that does not exist: run with --cfg job",
    "optimizer.lr=${nope}": r"optimizer\.lr must .*, but Interpolation key 'nope' not found",
    "model.name=${oc.env:NOPE}": r"model\.name must .* Environment variable 'NOPE' not found: give the value itself",
    "hydra.run.dir=/dev/null/run": r"run\.dir=/dev/null/run must .*, but /dev/null is a file",
    f"env.num_envs={'9' * 400}": r"env\.num_envs=9{20}\.\.\. must fit into 64 bits, but it has 400 digits",
    f"optimizer.lr={'9' * 400}": r"optimizer\.lr=9{20}\.\.\. must fit into 64 bits",
    "env.system_prompt=\udcff": r"env\.system_prompt='\\udcff' must be text in UTF-8",
    "algo=dapp": r"error: algo=dapp must be one of cispo, clip_cov, dapo, .*, vespo: did you mean dapo\?\n$",
    "hydra/launcher=zzz": r"error: hydra/launcher=zzz must be one of basic.*: use one of them\..*\[sweep\]'\.\n$",
    "optimizer.lr=[1": r"optimizer\.lr=\[1 must be .*:\nno viable alternative at input '\[1'",
    "env.prompt_template={a}+{b}=?": r"_template=.* must .*: use 'env\.prompt_template=\"\{a\}\+\{b\}=\?\"'\.",
    "optimizer.lr=???": r"optimizer\.lr=\?\?\? must have a value",
    "--cfg job env.datasets=[{dataset:gsm8k,weight:???}]": r"env\.datasets\.weight=\?\?\? must have a value",
    "~optimizer.lr": r"Error merging override ~optimizer\.lr\. .*does not support deletion",
    "env.num_envs=30": r"env\.num_envs=30 must be a multiple of env\.repeats=8",
    "--cfg job train.epochs=x": r"train\.epochs=x must have the type int",
    "--config-dir . --config-name theirs": r"train\.epochs=many must have the type int",
    "--config-dir . --config-name broken": r"mapping values are not allowed here\n.*broken\.yaml.*, line 2, column",
}
TYPED = """
import contextlib, io, json, runpy, sys
answers = {}
for line in json.load(sys.stdin):
    script, sys.argv, told = sys.argv[0], [sys.argv[0], *line.split(" ")], io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        answers[line] = ended.code, told.getvalue()
json.dump([answers, "torch" in sys.modules], sys.stdout)
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, tuple[int, str]], bool]:
    """Return exit status and output of each of ``MISTAKES``, and whether any of them imported
    torch.
    """
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "theirs.yaml").write_text(
        "defaults: [grpo_arithmetic, _self_]\ntrain: {epochs: many}\n"
    )
    (folder / "broken.yaml").write_text("defaults: [grpo_arithmetic]\ntrain epochs: a: 1\n")
    code = TYPED.replace("sys.argv[0]", repr(str(ROOT / "sota" / "grpo" / "grpo.py")))
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(list(MISTAKES)),
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_on_the_command_line_is_one_message(
    typed: str, answers: tuple[Any, bool]
) -> None:
    status, printed = answers[0][typed]
    assert status == 2
    assert re.search(MISTAKES[typed], printed, re.DOTALL)
    assert printed.startswith("\nerror: ") and "Traceback" not in printed


@pytest.mark.parametrize(
    "text", ["{a}+{b}=?", 'Say "hi" (now', "Don't", '{x}\\"\\', '"abc', "{a}\n#### {b}"]
)
def test_the_quotes_that_a_text_needs_are_shown(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit), orderly_exit():
        compose_config(f"env.retry_prompt={text}")
    (quoted,) = shlex.split(capsys.readouterr().err.rpartition(": use ")[2].rstrip(".\n"))
    assert compose_config(quoted, "env.max_turns=2").env.retry_prompt == text


@pytest.mark.slow
def test_mistakes_are_answered_without_importing_torch(answers: tuple[Any, bool]) -> None:
    assert answers[1] is False


def test_hydra_itself_refuses_unknown_keys_too() -> None:
    with pytest.raises(HydraException):
        compose_config("optimizer.lrr=1")


@pytest.mark.parametrize(
    "override",
    [
        "policy.kl_estimator=null,k3",
        "policy.ratio_level='token',sequence",
        "policy.ratio_level=choice(token,sequence)",
        "policy.ratio_level=${train.mixed_precision}",
        "+inference_model.weight_transfer=auto",
        "policy.clip_epsilon=0.1,[0.2,0.3]",
        "algo=grpo,dapo",
    ],
)
def test_only_what_is_surely_no_choice_is_refused_before_hydra(override: str) -> None:
    check_command_line([override])


def test_your_own_config_wins_over_the_algorithm_that_it_starts_from() -> None:
    register()
    search = f"hydra.searchpath=[file://{ROOT / 'config'}]"
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "examples")):
        config = from_hydra(compose("my_run", overrides=[search]))
    assert (config.clip_epsilon, config.policy.aggregation) == ((0.2, 0.28), "token_mean")
    assert (config.env.dataset, config.train.total_dialog_turns) == ("arithmetic", 5120)


def test_geometry_is_derived_from_the_config() -> None:
    config = compose_config(
        "env.num_envs=32",
        "train.dialog_turns_per_batch=64",
        "train.total_dialog_turns=100",
        "policy.clip_epsilon=[0.2,0.28]",
    )
    assert (config.num_batches, config.optim_batch_size, config.clip_epsilon) == (
        2,
        64,
        (0.2, 0.28),
    )
    assert (
        compose_config("env.max_turns=3", "inference_model.max_new_tokens=10").max_response_tokens
        == 30
    )


@pytest.mark.slow
def test_the_estimator_of_a_kl_in_the_reward_is_one_that_constrains() -> None:
    """k2 and k3 have almost no gradient near the reference in the reward; a user who wants them
    must say so.
    """
    assert compose_config().kl_estimator == "k3"
    assert compose_config("policy.kl_in_reward=true").kl_estimator == "k1"
    assert compose_config("policy.kl_in_reward=true", "policy.kl_estimator=k2").kl_estimator == "k2"


def test_a_group_of_one_may_be_compared_with_the_batch() -> None:
    assert compose_config("algo=reinforce_pp", "env.repeats=1").env.repeats == 1


def test_every_field_has_a_docstring_below_it() -> None:
    classes = [node for node in vars(schema).values() if dataclasses.is_dataclass(node)]
    missing = []
    for node in classes:
        lines = "".join(inspect.getsource(kind) for kind in node.__mro__[:-1]).splitlines()
        for item in dataclasses.fields(node):
            if dataclasses.is_dataclass(item.default_factory):
                continue
            at = next(i for i, line in enumerate(lines) if re.match(rf"    {item.name}: ", line))
            at += next(
                i
                for i, line in enumerate(lines[at:])
                if not line.endswith("(") and line[4:8] != "    "
            )
            if not lines[at + 1].strip().startswith('"""'):
                missing.append(f"{node.__name__}.{item.name}")
    assert missing == []


@pytest.mark.parametrize("error", [WorkersLostError, LearnerLostError, WaitedTooLongError])
def test_a_run_that_is_lost_ends_with_its_message(
    error: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, orderly_exit():
        raise error("all engines are gone.")
    assert ended.value.code == 1
    assert capsys.readouterr().err == "\nerror: all engines are gone.\n"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), WorkersLostError("gone")])
def test_how_to_resume_is_the_last_line(
    error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    error.add_note("Resume with:\ngrpo train.resume=auto")
    with pytest.raises(SystemExit), orderly_exit():
        raise error
    assert capsys.readouterr().err.endswith("Resume with:\ngrpo train.resume=auto\n")


@pytest.mark.parametrize(
    ("words", "checkpoint", "command"),
    [
        (
            ["python", "grpo.py", "env.prompt_template={x} it's", "train.resume=old", "seed=1"],
            "/a/run/checkpoints/checkpoint_000002",
            """python grpo.py 'env.prompt_template={x} it'"'"'s' seed=1 train.resume=auto hydra.run.dir=/a/run""",
        ),
        (
            ["grpo", "hydra.run.dir=/a/run"],
            "/my runs/checkpoint_000002",
            """grpo hydra.run.dir=/a/run 'train.resume='"'"'/my runs/checkpoint_000002'"'"''""",
        ),
        (["grpo", "-m", "seed=1,2"], "/a/run/checkpoint_000002", "train.resume=/a/run/checkpoint_000002"),
    ],
)  # fmt: skip
def test_the_command_that_resumes_can_be_pasted(
    words: list[str], checkpoint: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", words)
    with interrupts.watched():
        assert resume_command(Path(checkpoint), Path("/a/run")) == command
    assert resume_command(Path(checkpoint), Path("/a/run")) == f"train.resume={checkpoint}"


def test_an_error_of_an_unknown_kind_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="unknown"), orderly_exit():
        raise RuntimeError("unknown")


def test_torchrls_name_of_a_key_sets_it_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    assert compose_config("env.max_steps=3").env.max_turns == 3 and not caplog.records


@pytest.mark.slow
def test_a_component_may_be_set_as_a_whole() -> None:
    node = {"_target_": "my_loss.py:MyLoss", "count": 3}
    assert command_line.compose("grpo_arithmetic", {"policy.loss": node}).policy.loss == node
    words = ["env.task={_target_: my_tasks.py:MyTask, size: 5}"]
    task = command_line.compose("grpo_arithmetic", words).env.task
    assert task == {"_target_": "my_tasks.py:MyTask", "size": 5}


def test_torchrls_name_with_another_value_of_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env\.max_steps=3 .* env\.max_turns=4"):
        compose_config("env.max_steps=3", "env.max_turns=4")


def test_a_choice_in_a_yaml_file_is_checked_too() -> None:
    config = compose_config()
    config.policy.ratio_level = "word"
    with pytest.raises(
        ConfigError,
        match=r"policy\.ratio_level=word must be one of token, sequence",
    ):
        validate(config)


@pytest.mark.parametrize(
    ("overrides", "taken_back"),
    [
        (["algo=rloo", "policy.aggregation=token_mean"], "policy.constant_length=null"),
        (
            ["algo=dapo", "policy.sft_coef=0.1", "env.columns.completion=c"],
            "policy.dynamic_sampling=false",
        ),
        (["algo=rloo", "policy.advantage_level=token"], "policy.advantage_mean=group"),
    ],
)
def test_a_key_of_a_preset_is_not_called_the_users(overrides: list[str], taken_back: str) -> None:
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "config")):
        composed = compose("grpo_arithmetic", overrides=[*overrides, "env.dataset=mine.jsonl"])
    with pytest.raises(
        ConfigError, match=rf"{overrides[0]} sets .*{taken_back} undoes that"
    ) as error:
        from_hydra(composed, overrides)
    assert f"sets {overrides[1].partition('=')[0]}=" not in str(error.value)
    key = taken_back.partition("=")[0]
    with pytest.raises(ConfigError) as error:  # typed by the user, so the user's
        from_hydra(composed, [*overrides, f"{key}={composed.policy[key.removeprefix('policy.')]}"])
    assert "undoes that" not in str(error.value)
