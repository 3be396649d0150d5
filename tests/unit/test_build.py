"""From the config to a run: errors before weights are loaded, the wiring of the parts, and no dead
keys.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import torchrl_grpo.generation.vllm as vllm_module
from tests.support.configs import compose_config
from tests.support.documentation import undocumented
from tests.support.models import make_lora, make_tiny_model
from tests.support.runs import at, state_in, whole_state_of
from torchrl_grpo.assembly import layouts
from torchrl_grpo.assembly import prepare as prepare_module
from torchrl_grpo.assembly import run as run_module
from torchrl_grpo.assembly.geometry import geometry_rows
from torchrl_grpo.assembly.prepare import prepare
from torchrl_grpo.assembly.run import Run, build
from torchrl_grpo.assembly.shares import shares
from torchrl_grpo.assembly.tasks import make_task
from torchrl_grpo.config import ConfigError, GRPOConfig, leaves, plain
from torchrl_grpo.models import loading
from torchrl_grpo.reporting.metrics import read_jsonl
from torchrl_grpo.runtime.placement import DevicePlan

SMALL = (
    "env.num_envs=16",
    "env.repeats=4",
    "train.total_dialog_turns=32",
    "evaluation.num_prompts=8",
    "evaluation.k=2",
    "logging.tensorboard=false",
)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise if weights are loaded: the user's mistakes must be found earlier."""

    def load_model(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded before the input was checked")

    monkeypatch.setattr(loading, "load_model", load_model)


def write_jsonl(folder: Path, *lines: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "train.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "test.jsonl").write_text(
        "".join(line.replace('": "1', '": "2') + "\n" for line in lines)
    )
    return folder


GOOD = json.dumps({"question": "1+1?", "answer": "It is #### 2"})


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.name=nobody/nothing"], r"model\.name=nobody/nothing must be a folder or a model"),
        (
            ["inference_model.num_devices=3"],
            r"env\.num_envs=16 must be a multiple of env\.repeats=4 times the 3 samplers",
        ),
        (
            ["train_model.num_devices=3", "train_model.tensor_parallel_size=2"],
            r"tensor_parallel_size=2 must divide the number of training devices, 3: use train_model\.num_devices=4",
        ),
        (
            ["train_model.num_devices=64", "train_model.tensor_parallel_size=64"],
            r"train_model\.tensor_parallel_size=64 must divide .* key and value heads: use \d+\.",
        ),
        (
            [
                "train_model.num_devices=2",
                "train_model.tensor_parallel_size=2",
                "train_model.lora.enabled=true",
            ],
            r"tensor_parallel_size=2 must be 1 with train_model\.lora\.enabled=true",
        ),
        (
            ["train_model.num_devices=6", "train_model.replicas=4"],
            r"train_model\.replicas=4 must divide the number of training devices, 6, .*: use .*\.num_devices=8",
        ),
        (
            ["train_model.cpu_offload=true", "optimizer.name=adamw_8bit"],
            r"optimizer\.name=adamw_8bit must be adamw with train_model\.cpu_offload=true",
        ),
        (
            ["train_model.model_kwargs={attention_dropuot: 0.1}"],
            r"train_model\.model_kwargs\.attention_dropuot=0\.1 must be a field .*: did you mean attention_dropout\?",
        ),
        (
            ["train_model.model_kwargs={torch_dtype: bfloat16}"],
            r"model_kwargs\.torch_dtype=bfloat16 must be left out, because another key sets it: use train_model\.dtype",
        ),
        (
            ["train.max_staleness=1"],
            r"train\.max_staleness=1 must be 0 in grpo\.py.*grpo-async\.py",
        ),
        (
            ["inference_model.devices=[0]"],
            r"inference_model\.devices=\[0\] must be accelerators of this machine",
        ),
        (
            ["inference_model.max_new_tokens=2048"],
            r"max_new_tokens=2048 must leave room for a prompt in the context",
        ),
        (["env.max_prompt_tokens=3"], r"max_prompt_tokens=3"),
        (["env.dataset=gsm8k"], r"dataset_path"),
        (["env.dataset=gsm8k", "env.dataset_path=/nowhere"], r"/nowhere"),
        (
            ["env.max_turns=4"],
            r"env\.max_turns=4 must be 1 with task 'arithmetic', whose dialogs end after",
        ),
        (
            ["model.chat_template=no.jinja"],
            r"model\.chat_template=no\.jinja must be a Jinja template or the path",
        ),
        (
            ["model.attn_implementation=foo"],
            r"model\.attn_implementation=foo must be an attention .*: use sdpa or eager",
        ),
        (
            ["model.attn_implementation=FA4"],
            r"model\.attn_implementation=FA4 must be an attention .*: use sdpa or eager",
        ),
        (
            ["policy.loss._target_=torchrl_grpo.objectives.CISPOLoss", "policy.dual_clip=3"],
            r"policy\.loss\._target_=torchrl_grpo\.objectives\.CISPOLoss was refused: dual_clip=3",
        ),
    ],
)
def test_user_errors_come_before_any_weights(
    overrides: list[str], message: str, tmp_path: Path
) -> None:
    if torch.cuda.is_available() and "devices" in overrides[0]:
        pytest.skip("there are accelerators here")
    if overrides == ["inference_model.num_devices=3"]:
        pytest.importorskip("ray")
    with pytest.raises(ConfigError, match=message):
        build(compose_config(*SMALL, *overrides), tmp_path)


def test_a_copy_of_the_model_may_be_on_each_device() -> None:
    plan = prepare(
        compose_config(*SMALL, "train_model.num_devices=2", "train_model.replicas=2"), []
    ).plan
    assert len(plan.train) == 2


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([GOOD, '{"question": "1+1?"'], r"train\.jsonl:2"),
        ([GOOD, '{"query": "1+1?", "answer": "#### 2"}'], r"question.*query"),
    ],
)
def test_bad_data_is_named_by_file_and_line_or_column(
    lines: list[str], message: str, tmp_path: Path
) -> None:
    folder = write_jsonl(tmp_path / "data", *lines)
    with pytest.raises(ConfigError, match=message):
        build(
            compose_config(*SMALL, "env.dataset=gsm8k", f"env.dataset_path={folder}"),
            tmp_path / "run",
        )


@pytest.mark.usefixtures("no_weights")
def test_a_missing_vllm_is_found_before_any_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_module, "_has_vllm", False)
    with pytest.raises(ConfigError, match=r"inference_model\.backend=vllm .*: install"):
        build(compose_config(*SMALL, "inference_model.backend=vllm"), tmp_path)


@pytest.mark.usefixtures("no_weights")
def test_a_tokenizer_larger_than_the_model_is_found_before_any_weights(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    make_tiny_model(vocab_size=100).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"model has 100 .*ids up to 260"):
        build(compose_config(*SMALL, f"model.name={tmp_path / 'model'}"), tmp_path / "run")


@pytest.mark.slow
def test_long_prompts_are_dropped_and_counted(tmp_path: Path) -> None:
    long = json.dumps({"question": "1" * 400, "answer": "#### 2"})
    folder = write_jsonl(tmp_path, GOOD, long)
    config = compose_config(
        *SMALL,
        "env.dataset=gsm8k",
        f"env.dataset_path={folder}",
        "env.max_prompt_tokens=300",
        name="grpo_arithmetic",
    )
    context = prepare(config)
    assert context.train_env.num_dropped == 1
    assert context.tests is not None and context.tests.greedy.batch_size == (
        1,
    )  # no problem is counted twice


@pytest.mark.slow
@pytest.mark.usefixtures("no_weights")
def test_the_plan_table_lists_the_devices_and_what_one_of_them_holds() -> None:
    def table(plan: DevicePlan, *overrides: str) -> list[tuple[str, str, float]]:
        context = dataclasses.replace(prepare(compose_config(*SMALL, *overrides)), plan=plan)
        roles = shares(context).values()
        peaks = [0 if share.memory is None else share.memory.peak for share in roles]
        assert [share.row()["memory per device"] for share in roles] == peaks
        held = [0 if share.memory is None else share.memory.parts()["weights"] for share in roles]
        count = context.shape.parameters
        return [
            (share.label, share.row()["devices"], weights / count)
            for share, weights in zip(roles, held, strict=True)
        ]

    cpu = torch.device("cpu")
    gpu = [torch.device("cuda", index) for index in range(8)]
    plan = DevicePlan((cpu,), ((cpu,),), (cpu,), colocated=False)
    assert table(plan) == [
        ("train", "cpu", 4),
        ("inference (transformers)", "cpu", 4),
        ("reference", "cpu", 4),
    ]
    plan = DevicePlan((cpu,) * 2, ((cpu,),) * 3, (), colocated=False)
    adapted = table(plan, "train_model.lora.enabled=true", "env.num_envs=24")
    assert [row[:2] for row in adapted] == [
        ("train (LoRA)", "2 x cpu"),
        ("inference (transformers)", "3 x cpu"),
        ("reference (adapters off)", "2 x cpu"),
    ]
    plan = DevicePlan(
        tuple(gpu[:4]), (tuple(gpu[4:6]), tuple(gpu[6:8])), (gpu[0],), colocated=False
    )
    four = table(plan, "inference_model.dtype=bfloat16", "ref_model.dtype=bfloat16")
    assert [row[1] for row in four] == [
        "cuda:0, cuda:1, cuda:2, cuda:3",
        "cuda:4+cuda:5, cuda:6+cuda:7",
        "cuda:0",
    ]
    assert [row[2] for row in four[1:]] == [2, 2]  # the engine's tensor_parallel_size is 1


def test_the_batch_geometry_counts_the_tokens_of_all_turns() -> None:
    config = compose_config(*SMALL, "env.max_turns=3", "inference_model.max_new_tokens=5")
    rows = {row["quantity"]: (row["per step"], row["whole run"]) for row in geometry_rows(config)}
    assert rows["response tokens (max)"] == (16 * 3 * 5, 32 * 3 * 5)
    assert rows["steps (weight syncs)"] == (1, 2)


def test_vllm_use_v1_is_answered_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(prepare_module.torchrl_logger, "info", lines.append)
    monkeypatch.setenv("VLLM_USE_V1", "0")
    prepare(compose_config(*SMALL))
    assert [line for line in lines if "VLLM_USE_V1" in line] == [
        "VLLM_USE_V1 has no effect: vLLM no longer has a V0 engine."
    ]


def test_adapters_of_a_tied_embedding_are_refused_before_weights_load() -> None:
    lora = ["train_model.lora.enabled=true", "train_model.lora.target_modules=[embed_tokens]"]
    config = compose_config(*SMALL, *lora)
    with pytest.raises(
        ConfigError, match=r"train_model\.lora\.target_modules=.* use \[all-linear\]"
    ):
        prepare(config)


@pytest.mark.slow
@pytest.mark.usefixtures("curves")
def test_a_run_trains_evaluates_checkpoints_exports_and_reports(tmp_path: Path) -> None:
    config = compose_config(*SMALL, "train.checkpoint_frequency=1")
    run = build(config, tmp_path)
    try:
        summary = run.fit()
    finally:
        run.close()
        run.close()
    assert summary["steps"] == 2
    assert summary["sequences"] == 32
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert undocumented(rows) == set()
    # All reports must define throughput the same way: each step, the last one (which is evaluated),
    # and the summary.
    tokens, seconds = (
        [row[name] for row in rows[1:]] for name in ("rollout/tokens", "time/step_s")
    )
    speeds = [row["throughput/trained_tokens_per_s"] for row in rows[1:]]
    assert speeds == pytest.approx(
        [count / time for count, time in zip(tokens, seconds, strict=True)]
    )
    assert summary["trained_tokens_per_s"] == pytest.approx(sum(tokens) / sum(seconds))
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert {"eval/pass@1", "eval/pass@2"} <= rows[0].keys() & rows[2].keys()
    assert rows[2]["train/kl_k3_to_inference"] < 1e-8  # float32 on both sides
    assert rows[1]["staleness/max"] == 0
    assert rows[1]["train/ratio_mean"] == pytest.approx(
        1.0, abs=1e-4
    )  # the step is on-policy, and the engine has the weights
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["checkpoint_000001", "checkpoint_000002", "model"]
    state = whole_state_of(tmp_path / "checkpoints" / "checkpoint_000002")
    assert state["step"] == 2
    assert state["config"]["env"]["dataset"] == "arithmetic"
    assert state["trainer"].keys() >= {"model", "optimizer", "scaler"}
    exported = loading.load_model(
        str(tmp_path / "checkpoints" / "model"), dtype=torch.float32, device=torch.device("cpu")
    )
    for name, value in exported.state_dict().items():
        torch.testing.assert_close(
            value, run.learner.trainer.model.state_dict()[name], rtol=0, atol=0
        )
    for name in ("report.html", "curves.png", "samples.jsonl"):
        assert (tmp_path / name).stat().st_size > 0


def fit(folder: Path, *overrides: str) -> tuple[Run, list[dict[str, Any]]]:
    """Return a run that has ended and is closed, and its metrics."""
    with closing(build(compose_config(*SMALL, *overrides), folder)) as run:
        run.fit()
    return run, read_jsonl(folder / "metrics.jsonl")


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path: Path) -> None:
    def numbers(name: str, seed: int) -> list[float]:
        _, rows = fit(tmp_path / name, f"seed={seed}", "evaluation.num_prompts=0")
        return [row["train/loss"] for row in rows[1:]] + [rows[-1]["train/grad_norm"]]

    first = numbers("a", 0)
    assert numbers("b", 0) == first
    assert numbers("c", 1) != first


@pytest.mark.slow
def test_evaluation_changes_nothing_in_the_run(tmp_path: Path) -> None:
    often, never = (
        dict(fit(tmp_path / override, override)[0].learner.trainer.weights())
        for override in ("evaluation.frequency=1", "evaluation.num_prompts=0")
    )
    assert all(torch.equal(often[name], value) for name, value in never.items())


@pytest.mark.slow
def test_a_run_that_is_interrupted_saves_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build(compose_config(*SMALL, "evaluation.num_prompts=0"), tmp_path)
    real = run.learner.train_groups

    def train_once(*groups: Any) -> dict[str, float]:
        if run.learner.version == 1:
            raise KeyboardInterrupt
        return real(*groups)

    monkeypatch.setattr(run.learner, "train_groups", train_once)
    with pytest.raises(KeyboardInterrupt):
        run.fit()
    run.close()
    assert (tmp_path / "checkpoints" / "checkpoint_000001").exists()
    assert (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_a_run_that_is_stopped_inside_a_step_saves_no_half_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build(
        compose_config(*SMALL, "evaluation.num_prompts=0", "train.optim_batch_size=8"), tmp_path
    )
    real = run.learner.trainer.train_step

    def three_steps(
        batch: Any,
    ) -> dict[str, float]:  # two make a batch: this stops in the middle of the second
        if run.learner.trainer.optim_steps == 3:
            raise KeyboardInterrupt
        return real(batch)

    monkeypatch.setattr(run.learner.trainer, "train_step", three_steps)
    with pytest.raises(KeyboardInterrupt):
        run.fit()
    run.close()
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.slow
def test_an_engine_with_another_distribution_ends_the_first_step(tmp_path: Path) -> None:
    """Otherwise it would train on samples of another policy, and end without an error."""
    run = build(compose_config(*SMALL, "evaluation.num_prompts=0"), tmp_path)
    engine = run.rollouts.samplers[0].part.engine
    update = engine.update_weights
    engine.update_weights = lambda weights, version: update(
        ((name, 2 * w) for name, w in weights), version
    )
    try:
        with pytest.raises(
            RuntimeError,
            match=r"KL to the engine's policy .* 0\.1",
        ):
            run.fit()
    finally:
        run.close()


@pytest.mark.slow
def test_a_checkpoint_has_the_data_position_of_its_step(tmp_path: Path) -> None:
    fit(tmp_path, "evaluation.num_prompts=0", "train.checkpoint_frequency=1")
    for step in (1, 2):
        state = state_in(at(tmp_path, step))
        assert state["source"]["drawing"]["position"] == 4 * step  # 16 sequences are 4 groups
        assert state["trainer"]["version"] == step


@pytest.mark.slow
def test_the_optimizer_is_adamw_without_weight_decay_on_vectors(tmp_path: Path) -> None:
    run = build(
        compose_config(
            *SMALL, "optimizer.lr=0.5", "optimizer.beta1=0.8", "optimizer.beta2=0.7", "optimizer.eps=1e-3",
            "optimizer.weight_decay=0.25", "optimizer.warmup_steps=5", "evaluation.num_prompts=0",
        ),
        tmp_path,
    )  # fmt: skip
    run.close()
    optimizer = run.learner.trainer.optimizer
    assert type(optimizer) is torch.optim.AdamW
    for group in optimizer.param_groups:
        assert (group["betas"], group["eps"], group["lr"]) == (
            (0.8, 0.7),
            1e-3,
            0.1,
        )  # a fifth of 0.5: warming up
        assert group["weight_decay"] == (0.25 if group["params"][0].ndim > 1 else 0.0)
    assert len(optimizer.param_groups) == 2


@pytest.mark.slow
def test_temperature_is_that_of_engine_trainer_and_reference(tmp_path: Path) -> None:
    _, rows = fit(tmp_path, "inference_model.temperature=0.6", "evaluation.num_prompts=0")
    assert rows[1]["train/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert rows[1]["train/ESS"] == pytest.approx(1.0, abs=1e-4)
    assert rows[1]["train/kl_k3_to_ref"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.slow
def test_a_run_continues_with_adapters_from_a_folder(tmp_path: Path) -> None:
    """Engine and trainer have them before the first step, and the reference does not."""
    base = loading.load_model("starter", dtype=torch.float32, device=torch.device("cpu"))
    torch.manual_seed(0)
    make_lora(base).save_pretrained(tmp_path / "adapters")
    lora = ["train_model.lora.enabled=true", f"train_model.lora.path={tmp_path / 'adapters'}"]
    _, rows = fit(tmp_path / "run", *lora)
    assert max(row["train/kl_k3_to_inference"] for row in rows[1:]) < 1e-6
    assert rows[1]["train/kl_k3_to_ref"] > 0.1


@pytest.mark.slow
def test_lora_scores_the_reference_with_its_adapters_off(tmp_path: Path) -> None:
    _, rows = fit(tmp_path, "train_model.lora.enabled=true", "optimizer.lr=1e-2")
    assert rows[1]["train/kl_k3_to_ref"] == pytest.approx(0.0, abs=1e-6)
    assert rows[2]["train/kl_k3_to_ref"] > 1e-6
    assert rows[2]["train/ratio_mean"] == pytest.approx(
        1.0, abs=1e-3
    )  # the engine got the merged weights


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[str, str]]]:
    """Record which fields of which config class are read."""
    read: set[tuple[str, str]] = set()

    def recording(node: Any, name: str) -> Any:
        read.add((type(node).__name__, name))
        return object.__getattribute__(node, name)

    classes = {type(node) for node in _nodes(GRPOConfig())}
    for node in classes:
        monkeypatch.setattr(node, "__getattribute__", recording, raising=False)
    yield read


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for value in vars(node).values():
        if dataclasses.is_dataclass(value):
            yield from _nodes(value)


@pytest.mark.slow
def test_every_config_key_is_read_by_something_that_uses_it(
    tmp_path: Path, recorded: set[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that nothing reads is a bug. Validation and saving read all keys, so they don't count.

    The vLLM engine is not started for this: a stand-in takes its arguments.
    """
    pytest.importorskip("ray")
    if not vllm_module._has_vllm:
        pytest.skip("vllm is not installed")
    saved = plain(compose_config(*SMALL))
    monkeypatch.setattr(run_module, "plain", lambda config: saved)
    configs = [
        compose_config(
            *SMALL,
            "train_model.lora.enabled=true",
            "optimizer.warmup_steps=1",
            "env.reward_workers=1",
        ),
        compose_config(*SMALL, "inference_model.backend=vllm"),
        compose_config(
            *SMALL,
            *("teacher.model=starter", "policy.teacher_coef=0.1"),
            *("policy.teacher_divergence=jsd", "env.sampling=pass_rate"),
        ),
    ]
    expected = {
        (type(node).__name__, item.name)
        for node in _nodes(GRPOConfig())
        for item in dataclasses.fields(node)
        if item.name != "max_steps"  # read when the config is created
    }
    recorded.clear()
    folder = write_jsonl(tmp_path / "data", GOOD)
    make_task(compose_config("env.dataset=gsm8k", f"env.dataset_path={folder}").env)
    for index, config in enumerate(configs):
        if index == 1:

            class Stop(Exception):
                pass

            def stand_in(*_: object, **__: object) -> None:
                raise Stop

            monkeypatch.setattr(vllm_module, "_has_vllm", True)
            monkeypatch.setattr(vllm_module.VLLMEngine, "__init__", stand_in)
            with pytest.raises(Stop):
                build(config, tmp_path / "vllm")
            monkeypatch.setattr(layouts, "start", stand_in)
            with pytest.raises(Stop):
                build(config, tmp_path / "ray", asynchronous=True)
            continue
        with closing(build(config, tmp_path / str(index))) as run:
            run.fit()
    assert expected - recorded == set()
    assert len(list(leaves(GRPOConfig()))) > 40


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "expected"), [(None, 1), ("2", 2)])
def test_a_small_model_is_computed_on_one_thread_until_the_run_is_closed(
    setting: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if setting is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", setting)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run = build(compose_config(*SMALL, "evaluation.num_prompts=0"), tmp_path)
        assert torch.get_num_threads() == expected
        run.logger.log(0, {})  # the machine's description is rewritten when logging starts
        assert json.loads((tmp_path / "environment.json").read_text())["threads"] == expected
        run.close()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
