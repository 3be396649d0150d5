"""The TensorDict keys of the package.

They are TorchRL's own LLM keys where TorchRL has one, so data is exchanged without renaming. Shapes
are those of one sequence with T tokens; a batch is a lazy stack of such sequences (ragged) unless a
function says that it takes padded ``[B, T]`` tensors. docs/reference/batch.md has all in one table.
"""

from __future__ import annotations

PROMPT = ("tokens", "prompt")
"""[Tp] int64. The first prompt. Written by the environment; read by the engine."""
IMAGES = "images"
"""non-tensor tuple of ``ImageSpan``. The images among the tokens; only with a vision-language model
and problems with images. Written by the environment; read by the engine, scorers.
"""
RESPONSE = ("tokens", "response")
"""[Tr] int64. Everything after the first prompt. Written by the collector; read by metrics."""
FULL = ("tokens", "full")
"""[T] int64. Prompt and response. Written by the collector; read by scorers, the loss."""
ATTENTION_MASK = ("masks", "all_attention_mask")
"""[T] bool. True on real tokens, False on padding. Written by the collector; read by the trainer.
"""
ASSISTANT_MASK = ("masks", "all_assistant_mask")
"""[T] bool. True on the tokens that the policy sampled. Written by the collector; read by
transforms, scorers, the loss.
"""
LOG_PROBS = ("log_probs", "full")
"""[T] float32. Log-probs of the sampling policy, 0 on tokens that it did not sample. Written by the
policy; read by the loss, ``RewardShaping``.
"""
KEPT = ("kept_tokens", "sampled")
"""[S, K] int32. For each of the S sampled tokens, the tokens that it was drawn from, followed by -1
where they are fewer; only with ``inference_model.top_k``. Written by the policy; read by
``TokenScorer``, ``KLScoring``, metrics.
"""
KEPT_LOG_PROBS = ("kept_log_probs", "sampled")
"""[S, K] float32. Log-probs of the sampling policy for the tokens of ``KEPT``, -inf where that has
-1; only with ``policy.score_centering``. Written by the policy; read by ``TokenScorer``.
"""
REF_LOG_PROBS = ("next", "ref_log_probs", "full")
"""[T] float32. Log-probs of the reference model, 0 on tokens that were not sampled. Written by
``KLScoring``; read by the loss, ``RewardShaping``.
"""
TEACHER_LOG_PROBS = ("next", "teacher_log_probs", "full")
"""[T] float32. Log-probs of the teacher, 0 on tokens that were not sampled. Written by
``KLScoring``; read by the loss, ``TeacherAdvantage``.
"""
TEACHER_STATES = ("next", "teacher_states")
"""[S, E] or [S, 2 K + 1] float32. For each of the S sampled tokens, the input of the teacher's LM
head, or its K largest log-probs, their ids and, unless from a server, the log-prob of all others.
Written by ``TeacherStates``; read by ``TokenScorer``.
"""
TEACHER_PROMPT = ("teacher", "prompt")
"""[Tq] int64. The prompt that the teacher reads instead of the policy's; empty if it scores
nothing. Written by ``TeacherPrompts``; read by ``TeacherScoring``.
"""
TEACHER_IMAGES = ("teacher", "images")
"""non-tensor tuple of ``ImageSpan``. The images among that prompt's tokens; only with a
vision-language model and problems with images. Written by ``TeacherPrompts``; read by
``TeacherScoring``.
"""
TEACHER_VALID = "teacher_valid"
"""[1] bool. False if no teacher scored the sequence. Written by ``TeacherScoring``; read by
``TeacherAdvantage``, the loss, metrics.
"""
REWARD = ("next", "reward")
"""[1] float32. Reward of the trajectory, the sum over its turns; 0 if it is not valid. Written by
the environment; read by ``GroupAdvantage``, ``RewardShaping``, metrics.
"""
TURN_REWARDS = ("next", "turn_rewards")
"""[T] float64. Reward of each turn, at the last token that the turn sampled; only if a dialog of
the rollout had several turns. In a trajectory of several samples, each may have all that followed
its last turn. Written by the collector; read by ``GroupAdvantage``,
``RewardShaping``, metrics.
"""
SHAPED_REWARD = ("next", "shaped_reward")
"""[1] float32. Reward after KL penalty, scaling and clipping. Written by ``RewardShaping``; read by
``GroupAdvantage``.
"""
TOKEN_REWARD = ("next", "token_reward")
"""[T] float32. The shaped reward of each token, 0 on tokens that were not sampled. Written by
``RewardShaping``; read by ``GroupAdvantage``.
"""
REWARD_PARTS = ("next", "reward_parts")
"""non-tensor dict. Parts of the reward by name; None for a part that does not apply. Written by the
environment; read by ``GroupAdvantage``, metrics.
"""
DONE = ("next", "done")
"""[1] bool. Terminated or truncated. Written by the environment; read by the collector,
``GroupAdvantage``.
"""
TERMINATED = ("next", "terminated")
"""[1] bool. The policy ended its last turn itself. Written by the environment; read by TorchRL."""
TRUNCATED = ("next", "truncated")
"""[1] bool. A limit on tokens or turns cut the dialog off. Written by the environment; read by the
loss, metrics.
"""
CORRECT = ("next", "correct")
"""[1] bool. Whether the task counts the dialog as correct, for accuracy and pass@k. Written by the
environment; read by metrics.
"""
REWARD_VALID = "reward_valid"
"""[1] bool. False if the reward raised or timed out. Written by the environment; read by
``GroupAdvantage``, ``RewardShaping``, the loss, metrics.
"""
REWARD_ERROR = "reward_error"
"""non-tensor str. Why the reward is not valid; only in such sequences. Written by the collector;
read by error messages.
"""
FEEDBACK = "feedback"
"""non-tensor str. What the scorer says about the response; only if it says something about one of
the rollout. Written by the collector; read by ``TeacherPrompts``.
"""
GROUP_ID = "group_id"
"""[1] int64. Equal for the responses to one prompt, unique in a run. Written by the environment;
read by ``GroupAdvantage``.
"""
PROBLEM = "problem"
"""[1] int64. Index of the problem in its split. Written by the environment; read by
``GroupAdvantage``, which refuses a group of two problems.
"""
TRAJECTORY = "trajectory"
"""[1] int64. Equal for the training samples of one trajectory, unique in a run; only if a
trajectory of the rollout has several. They are adjacent rows, and only the last one is done and has
the reward. Written by the collector; read by ``GroupAdvantage``, ``RewardShaping``, the loss.
"""
POLICY_VERSION = "policy_version"
"""[1] int64. Oldest version of the weights that sampled a token of the sequence. Written by the
policy; read by the trainer, metrics.
"""
NEXT_POLICY_VERSION = ("next", "policy_version")
"""[1] int64. The same again, where TorchRL's ``PolicyVersion`` puts it. Written by the collector;
read by TorchRL's trainers.
"""
POLICY_VERSIONS = ("policy_versions", "full")
"""[T] int64. Version of the weights that sampled each token, -1 on tokens that were not sampled.
Written by the policy; read by the trainer.
"""
ADVANTAGE = "advantage"
"""[1] or [T] float32. Advantage of the sequence, or of each token with ``level="token"``. Written
by ``GroupAdvantage``; read by the loss, metrics.
"""
STATE_VALUE = "state_value"
"""[T] float32. Value of the state in which each token was sampled, before the batch's first step;
only with a critic. Written by the trainer, or your own critic; read by ``GroupAdvantage``, the
loss.
"""
VALUE_TARGET = "value_target"
"""[T] float32. What that value should be: the estimate of the advantage plus the value, 0 on tokens
that were not sampled; in an invalid trajectory the value itself. Written by ``GroupAdvantage``; read by the loss.
"""
PROX_LOG_PROBS = ("prox_log_probs", "full")
"""[T] float32. Log-probs of the proximal policy. Written by the trainer; read by the loss."""
PROX_ENTROPY = ("prox_entropy", "full")
"""[T] float32. Entropy of the proximal policy, only with ``policy.top_entropy_quantile``. Written
by the trainer; read by the loss.
"""
STALENESS = "staleness"
"""[1] or [T] int64. Batches trained since the weights that sampled the sequence or token. Written
by the trainer; read by the loss.
"""
LENGTH_STOPPED = "length_stopped"
"""[1] bool. A token limit ended the turn, not a stop token. Written by the policy; read by the
environment.
"""
QUERY = "query"
"""non-tensor str. The question, as text. Written by the environment; read by metrics."""
DATASET = "dataset"
"""non-tensor str. Name of the data set, if there are several. Written by the environment; read by
``GroupAdvantage``, metrics.
"""
RESPONSE_TEXT = ("text", "response")
"""non-tensor str. The response as text, all turns of a dialog; never tokenized again. Written by
the policy; read by metrics.
"""
STEPPING = "_step"
"""[1] bool. TorchRL's: whether a row takes part in the next step. Written by the collector; read by
the environment.
"""
CUR_LOG_PROBS = ("cur_log_probs", "full")
"""[T] float32. Log-probs of the policy that is trained. Written by ``TokenScorer``; read by the
loss.
"""
ENTROPY = ("entropy", "full")
"""[T] float32. Entropy of the policy that is trained, at each token. Written by ``TokenScorer``;
read by the loss.
"""
VALUE = ("value", "full")
"""[T] float32. Value of the state in which each token was sampled, by the critic that is trained.
Written by ``TokenScorer``; read by the loss.
"""
CENTERING = ("centering", "full")
"""[T] float32. Mean score of each sampled token's distribution, see
``functional.centering_coefficients``. Written by ``TokenScorer``; read by the loss.
"""
DIVERGENCE = ("divergence", "full")
"""[T] float32. Divergence from the teacher at each sampled token. Written by ``TokenScorer``; read
by the loss.
"""
DEMONSTRATION = ("demonstration", "full")
"""[T] int64. Prompt and demonstration of the group's problem, in the first row of the group; empty
in its other rows. Written by the sampler; read by the trainer.
"""
DEMONSTRATION_MASK = ("demonstration", "mask")
"""[T] bool. True on the demonstration's tokens that are trained. Written by the sampler; read by
the trainer.
"""
DEMONSTRATION_IMAGES = ("demonstration", "images")
"""non-tensor tuple of ``ImageSpan``. The images among the demonstration's tokens; only with a
vision-language model and problems with images. Written by the sampler; read by the trainer.
"""
IS_DEMONSTRATION = "is_demonstration"
"""[1] bool. True in rows that are demonstrations, with no token that the policy sampled. Written by
the trainer; read by the loss.
"""
LOSS_WEIGHTS = ("loss", "weights")
"""[T] float32. Each token's share of the loss. Written by ``GRPOLoss.normalize``; read by the loss.
"""
TOKEN_COUNT = ("loss", "num_tokens")
"""[1] int64. Tokens of the whole optimization batch. Written by ``GRPOLoss.normalize``; read by the
loss.
"""
SEQUENCE_COUNT = ("loss", "num_sequences")
"""[1] int64. Sequences with a sampled token in the whole optimization batch. Written by
``GRPOLoss.normalize``; read by the loss.
"""
DEMONSTRATION_COUNT = ("loss", "num_demonstration_tokens")
"""[1] int64. Tokens of the demonstrations of the whole optimization batch. Written by
``GRPOLoss.normalize``; read by the loss.
"""
TOKEN_ROLES = ("loss", "token_roles")
"""[T] bool. False on tokens that a rule over the whole optimization batch leaves out of the
objective. Written by ``GRPOLoss.normalize``; read by the loss.
"""
