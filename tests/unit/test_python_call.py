"""``torchrl_grpo.train``: objects in place of names, with the checks of the command line."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

import torchrl_grpo
from tests.support.documentation import blocks
from tests.support.objects import Game, play, right
from torchrl_grpo.config import ConfigError, compose
from torchrl_grpo.errors import RunLostError
from torchrl_grpo.extras.call import notebook
from torchrl_grpo.host.objects import OBJECTS
from torchrl_grpo.loop import Observer
from torchrl_grpo.models.loading import load_model, load_tokenizer
from torchrl_grpo.objectives import GRPOLoss, Surrogate
from torchrl_grpo.tasks import Problem, Score, Task
from torchrl_grpo.tools import ToolCall

pytestmark = pytest.mark.slow

ROWS = [
    {"prompt": f"{a}+{b}=? #### n", "answer": str(a + b), "level": a % 3}
    for a in range(10, 16)
    for b in range(10, 20)
]
QUICK: Mapping[str, Any] = {
    "env.num_envs": 8,
    "env.repeats": 4,
    "train.total_steps": 2,
    "evaluation.num_prompts": 0,
    "inference_model.max_new_tokens": 16,
    "logging.tensorboard": False,
    "logging.page": False,
}


@pytest.fixture(autouse=True)
def no_objects() -> Iterator[None]:
    yield
    OBJECTS.clear()


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., torchrl_grpo.Result]:
    def call(**arguments: Any) -> torchrl_grpo.Result:
        overrides = {**QUICK, **arguments.pop("overrides", {})}
        name = arguments.pop("config", "grpo_arithmetic")
        arguments = {"folder": tmp_path / "run", "dataset": ROWS, "reward": right, **arguments}
        return torchrl_grpo.train(name, overrides=overrides, **arguments)

    return call


def columns(result: torchrl_grpo.Result, name: str) -> list[Any]:
    return [row[name] for row in result.metrics if name in row]


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, torchrl_grpo; torchrl_grpo.train; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    with pytest.raises(AttributeError, match="trian"):
        _ = torchrl_grpo.trian  # type: ignore[attr-defined]


def test_a_call_is_the_run_of_a_command_line(
    train: Callable[..., torchrl_grpo.Result], tmp_path: Path
) -> None:
    """The ten lines of the README, and what a run leaves."""
    steps = []
    result = train(
        dataset=Dataset.from_list(ROWS[:50]),
        test_dataset=ROWS[50:],
        model="starter",
        overrides={"optimizer.lr": 1e-4, "evaluation.num_prompts": 8, "evaluation.k": 0},
        observers=[lambda step, metrics: steps.append((step, metrics["rollout/sequences"]))],
    )
    assert steps == [(1, 8), (2, 8)]
    assert [row["step"] for row in result.metrics] == [0, 1, 2]
    assert columns(result, "train/lr") == [1e-4, 1e-4]
    tests = {row["query"] for row in result.samples if row["split"] == "test"}
    assert tests <= {row["prompt"] for row in ROWS[50:]} and len(tests) == 8
    trained = result.model.state_dict()
    starter = load_model("starter", dtype=torch.float32, device=torch.device("cpu")).state_dict()
    assert trained.keys() == starter.keys()
    assert any(not torch.equal(trained[name], starter[name]) for name in starter)
    assert result.tokenizer.chat_template == load_tokenizer("starter").chat_template
    page = result.report.read_text()
    assert (
        "starter on" in page and "optimizer:" in page and " with " not in page.split("<h1")[1][:200]
    )
    assert repr(result).startswith("Result(")


@pytest.mark.nightly
def test_the_same_seed_gives_the_command_lines_numbers(
    train: Callable[..., torchrl_grpo.Result], tmp_path: Path
) -> None:
    from torchrl_grpo.assembly.run import build

    words = [f"{key}={value}" for key, value in QUICK.items()]
    run = build(compose("grpo_arithmetic", words), tmp_path / "command")
    try:
        run.fit()
    finally:
        run.close()
    ours = train(dataset=None, reward=None)
    theirs = torchrl_grpo.Result(tmp_path / "command")
    for name in ("rollout/reward_mean", "train/loss", "train/grad_norm"):
        assert columns(ours, name) == columns(theirs, name)


@pytest.mark.nightly
def test_rows_of_every_kind_are_the_same_data(
    train: Callable[..., torchrl_grpo.Result], tmp_path: Path
) -> None:
    pandas = pytest.importorskip("pandas")
    rewards = []
    kinds = (ROWS, Dataset.from_list(ROWS), (row for row in ROWS), pandas.DataFrame(ROWS))
    for number, rows in enumerate(kinds):
        result = train(dataset=rows, folder=tmp_path / str(number))
        rewards.append(columns(result, "rollout/reward_mean"))
    assert rewards[0] and all(each == rewards[0] for each in rewards)


def test_three_rewards_with_weights_and_names(train: Callable[..., torchrl_grpo.Result]) -> None:
    def of_level(response: str, level: int) -> float:
        return float(level == 1)

    rewards = [
        {"fn": right, "weight": 0.5},
        {"fn": lambda response: 0.25, "name": "constant"},
        of_level,
        {"fn": "length", "weight": 0.0, "target": 10},
    ]
    result = train(reward=rewards[:3])
    names = ("right", "constant", "of_level")
    parts = zip(*(columns(result, f"reward/{name}/mean") for name in names), strict=True)
    totals = [0.5 * first + second + third for first, second, third in parts]
    assert columns(result, "rollout/reward_mean") == pytest.approx(totals)


def test_tools_are_called(train: Callable[..., torchrl_grpo.Result]) -> None:
    def parse(text: str) -> list[ToolCall]:
        return [ToolCall("add", {"a": 1, "b": 2})]

    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: one.
            b: the other.
        """
        return a + b

    result = train(
        tools=[add],
        overrides={
            "env.max_turns": 2,
            "env.tool_parser": parse,
            "inference_model.max_new_tokens": 32,
        },
    )
    assert min(columns(result, "tools/calls")) >= 8


def test_an_environment_plays_without_data(train: Callable[..., torchrl_grpo.Result]) -> None:
    result = train(dataset=None, reward=None, environment=Game)
    assert all(row["query"].endswith("+1=? #### n") for row in result.samples)
    assert columns(result, "rollout/reward_mean")


def test_an_agent_asks_the_policy(train: Callable[..., torchrl_grpo.Result]) -> None:
    result = train(reward=None, agent=play)
    prompts = {row["prompt"] for row in ROWS}
    assert result.samples and all(row["query"] in prompts for row in result.samples)
    assert columns(result, "rollout/reward_mean")[-1] > 0


class Level(Task):
    name = "level"

    def __init__(self, level: int) -> None:
        self.level = level

    def problems(self, split: str) -> list[Problem]:
        return [Problem(f"{self.level}+{n}=? #### n", str(self.level + n)) for n in range(8)]

    def score(self, problem: Problem, responses: Any) -> Score:
        return Score(float(self.level), True)


@pytest.mark.parametrize(
    ("task", "overrides"),
    [(Level(7), {}), pytest.param(Level, {"env.task.level": 7}, marks=pytest.mark.nightly)],
    ids=["object", "class"],
)
def test_a_task(
    train: Callable[..., torchrl_grpo.Result], task: Any, overrides: dict[str, Any]
) -> None:
    result = train(dataset=None, reward=None, task=task, overrides=overrides)
    assert columns(result, "rollout/reward_mean") == [7.0, 7.0]


def test_a_model_and_its_tokenizer(
    train: Callable[..., torchrl_grpo.Result], tmp_path: Path
) -> None:
    model = load_model("starter", dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        model.lm_head.weight.mul_(0.3)  # the entropy shows which model is trained
    before = model.lm_head.weight.clone()
    result = train(model=model, tokenizer=load_tokenizer("starter"))
    starter = train(folder=tmp_path / "starter")
    assert columns(result, "train/entropy")[0] > 4 * columns(starter, "train/entropy")[0]
    assert (tmp_path / "run" / "inputs" / "model" / "model.safetensors").is_file()
    assert torch.equal(model.lm_head.weight, before)  # a copy is trained


class Squared(Surrogate):
    calls = 0

    def forward(self, t: Any) -> Any:
        Squared.calls += 1
        return t["advantage"] * t["log_prob"]


class Doubled(GRPOLoss):
    pass


@pytest.mark.parametrize("loss", [Squared, pytest.param(Doubled, marks=pytest.mark.nightly)])
def test_a_loss(train: Callable[..., torchrl_grpo.Result], loss: type) -> None:
    before = Squared.calls
    train(loss=loss)
    assert (Squared.calls > before) == (loss is Squared)


def test_an_observer_sees_the_events_and_can_end_the_run(
    train: Callable[..., torchrl_grpo.Result], tmp_path: Path
) -> None:
    class Stop(Observer):
        def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
            raise RunLostError("enough")

    with pytest.raises(RunLostError, match="enough"):
        train(observers=[Stop()])
    assert [row["step"] for row in torchrl_grpo.Result(tmp_path / "run").metrics] == [0, 1]


def test_text_arrives_as_it_is(train: Callable[..., torchrl_grpo.Result]) -> None:
    text = "Say \"a, b\": {prompt}\n[x] = 'y', \\nothing \\\\ $5 (#) é, true"
    result = train(overrides={"env.prompt_template": text, "env.max_prompt_tokens": None})
    [first, *_] = result.samples
    start, end = text.split("{prompt}")
    prompt = (
        load_tokenizer("starter").decode(first["prompt_tokens"])
        if "prompt_tokens" in first
        else first["prompt"]
    )
    assert start in prompt and end in prompt


@pytest.mark.nightly
def test_a_preset_is_an_override(train: Callable[..., torchrl_grpo.Result], tmp_path: Path) -> None:
    train(overrides={"algo": "dapo", "policy.dynamic_sampling": False, "train.total_steps": 1})
    config = (tmp_path / "run" / ".hydra" / "config.yaml").read_text()
    assert "clip_epsilon:\n  - 0.2\n  - 0.28" in config


MISTAKES = {
    "column": ({"overrides": {"env.columns.prompt": "promt"}}, ["env.columns.prompt", "prompt"]),
    "reward column": ({"reward": lambda response, anwser: 0.0}, ["anwser", "answer"]),
    "key": ({"overrides": {"optimizer.learning_rate": 1}}, ["optimizer.learning_rate", "optimizer.lr"]),
    "choice": ({"overrides": {"policy.aggregation": "tokn"}}, ["policy.aggregation", "token"]),
    "type": ({"overrides": {"env.num_envs": "many"}}, ["env.num_envs", "many", "int"]),
    "rule": ({"overrides": {"env.num_envs": 6, "env.repeats": 4}}, ["env.num_envs=6", "8"]),
    "config": ({"config": "grpo_arithmetik"}, ["grpo_arithmetik", "did you mean grpo_arithmetic"]),
    "model": ({"model": "statrer"}, ["model.name=statrer", "starter"]),
    "rows": ({"dataset": ["1+1=?"]}, ["env.dataset", "1+1=?", '{"prompt"']),
    "no rows": ({"dataset": []}, ["dataset must have problems", "add rows"]),
    "no reward": ({"reward": None}, ["env.reward"]),
    "number as reward": ({"reward": 5}, ["env.reward", "5"]),
    "bytes": ({"overrides": {"env.system_prompt": b"x"}}, ["env.system_prompt", "bytes"]),
    "class as tool": ({"tools": [Game], "overrides": {"env.max_turns": 2}}, ["env.tools", "Game"]),
    "tokenizer": ({"tokenizer": object()}, ["tokenizer", "model"]),
    "two values": ({"model": "starter", "overrides": {"model.name": "starter"}}, ["model.name"]),
    "hydra": ({"overrides": {"hydra.run.dir": "x"}}, ["hydra.run.dir", "folder"]),
    "secret": ({"overrides": {"logging.wandb.entity": "hf_" + "a" * 30}}, ["logging.wandb.entity"]),
    "no test split": ({"overrides": {"evaluation.num_prompts": 8}}, ["dataset must", "test_dataset", "test_fraction"]),
    "function as observers": ({"observers": print}, ["observers", "[print]"]),
    "number as observer": ({"observers": [3]}, ["observers=[3]", "[print]"]),
    "staleness": ({"overrides": {"train.max_staleness": 2}}, ["train.max_staleness=2", "asynchronous"]),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found_before_a_model_loads(
    train: Callable[..., torchrl_grpo.Result], tmp_path: Path, mistake: str
) -> None:
    arguments, words = MISTAKES[mistake]
    with pytest.raises(ConfigError) as caught:
        train(**arguments)
    assert [word for word in words if word not in str(caught.value)] == []
    assert caught.value.__cause__ is None  # no traceback of Hydra's
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("overrides", ["optimizer.lr=1e-4", ["optimizer.lr=1e-4"]])
def test_overrides_as_on_a_command_line_are_refused(overrides: Any) -> None:
    with pytest.raises(ConfigError, match=r"overrides=.*optimizer\.lr=1e-4.*dict"):
        torchrl_grpo.train("grpo_arithmetic", overrides=overrides)
    with pytest.raises(ConfigError, match=r"overrides=.*dict"):
        torchrl_grpo.evaluate("grpo_arithmetic", overrides=overrides)


def test_a_model_without_a_tokenizer_is_refused(
    train: Callable[..., torchrl_grpo.Result], tmp_path: Path
) -> None:
    model = load_model("starter", dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"model\.name.*tokenizer"):
        train(model=model)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("result", "text"), [(None, "None"), ("good", "str"), (RuntimeError("no luck"), "no luck")]
)
def test_a_reward_that_always_fails_ends_the_run(
    train: Callable[..., torchrl_grpo.Result], result: Any, text: str
) -> None:
    def judge(response: str) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    with pytest.raises(RunLostError, match=text):
        train(reward=judge)


@pytest.mark.parametrize("refused", [{"optimizer.lr": -1}, {"env.reward": "nowhere.py:reward"}])
@pytest.mark.parametrize("folder", [None, "some/where"])
def test_a_refused_call_leaves_no_folder(
    refused: dict[str, Any], folder: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError):
        torchrl_grpo.train("grpo_arithmetic", overrides={**QUICK, **refused}, folder=folder)
    assert list(tmp_path.iterdir()) == []


def test_a_run_in_a_relative_folder_continues(
    train: Callable[..., torchrl_grpo.Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = {"dataset": ROWS, "reward": right, "folder": "mine", "resume": "auto"}
    train(**arguments)
    result = train(**arguments, overrides={"train.total_steps": 3})
    assert result.metrics[-1]["step"] == 3


def test_a_folder_with_a_run_is_refused_and_resumed(
    train: Callable[..., torchrl_grpo.Result], tmp_path: Path
) -> None:
    arguments = {"dataset": ROWS, "reward": right}
    model = load_model("starter", dtype=torch.float32, device=torch.device("cpu"))
    objects = {"model": model, "tokenizer": load_tokenizer("starter")}
    train(**arguments, **objects)
    with pytest.raises(ConfigError, match=r"folder=.*train\.resume=auto"):
        train(**arguments)
    further = {"train.total_steps": 3}
    result = train(**arguments, **objects, resume="auto", overrides=further)
    assert [row["step"] for row in result.metrics] == [0, 1, 2, 3]
    # The data is in the folder; code must be given again, and nothing may change.
    further["train.total_steps"] = 4
    with pytest.raises(ConfigError, match=r"env\.reward=.*:right"):
        train(dataset=None, reward=None, resume="auto", overrides=further)
    with pytest.raises(ConfigError, match="inputs/data must have what the run began with"):
        train(dataset=ROWS[::-1], reward=right, resume="auto", overrides=further)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    with pytest.raises(ConfigError, match="inputs/model must have what the run began with"):
        train(**arguments, **objects, resume="auto", overrides=further)
    result = train(dataset=None, reward=right, resume="auto", overrides=further)
    assert result.metrics[-1]["step"] == 4
    elsewhere = train(
        **arguments,
        resume=tmp_path / "run",
        folder=tmp_path / "elsewhere",
        overrides={"train.total_steps": 5},
    )
    assert elsewhere.metrics[-1]["step"] == 5


def test_an_interrupted_run_leaves_a_checkpoint(
    train: Callable[..., torchrl_grpo.Result], tmp_path: Path
) -> None:
    import signal

    def stop(step: int, metrics: Mapping[str, float]) -> None:
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as caught:
        train(observers=[stop])
    assert signal.getsignal(signal.SIGINT) is before
    assert 'resume="auto"' in "".join(caught.value.__notes__)
    assert (tmp_path / "run" / "checkpoints" / "checkpoint_000001").is_dir()
    result = train(resume="auto")
    assert [row["step"] for row in result.metrics] == [0, 1, 2]


@pytest.mark.nightly
def test_a_run_outside_the_main_thread(train: Callable[..., torchrl_grpo.Result]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        assert len(pool.submit(train).result().metrics) == 3


def test_what_cannot_travel_is_refused_if_it_must(
    train: Callable[..., torchrl_grpo.Result],
) -> None:
    lock = threading.Lock()

    def judge(response: str) -> float:
        with lock:
            return 1.0

    with pytest.raises(ConfigError, match=r":judge.*my_file\.py:judge"):
        train(reward=judge, overrides={"env.reward_workers": 1})


def test_a_class_of_a_function_is_a_loss(train: Callable[..., torchrl_grpo.Result]) -> None:
    class Local(Squared):
        pass

    before = Squared.calls
    train(loss=Local, overrides={"train.total_steps": 1})
    assert Squared.calls > before


def test_evaluate_trains_nothing(tmp_path: Path) -> None:
    result = torchrl_grpo.evaluate(
        "grpo_arithmetic",
        dataset=ROWS,
        reward=right,
        overrides={"evaluation.num_prompts": 20, "evaluation.k": 0, "logging.page": False},
        folder=tmp_path / "run",
    )
    [row] = result.metrics
    samples = result.samples
    share = sum(sample["reward"] for sample in samples) / len(samples)
    assert row["eval/pass@1"] == pytest.approx(share) and len(samples) == 20
    with pytest.raises(ValueError, match="has no model"):
        _ = result.model


@pytest.mark.parametrize("by", ["test_dataset", "env.test_fraction"])
def test_evaluate_takes_the_test_problems_of_train(by: str, tmp_path: Path) -> None:
    overrides: dict[str, Any] = {"evaluation.num_prompts": 60, "evaluation.k": 0}
    others = [{"prompt": f"{a}+21=? #### n", "answer": str(a + 21)} for a in range(3)]
    arguments: dict[str, Any] = {"test_dataset": others}
    if by == "env.test_fraction":
        overrides[by], arguments = 0.1, {}
    result = torchrl_grpo.evaluate(
        "grpo_arithmetic", dataset=ROWS, reward=right, folder=tmp_path / "run", **arguments,
        overrides=overrides | {"logging.page": False},
    )  # fmt: skip
    queries = [sample["query"] for sample in result.samples]
    if by == "test_dataset":
        assert sorted(queries) == [row["prompt"] for row in others]
    else:
        assert 0 < len(queries) < 20 and set(queries) < {row["prompt"] for row in ROWS}


@pytest.mark.nightly
def test_a_dry_run_trains_nothing(
    train: Callable[..., torchrl_grpo.Result], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(overrides={"dry_run": True})
    assert "No check failed" in capsys.readouterr().out
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.nightly
def test_objects_reach_reward_workers(train: Callable[..., torchrl_grpo.Result]) -> None:
    result = train(overrides={"env.reward_workers": 1})
    assert columns(result, "rollout/reward_mean")


@pytest.mark.nightly
def test_the_page_from_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block as it is, with runs of two steps."""
    monkeypatch.chdir(tmp_path)
    real_train, real_evaluate = torchrl_grpo.train, torchrl_grpo.evaluate
    quick = {**QUICK, "env.max_samples": 64, "inference_model.max_new_tokens": 32}
    del quick["evaluation.num_prompts"], quick["train.total_steps"]
    quick["evaluation.k"] = 0

    def shortened(arguments: dict[str, Any], **shorter: Any) -> dict[str, Any]:
        length = arguments["overrides"].pop("train.total_dialog_turns", 0)
        own = quick if "environment" not in arguments else {**QUICK, "env.repeats": 4}
        overrides = {**own, **arguments["overrides"], **shorter}
        overrides.setdefault("evaluation.num_prompts", 4)
        if "train.total_dialog_turns" not in overrides:
            overrides["train.total_steps"] = 3 if length else 2
        return arguments | {"overrides": overrides}

    def train(*names: str, **arguments: Any) -> torchrl_grpo.Result:
        return real_train(*names, **shortened(arguments))

    def evaluate(*names: str, **arguments: Any) -> torchrl_grpo.Result:
        arguments["overrides"].update({**quick, "evaluation.num_prompts": 4})
        return real_evaluate(*names, **arguments)

    monkeypatch.setattr(torchrl_grpo, "train", train, raising=False)
    monkeypatch.setattr(torchrl_grpo, "evaluate", evaluate, raising=False)
    variables: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks("python"):
        if block.language == "python":
            exec(block.text, variables)
    assert variables["best"]["step"] in (1, 2) and variables["result"].metrics[-1]["step"] == 3


def test_a_notebook_shows_the_run_in_one_output(monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[Any] = []

    class Handle:
        def update(self, page: Any) -> None:
            pages[-1] = page

    def display(page: Any, display_id: bool) -> Handle:
        pages.append(page)
        return Handle()

    pytest.importorskip("IPython")
    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr(notebook, "_MIN_UPDATE_S", 0.0)
    with notebook.NotebookConsole() as console:
        console.table("Device plan", [{"role": "train", "memory": 2**20}])
        console.problems(60, 20, "<|user|>1+1=?")
        console.page("http://127.0.0.1:1/token/")
        console.start(0, 24)
        console.evaluation(0, {"eval/pass@1": 0.25})
        for step in (1, 2, 3):
            metrics = {"rollout/reward_mean": step / 10, "rollout/accuracy": step / 10}
            console.step(step, metrics, 8 * step, 24)
        console.samples(3, [{"query": "<b>", "response": "a\x1b", "reward": 1, "valid": True}])
        console.alarm(3, "length", "too long & more")
    [page] = (page.data for page in pages)
    assert "step 3" in page and "24 of 24 sequences" in page and "width:100.0%" in page
    assert "&lt;b&gt;" in page and "<b>&" not in page and "\x1b" not in page
    assert "http://127.0.0.1:1/token/" in page and "too long &amp; more" in page
    assert page.count("<svg") == 2 and "30.0%" in page and "25.0%" in page
    assert "1.05 MB" in page or "1 MB" in page, page
