"""Functions that a user names: loaded from files and packages, and sent to other processes."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import get_json_schema

from torchrl_grpo.host.objects import load_function
from torchrl_grpo.reward_pool import Failure, RewardPool
from torchrl_grpo.rewards import BUILTINS
from torchrl_grpo.tasks.arithmetic import ArithmeticTask
from torchrl_grpo.tasks.base import Dialog, Problem, Turn
from torchrl_grpo.tasks.with_rewards import WithRewards, make_rewards


def dialog(response: str) -> Dialog:
    return Dialog(Problem("6*7=?", "42"), [response])


def load_reward(name: str) -> Any:
    return load_function(name, "env.reward", BUILTINS)


FILE = """
import functools, re, threading
import beside
from beside import times
lock = threading.Lock()
@functools.lru_cache
def letters(text): return len(re.findall('a', text))
async def score(response: str, *, extra: int = 0) -> int:
    "Counts."
    import later
    with lock:
        return times(letters(response)) + beside.WEIGHT + later.ONE + extra
"""


@pytest.mark.slow
def test_a_function_of_a_file_runs_where_the_file_is_not(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text(
        "import later\nWEIGHT = 3\ndef times(x): return x * WEIGHT\n"
    )
    (tmp_path / "later.py").write_text("ONE = 1\n")
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    rewards = make_rewards({"fn": f"{file}:score", "extra": 10})
    assert rewards.asynchronous and rewards(dialog("aa")).reward == 20
    sent = pickle.dumps(rewards)
    for path in tmp_path.glob("*.py"):
        path.unlink()
    code = (
        "import pickle, sys, cloudpickle\nfrom torchrl_grpo.tasks.base import *\n"
        "rewards = pickle.loads(cloudpickle.dumps(pickle.load(sys.stdin.buffer)))\n"
        "print(rewards(Dialog(Problem('', None), ['aa'])).parts, rewards.asynchronous)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], input=sent, capture_output=True, check=True, cwd="/"
    )
    assert out.stdout.decode().strip() == "{'score': 20.0} True"


def test_a_function_of_a_file_shows_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\n"
        'def add(a: int, b: int) -> int:\n    """Adds.\n\n    Args:\n        a: one.\n        b: two.\n    """\n'
        "    return a + b\n"
    )
    add = pickle.loads(pickle.dumps(load_reward(f"{tmp_path}/mine.py:add")))
    schema = get_json_schema(add)["function"]
    assert (add(1, 2), schema["name"], schema["description"]) == (3, "add", "Adds.")
    assert schema["parameters"]["properties"]["b"] == {"type": "integer", "description": "two."}


@pytest.mark.slow
def test_an_edited_file_is_loaded_again_and_an_unchanged_one_is_not(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(response): return 1\ndef other(response): return 3\n")
    first = load_reward(f"{file}:score")
    assert load_reward(f"{file}:other").__wrapped__.__globals__ is first.__wrapped__.__globals__
    file.write_text("def score(response): return 2\n")
    assert (first("x"), load_reward(f"{file}:score")("x")) == (1, 2)


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("gsm9k", "", "env.reward=gsm9k must be a built-in or installed name .*gsm8k.*, file.py:function or .* gsm8k"),
        ("rew", "", r"env.reward=rew must be .*package.module:function: use one of them"),
        ("{}", "def good(response): ...\nclass Bad: ...", r"must name a function in .*py.*: use one of \['good'\]"),
        ("{}:", "def good(response): ...", r"must name a function in .*mine.py.*: use one of \['good'\]"),
        ("nothing.py", "", r"must name a file that exists, but there is no .*/nothing.py: fix the path"),
        ("nothing.py:f", "", r"must name a file that exists, but there is no .*/nothing.py: fix the path"),
        ("{}:f", "def good(response): ...\nclass Bad: ...\ndef _no(): ...", r"which has no 'f': use one of \['good'\]"),
        ("{}:N", "N = 3", r"must name a function in .*mine.py, but it is not .*: use one of the ones defined there"),
        ("{}:f", "x = 1\nimport no_such_package", r"raised ModuleNotFoundError: No module.* at .*mine.py:2: fix it"),
        ("{}:f", "x = 1\ndef f(:", "raised SyntaxError: .* at .*mine.py:2: fix it"),
        ("{}:f", "import sys\nsys.exit(3)", "raised SystemExit: 3 at .*mine.py:2"),
        ("{}:f", "open('/no/such/file')", "raised FileNotFoundError: .*/no/such/file.* at .*mine.py:1: fix it"),
        ("no_such_package.module:f", "", "No module named 'no_such_package': put its folder on PYTHONPATH, or"),
        ("json:nothing", "", r"must name a function in json, which has no 'nothing': use one of \['dump'"),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded_says_why(
    tmp_path: Path, name: str, source: str, message: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    with pytest.raises(ValueError, match=message):
        load_reward(name.format(file))


def test_a_file_with_relative_imports_is_to_be_named_as_a_module(tmp_path: Path) -> None:
    folder = tmp_path / "outer" / "inner"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    (folder / "helper.py").write_text("ONE = 1\n")
    (folder / "mine.py").write_text("from .helper import ONE\ndef score(response): return ONE\n")
    with pytest.raises(
        ValueError,
        match=r"outer\.inner\.mine:score",
    ):
        load_reward(f"{folder}/mine.py:score")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        assert load_reward("outer.inner.mine:score")("x") == 1


def test_other_functions_than_rewards_are_loaded_under_their_own_field(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"env\.tools=calc must be file\.py:function"):
        load_function("calc", "env.tools")
    assert load_function("os.path:basename", "env.tools")("a/b") == "b"


HOSTILE = """
import os, sys, threading, time
lock = threading.Lock()
def score(response, answer):
    order = response[:9]
    if order == "hang": time.sleep(100)
    if order == "exit": os._exit(1)
    if order == "sys.exit": sys.exit(1)
    return {"huge": 10**400, "nan": float("nan"), "none": None, "text": "1" * 10**7}.get(order, len(response))
"""


@pytest.mark.slow
def test_reward_workers_name_the_cause_of_every_invalid_reward(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HOSTILE)
    task = WithRewards(ArithmeticTask(), make_rewards(f"{tmp_path}/mine.py:score"))
    orders = ("fine", "huge", "nan", "none", "text", "sys.exit", "exit", "hang", "x" * 10**7)
    with RewardPool(task, 2, timeout_s=3) as pool:
        futures = [pool.submit(dialog(order)) for order in orders]
        turns = [future.result() for future in futures]
    rewards = [turn.score.reward for turn in turns if isinstance(turn, Turn) and turn.score]
    causes = [turn.cause for turn in turns if isinstance(turn, Failure)]
    assert rewards == [4.0, 1e7]
    assert causes == [
        "not_finite",
        "not_finite",
        "none",
        "not_finite",
        "exception",
        "crash",
        "timeout",
    ]
