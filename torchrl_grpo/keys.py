"""The TensorDict keys of the package, in one table.

They are TorchRL's own LLM keys where TorchRL has one, so data is exchanged without renaming. Shapes
are those of one sequence; a batch is a lazy stack of such sequences (ragged) unless a function says
that it takes padded ``[B, T]`` tensors.

=========================================  ==================  =====================================
key                                        shape, dtype        meaning
=========================================  ==================  =====================================
``("tokens", "prompt")``                   [Tp] int64          what the policy was given
``("tokens", "response")``                 [Tr] int64          everything after the first prompt
``("tokens", "full")``                     [T] int64           prompt + response
``("masks", "all_attention_mask")``        [T] bool            True on real tokens (False only on
                                                               padding)
``("masks", "all_assistant_mask")``        [T] bool            True on the tokens that the policy
                                                               sampled
``("log_probs", "full")``                  [T] float32         behavior log-probs, 0 on tokens that
                                                               were not sampled
``("next", "ref_log_probs", "full")``      [T] float32         reference log-probs, 0 on tokens that
                                                               were not sampled
``("next", "teacher_log_probs", "full")``  [T] float32         the teacher's, likewise
``("next", "teacher_states")``             [S, E] or [S, 2 K]  of the S sampled tokens: what goes
                                                               into the teacher's LM head, or its K
                                                               largest log-probs and then their ids
``("next", "reward")``                     [1] float32         score of the trajectory, the sum over
                                                               its turns; 0 where not valid
``("next", "turn_rewards")``               [T] float64         each turn's reward on the last token
                                                               that the turn sampled, where a dialog
                                                               of the rollout had several turns;
                                                               else all of the reward is the last
                                                               turn's
``("next", "shaped_reward")``              [1] float32         written by ``RewardShaping``: what
                                                               the policy is trained for
``("next", "token_reward")``               [T] float32         likewise: its parts, 0 on tokens that
                                                               were not sampled
``("next", "reward_parts")``               non-tensor dict     parts of the reward by name, None for
                                                               one that does not apply
``("next", "done")``                       [1] bool            terminated or truncated
``("next", "terminated")``                 [1] bool            the policy ended its last turn itself
``("next", "truncated")``                  [1] bool            cut off by a token or turn limit;
                                                               recorded, never inferred
``("next", "correct")``                    [1] bool            the task's verdict, used for accuracy
                                                               and pass@k
``"reward_valid"``                         [1] bool            False where the reward crashed or
                                                               timed out
``"reward_error"``                         non-tensor str      why, and where; only in sequences
                                                               whose reward is not valid
``"group_id"``                             [1] int64           equal for the G responses to one
                                                               prompt, unique in a run
``"trajectory"``                           [1] int64           where a trajectory of the rollout has
                                                               several training samples: unique in a
                                                               run, and equal for these. They are
                                                               adjacent rows, the last of which
                                                               alone is done and has the reward
``"policy_version"``                       [1] int64           the oldest weights that sampled a
                                                               token of the sequence
``("policy_versions", "full")``            [T] int64           the weights that sampled each token,
                                                               -1 on tokens not sampled
``"advantage"``                            [1] float32         written by ``GroupAdvantage``; [T] at
                                                               its level "token"
``"state_value"``                          [T] float32         read by it if there: value of the
                                                               state a token was sampled in
``("prox_log_probs", "full")``             [T] float32         proximal log-probs, written by the
                                                               trainer where a loss reads them
``"staleness"``                            [1] or [T] int64    trained batches since the weights
                                                               that sampled, likewise
``"query"``                                non-tensor str      the question, as text
``"dataset"``                              non-tensor str      which of several data sets it is of;
                                                               empty where there is one
``("text", "response")``                   non-tensor str      the response, decoded (for logs
                                                               only); of a dialog all its turns
``"length_stopped"``                       [1] bool            written by the policy: a token limit
                                                               ended its turn, no stop token
``"_step"``                                [1] bool            TorchRL's: whether a row takes part
                                                               in the next step
``("cur_log_probs", "full")``              [T] float32         written by a scorer: log-probs of the
                                                               policy that is trained
``("entropy", "full")``                    [T] float32         likewise: its entropy where each
                                                               token was sampled
``("divergence", "full")``                 [T] float32         likewise: divergence from a teacher
                                                               at each sampled token
``("demonstration", "full")``              [T] int64           prompt and demonstration of the
                                                               group's problem, in the first row of
                                                               the group; [0] in its others
``("demonstration", "mask")``              [T] bool            True on those of these tokens that
                                                               the assistant says
``"is_demonstration"``                     [1] bool            written by the trainer: whether a row
                                                               is such a demonstration, and nothing
                                                               that the policy sampled
``("loss", "weights")``                    [T] float32         written by ``GRPOLoss.normalize``:
                                                               each token's share of the loss
``("loss", "num_tokens")``                 [1] int64           likewise: tokens of the whole
                                                               optimization batch
``("loss", "demonstration_weights")``      [T] float32         likewise: each token's share of the
                                                               demonstrations' log-likelihood
``"layout"``                               non-tensor          written by the trainer: how a pass
                                                               computes its micro-batch
=========================================  ==================  =====================================
"""

from __future__ import annotations

PROMPT = ("tokens", "prompt")
RESPONSE = ("tokens", "response")
FULL = ("tokens", "full")
ATTENTION_MASK = ("masks", "all_attention_mask")
ASSISTANT_MASK = ("masks", "all_assistant_mask")
LOG_PROBS = ("log_probs", "full")
REF_LOG_PROBS = ("next", "ref_log_probs", "full")
TEACHER_LOG_PROBS = ("next", "teacher_log_probs", "full")
TEACHER_STATES = ("next", "teacher_states")
REWARD = ("next", "reward")
TURN_REWARDS = ("next", "turn_rewards")
SHAPED_REWARD = ("next", "shaped_reward")
TOKEN_REWARD = ("next", "token_reward")
REWARD_PARTS = ("next", "reward_parts")
DONE = ("next", "done")
TERMINATED = ("next", "terminated")
TRUNCATED = ("next", "truncated")
CORRECT = ("next", "correct")
REWARD_VALID = "reward_valid"
REWARD_ERROR = "reward_error"
GROUP_ID = "group_id"
TRAJECTORY = "trajectory"
POLICY_VERSION = "policy_version"
POLICY_VERSIONS = ("policy_versions", "full")
ADVANTAGE = "advantage"
STATE_VALUE = "state_value"
PROX_LOG_PROBS = ("prox_log_probs", "full")
STALENESS = "staleness"
LENGTH_STOPPED = "length_stopped"
QUERY = "query"
DATASET = "dataset"
RESPONSE_TEXT = ("text", "response")
STEPPING = "_step"
CUR_LOG_PROBS = ("cur_log_probs", "full")
ENTROPY = ("entropy", "full")
DIVERGENCE = ("divergence", "full")
DEMONSTRATION = ("demonstration", "full")
DEMONSTRATION_MASK = ("demonstration", "mask")
IS_DEMONSTRATION = "is_demonstration"
LOSS_WEIGHTS = ("loss", "weights")
TOKEN_COUNT = ("loss", "num_tokens")
DEMONSTRATION_WEIGHTS = ("loss", "demonstration_weights")
LAYOUT = "layout"
