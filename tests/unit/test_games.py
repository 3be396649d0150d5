"""One game as a task, a text game, a class of tools, and an agent: all of them give the same run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torchrl import torchrl_logger
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from tests.support.configs import ROOT
from torchrl_grpo import keys
from torchrl_grpo.assembly.tasks import make_task
from torchrl_grpo.collectors import RolloutCollector
from torchrl_grpo.config.env import EnvConfig
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.generation.transformers import TransformersEngine
from torchrl_grpo.learner.step import PolicyTrainer
from torchrl_grpo.models.loading import load_tokenizer
from torchrl_grpo.models.scoring import TokenScorer
from torchrl_grpo.objectives import GRPOLoss
from torchrl_grpo.starter import starter_path
from torchrl_grpo.transforms import GroupAdvantage

GAMES = f"{ROOT}/examples/my_games.py"
FORMS: dict[str, dict[str, Any]] = {
    "task": {"task": {"_target_": "my_games.GuessTask"}},
    "text game": {"environment": f"{GAMES}:TextGame"},
    "tools": {"environment": f"{GAMES}:ToolGame", "tool_parser": f"{GAMES}:bare_digit"},
    "agent": {"task": {"_target_": "my_games.GuessTask"}, "agent": f"{GAMES}:play"},
}
Player = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def player() -> Player:
    """Return the starter after a few steps on demonstrations: it mostly says one digit, and
    sometimes something else.
    """
    from examples.my_games import GuessTask

    tokenizer = load_tokenizer(
        str(starter_path()), chat_template=f"{ROOT}/examples/tool_as_user.jinja"
    )
    model = AutoModelForCausalLM.from_pretrained(starter_path())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    task = GuessTask()
    chats = [
        [*task.messages(problem), *task.demonstration(problem)]
        for problem in task.problems("train")[:640]
    ]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    for first in range(0, len(texts), 16):
        tokens = tokenizer(
            texts[first : first + 16], padding=True, padding_side="right", return_tensors="pt"
        ).input_ids
        model(
            input_ids=tokens, labels=tokens.masked_fill(tokens == tokenizer.pad_token_id, -100)
        ).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), tokenizer


def first_step(
    player: Player, form: str
) -> tuple[TensorDictBase, dict[str, Any], dict[str, torch.Tensor]]:
    """Return the batch of a run's first step, the step's metrics, and the weights after it."""
    model, tokenizer = player
    engine = TransformersEngine(model)
    engine.seed(3)
    task = make_task(EnvConfig(**FORMS[form], max_turns=3))
    env = LLMEnv(task, tokenizer, num_envs=32, repeats=8, max_turns=3, seed=5)
    collector = RolloutCollector(
        env, GenerationPolicy(engine, SamplingParams(4, stop_token_ids=(1,)))
    )
    batch = GroupAdvantage(8)(collector.rollout())
    trained = AutoModelForCausalLM.from_pretrained(starter_path())
    trained.load_state_dict(model.state_dict())
    loss = GRPOLoss(TokenScorer(trained.eval()))
    trainer = PolicyTrainer(
        loss, trained, torch.optim.SGD(trained.parameters(), lr=0.1), optim_batch_size=32
    )
    metrics = trainer.train_batch(batch)
    return batch, metrics, trained.state_dict()


@pytest.mark.slow
def test_one_game_in_four_forms_gives_one_batch_one_loss_and_one_update(
    player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openai")
    monkeypatch.syspath_prepend(f"{ROOT}/examples")
    batch, metrics, weights = first_step(player, "task")
    turns = [int((row[keys.FULL] == 1)[row[keys.ASSISTANT_MASK]].sum()) for row in batch.unbind(0)]
    assert 3 in turns and min(turns) < 3, "some play to the end, and some say no number"
    assert 0 < batch[keys.REWARD].sum() < 32 and metrics["train/grad_norm"] > 0
    for form in ("text game", "tools", "agent"):
        other, other_metrics, other_weights = first_step(player, form)
        for key in (
            keys.FULL, keys.ASSISTANT_MASK, keys.LOG_PROBS, keys.REWARD, keys.CORRECT, keys.REWARD_VALID, keys.ADVANTAGE
        ):  # fmt: skip
            for left, right in zip(batch.unbind(0), other.unbind(0), strict=True):
                assert torch.equal(left[key], right[key]), (form, key)
        for name in ("train/loss", "train/grad_norm"):
            assert metrics[name] == other_metrics[name], (form, name)
        assert all(torch.equal(weight, other_weights[name]) for name, weight in weights.items()), (
            form
        )


@pytest.mark.parametrize(("max_turns", "warnings"), [(1, 1), (2, 0)])
def test_a_game_without_max_turns_says_that_it_has_one_turn(
    max_turns: int, warnings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(torchrl_logger, "warning", warned.append)
    make_task(EnvConfig(dataset=None, environment=f"{GAMES}:TextGame", max_turns=max_turns))
    assert len([text for text in warned if text.startswith("env.max_turns=1")]) == warnings
