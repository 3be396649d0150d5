"""``ServedTeacher``: scores the sampled tokens with a teacher on a running server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import Transform

from torchrl_grpo import keys
from torchrl_grpo.integrations.server_answers import LARGEST_VOCABULARY
from torchrl_grpo.integrations.servers import AT_A_TIME, COMES_BACK_S, connect, require_httpx2
from torchrl_grpo.models.entries import has
from torchrl_grpo.transforms.ragged import flatten, set_rows


class ServedTeacher(Transform):
    """Writes the same entries as ``KLScoring`` or, with ``top_k``, ``TeacherStates``, from a
    server's log-probs of the tokens.

    Servers return log-probs of prompt tokens at temperature 1. They do not return the hidden states
    before the LM head, so a divergence over the whole vocabulary needs ``top_k``.

    Args:
        address: address of the server, such as ``http://127.0.0.1:8000``, which receives token ids
            and returns log-probs.
        top_k: number of the most likely tokens; None writes only the log-probs of the sampled
            tokens.
        vocabulary: number of the policy's token ids.

    Raises:
        EngineDeadError: the server does not answer.
        ValueError: the server cannot be a teacher.
    """

    def __init__(
        self,
        address: str,
        *,
        top_k: int | None = None,
        vocabulary: int = LARGEST_VOCABULARY,
    ) -> None:
        self.out_key = keys.TEACHER_LOG_PROBS if top_k is None else keys.TEACHER_STATES
        super().__init__(in_keys=[keys.FULL, keys.ASSISTANT_MASK], out_keys=[self.out_key])
        self.top_k = top_k
        self._server = connect(address, COMES_BACK_S, "teacher")
        self._server.vocabulary = vocabulary
        self._threads = ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="teacher")

    @staticmethod
    def check(address: str, *, vocabulary: int, longest: int, top_k: int | None = None) -> None:
        """Refuse a server that cannot be the teacher.

        Args:
            address: address of the server.
            vocabulary: size of the teacher's vocabulary.
            longest: length of the longest sequence, in tokens.
            top_k: as above.

        Raises:
            ValueError: the server does not answer, has another vocabulary or too short a context,
                or refuses to score.
        """
        require_httpx2("teacher.address")
        server = connect(address, 0, "teacher")
        try:
            server.check_context(longest)
            server.check_scores(top_k or 0)
            server.check_vocabulary(vocabulary)
        finally:
            server.close()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Score a batch [B] (or one sequence) in place. A batch that already has the entry is left
        unchanged.

        Raises:
            EngineDeadError: the server is down, too slow, or scored other tokens.
        """
        if has(tensordict, self.out_key):
            return tensordict
        rows = flatten(tensordict).unbind(0)
        return set_rows(tensordict, self.out_key, list(self._threads.map(self._score, rows)))

    def _score(self, row: TensorDictBase) -> Tensor:
        """Return log-probs [T] float32, 0 outside the mask; or states [S, 2 K] float32 of the S
        sampled tokens.
        """
        tokens = row.get(keys.FULL).tolist()
        mask = row.get(keys.ASSISTANT_MASK).tolist()
        start = max(1, mask.index(True)) if True in mask else len(tokens)
        scores = self._server.score(tokens, start, self.top_k or 0) if start < len(tokens) else []
        scored = zip(tokens[start:], mask[start:], scores, strict=True)
        if self.top_k is None:
            log_probs = [likely[token] if sampled else 0.0 for token, sampled, likely in scored]
            return torch.tensor([0.0] * start + log_probs, device="cpu")
        states = [_states(likely, self.top_k) for _, sampled, likely in scored if sampled]
        return torch.tensor(states, device="cpu").view(-1, 2 * self.top_k)


def _states(log_probs: dict[int, float], top_k: int) -> list[float]:
    """Return the largest log-probs, followed by their token ids."""
    tokens = sorted(log_probs, key=log_probs.__getitem__, reverse=True)[:top_k]
    return [*(log_probs[token] for token in tokens), *map(float, tokens)]
