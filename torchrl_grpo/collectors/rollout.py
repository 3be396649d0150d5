"""``RolloutCollector``: plays whole groups of dialogs to their end and yields their trajectories."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tensordict import TensorDictBase, lazy_stack
from torch import nn
from torchrl.collectors import BaseCollector
from torchrl.data import ReplayBuffer
from torchrl.envs import EnvBase, TransformedEnv

from torchrl_grpo import keys
from torchrl_grpo.collectors.trajectories import make_trajectories
from torchrl_grpo.envs import LLMEnv
from torchrl_grpo.generation.base import Completion, cut_off
from torchrl_grpo.generation.policy import GenerationPolicy, generation_of
from torchrl_grpo.generation.stops import completed_at, token_bytes
from torchrl_grpo.host.extras import load_extra
from torchrl_grpo.tasks.drawing import Drawn


@dataclass
class RolloutCounts:
    """Counts of a rollout: turns and tokens that the policy sampled, and the seconds spent in the
    policy and in the environment.
    """

    turns: int = 0
    tokens: int = 0
    generate_seconds: float = 0.0
    env_seconds: float = 0.0


class RolloutCollector(BaseCollector):
    """Plays an ``LLMEnv`` with a ``GenerationPolicy``.

    ``pre_collect_hook`` is called before each rollout, ``post_collect_hook`` with each batch after
    ``postproc``, as by TorchRL's collectors.

    Each batch is a flat lazy stack of finished trajectories: whole groups, with adjacent members. A
    trajectory is one row, or one row per sample if the task begins several samples in it. The last
    of these rows has the reward and is done (see ``"trajectory"`` in ``torchrl_grpo.keys``).

    The turns of a dialog are one sequence:

    - ``("tokens", "prompt")`` is the first prompt; ``("tokens", "response")`` is the rest.
    - ``("masks", "all_assistant_mask")`` is True on the tokens that the policy sampled; log-probs
      are 0 elsewhere.
    - ``"policy_version"`` is the oldest version among the turns; ``("next", "policy_version")`` is
      the last turn's.
    - ``("next", ...)`` comes from the last turn, except for the reward, which is the sum over the
      turns and is valid if all of theirs are. ``("next", "turn_rewards")`` has the reward of each
      turn if any dialog of the rollout had several.

    Finished rows cost nothing in later turns.

    Attributes:
        last: counts of the latest rollout.

    Args:
        env: an ``LLMEnv``, possibly in a ``TransformedEnv``, or a function that makes it.
        policy: samples the responses: a ``GenerationPolicy``, or a module that contains one, such as
            a ``TensorDictSequential``. Its engine receives the weights.

    Keyword Args:
        policy_factory: function that makes the policy, instead of ``policy``.
        dialog_turns_per_batch: minimum number of trajectories in a batch, which consists of whole
            rollouts. A dialog counts once, however many turns it has. None is one rollout
            (``num_envs`` trajectories). The config's ``train.dialog_turns_per_batch`` sets it.
        total_dialog_turns: number of trajectories after which iteration ends; -1 never ends. The
            config's ``train.total_dialog_turns`` sets it. (TorchRL's collector also counts the
            turns within a dialog.)
        replay_buffer: if set, iteration writes each batch to it and yields None.
        postproc: function applied to each batch before it is yielded or written, such as
            ``GroupAdvantage``.
        yield_only_last_steps: ignored, because a row has all turns of its dialog.
        **others: further arguments of TorchRL's ``LLMCollector``, accepted only with values that
            match how this collector works.

    Raises:
        ValueError: a number is out of range, or the environment or policy has the wrong type.
        TypeError: an argument of ``LLMCollector`` asks for something that this collector does not
            support, or not exactly one of ``policy`` and ``policy_factory`` is set.

    Examples:
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer
        >>> from torchrl_grpo.envs import LLMEnv
        >>> from torchrl_grpo.generation.base import SamplingParams
        >>> from torchrl_grpo.generation.transformers import TransformersEngine
        >>> from torchrl_grpo.starter import starter_path
        >>> from torchrl_grpo.tasks.arithmetic import ArithmeticTask
        >>> model = AutoModelForCausalLM.from_pretrained(starter_path())
        >>> policy = GenerationPolicy(TransformersEngine(model), SamplingParams(max_new_tokens=4))
        >>> env = LLMEnv(ArithmeticTask(), AutoTokenizer.from_pretrained(starter_path()), num_envs=8, repeats=4)
        >>> collector = RolloutCollector(env, policy, total_dialog_turns=16)
        >>> for version, batch in enumerate(collector, start=1):
        ...     # ... train on the batch ...
        ...     collector.update_policy_weights_(model.named_parameters(), version)
        ...     print(batch.shape, batch["policy_version"].unique().item())
        torch.Size([8]) 0
        torch.Size([8]) 1
        >>> collector.shutdown()
    """

    init_random_frames = 0  # TorchRL's trainers collect this many before they begin to train
    yield_completed_trajectories = True

    def __init__(
        self,
        env: EnvBase | Callable[[], EnvBase],
        policy: GenerationPolicy | None = None,
        *,
        policy_factory: Callable[[], GenerationPolicy] | None = None,
        dialog_turns_per_batch: int | None = None,
        total_dialog_turns: int = -1,
        replay_buffer: ReplayBuffer | None = None,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        yield_only_last_steps: bool | None = None,
        **others: Any,
    ) -> None:
        load_extra("refuse_arguments")(type(self), others)
        super().__init__()
        if (policy is None) == (policy_factory is None):
            raise TypeError(
                "RolloutCollector needs one of policy and policy_factory: use policy=policy."
            )
        env = env if isinstance(env, EnvBase) else env()
        self._owns_policy = policy_factory is not None
        policy = policy_factory() if policy_factory else policy
        if not isinstance(_base_env(env), LLMEnv):
            raise ValueError(
                f"env={type(_base_env(env)).__name__} must be an LLMEnv: use TorchRL's "
                "LLMCollector for others, and num_envs for more rows."
            )
        if dialog_turns_per_batch is not None and dialog_turns_per_batch < 1:
            raise ValueError(
                f"dialog_turns_per_batch={dialog_turns_per_batch} must be at least 1: use None for "
                "one rollout."
            )
        if total_dialog_turns < 1 and total_dialog_turns != -1:
            raise ValueError(
                f"total_dialog_turns={total_dialog_turns} must be at least 1, or -1 to run "
                "indefinitely."
            )
        self.env = env
        self.policy: Any = policy
        self.generation = generation_of(policy)
        # These three names are TorchRL's: __len__ and stats() of the base class read them.
        self.requested_frames_per_batch = dialog_turns_per_batch or env.batch_size[0]
        self.total_frames = total_dialog_turns
        self.replay_buffer = replay_buffer
        self.postproc = postproc
        self.yield_only_last_steps = bool(yield_only_last_steps)
        self._frames = 0
        self.last = RolloutCounts()
        self._closed = False
        self._next_in_line, self._in_use = threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def base_env(self) -> LLMEnv:
        """The environment without its transforms."""
        return _base_env(self.env)

    @property
    def transforms(self) -> nn.ModuleList:
        """The transforms of the environment, of the outermost one first."""
        transforms, env = nn.ModuleList(), self.env
        while isinstance(env, TransformedEnv):
            transforms.append(env.transform)
            env = env.base_env
        return transforms

    @property
    def dialog_turns_per_batch(self) -> int:
        """Minimum number of trajectories in a batch."""
        return self.requested_frames_per_batch

    @property
    def total_dialog_turns(self) -> int:
        """Number of trajectories after which iteration ends; -1 never ends."""
        return self.total_frames

    @property
    def dialog_turns(self) -> int:
        """Number of trajectories in the batches so far."""
        return self._frames

    @property
    def policy_version(self) -> int:
        """Version of the weights that the engine has now."""
        return self.generation.engine.policy_version

    def get_policy_version(self) -> int:
        """Return ``policy_version``."""
        return self.policy_version

    def set_postproc(self, postproc: Callable[[TensorDictBase], TensorDictBase]) -> None:
        """Set the function that iteration applies to each batch.

        Raises:
            RuntimeError: ``postproc`` is already set.
        """
        if self.postproc is not None:
            raise RuntimeError("postproc is already set: use Compose for several transforms.")
        self.postproc = postproc

    def getattr_rb(self, attr: str) -> Any:
        """Return an attribute of the replay buffer, or raise if background sampling failed."""
        if self._failure is not None:
            raise RuntimeError("sampling in the background failed.") from self._failure
        return getattr(self.replay_buffer, attr)

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Do nothing: each rollout begins with new dialogs."""

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Context of a rollout or a weight update; callers enter in the order of their requests."""
        with self._next_in_line:
            self._in_use.acquire()
        try:
            yield
        finally:
            self._in_use.release()

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yield batches (None with a replay buffer) until ``total_dialog_turns`` trajectories have
        been collected.
        """
        while self.total_frames < 0 or self._frames < self.total_frames:
            batch = self.rollout()
            if self.postproc is not None:
                batch = self.postproc(batch)
            if self.post_collect_hook is not None:
                self.post_collect_hook(batch)
            if self.replay_buffer is None:
                yield batch
            else:
                self.replay_buffer.extend(batch)
                yield None

    def rollout(self, drawn: Sequence[Drawn] = ()) -> TensorDictBase:
        """Play one batch.

        Args:
            drawn: the groups to play, ``num_envs / repeats`` of them; without groups the
                environment draws them.

        Returns:
            flat lazy stack of trajectories with the keys of ``torchrl_grpo.keys``. ``"advantage"``
            and ``("next", "ref_log_probs", "full")`` are present only if a transform of the
            environment writes them.

        Raises:
            RuntimeError: the collector is shut down, or a later turn did not keep the tokens of an
                earlier one.
            ValueError: a prompt leaves no room for one token in the model's context.
        """
        if self.pre_collect_hook is not None:
            self.pre_collect_hook()
        with self._exclusive():
            if self._closed:
                raise RuntimeError(
                    "the collector has been shut down and cannot play: build a new one."
                )
            self.last = RolloutCounts()
            sequences: list[TensorDictBase] = []
            played = 0
            while not played or (not drawn and played < self.requested_frames_per_batch):
                sequences += self._play(drawn)
                played += self.base_env.batch_size[0]
            self._frames += played
            return lazy_stack(sequences)

    def _play(self, drawn: Sequence[Drawn]) -> Iterable[TensorDictBase]:
        """Reset the environment and play until all rows are done. Return one TensorDict per sample
        of each row.
        """
        start = time.perf_counter()
        data = self.env.reset(drawn=drawn)
        self.last.env_seconds += time.perf_counter() - start
        steps = []
        stepping = self.base_env.stepping
        if not stepping.all():
            data.set(keys.STEPPING, stepping)
        while True:
            start = time.perf_counter()
            data = self._sample(data)
            generated = time.perf_counter()
            if not stepping.any():
                del data[keys.STEPPING]  # with it, TorchRL would skip a step that no row takes
            data = self.env.step(data)
            self.last.env_seconds += time.perf_counter() - generated
            self.last.generate_seconds += generated - start
            steps.append(data)
            sampled = [len(dialog.tokens) for dialog in self.base_env.latest.values()]
            self.last.tokens += sum(sampled)
            self.last.turns += len(sampled)
            stepping = ~data.get(keys.DONE).reshape(-1)
            if not stepping.any():
                env = self.base_env
                return make_trajectories(steps, env.states, bool(env.task.group_rewards))
            data = self.env.step_mdp(data)
            data.set(keys.STEPPING, stepping)

    def _sample(self, data: TensorDictBase) -> TensorDictBase:
        """Sample the policy's next turn. Reward workers get each response when it finishes."""
        env = self.base_env
        on_response = self.generation.on_response
        generation = copy(self.generation)  # other collectors may be using it
        if env.task.is_stateful:
            generation.cut = self._cut

        def receive(row: int, done: Completion) -> None:
            env.receive(row, done.tokens, done.finish_reason == "length", done.log_probs)
            if on_response is not None:
                on_response(row, done)

        if env.reward_pool is not None:
            generation.on_response = receive
        return _replaced(self.policy, self.generation, generation)(data)

    def _cut(self, row: int, done: Completion) -> Completion:
        """Cut a row's response to the limits of the turn, before it is recorded."""
        limits = self.base_env.states[row].limits
        end = None
        if limits.stop:
            end = completed_at(limits.stop, done.tokens.tolist(), self._token_bytes)
        return cut_off(done, limits.max_tokens, end)

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        return token_bytes(self.base_env.tokenizer)

    def take_counts(self) -> dict[str, float]:
        """Return ``LLMEnv.take_counts``."""
        return self.base_env.take_counts()

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        version: int | None = None,
        *,
        weights: Any = None,
        policy: Any = None,
        weights_dict: Mapping[str, Any] | None = None,
        model_id: str | None = None,
        worker_ids: Any = None,
    ) -> None:
        """Give the engine new weights between two rollouts: all tokens of the next rollout are
        sampled with them.

        Args:
            policy_or_weights: weights in any form that ``GenerationPolicy.update_weights`` takes;
                without any, the weights of the model of ``GenerationPolicy.register_model``.
            version: the engine's new ``policy_version``; by default the next one.
            weights: the same as ``policy_or_weights``.
            policy: the same as ``policy_or_weights``.
            weights_dict: the same, as ``{"policy": weights}``.
            model_id: ``"policy"``.
            worker_ids: ignored, because there is only one worker.

        Raises:
            TypeError: there are no weights, or more than one argument has them.
            KeyError: the weights are for a model other than ``"policy"``.
            RuntimeError: a name is unknown or missing, or a shape differs; the engine then keeps
                its version.
        """
        sources = {model_id or "policy": None, **(weights_dict or {})}
        if sources.keys() != {"policy"}:
            raise KeyError(f"model_id={list(sources)} must be 'policy', the only model here.")
        forms = [policy_or_weights, weights, policy, sources["policy"]]
        sources_set = [form for form in forms if form is not None]
        if len(sources_set) > 1:
            raise TypeError("update_policy_weights_() takes the weights once: use one argument.")
        before = self.policy_version
        with self._exclusive():
            self.generation.update_weights(sources_set[0] if sources_set else None, version)
        if self.policy_version != before:
            self._advance_versions()

    def increment_version(self) -> None:
        """Raise the engine's ``policy_version`` by 1, as ``update_policy_weights_`` does without a
        version.
        """
        engine = self.generation.engine
        engine.load_state_dict(engine.state_dict() | {"policy_version": engine.policy_version + 1})
        self._advance_versions()

    def _advance_versions(self) -> None:
        """Tell the transforms that count versions themselves, such as TorchRL's
        ``PolicyVersion``.
        """
        for transform in self.transforms.modules():
            getattr(transform, "increment_version", bool)()

    def start(self) -> None:
        """Iterate in a thread that writes batches to the replay buffer. Weights are updated between
        two rollouts.

        Raises:
            RuntimeError: there is no replay buffer.
        """
        if self.replay_buffer is None:
            raise RuntimeError("start() needs a replay_buffer to write to: pass replay_buffer=.")
        if not self.is_running():
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            for _ in self.iterator():
                if self._closed:
                    return
        except BaseException as error:
            self._failure = None if self._closed else error

    def is_running(self) -> bool:
        """Return whether the thread of ``start`` is sampling."""
        return self._thread is not None and self._thread.is_alive()

    def shutdown(self, timeout: float | None = None, *args: Any, **kwargs: Any) -> None:
        """Close the environment after the rollout in progress, and the engine if ``policy_factory``
        made its policy: the caller closes any other engine. May be called again.

        Args:
            timeout: seconds to wait for the rollout that ``start`` has begun.
        """
        if not self._closed:
            self._closed = True
            if self._thread is not None:
                self._thread.join(timeout)
            self.env.close()
            if self._owns_policy:
                self.generation.engine.close()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Restart the order of the problems from ``seed``, and seed the engine. Return a new seed
        for another environment, as TorchRL's environments do.
        """
        self.generation.engine.seed(seed)
        return self.env.set_seed(seed, static_seed=static_seed)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next rollout depends on, apart from the weights."""
        state = {
            "env": self.base_env.state_dict(),
            "engine": self.generation.engine.state_dict(),
            "dialog_turns": self._frames,
        }
        if len(self.transforms):
            state["transforms"] = self.transforms.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore ``state_dict``.

        Raises:
            ValueError: the state is from an environment with another number of problems.
        """
        self.base_env.load_state_dict(state_dict["env"])
        self.transforms.load_state_dict(state_dict.get("transforms", {}))
        self.generation.engine.load_state_dict(state_dict["engine"])
        self._frames = state_dict["dialog_turns"]


def _replaced(module: Any, old: nn.Module, new: nn.Module) -> Any:
    """Return a shallow copy of a module in which ``new`` replaces the submodule ``old``."""
    if module is old:
        return new
    if old not in module.modules():
        return module
    module = copy(module)
    module._modules = {
        name: child and _replaced(child, old, new) for name, child in module._modules.items()
    }
    return module


def _base_env(env: EnvBase) -> EnvBase:
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env
