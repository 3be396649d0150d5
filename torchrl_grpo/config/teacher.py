"""The teacher, or several."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torchrl_grpo import checks
from torchrl_grpo.config.devices import DevicesConfig
from torchrl_grpo.config.fields import choice, limited
from torchrl_grpo.config.rule import Rule, is_set


@dataclass
class TeacherEntry:
    """One of several teachers."""

    model: str | None = None
    """As teacher.model."""
    datasets: list[str] = field(default_factory=list)
    """Names of the data sets whose responses it scores."""
    address: list[str] = field(default_factory=list)
    """As teacher.address; each teacher has as many."""
    dtype: str = choice(checks.Dtype, "float32")
    """Type of the weights."""


OWN_MODEL = "policy"
"""Value of ``teacher.model`` for the trained model."""


@dataclass
class TeacherConfig(DevicesConfig):
    """The model whose distribution the policy learns; exists only if policy.teacher_coef is not 0."""

    model: str | None = None
    """A folder, or a name on the Hugging Face hub, with @ before a revision; its tokens must be
    the same as model.name's. policy is the trained model itself. null for no teacher."""
    weights: str = choice(checks.TeacherWeights, "live")
    """teacher.model=policy: its weights at the start of each step (live), model.name's weights
    (frozen), or their exponential moving average (ema). With live and ema the training ranks
    score."""
    decay: float = limited(0.99, ge=0, lt=1)
    """teacher.weights=ema: the share of the average that each step keeps, in [0, 1)."""
    address: list[str] = field(default_factory=list)
    """URLs of servers of that model, such as [http://localhost:8000], which score instead of a
    model in this run. VLLM_API_KEY may hold their key."""
    dtype: str = choice(checks.Dtype, "float32")
    """Type of the weights; servers, and the policy itself, have their own."""
    prompt: str | None = None
    """Prompt that it reads instead of the policy's: what a function, file.py:function, returns as
    messages, or a prompt that shows the reference solution (solution), a correct response of the
    group (best_response) or what the scorer says (feedback). null is the policy's prompt."""


def _bad_teachers(config: Any) -> bool:
    teachers = config.teachers
    if teachers is None:
        return False
    names = [name for entry in teachers for name in entry.datasets]
    are_complete = all(
        entry.model not in (None, OWN_MODEL) and entry.datasets for entry in teachers
    )
    are_alike = len({len(entry.address) for entry in teachers}) == 1
    return not (len(teachers) > 1 and are_complete and are_alike and len(names) == len(set(names)))


RULES = (
    *(
        Rule(
            key,
            "must be left out without a teacher",
            "use algo=distill teacher.model=NAME, or leave it out",
            partial(lambda key, c: is_set(c, key) and not c.needs_teacher, key),
        )
        for key in (
            "teachers",
            "teacher.address",
            "teacher.prompt",
            "teacher.weights",
            "teacher.decay",
            "policy.teacher_clip",
        )
    ),
    *(
        Rule(
            "teacher.prompt",
            f"must be left out with {{{key}=}}, {why}",
            "set only one of them",
            key,
        )
        for key, why in (
            ("env.transforms", "which may change the prompts"),
            ("policy.demonstrations", "whose responses are not the policy's"),
        )
    ),
    Rule(
        "policy.teacher_divergence",
        "needs policy.teacher_top_k with teacher.address, because a server returns log-probs of "
        "some tokens and not the input of its LM head",
        "use policy.teacher_top_k=20, or policy.teacher_divergence=sampled",
        lambda c: bool(c.teacher.address) and c.teacher_in_loss and c.policy.teacher_top_k is None,
    ),
    Rule(
        "inference_model.temperature",
        "must be 1 with teacher.address, whose servers score at temperature 1",
        "use inference_model.temperature=1",
        "teacher.address",
    ),
    Rule(
        "teacher.model",
        "and {policy.teacher_coef=} go together",
        "use algo=distill teacher.model=NAME, or neither",
        lambda c: not c.teachers and c.needs_teacher != (c.teacher.model is not None),
    ),
    *(
        Rule(
            "teachers",
            f"must be left out with {{{key}=}}, because each teacher has its own",
            "set only one of them",
            key,
        )
        for key in ("teacher.model", "teacher.address", "teacher.dtype")
    ),
    Rule(
        "teachers",
        "must be several, each with a model, data sets that no other has, and as many addresses as "
        "the others",
        "for example, [{model: A, datasets: [math]}, {model: B, datasets: [code]}]",
        _bad_teachers,
    ),
    Rule(
        "policy.teacher_divergence",
        "needs policy.teacher_top_k with teachers, whose LM heads differ",
        "use policy.teacher_top_k=64, or policy.teacher_divergence=sampled",
        lambda c: c.teachers and c.teacher_in_loss and c.policy.teacher_top_k is None,
    ),
    Rule(
        "policy.reward_coef",
        "must be 1 without a teacher",
        "leave it out, or change optimizer.lr",
        lambda c: c.policy.reward_coef != 1 and not c.needs_teacher,
    ),
    *(
        Rule(
            key,
            "needs teacher.model=policy, the trained model itself",
            f"use teacher.model=policy, or leave {key} out",
            partial(lambda key, c: is_set(c, key) and c.teacher.model != OWN_MODEL, key),
        )
        for key in ("teacher.weights", "teacher.decay")
    ),
    Rule(
        "teacher.decay",
        "needs teacher.weights=ema, but {teacher.weights=}",
        "use teacher.weights=ema",
        lambda c: is_set(c, "teacher.decay") and c.teacher.weights != "ema",
    ),
    *(
        Rule(
            key,
            "must be left out with teacher.model=policy and {teacher.weights=}, because the training "
            "ranks score",
            f"leave {key} out, or use teacher.weights=frozen",
            "learner_teaches",
        )
        for key in ("teacher.num_devices", "teacher.devices", "teacher.address")
    ),
    Rule(
        "teacher.model",
        "needs teacher.prompt with {teacher.weights=}, because it is the policy itself",
        "use teacher.prompt=solution, or teacher.weights=ema",
        lambda c: c.learner_teaches and c.teacher.weights == "live" and c.teacher.prompt is None,
    ),
    Rule(
        "policy.teacher_divergence",
        "needs policy.teacher_top_k with {teacher.weights=}, whose LM head changes",
        "use policy.teacher_top_k=64, or policy.teacher_divergence=sampled",
        lambda c: c.learner_teaches and c.teacher_in_loss and c.policy.teacher_top_k is None,
    ),
)
