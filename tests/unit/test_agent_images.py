"""Agents that show the policy images, with OpenAI's and Anthropic's requests."""

from __future__ import annotations

import io
import json
import urllib.request
from base64 import b64encode
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from tests.support.pictures import Count, claiming, picture, see, shows_pictures
from tests.support.runs import run
from tests.support.vision import Kit, check_scores, make_qwen2_5_vl, template
from torchrl_grpo import keys
from torchrl_grpo.collectors.rollout import RolloutCollector
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.generation.transformers import TransformersEngine
from torchrl_grpo.images import ImageFile
from torchrl_grpo.integrations.agents import WithAgent
from torchrl_grpo.integrations.agents.programs import Function
from torchrl_grpo.integrations.agents.protocol import (
    ANTHROPIC,
    CHAT,
    BadRequest,
    parse_request,
)
from torchrl_grpo.reporting.metrics import read_jsonl
from torchrl_grpo.reward_pool import RewardPool

openai = pytest.importorskip("openai")

PARAMS = SamplingParams(max_new_tokens=3, stop_token_ids=tuple(range(320)))


def test_images_of_a_request_are_parsed() -> None:
    result = see("This: ", picture(2), role="tool", tool_call_id="a")
    body = json.dumps({"messages": [see(picture(1), "?"), see("no", " image"), result]})
    first, text, last = parse_request(CHAT, body.encode()).messages
    one, other = ({"type": "image", "image": picture(number)} for number in (1, 2))
    assert first["content"] == [one, {"type": "text", "text": "?"}]
    assert text["content"] == "no image"
    assert last["content"] == [{"type": "text", "text": "This: "}, other]


def test_images_of_anthropic_s_requests_are_parsed() -> None:
    data = b64encode(picture(1).data).decode()
    image = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": data},
    }
    text = {"type": "text", "text": "?"}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text, image]}
    messages = [{"role": "user", "content": [image, text]}, {"role": "user", "content": [result]}]
    body = json.dumps({"max_tokens": 3, "messages": messages}).encode()
    first, last = parse_request(ANTHROPIC, body).messages
    part = {"type": "image", "image": picture(1)}
    assert first["content"] == [part, text]
    assert (last["role"], last["content"]) == ("tool", [text, part])


def image_url(value: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image_url", "image_url": value}]}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (image_url({"url": "https://example.com/a.png"}), "no URL is fetched"),
        (image_url({"url": "file:///etc/passwd"}), "no URL is fetched"),
        (image_url({"url": "data:text/plain;base64,YQ=="}), "data:image/png;base64"),
        (image_url({"url": "data:image/png,abc"}), "data:image/png;base64"),
        (image_url({"url": "data:image/png;base64,@@@"}), "base64"),
        (image_url(None), "data:image/png;base64"),
        (image_url([1]), "data:image/png;base64"),
        (see(picture(1), role="assistant"), "user and tool"),
        (see(picture(1), role="system"), "user and tool"),
        ({"role": "user", "content": [{"type": "video_url"}]}, "texts and"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "texts and"),
        ({"role": "user", "content": [3]}, "texts and"),
    ],
)
def test_an_image_that_cannot_be_taken_is_refused(message: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRequest, match=reason) as error:
        parse_request(CHAT, json.dumps({"messages": [message]}).encode())
    assert error.value.status == 400 and "messages[0].content" in str(error.value)


@pytest.mark.parametrize(
    "source",
    [
        {"type": "url", "url": "https://example.com/a.png"},
        {"type": "file", "file_id": "a"},
        {"type": "base64", "media_type": "image/png"},
        {"type": "base64", "media_type": "application/pdf", "data": "YWJj"},
        {},
    ],
)
def test_a_source_of_anthropic_s_that_cannot_be_taken_is_refused(source: dict[str, Any]) -> None:
    message = {"role": "user", "content": [{"type": "image", "source": source}]}
    with pytest.raises(BadRequest, match=r"messages\[0\]\.content") as error:
        parse_request(ANTHROPIC, json.dumps({"messages": [message]}).encode())
    assert error.value.status == 400


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Kit:
    return Kit(make_qwen2_5_vl(tmp_path_factory.mktemp("model"), tokenizer))


def rollout(kit: Kit, play: Any, pool: bool = False, **options: Any) -> Any:
    """Play two groups of two dialogs with an agent."""
    task = WithAgent(Count(), Function(play))
    settings = {"image_encoder": kit.encoder, "max_turns": 8, **options}
    reward_pool = RewardPool(task, 1, timeout_s=300) if pool else None
    env = LLMEnv(task, kit.tokenizer, num_envs=4, repeats=2, reward_pool=reward_pool, **settings)
    batch = RolloutCollector(
        env, GenerationPolicy(TransformersEngine(kit.model()), PARAMS)
    ).rollout()
    if reward_pool is not None:
        reward_pool.close()
    for row in batch.unbind(0):
        assert bool(row[keys.REWARD_VALID]), row.get(keys.REWARD_ERROR, None)
    return batch


@pytest.mark.parametrize("pool", [False, True], ids=["here", "worker"])
def test_an_agent_shows_images_in_every_turn(kit: Kit, pool: bool) -> None:
    batch = rollout(kit, shows_pictures, pool)
    check_scores(kit.model(), batch)
    files = [[span.image.file for span in row[keys.IMAGES]] for row in batch.unbind(0)]
    first, result, other = picture(1), picture(2), picture(5)
    assert files == [[first, result], [other, result]] * 4
    turns = [int(row[keys.ASSISTANT_MASK].sum()) for row in batch.unbind(0)]
    assert turns == [3, 1] * 4


async def status_of(client: Any, messages: list[Any]) -> str:
    """The refusal of a request; empty if it is answered."""
    try:
        await client.chat.completions.create(model="policy", messages=messages)
    except openai.BadRequestError as error:
        return str(error)
    return ""


def test_a_model_that_reads_text_alone_refuses_images(kit: Kit) -> None:
    refusals: list[tuple[str, str]] = []

    async def play(client, problem):
        first = await status_of(client, [see("?", picture(1))])
        refusals.append((first, await status_of(client, [see("?")])))
        return 1.0

    rollout(kit, play, image_encoder=None)
    assert all("vision-language" in first and not second for first, second in refusals)


def test_roles_whose_images_the_template_drops_are_refused(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = "part['type'] == 'image'"
    own = template("<|image_pad|>").replace(image, f"{image} and m['role'] != 'tool'")
    monkeypatch.setattr(kit.tokenizer, "chat_template", own)
    refusals: list[tuple[str, str]] = []

    async def play(client, problem):
        chat = [see("?", picture(1)), {"role": "assistant", "content": "!"}]
        result = see(picture(2), role="tool", tool_call_id="a")
        first = await status_of(client, [*chat, result])
        refusals.append((first, await status_of(client, chat[:1])))
        return 1.0

    batch = rollout(kit, play)
    assert all("role tool" in first and not second for first, second in refusals)
    assert [len(row[keys.IMAGES]) for row in batch.unbind(0)] == [1] * 4


def test_broken_images_are_refused_and_the_agent_goes_on(kit: Kit) -> None:
    jpeg = io.BytesIO()
    picture(1, (64, 64)).open().save(jpeg, "JPEG")
    whole = ImageFile(jpeg.getvalue())
    broken = [whole.data[:-40], claiming(50_000, 50_000), claiming(9000, 9000), b"no image"]
    refusals: list[str] = []

    async def play(client, problem):
        refusals.extend([await status_of(client, [see("?", ImageFile(data))]) for data in broken])
        assert not await status_of(client, [see("?", whole)])
        return 1.0

    batch = rollout(kit, play)
    assert len(refusals) == 16 and all("readable images" in refusal for refusal in refusals)
    assert ["env.max_image_pixels" in refusal for refusal in refusals] == [
        False,
        False,
        True,
        False,
    ] * 4
    check_scores(kit.model(), batch)


def test_only_a_request_with_a_key_may_be_large(kit: Kit) -> None:
    statuses: list[int] = []

    async def play(client, problem):
        body = json.dumps({"messages": [see("?")], "metadata": "a" * 2**20}).encode()
        for key in (client.api_key, "another"):
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            path = f"{client.base_url}chat/completions"
            request = urllib.request.Request(path, body, headers)
            try:
                with urllib.request.urlopen(request, timeout=300) as answer:
                    statuses.append(answer.status)
            except HTTPError as error:
                statuses.append(error.code)
        return 1.0

    rollout(kit, play)
    assert sorted(statuses) == [200] * 4 + [413] * 4


AGENT = """
async def play(client, problem):
    assert problem["messages"][0]["content"][0]["image_url"]["url"] == problem["picture"]
    answer = await client.chat.completions.create(model="policy", messages=problem["messages"])
    return float(len(answer.choices[0].message.content) > 3)
"""


@pytest.mark.slow
def test_a_run_trains_an_agent_on_images(kit: Kit, tmp_path: Path) -> None:
    rows = []
    for number in range(12):
        (tmp_path / f"{number}.png").write_bytes(picture(number).data)
        rows.append(json.dumps({"question": "?", "answer": "1", "picture": f"{number}.png"}))
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    (tmp_path / "agent.py").write_text(AGENT)
    arguments = (
        f"model.name={kit.path}",
        f"env.dataset={tmp_path / 'data.jsonl'}",
        "env.columns.images=picture",
        f"env.agent={tmp_path / 'agent.py'}:play",
        "env.max_turns=2",
        "inference_model.max_new_tokens=6",
        "train.total_dialog_turns=32",
    )
    metrics = [row for row in run(tmp_path / "run", *arguments) if "train/loss" in row]
    assert metrics and max(row["train/kl_k3_to_inference"] for row in metrics) < 1e-8
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert samples and all(s["valid"] and len(s["images"]) == 1 for s in samples)
