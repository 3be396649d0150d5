"""GenerationPolicy and RolloutCollector: requests, merged turns, whole groups, resume."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import BaseCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import TransformedEnv
from torchrl.envs.llm.transforms.policy_version import PolicyVersion

from tests.support.echo import EchoTask, TwoTurnTask
from tests.support.envs import END, ScriptedEngine
from tests.support.models import make_tiny_model
from torchrl_grpo import keys
from torchrl_grpo.collectors.rollout import RolloutCollector
from torchrl_grpo.collectors.summary import response_lengths
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation.base import SamplingParams
from torchrl_grpo.generation.policy import GenerationPolicy
from torchrl_grpo.generation.transformers import TransformersEngine
from torchrl_grpo.transforms import GroupAdvantage, RewardShaping

PARAMS = SamplingParams(max_new_tokens=8)
KEYS = {
    *(("tokens", name) for name in ("prompt", "response", "full")),
    *(("masks", name) for name in ("all_attention_mask", "all_assistant_mask")),
    ("log_probs", "full"),
    ("policy_versions", "full"),
    *(("next", name) for name in ("reward", "done", "terminated", "truncated", "correct")),
    *(("reward_valid",), ("group_id",), ("problem",), ("policy_version",)),
    *(("query",), ("text", "response")),
    ("next", "policy_version"),
}


def copies_of(engine_rule=None) -> ScriptedEngine:
    """Return an engine whose k-th copy answers with k + 1 tokens and the end token."""
    return ScriptedEngine(
        engine_rule or (lambda prompt, copy: ([10 + copy] * (copy + 1) + [END], "stop"))
    )


def rows_of(*prompts: list[int], groups: list[int] | None = None) -> TensorDict:
    data = TensorDict(
        {
            "tokens": lazy_stack(
                [TensorDict({"prompt": torch.tensor(prompt)}) for prompt in prompts]
            )
        },
        [len(prompts)],
    )
    if groups is not None:
        data["group_id"] = torch.tensor(groups).unsqueeze(-1)
    return data


def lists(data: TensorDict, *key: str) -> list[list]:
    return [row.get(key).tolist() for row in data.unbind(0)]


def outcome(row: TensorDict) -> list:
    return [row["next", key].item() for key in ("reward", "done", "terminated", "truncated")]


# GenerationPolicy


def test_rows_of_one_group_and_prompt_are_one_request():
    engine = copies_of()
    data = rows_of([5, 6], [5, 6], [7], [5, 6], [8, 8], [8, 8], groups=[0, 0, 1, 9, 2, 2])
    out = GenerationPolicy(engine, PARAMS)(data)
    assert out is data
    assert engine.calls == [([[5, 6], [8, 8]], 2), ([[7], [5, 6]], 1)]
    assert lists(out, "tokens", "response") == [
        [10, 1],
        [11, 11, 1],
        [10, 1],
        [10, 1],
        [10, 1],
        [11, 11, 1],
    ]


def test_policy_writes_masks_log_probs_version_and_finish_reason():
    engine = copies_of(
        lambda prompt, copy: ([20, 21, 22], "length") if copy else ([9, END], "stop")
    )
    engine.policy_version = 7
    out = GenerationPolicy(engine, PARAMS)(rows_of([5, 6], [5, 6], groups=[3, 3]))
    assert lists(out, "tokens", "full") == [[5, 6, 9, 1], [5, 6, 20, 21, 22]]
    assert lists(out, "masks", "all_assistant_mask") == [
        [False, False, True, True],
        [False, False, True, True, True],
    ]
    assert lists(out, "masks", "all_attention_mask") == [[True] * 4, [True] * 5]
    assert lists(out, "log_probs", "full") == [[0.0, 0.0, -1.0, -2.0], [0.0, 0.0, -1.0, -2.0, -3.0]]
    assert out[0]["log_probs", "full"].dtype == torch.float32
    assert out["policy_version"].tolist() == [[7], [7]]
    assert lists(out, "policy_versions", "full") == [[-1, -1, 7, 7], [-1, -1, 7, 7, 7]]
    assert out["length_stopped"].tolist() == [[False], [True]]


def test_the_version_is_the_one_before_generation():
    engine = copies_of()

    def publish_while_generating(prompt, copy):
        engine.policy_version += 1
        return [9, END], "stop"

    engine.rule = publish_while_generating
    assert GenerationPolicy(engine, PARAMS)(rows_of([5]))["policy_version"].tolist() == [[0]]


def test_engine_versions_are_kept_and_the_oldest_is_the_sequences():
    engine = copies_of(
        lambda prompt, copy: ([20, 21, 22], "length") if copy else ([9, END], "stop")
    )
    plain = engine.generate
    reported = iter([[3, 4], [4, 4, 5]])

    def generate(prompts, n, params):
        groups = plain(prompts, n, params)
        for done in groups[0]:
            done.versions = torch.tensor(next(reported))
        return groups

    engine.generate = generate
    engine.policy_version = 9
    out = GenerationPolicy(engine, PARAMS)(rows_of([5, 6], [5, 6], groups=[3, 3]))
    assert lists(out, "policy_versions", "full") == [[-1, -1, 3, 4], [-1, -1, 4, 4, 5]]
    assert out["policy_version"].tolist() == [[3], [4]]


def test_policy_takes_any_batch_size_and_lazy_stacks():
    policy = GenerationPolicy(copies_of(), PARAMS)
    flat = rows_of([5], [6, 6], [7], [7], [8], [9], groups=[0, 1, 2, 2, 3, 4])
    expected = [row.tolist() for row in policy(flat.copy())["tokens"].get("response", as_list=True)]

    single = policy(
        TensorDict({"tokens": {"prompt": torch.tensor([5])}, "group_id": torch.tensor([0])})
    )
    assert single["tokens", "full"].tolist() == [5, 10, 1] and single["policy_version"].shape == (
        1,
    )

    lazy = policy(lazy_stack(list(flat.unbind(0))))
    assert lists(lazy, "tokens", "response") == expected

    block = flat.select("group_id").reshape(2, 3)
    prompts = flat.get("tokens").unbind(0)
    block["tokens"] = lazy_stack([lazy_stack(list(prompts[:3])), lazy_stack(list(prompts[3:]))])
    block = policy(block)
    assert block["length_stopped"].shape == (2, 3, 1)
    assert [
        block[i, j]["tokens", "response"].tolist() for i in range(2) for j in range(3)
    ] == expected


def test_rows_that_do_not_step_cost_nothing():
    engine = copies_of()
    data = rows_of([5], [5], [6], groups=[0, 0, 1])
    data["_step"] = torch.tensor([[False], [True], [False]])
    out = GenerationPolicy(engine, PARAMS)(data)
    assert engine.calls == [([[5]], 1)]
    assert lists(out, "tokens", "response") == [[], [10, 1], []]
    assert lists(out, "masks", "all_assistant_mask") == [[False], [False, True, True], [False]]


# RolloutCollector


def make_collector(
    tokenizer, task=None, engine=None, *, env_seed=0, **arguments
) -> RolloutCollector:
    env = LLMEnv(task or EchoTask(), tokenizer, num_envs=4, repeats=2, max_turns=2, seed=env_seed)
    return RolloutCollector(env, GenerationPolicy(engine or copies_of(), PARAMS), **arguments)


def test_batches_are_flat_lazy_stacks_with_the_keys_of_the_table(tokenizer):
    collector = make_collector(tokenizer)
    assert isinstance(collector, BaseCollector)
    batch = next(iter(collector))
    assert batch.shape == (4,)
    row = batch[0]
    keys = {key if isinstance(key, tuple) else (key,) for key in row.keys(True, True)}
    keys |= {("query",), ("text", "response")}
    assert keys == KEYS
    assert isinstance(row["query"], str) and isinstance(row["text", "response"], str)
    expected = {
        ("next", "reward"): ((1,), torch.float32),
        ("next", "correct"): ((1,), torch.bool),
        "reward_valid": ((1,), torch.bool),
        "group_id": ((1,), torch.int64),
        "policy_version": ((1,), torch.int64),
        ("tokens", "response"): ((2,), torch.int64),
    }
    assert {key: (tuple(row[key].shape), row[key].dtype) for key in expected} == expected


def test_a_batch_has_whole_groups_with_adjacent_members(tokenizer):
    collector = make_collector(tokenizer, dialog_turns_per_batch=6)
    batch = collector.rollout()
    assert batch["group_id"].squeeze(-1).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [prompt for _, prompt in collector.policy.engine.calls] == [2, 2]
    assert collector.last.turns == 8
    assert collector.last.tokens == 4 * (2 + 3)
    assert collector.last.generate_seconds > 0 and collector.last.env_seconds > 0


def test_turns_become_one_sequence(tokenizer, encode):
    again = encode("<|user|>again?<|end|><|assistant|>")

    def rule(prompt, copy):
        engine.policy_version += 1  # as if weights arrived in the middle
        second = prompt[-len(again) :].tolist() == again
        if second:
            return [30, 31, 32], "length"
        return ([*encode("stop"), END], "stop") if copy == 0 else ([20, END], "stop")

    engine = copies_of(rule)
    collector = make_collector(tokenizer, TwoTurnTask(), engine)
    batch = collector.rollout()

    # The second turn is only sampled for rows 1 and 3.
    assert [(len(prompts), n) for prompts, n in engine.calls] == [(2, 2), (2, 1)]
    assert collector.last.turns == 6 and collector.last.tokens == 2 * (5 + 2 + 3)
    assert response_lengths(batch).tolist() == [5, 2 + 3] * 2, "the policy's tokens alone"
    stopped, went_on = batch[0], batch[1]
    prompt = encode(f"<|user|>{batch[0]['query']}<|end|><|assistant|>")
    assert went_on["tokens", "prompt"].tolist() == prompt
    assert went_on["tokens", "response"].tolist() == [20, END, *again, 30, 31, 32]
    assert went_on["tokens", "full"].tolist() == [*prompt, 20, END, *again, 30, 31, 32]
    mask = [*[False] * len(prompt), True, True, *[False] * len(again), True, True, True]
    assert went_on["masks", "all_assistant_mask"].tolist() == mask
    log_probs = [*[0.0] * len(prompt), -1.0, -2.0, *[0.0] * len(again), -1.0, -2.0, -3.0]
    assert went_on["log_probs", "full"].tolist() == log_probs
    assert went_on["policy_version"].tolist() == [0]
    first, second = (
        0,
        4,
    )  # the first turn had four requests, each of which raised the version
    versions = [*[-1] * len(prompt), first, first, *[-1] * len(again), second, second, second]
    assert went_on["policy_versions", "full"].tolist() == versions
    assert [
        went_on["next", key].item() for key in ("reward", "done", "terminated", "truncated")
    ] == [
        2,
        True,
        False,
        True,
    ]

    assert stopped["tokens", "full"].tolist() == [*prompt, *encode("stop"), END]
    assert [
        stopped["next", key].item() for key in ("reward", "done", "terminated", "truncated")
    ] == [
        1,
        True,
        True,
        False,
    ]
    assert batch["next", "correct"].squeeze(-1).tolist() == [False, True, False, True]


def test_iteration_ends_after_the_turns_that_were_asked_for(tokenizer):
    collector = make_collector(tokenizer, total_dialog_turns=10)
    assert len(collector) == 3
    assert len(list(collector)) == 3
    assert collector.dialog_turns == 12
    assert collector.stats()["frames"] == 12 and collector.stats()["completed"]
    assert collector.next() is None


def test_weights_reach_the_engine_and_the_next_batch(tokenizer):
    collector = make_collector(tokenizer)
    assert collector.rollout()["policy_version"].unique().tolist() == [0]
    collector.update_policy_weights_([("weight", torch.zeros(1))], 3)
    assert collector.policy_version == 3
    assert collector.rollout()["policy_version"].unique().tolist() == [3]


@pytest.mark.parametrize("is_made_here", [True, False])
def test_shutdown_closes_only_an_engine_that_the_collector_has_made(tokenizer, is_made_here):
    policy = GenerationPolicy(copies_of(), PARAMS)
    env = LLMEnv(EchoTask(), tokenizer, num_envs=4, repeats=2)
    how = {"policy_factory": lambda: policy} if is_made_here else {"policy": policy}
    collector = RolloutCollector(env, **how)
    collector.shutdown()
    collector.shutdown()
    assert policy.engine.num_closed == is_made_here and collector.env.is_closed
    with pytest.raises(RuntimeError, match="shut down"):
        collector.rollout()


def test_a_policy_whose_engine_a_function_makes_has_one_engine(tokenizer):
    made = []
    policy = GenerationPolicy(lambda: made.append(copies_of()) or made[-1], PARAMS)
    collector = RolloutCollector(LLMEnv(EchoTask(), tokenizer, num_envs=4, repeats=2), policy)
    collector.rollout()
    collector.rollout()
    assert len(made) == 1 and len(made[0].calls) == 2


def test_a_policy_may_be_part_of_a_sequence(tokenizer):
    """Its neighbors run too, and its response is cut and received as without them."""
    policy = GenerationPolicy(copies_of(), PARAMS)
    before = TensorDictModule(lambda x: x + 1, in_keys=["group_id"], out_keys=["before"])
    after = TensorDictModule(lambda x: 2 * x, in_keys=["before"], out_keys=["after"])
    sequence = TensorDictSequential(before, TensorDictSequential(policy, after))
    batches = []
    for each in (policy, sequence):
        env = LLMEnv(TwoTurnTask(), tokenizer, num_envs=4, repeats=2, max_turns=2)
        collector = RolloutCollector(env, each)
        collector.set_seed(3)
        batches.append(collector.rollout())
        collector.update_policy_weights_([("weight", torch.zeros(1))])
    assert lists(batches[0], "tokens", "full") == lists(batches[1], "tokens", "full")
    assert batches[1]["after"].tolist() == (2 * (batches[1]["group_id"] + 1)).tolist()
    assert policy.engine.policy_version == 2


def test_a_wrong_policy_or_engine_is_refused_with_what_to_use(tokenizer, tiny_model):
    env = LLMEnv(EchoTask(), tokenizer, num_envs=4, repeats=2)
    for part in (tiny_model, "model", TensorDictSequential(before_nothing())):
        with pytest.raises(ValueError, match=f"policy={type(part).__name__}.*GenerationPolicy"):
            RolloutCollector(env, part)
    with pytest.raises(ValueError, match="env=Qwen2ForCausalLM must be an LLMEnv"):
        RolloutCollector(lambda: tiny_model, GenerationPolicy(copies_of(), PARAMS))
    for part in (tiny_model, "model"):
        with pytest.raises(ValueError, match=f"engine={type(part).__name__}.*TransformersEngine"):
            GenerationPolicy(part, PARAMS)
    with pytest.raises(ValueError, match=r"batch_size=\[0\]"):
        GenerationPolicy(copies_of(), PARAMS)(env.reset()[:0])


def before_nothing() -> TensorDictModule:
    return TensorDictModule(lambda x: x, in_keys=["group_id"], out_keys=["same"])


@pytest.mark.parametrize("version_type", ["int", "uuid"])
def test_torchrls_policy_version_advances_with_the_engines(tokenizer, version_type):
    transform = PolicyVersion(version_type=version_type)
    env = LLMEnv(EchoTask(), tokenizer, num_envs=4, repeats=2)
    policy = GenerationPolicy(copies_of(), PARAMS)
    collector = RolloutCollector(TransformedEnv(env, transform), policy)
    versions = [transform.version]
    collector.update_policy_weights_([("weight", torch.zeros(1))])
    versions.append(transform.version)
    collector.increment_version()
    versions.append(transform.version)
    assert len(set(versions)) == 3
    assert version_type == "uuid" or versions == [0, 1, collector.policy_version]


def test_an_update_without_weights_brings_those_of_the_registered_model(tiny_model):
    trained = make_tiny_model()
    trained.lm_head.weight.data += 1
    policy = GenerationPolicy(TransformersEngine(tiny_model), PARAMS)
    policy.update_weights()
    assert policy.engine.policy_version == 0  # the engine has the weights that it was made with
    policy.register_model(trained)
    assert "model" not in policy.state_dict() and not list(policy.parameters())
    policy.update_weights()
    assert policy.engine.policy_version == 1
    assert torch.equal(policy.model.lm_head.weight, trained.lm_head.weight)
    del trained
    with pytest.raises(TypeError, match="register_model"):
        policy.update_weights()


def test_a_resumed_collector_goes_on_where_the_first_one_was(tokenizer):
    first = make_collector(tokenizer, env_seed=4, total_dialog_turns=16)
    first.rollout()
    first.policy.engine.policy_version = 5
    state = first.state_dict()
    expected = list(first)
    resumed = make_collector(tokenizer, total_dialog_turns=16)
    resumed.load_state_dict(state)
    batches = list(resumed)
    assert len(batches) == len(expected) == 3
    for batch, other in zip(batches, expected, strict=True):
        assert batch["query"] == other["query"]
        assert torch.equal(batch["group_id"], other["group_id"])
        assert torch.equal(batch["policy_version"], other["policy_version"])
        assert lists(batch, "tokens", "full") == lists(other, "tokens", "full")


def test_a_transform_that_changes_tokens_between_turns_is_found(tokenizer):
    engine = copies_of(lambda prompt, copy: ([20, END], "stop"))
    collector = make_collector(tokenizer, TwoTurnTask(), engine)

    class Shifted(GenerationPolicy):
        def forward(self, tensordict):
            if tensordict.get("_step", None) is not None:
                for row in tensordict.get("tokens").unbind(0):
                    row["prompt"] = row["prompt"] + 1
            return super().forward(tensordict)

    collector.policy = Shifted(engine, PARAMS)
    with pytest.raises(RuntimeError, match="are not the first of the"):
        collector.rollout()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dialog_turns_per_batch": 0}, "dialog_turns_per_batch=0 must be at least 1"),
        ({"total_dialog_turns": 0}, "total_dialog_turns=0 must be at least 1, or -1"),
    ],
)
def test_bad_arguments_say_what_to_use(tokenizer, arguments, message):
    with pytest.raises(ValueError, match=message):
        make_collector(tokenizer, **arguments)


@pytest.mark.parametrize("task", [EchoTask(), TwoTurnTask()])
def test_group_advantage_in_the_environment_reaches_the_batch(tokenizer, task):
    def rule(prompt, copy):
        # Echo: the first copy is right. Two turns: the first copy stops after one.
        if copy:
            return [20, END], "stop"
        text = tokenizer.decode(prompt[1:-2]) if type(task) is EchoTask else "stop"
        return [*tokenizer(text, add_special_tokens=False)["input_ids"], END], "stop"

    env = TransformedEnv(
        LLMEnv(task, tokenizer, num_envs=4, repeats=2, max_turns=2), GroupAdvantage(2)
    )
    collector = RolloutCollector(env, GenerationPolicy(copies_of(rule), PARAMS))
    batch = collector.rollout()
    sign = 1 if type(task) is EchoTask else -1
    expected = torch.tensor([[1.0], [-1.0]] * 2) * sign * 0.5**0.5
    torch.testing.assert_close(batch["advantage"], expected, atol=1e-5, rtol=0)
    assert env.transform.num_groups == 2
    state = collector.state_dict()
    collector.load_state_dict(state)
    assert collector.rollout()["group_id"].squeeze(-1).tolist() == [2, 2, 3, 3]


# Rewards of the turns


class TurnRewardEnv(LLMEnv):
    """An environment whose steps all have a reward: the number of letters of the turn, invalid for
    ``bad``.
    """

    def _step(self, tensordict):
        active = self.stepping.tolist()
        out = super()._step(tensordict)
        texts = [dialog.responses[-1] for dialog in self.dialogs]
        reward = [
            float(len(text)) if went else 99.0 for text, went in zip(texts, active, strict=True)
        ]
        valid = [text != "bad" for text in texts]
        return out.update(
            {"reward": torch.tensor(reward)[:, None], "reward_valid": torch.tensor(valid)[:, None]}
        )


def play_turns(tokenizer, encode, first: list[str]) -> TensorDict:
    """Play two dialogs of the same problem with these first responses; a second turn answers
    ``xy``.
    """
    again = encode("<|user|>again?<|end|><|assistant|>")

    def rule(prompt, copy):
        text = "xy" if prompt[-len(again) :].tolist() == again else first[copy]
        return [*encode(text), END], "stop"

    env = TurnRewardEnv(TwoTurnTask(), tokenizer, num_envs=2, repeats=2, max_turns=2)
    return RolloutCollector(env, GenerationPolicy(copies_of(rule), PARAMS)).rollout()


def test_a_dialogs_reward_is_the_sum_and_each_turn_keeps_its_own(tokenizer, encode):
    batch = play_turns(tokenizer, encode, ["stop", "abc"])
    assert batch["next", "reward"].squeeze(-1).tolist() == [4, 3 + 2]
    for row, expected in zip(batch.unbind(0), ([4.0], [3.0, 2.0]), strict=True):
        sampled, rewards = row["masks", "all_assistant_mask"], row["next", "turn_rewards"]
        ends = (sampled & ~torch.cat([sampled[1:], torch.tensor([False])])).nonzero().reshape(-1)
        assert rewards.dtype == torch.float64 and rewards.shape == sampled.shape
        assert rewards[ends].tolist() == expected and rewards.sum() == row["next", "reward"]
    shaped = RewardShaping(scale=2.0, bias=1.0)(batch)[1]
    places = shaped[keys.TOKEN_REWARD].nonzero().reshape(-1)
    assert shaped[keys.TOKEN_REWARD][places].tolist() == [6, 5] and shaped[
        keys.SHAPED_REWARD
    ].tolist() == [11]


def test_a_dialog_is_valid_if_all_its_turns_are(tokenizer, encode):
    batch = play_turns(tokenizer, encode, ["bad", "good"])
    assert batch["reward_valid"].squeeze(-1).tolist() == [False, True]


def test_dialogs_of_one_turn_have_no_turn_rewards(tokenizer, encode):
    batch = play_turns(tokenizer, encode, ["stop", "stop"])
    assert batch["next", "reward"].squeeze(-1).tolist() == [4, 4]
    assert "turn_rewards" not in batch[0]["next"]


# With the real engine


class AlwaysAgain(TwoTurnTask):
    """Always asks for a second turn."""

    def next_turn(self, problem, responses):
        return "again?" if len(responses) == 1 else None


def make_real(tokenizer, model, *, seed: int) -> RolloutCollector:
    engine = TransformersEngine(model)
    params = SamplingParams(
        max_new_tokens=24, temperature=0.7, stop_token_ids=tuple(range(1, 261, 8))
    )
    env = LLMEnv(AlwaysAgain(), tokenizer, num_envs=8, repeats=4, max_turns=2)
    collector = RolloutCollector(env, GenerationPolicy(engine, params))
    collector.set_seed(seed)
    return collector


def test_log_probs_of_two_turns_are_those_of_one_forward_over_the_dialog(tokenizer, tiny_model):
    batch = make_real(tokenizer, tiny_model, seed=1).rollout()
    turns = []
    for row in batch.unbind(0):
        tokens, sampled = row["tokens", "full"], row["masks", "all_assistant_mask"]
        with torch.no_grad():
            logits = tiny_model.double()(tokens.unsqueeze(0)).logits[0] / 0.7
        reference = logits.log_softmax(-1)[:-1].gather(-1, tokens[1:, None]).squeeze(-1)
        reference = torch.cat([torch.zeros(1, dtype=torch.float64), reference]) * sampled
        torch.testing.assert_close(row["log_probs", "full"].double(), reference, atol=2e-5, rtol=0)
        assert row["masks", "all_attention_mask"].all() and sampled.sum() > 1
        # A turn of sampled tokens begins wherever the mask goes from False to True.
        turns.append(int((sampled[1:] & ~sampled[:-1]).sum()))
        assert row["next", "truncated"].item() != row["next", "terminated"].item()
    assert set(turns) == {1, 2}  # some first turns were cut off by the token limit
    truncated = batch["next", "truncated"].squeeze(-1).tolist()
    assert all(count == 2 or cut for count, cut in zip(turns, truncated, strict=True))


@pytest.mark.slow
def test_interrupted_and_resumed_gives_the_same_tokens(tokenizer, tiny_model):
    first = make_real(tokenizer, tiny_model, seed=2)
    first.rollout()
    state = first.state_dict()
    expected = first.rollout()
    resumed = make_real(tokenizer, tiny_model, seed=3)
    resumed.load_state_dict(state)
    batch = resumed.rollout()
    for key in (
        ("tokens", "full"),
        ("masks", "all_assistant_mask"),
        ("log_probs", "full"),
        ("group_id",),
    ):
        assert lists(batch, *key) == lists(expected, *key)


def test_published_weights_change_the_next_tokens(tokenizer, tiny_model):
    collector = make_real(tokenizer, tiny_model, seed=2)
    collector.update_policy_weights_(
        [(n, torch.zeros_like(p)) for n, p in tiny_model.named_parameters()], 4
    )
    row = collector.rollout()[0]
    assert row["policy_version"].tolist() == [4]
    # All weights 0: every token is equally likely.
    sampled = row["log_probs", "full"][row["masks", "all_assistant_mask"]]
    torch.testing.assert_close(sampled, torch.full_like(sampled, 1 / 261).log())


# TorchRL's own parts


def test_a_replay_buffer_of_torchrl_takes_the_batches(tokenizer):
    collector = make_collector(tokenizer)
    buffer = ReplayBuffer(
        storage=LazyStackStorage(8),
        sampler=SamplerWithoutReplacement(),
        transform=GroupAdvantage(2),
        batch_size=8,
    )
    batches = [collector.rollout(), collector.rollout()]
    for batch in batches:
        buffer.extend(batch)
    assert len(buffer) == 8
    sample = buffer.sample()
    assert sorted(sample["group_id"].squeeze(-1).tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]
    stored = {tuple(row["tokens", "full"].tolist()) for row in sample.unbind(0)}
    assert stored == {tuple(full) for batch in batches for full in lists(batch, "tokens", "full")}
    assert sample["advantage"].tolist() == [[0.0]] * 8
    assert batches[0].get("advantage", None) is None
