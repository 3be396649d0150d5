"""``evaluation.datasets``: further test sets beside the task's own test split."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.support.configs import compose_config
from tests.support.documentation import undocumented
from torchrl_grpo.assembly.prepare import prepare
from torchrl_grpo.assembly.run import build
from torchrl_grpo.config import ConfigError, from_hydra
from torchrl_grpo.reporting.metrics import read_jsonl
from torchrl_grpo.tasks.arithmetic import ArithmeticTask
from torchrl_grpo.tasks.mixed import MixedTask
from torchrl_grpo.tasks.with_tests import WithTests

SMALL = (
    "env.num_envs=16",
    "env.repeats=4",
    "inference_model.max_new_tokens=4",
    "logging.tensorboard=false",
)


def write(folder: Path, name: str, count: int) -> Path:
    rows = [json.dumps({"question": f"{name} {n}+1=", "answer": str(n + 1)}) for n in range(count)]
    (folder / name).write_text("\n".join(rows) + "\n")
    return folder / name


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True])
def test_the_own_test_problems_keep_their_order(mixed: bool) -> None:
    own = (
        MixedTask([ArithmeticTask(1), ArithmeticTask(2)], [1, 2], ["a", "b"])
        if mixed
        else ArithmeticTask(1)
    )
    problems = own.problems("test")
    alone = [problems[i] for i in own.epoch(problems, range(len(problems)), random.Random(3))]
    task = WithTests(own, {"hard": ArithmeticTask(3)})
    both = task.problems("test")
    order = [both[i] for i in task.epoch(both, range(len(both)), random.Random(3))]
    assert [problem for problem in order if problem.dataset != "hard"] == alone
    assert Counter(problem.dataset == "hard" for problem in order[:40]) == {True: 20, False: 20}
    assert task.problems("train") == own.problems("train") or mixed
    trained = own.problems("train")
    usable = range(len(trained))
    assert task.epoch(trained, usable, random.Random(1)) == own.epoch(
        trained, usable, random.Random(1)
    )


@pytest.mark.slow
def test_a_run_measures_each_test_set_and_the_own_split_or_none(tmp_path: Path) -> None:
    """A file has no test split: as a test set all of it is tested, as training data it has no test
    of its own.
    """
    train, small = write(tmp_path, "train.jsonl", 8), write(tmp_path, "small.jsonl", 3)
    sets = f"[{{dataset: {small}}},{{dataset: arithmetic, difficulty: 1, name: sums}}]"
    config = compose_config(
        *SMALL, f"env.dataset={train}", "env.reward=number", "train.total_dialog_turns=0", "evaluation.num_prompts=5",
        "evaluation.k=2", "evaluation.temperature=0.5", f"evaluation.datasets={sets}", "logging.sample_rows=all",
    )  # fmt: skip
    run = build(config, tmp_path / "run")
    try:
        run.fit()
        evaluator = run.rollouts.samplers[0].part.evaluator  # type: ignore[attr-defined]
        assert evaluator is not None and evaluator._sampling_policy.params.temperature == 0.5
        assert run.rollouts.samplers[0].part._take(1).policy.params.temperature == 1.0  # type: ignore[attr-defined]
    finally:
        run.close()
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert undocumented(rows) == set()
    names = {name for name in rows[0] if name.startswith("eval/pass")}
    assert names == {f"eval/pass@{k}/{name}" for k in (1, 2) for name in ("small", "sums")}
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert Counter(row["dataset"] for row in samples) == {"small": 3, "sums": 5}


@pytest.mark.slow
def test_long_prompts_leave_as_many_of_the_other_sets(tmp_path: Path) -> None:
    short, some = write(tmp_path, "short.jsonl", 9), write(tmp_path, "some.jsonl", 4)
    with some.open("a") as file:
        file.write(json.dumps({"question": "1+" * 400 + "1=", "answer": "401"}) + "\n")
    context = prepare(
        compose_config(
            *SMALL, "evaluation.num_prompts=6", "evaluation.k=2", "env.reward=number", "env.max_prompt_tokens=64",
            f"evaluation.datasets=[{{dataset: {short}}},{{dataset: {some}}}]",
        ),
        [],
    )  # fmt: skip
    assert context.tests is not None and context.tests.sampled is not None
    names = context.tests.greedy.reset()["dataset"]
    assert Counter(names) == {"": 6, "short": 6, "some": 4}
    assert Counter(context.tests.sampled.reset()["dataset"]) == {"": 12, "short": 12, "some": 8}


def test_test_sets_beside_a_task_of_verifiers_are_refused_with_a_fix() -> None:
    config = compose_config(
        "env.task=verifiers:any", "env.dataset=null", "evaluation.datasets=[{dataset: arithmetic}]"
    )
    with pytest.raises(
        ConfigError,
        match=r"evaluation\.datasets .*: leave it out, .*total_dialog_turns=0",
    ):
        prepare(config, [])


GAME = """
class Rows:
    def reset(self, level):
        return None

    def step(self, response):
        return "no", 0.0, False


def leveled(response, level):
    return float(len(response) > level)
"""


@pytest.mark.slow
@pytest.mark.parametrize("scored_by", ["env.environment={}:Rows", "env.reward={}:leveled"])
@pytest.mark.parametrize("where", ["set", "split"])
def test_test_problems_without_a_needed_column_are_refused_before_loading(
    scored_by: str, where: str, tmp_path: Path
) -> None:
    (tmp_path / "games.py").write_text(GAME)
    data = tmp_path / "data"
    data.mkdir()
    for split, columns in (
        ("train", {"level": 1}),
        ("test", {} if where == "split" else {"level": 1}),
    ):
        rows = [
            json.dumps({"question": f"{split} {n}+1=", "answer": str(n + 1), **columns})
            for n in range(8)
        ]
        (data / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    other = write(tmp_path, "other.jsonl", 4)
    sets = [f"evaluation.datasets=[{{dataset: {other}}}]"] if where == "set" else []
    config = compose_config(
        *SMALL, f"env.dataset={data}", scored_by.format(tmp_path / "games.py"), *sets
    )
    with pytest.raises(ConfigError, match=r"level"):
        prepare(config, [])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{difficulty: 2}", r"evaluation\.datasets\[0\]\.dataset=null must be a data set"),
        ("{dataset: a, test_fraction: 2}", r"evaluation\.datasets\[0\]\.test_fraction=2\.0 mu"),
    ],
)
def test_a_test_set_that_cannot_be_is_refused(entry: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose_config(f"evaluation.datasets=[{entry}]")


@pytest.mark.parametrize(
    ("own", "sets", "key"),
    [
        ([], "[{dataset: arithmetic},{dataset: arithmetic}]", r"0\]\.name=arithmetic"),
        (
            [
                "env.datasets=[{dataset: arithmetic, name: a}]",
                "env.dataset=null",
                "env.difficulty=2",
            ],
            *("[{dataset: countdown},{dataset: arithmetic, name: a}]", r"1\]\.name=a"),
        ),
    ],
)
def test_test_sets_have_names_of_their_own(own: list[str], sets: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^evaluation\.datasets\[{key} must differ"):
        prepare(compose_config(*SMALL, *own, f"evaluation.datasets={sets}"), [])


def test_a_mistake_in_an_entry_names_the_list() -> None:
    config = OmegaConf.create({"evaluation": {"datasets": ["gsm8k"]}})
    with pytest.raises(ConfigError, match=r"evaluation\.datasets must be a list.* gsm8k"):
        from_hydra(config)
