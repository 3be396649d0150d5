"""``GenerationPolicy``: an engine as a TensorDict module, which turns rows into requests and
completions into rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl import torchrl_logger

from torchrl_grpo.errors import NonFiniteError
from torchrl_grpo.generation.base import Completion, Engine, SamplingParams
from torchrl_grpo.host.extras import load_extra
from torchrl_grpo.images import Prompt, Spans, images_of, tokens_of
from torchrl_grpo.keys import (
    ASSISTANT_MASK,
    ATTENTION_MASK,
    FULL,
    GROUP_ID,
    IMAGES,
    KEPT,
    KEPT_LOG_PROBS,
    LENGTH_STOPPED,
    LOG_PROBS,
    POLICY_VERSION,
    POLICY_VERSIONS,
    PROMPT,
    RESPONSE,
    STEPPING,
)
from torchrl_grpo.weights import WeightHandle, weights_of


class GenerationPolicy(TensorDictModuleBase):
    """Samples a response to each row's prompt.

    Rows that share group and prompt become one request, so that the engine computes their prompt
    once. If the tensordict has a ``"_step"`` entry (TorchRL's mark for rows that take part in
    the next step), the other rows get an empty response and cost nothing. An engine that can change
    its weights during generation reports the version that sampled each token; the version of any
    other engine is read before generation starts.

    It can be copied and pickled if its engine can, or if ``engine`` is a function.

    Attributes:
        on_response: called with the row and the completion of each finished response, while others
            are still being sampled.
        cut: maps a row and its completion to a beginning of the completion, before ``on_response``
            and the output see it. None changes nothing.

    Args:
        engine: samples the tokens; or a function that makes the engine when it is first needed.
        params: parameters of sampling.
        rescore: replaces the engine's log-probs of a finished response. It maps tokens [1, T]
            int64, a mask [1, T] bool of the sampled ones, the length [1] int64, the kept tokens
            [1, S, K] int32 (or None) and the images (or None) to log-probs [1, T] float32
            (``KLScoring.log_probs``). It may compute with the engine's model, whose weights do not
            change meanwhile.

    Raises:
        ValueError: ``engine`` is neither an engine nor a function.

    Examples:
        >>> from transformers import AutoModelForCausalLM
        >>> from torchrl_grpo.generation.transformers import TransformersEngine
        >>> from torchrl_grpo.starter import starter_path
        >>> engine = TransformersEngine(AutoModelForCausalLM.from_pretrained(starter_path()))
        >>> policy = GenerationPolicy(engine, SamplingParams(max_new_tokens=4))
        >>> out = policy(TensorDict({"tokens": {"prompt": torch.tensor([5, 6, 7])}}))
        >>> out["tokens", "response"].shape, out["length_stopped"]
        (torch.Size([4]), tensor([True]))
    """

    def __init__(
        self,
        engine: Engine | Callable[[], Engine],
        params: SamplingParams,
        *,
        rescore: Callable[..., Tensor] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(engine, Engine) and (
            isinstance(engine, nn.Module) or not callable(engine)
        ):
            raise ValueError(
                f"engine={type(engine).__name__} must be an engine, or a function that makes one: use "
                "TransformersEngine(model)."
            )
        self.rescore = rescore
        self.on_response: Callable[[int, Completion], None] | None = None
        self.cut: Callable[[int, Completion], Completion] | None = None
        self._engine = engine if isinstance(engine, Engine) else None
        self._make_engine = None if isinstance(engine, Engine) else engine
        self._collector: ref[Any] | None = None
        self._source: ref[Any] | None = None
        self.params = params
        self.in_keys = [PROMPT, GROUP_ID]
        self.out_keys = [
            RESPONSE,
            FULL,
            ATTENTION_MASK,
            ASSISTANT_MASK,
            LOG_PROBS,
            POLICY_VERSION,
            POLICY_VERSIONS,
            LENGTH_STOPPED,
        ]
        if params.return_kept:
            self.out_keys.append(KEPT)
        if params.return_kept_log_probs:
            self.out_keys.append(KEPT_LOG_PROBS)

    @property
    def engine(self) -> Engine:
        """The engine that samples the tokens."""
        if self._engine is None:
            assert self._make_engine is not None
            self._engine = self._make_engine()
        return self._engine

    @property
    def model(self) -> Any:
        """The model that the engine samples with, if it has one in this process."""
        return self.engine.model  # type: ignore[attr-defined]

    def __copy__(self) -> GenerationPolicy:
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__, _engine=self.engine)
        return new

    def __getstate__(self) -> dict[str, Any]:
        engine = {} if self._make_engine is None else {"_engine": None}
        return {**self.__dict__, **engine, "_collector": None, "_source": None}

    def register_collector(self, collector: Any) -> None:
        """Have a collector's ``update_policy_weights_`` reach the engine. TorchRL's collectors call
        this themselves.
        """
        self._collector = ref(collector)
        self._bring_weights()

    def _bring_weights(self) -> None:
        # A collector forgets schemes that were set before it was complete, so this is repeated.
        collector = self._collector and self._collector()
        if collector is not None:
            load_extra("set_weight_sync")(collector)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the response, its log-probs, masks and policy versions, and ``"length_stopped"``.

        Args:
            tensordict: any batch size, with ``("tokens", "prompt")`` ([T] int64 per row, without
                padding); rows may have different lengths. Without ``"group_id"``, rows are grouped
                only by prompt.

        Returns:
            the same tensordict.

        Raises:
            ValueError: there are no tokens, or a prompt leaves no room for one token in the model's
                context.
            NonFiniteError: the engine's weights give no distribution.
        """
        self._bring_weights()
        shape = tensordict.batch_size
        size = shape.numel()
        if not size:
            raise ValueError(
                f"batch_size={list(shape)} must have at least one row: leave out empty batches."
            )
        if not isinstance(tensordict.get(PROMPT[0], None), TensorDictBase):
            raise ValueError(
                'GenerationPolicy reads ("tokens", "prompt") of a TensorDict, which the environment '
                "lacks: use LLMEnv, or TransformersWrapper or vLLMWrapper for ChatEnv, which writes "
                "TorchRL's own Tokens."
            )
        token_rows = list(tensordict.get(PROMPT[0]).reshape(-1).unbind(0))
        tokens = [row.get(PROMPT[-1]).cpu() for row in token_rows]
        requests = self._with_images(tensordict, tokens)
        groups = tensordict.get(GROUP_ID, torch.zeros(size)).reshape(-1).tolist()
        active = tensordict.get(STEPPING, torch.ones(size)).reshape(-1).tolist()
        with self.engine.exclusive:
            version = int(self.engine.policy_version)
            completions = self._generate(requests, groups, active)
            completions = list(map(self._rescore, requests, completions))
        _check_finite(completions, version)

        rows, oldest = [], []
        for token_row, prompt, completion in zip(token_rows, tokens, completions, strict=True):
            response, versions = completion.tokens, completion.versions
            if versions is None:
                versions = torch.full_like(response, version)
            full = torch.cat([prompt, response])
            sampled = torch.arange(len(full)) >= len(prompt)
            values: dict[tuple[str, str], Any] = {
                RESPONSE: response,
                FULL: full,
                ATTENTION_MASK: torch.ones_like(sampled),
                ASSISTANT_MASK: sampled,
                LOG_PROBS: torch.cat([torch.zeros(len(prompt)), completion.log_probs]),
                POLICY_VERSIONS: torch.cat([torch.full_like(prompt, -1), versions]),
            }
            if self.params.return_kept:
                values[KEPT] = completion.kept
            if self.params.return_kept_log_probs:
                values[KEPT_LOG_PROBS] = completion.kept_log_probs
            row: dict[str, dict[str, Any]] = {PROMPT[0]: {**token_row}}
            for (name, entry), value in values.items():
                row.setdefault(name, {})[entry] = value
            rows.append(row)
            oldest.append(min(versions.tolist(), default=version))
        length_stopped = [completion.finish_reason == "length" for completion in completions]
        for name in rows[0]:
            tensordict.set(name, _stack([TensorDict(row[name], []) for row in rows], shape))
        tensordict.set(POLICY_VERSION, torch.tensor(oldest, dtype=torch.int64).reshape(*shape, 1))
        stopped = torch.tensor(length_stopped, dtype=torch.bool)
        tensordict.set(LENGTH_STOPPED, stopped.reshape(*shape, 1))
        return tensordict

    def register_model(self, model: nn.Module) -> None:
        """Set the model whose weights an update without weights brings to the engine, such as the
        update that TorchRL's ``Trainer`` makes when it resumes. The model is not kept alive.
        """
        self._source = ref(model)

    def update_weights(self, weights: Any = None, version: int | None = None) -> None:
        """Give the engine new weights.

        Args:
            weights: a ``WeightHandle``; a model or a module that contains one (``TokenScorer``, a
                wrapper, a loss), ``TensorDict.from_module`` of either, a state dict, or pairs (name
                in the Hugging Face checkpoint, tensor), every parameter once. None takes the
                weights of the model of ``register_model``; without one, an engine of version 0 keeps the weights
                that it was made with.
            version: the engine's new ``policy_version``; by default the current one plus 1.

        Raises:
            TypeError: there are no weights.
            RuntimeError: a name is unknown or missing, or a shape differs; the engine then keeps
                its version.
        """
        if weights is None:
            weights = self._source and self._source()
            if weights is None and not self.engine.policy_version:
                torchrl_logger.warning(
                    "update_policy_weights_() without weights changes nothing: if the trainer has a "
                    "model of its own, use register_model(model) of the GenerationPolicy."
                )
                return
        version = self.engine.policy_version + 1 if version is None else version
        if isinstance(weights, WeightHandle):
            self.engine.load(weights, version)
        else:
            self.engine.update_weights(weights_of(weights), version)

    @staticmethod
    def _with_images(
        tensordict: TensorDictBase, tokens: Sequence[Tensor]
    ) -> Sequence[Tensor | Prompt]:
        """Return the prompts of the rows with their images."""
        if tensordict.get(IMAGES, None) is None:
            return tokens
        images = (row.get(IMAGES).data for row in tensordict.reshape(-1).unbind(0))
        pairs = zip(tokens, images, strict=True)
        return [Prompt(ids, spans) if spans else ids for ids, spans in pairs]

    def _generate(
        self, prompts: Sequence[Tensor | Prompt], groups: Sequence[int], active: Sequence[bool]
    ) -> list[Completion]:
        """Return one completion per row, an empty one for inactive rows."""
        requests: dict[tuple[int, bytes, Spans], list[int]] = defaultdict(list)
        for row, prompt in enumerate(prompts):
            if active[row]:
                ids = tokens_of(prompt).numpy().tobytes()
                requests[groups[row], ids, images_of(prompt)].append(row)
        # An engine call has one n for all its prompts.
        calls: dict[int, list[list[int]]] = defaultdict(list)
        for rows in requests.values():
            calls[len(rows)].append(rows)
        kept = torch.empty(0, self.params.top_k, dtype=torch.int32)
        tokens = torch.empty(0, dtype=torch.int64)
        nothing = Completion(tokens, tokens.float(), "stop", kept=kept, kept_log_probs=kept.float())
        completions = [nothing] * len(prompts)
        for n, members in calls.items():
            first = [prompts[rows[0]] for rows in members]
            callback = {}
            if self.on_response is not None:
                callback["on_finished"] = partial(self._tell, members)
            answers = self.engine.generate(first, n, self.params, **callback)
            for rows, answer in zip(members, answers, strict=True):
                for row, completion in zip(rows, answer, strict=True):
                    completions[row] = completion if self.cut is None else self.cut(row, completion)
        return completions

    def _rescore(self, prompt: Tensor | Prompt, completion: Completion) -> Completion:
        """Return the completion with the log-probs of ``rescore``, if there is one."""
        if self.rescore is None or not len(completion.tokens):
            return completion
        full = torch.cat([tokens_of(prompt), completion.tokens])[None]
        length = torch.tensor([full.shape[1]])
        sampled = torch.arange(full.shape[1])[None] >= len(prompt)
        kept = None if completion.kept is None else completion.kept[None]
        images = [images_of(prompt)] if images_of(prompt) else None
        log_probs = self.rescore(full, sampled, length, kept, images)
        return replace(completion, log_probs=log_probs[0, len(prompt) :])

    def _tell(
        self, members: Sequence[Sequence[int]], request: int, number: int, completion: Completion
    ) -> None:
        """Call ``on_response`` with the row of a request's response."""
        assert self.on_response is not None
        row = members[request][number]
        self.on_response(row, completion if self.cut is None else self.cut(row, completion))


def generation_of(policy: Any) -> GenerationPolicy:
    """Return the ``GenerationPolicy`` that a policy is or contains.

    Raises:
        ValueError: there is none.
    """
    for module in policy.modules() if isinstance(policy, nn.Module) else ():
        if isinstance(module, GenerationPolicy):
            return module
    raise ValueError(
        f"policy={type(policy).__name__} must be or contain a GenerationPolicy: use TorchRL's "
        "LLMCollector for others, and GenerationPolicy(TransformersEngine(model), "
        "SamplingParams(...)) for a model."
    )


def _check_finite(completions: Sequence[Completion], version: int) -> None:
    log_probs = [completion.log_probs for completion in completions]
    if not torch.cat(log_probs).isfinite().all():
        when = f"after step {version}, which made its weights useless: use a lower optimizer.lr"
        when = when if version else "before any step: use another model"
        raise NonFiniteError(f"the policy's log-probs are not finite {when}.")


def _stack(rows: Sequence[TensorDictBase], shape: Sequence[int]) -> TensorDictBase:
    """Return rows as a lazy stack of batch size ``shape``."""
    if not shape:
        return rows[0]
    if len(shape) == 1:
        return lazy_stack(list(rows))
    inner = len(rows) // shape[0]
    return lazy_stack(
        [_stack(rows[i * inner : (i + 1) * inner], shape[1:]) for i in range(shape[0])]
    )
