"""Images that tools and environments show between the policy's turns."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from torchrl.envs.utils import check_env_specs
from transformers import PreTrainedTokenizerBase

from tests.support.configs import ROOT
from tests.support.pictures import (
    Count,
    Gallery,
    Screen,
    broken_pictures,
    claiming,
    draw,
    noise,
    picture,
    task_of,
)
from tests.support.runs import run
from tests.support.vision import MAKERS, Kit, check_scores, template
from torchrl_grpo import keys
from torchrl_grpo.collectors.rollout import RolloutCollector
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.generation.transformers import TransformersEngine
from torchrl_grpo.images import ImageFile, message_content
from torchrl_grpo.reporting.metrics import read_jsonl
from torchrl_grpo.reward_pool import Failure, RewardPool
from torchrl_grpo.tasks.base import Dialog, Message, Task
from torchrl_grpo.tasks.conversations import WithTools
from torchrl_grpo.tasks.seeds import SeedsTask
from torchrl_grpo.tasks.with_environment import Kind, WithEnvironment
from torchrl_grpo.tools import Toolbox, ToolCall

PARAMS = SamplingParams(max_new_tokens=3, stop_token_ids=tuple(range(320)))


def make_env(kit: Kit, task: Task, **options: Any) -> LLMEnv:
    settings = {"image_encoder": kit.encoder, "max_turns": 4, **options}
    return LLMEnv(task, kit.tokenizer, num_envs=4, repeats=2, **settings)


@pytest.fixture(scope="module", params=["idefics3", "qwen2_5_vl"])
def kit(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: PreTrainedTokenizerBase,
) -> Kit:
    return Kit(MAKERS[request.param](tmp_path_factory.mktemp(request.param), tokenizer))


ONE_FAMILY = pytest.mark.parametrize("kit", ["qwen2_5_vl"], indirect=True)


def check_dialogs(kit: Kit, env: LLMEnv, images: int) -> None:
    """Play an environment; the scorer must give the engine's log-probs, and spans their tokens."""
    model = kit.model()
    batch = RolloutCollector(env, GenerationPolicy(TransformersEngine(model), PARAMS)).rollout()
    check_env_specs(env, break_when_any_done="both")
    check_scores(model, batch)
    for row in batch.unbind(0):
        assert row[keys.ASSISTANT_MASK].sum() >= 2 and len(row[keys.IMAGES]) == images


@pytest.mark.parametrize("name", ["tools", "methods", "game", "screen"])
def test_later_turns_read_images(kit: Kit, name: str) -> None:
    task, images = task_of(name)
    check_dialogs(kit, make_env(kit, task), images)


@ONE_FAMILY
@pytest.mark.parametrize("name", ["tools", "methods", "game", "screen"])
def test_reward_workers_send_images(kit: Kit, name: str) -> None:
    task, images = task_of(name)
    with RewardPool(task, 1, timeout_s=300) as pool:
        check_dialogs(kit, make_env(kit, task, reward_pool=pool), images)


@ONE_FAMILY
def test_a_turn_without_room_drops_its_images(kit: Kit) -> None:
    check_dialogs(kit, make_env(kit, task_of("game")[0], max_dialog_tokens=100), 3)


def replies(kit: Kit, env: LLMEnv) -> list[list[Message]]:
    """Return the tools' messages of each dialog."""
    engine = TransformersEngine(kit.model())
    batch = RolloutCollector(env, GenerationPolicy(engine, PARAMS)).rollout()
    assert batch[keys.REWARD_VALID].all() and not any(batch[keys.IMAGES])
    return [[m for m in dialog.messages if m["role"] == "tool"] for dialog in env.dialogs]


@ONE_FAMILY
@pytest.mark.parametrize("name", ["tools", "methods"])
def test_an_image_that_the_template_drops_is_an_error_for_the_policy(
    kit: Kit, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = "part['type'] == 'image'"
    chat_template = template("<|image_pad|>").replace(image, f"{image} and m['role'] != 'tool'")
    monkeypatch.setattr(kit.tokenizer, "chat_template", chat_template)
    env = make_env(kit, task_of(name)[0])
    for messages in replies(kit, env):
        assert len(messages) == 6
        for message in messages:
            assert message["content"].startswith("error: the result has an image")
    counts = env.take_counts()
    assert counts["tools/errors"] == 24


@ONE_FAMILY
def test_an_image_for_a_model_without_images_is_an_error_for_the_policy(kit: Kit) -> None:
    env = make_env(kit, task_of("tools")[0], image_encoder=None)
    engine = TransformersEngine(kit.model())
    RolloutCollector(env, GenerationPolicy(engine, PARAMS)).rollout()
    messages = [m for dialog in env.dialogs for m in dialog.messages if m["role"] == "tool"]
    assert messages and all(
        m["content"].startswith("error: the result has an image") for m in messages
    )


def test_a_tool_returns_images_in_every_form() -> None:
    image = draw(1)
    file = picture(1)
    see = {"type": "text", "text": "x" * 9000}
    values: dict[str, Any] = {
        "pil": image,
        "bytes": file.data,
        "parts": [see, {"type": "image", "image": image}],
        "texts": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        "no image": b"abc",
        "list": [],
        "data": [{"type": "video", "url": "v"}],
        "broken": [see, {"type": "image", "image": b"abc"}],
        "cut": [{"type": "image", "image": file.data[:10]}],
        "exif": broken_pictures()["undefined orientation"],
        "huge": claiming(50_000, 50_000),
    }

    def show(name: str) -> Any:
        """Show. Args: name: what."""
        return values[name]

    box = Toolbox([show])
    results = {name: box.run(ToolCall("show", {"name": name})) for name in values}
    parts = [{"type": "image", "image": file}]
    assert results["pil"] == results["bytes"] == (parts, True)
    content, is_well = results["parts"]
    assert is_well and content[1] == parts[0] and len(content[0]["text"]) < 8300
    assert results["texts"] == ("ab", True)
    assert results["no image"] == ("\"b'abc'\"", True)
    assert results["list"] == ("[]", True)
    assert results["data"] == (json.dumps(values["data"]), True)
    for name in ("exif", "huge"):  # the second becomes an error where the model would read it
        assert results[name] == ([{"type": "image", "image": ImageFile(values[name])}], True)
    for name in ("broken", "cut"):
        content, is_well = results[name]
        assert not is_well and "the result of show" in content


@ONE_FAMILY
@pytest.mark.parametrize("name", ["no pixels", "too large"])
def test_a_broken_image_ends_no_run(kit: Kit, name: str) -> None:
    data = broken_pictures()[name]

    class Breaks(Screen):
        def step(self, response: str) -> tuple[Any, float, bool]:
            return data, 0.5, False

    class Broken(Screen):
        def reset(self, seed: int) -> bytes:
            return data

    class Replies(Count):
        def reply(self, dialog: Dialog) -> list[Message] | None:
            return [{"role": "user", "content": [{"type": "image", "image": ImageFile(data)}]}]

    def show() -> bytes:
        """Show a picture."""
        return data

    engine = TransformersEngine(kit.model())
    games = [WithEnvironment(SeedsTask(4), {"": Kind(game)}) for game in (Breaks, Broken)]
    for task in (*games, Replies()):
        env = make_env(kit, task)
        batch = RolloutCollector(env, GenerationPolicy(engine, PARAMS)).rollout()
        assert not batch[keys.REWARD_VALID].any()
    box = Toolbox([show], lambda text: [ToolCall("show", {})])
    for messages in replies(kit, make_env(kit, WithTools(Count(), box))):
        assert messages
        assert {m["content"] for m in messages} == {
            "error: the result has an image, which cannot be read here"
        }


@pytest.mark.slow
def test_a_turn_with_too_large_images_is_refused() -> None:
    large = noise(2100, 2100)

    class Large(Screen):
        def reset(self, seed: int) -> Image.Image:
            return large

    task = WithEnvironment(SeedsTask(4), {"": Kind(Large)})
    problem = task.problems("train")[0]
    opening = Dialog(problem, [], task.messages(problem), last=False, episode="a")
    with RewardPool(task, 1, timeout_s=300) as pool:
        turn = pool.submit(opening).result()
    assert isinstance(turn, Failure) and "JPEG" in turn.text


@ONE_FAMILY
def test_messages_of_a_task_show_images_in_every_form(kit: Kit) -> None:
    class Replies(Count):
        def reply(self, dialog: Dialog) -> list[Message] | None:
            if len(dialog.responses) > 1:
                return None
            content = [{"type": "image", "image": draw(2)}, {"type": "text", "text": "?"}]
            return [{"role": "user", "content": content}]

    check_dialogs(kit, make_env(kit, Replies()), 1)


@pytest.mark.parametrize("part", [{"type": "image"}, {"type": "image", "image": "a.png"}])
def test_a_part_without_text_or_image_is_refused(part: dict[str, Any]) -> None:
    class Broken(Gallery):
        def reset(self, seed: int) -> list[dict[str, Any]]:
            return [part]

    task = WithEnvironment(SeedsTask(4), {"": Kind(Broken)})
    problem = task.problems("train")[0]
    opening = Dialog(problem, [], task.messages(problem), last=False, episode="a")
    [turn] = task.advance([opening])
    assert isinstance(turn, ValueError) and "reset of the environment Broken" in str(turn)


@pytest.mark.slow
@ONE_FAMILY
def test_a_run_trains_on_the_environment_of_the_docs(kit: Kit, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(from PIL import Image.*?)```", page, re.S)
    (tmp_path / "game.py").write_text(code)
    arguments = (
        f"model.name={kit.path}",
        "env.dataset=null",
        f"env.environment={tmp_path / 'game.py'}:Walk",
        "env.max_turns=3",
        "inference_model.max_new_tokens=6",
        "train.total_dialog_turns=32",
    )
    rows = [row for row in run(tmp_path / "run", *arguments) if "train/loss" in row]
    assert rows and all(math.isfinite(row["train/loss"]) for row in rows)
    assert max(row["train/kl_k3_to_inference"] for row in rows) < 1e-8
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert all(sample["valid"] for sample in samples)
    assert {sample["query"] for sample in samples} == {"Walk to green: l or r?<image>"}
    assert all("[user] <image>" in s["response"] for s in samples if s["finish_reason"] == "stop")


@pytest.mark.parametrize(
    "value",
    [
        [{"type": "text", "name": "id"}],
        [{"type": "link", "href": "a"}, {"type": "image", "src": "x.png"}],
        [{"type": ["string", "null"]}],
        [1, 2],
        [],
    ],
)
def test_json_that_only_looks_like_parts_is_left_as_it_is(value: list[Any]) -> None:
    assert message_content(value, "a tool") is None
