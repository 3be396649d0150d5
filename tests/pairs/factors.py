"""The options of the runs, the combinations that the documentation excludes, and a covering array
of all pairs.
"""

from __future__ import annotations

import random
from itertools import combinations

Options = dict[str, str]

_HERE = "tests/pairs/functions.py"
_PARTS = f"[{{fn: {_HERE}:right, weight: 0.9}}, {{fn: {_HERE}:length, weight: W}}, {{fn: {_HERE}:maybe, weight: 0.3}}]"
_FILE = "columns: {answer: answer, completion: demo}, test_fraction: 0.2"
_ALGORITHMS = [
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "gspo_token",
    "cispo",
    "sapo",
    "rloo",
    "reinforce_pp",
    "ppo",
    "decoupled_ppo",
    "distill",
    "sft",
]
_LOSS = "policy.loss._target_=torchrl_grpo.objectives."
_IMAGES = ("model.name=vision_starter", "env.dataset=shapes")
_LORA = "train_model.lora.enabled=true"
_TEACHER = ("policy.teacher_coef=0.1", "teacher.model=DATA/teacher")

# Options by factor and name; each factor's first option is its default. DATA stands for the data
# folder.
FACTORS: dict[str, dict[str, tuple[str, ...]]] = {
    "script": {
        "sync": (),
        "bound_0": ("train.max_staleness=0",),
        "bound_1": ("train.max_staleness=1",),
    },
    "train": {
        "one": (),
        "two": ("train_model.num_devices=2",),
        "split": ("train_model.num_devices=2", "train_model.tensor_parallel_size=2"),
        "copies": ("train_model.num_devices=2", "train_model.replicas=2"),
        "offload": ("train_model.cpu_offload=true",),
    },
    "samplers": {"one": (), "two": ("inference_model.num_devices=2",)},
    "algo": {name: (f"algo={name}",) for name in _ALGORITHMS},
    "data": {
        "arithmetic": (),
        "file": (
            "env.dataset=DATA/one.jsonl",
            "env.columns.answer=answer",
            "env.test_fraction=0.2",
        ),
        "two": (
            f"env.datasets=[{{dataset: DATA/one.jsonl, weight: 0.7, {_FILE}, reward: REWARD}}, "
            f"{{dataset: DATA/two.jsonl, weight: 0.3, {_FILE}, reward: OTHER}}]",
        ),
        "countdown": ("env.dataset=countdown", "env.difficulty=2"),
        "images": _IMAGES,
        "vision": (*_IMAGES, "train_model.train_vision=true"),
    },
    "dialog": {
        "single": (),
        "tools": (
            f"env.tools=[{_HERE}:calculate]",
            f"env.tool_parser={_HERE}:parse",
            "env.max_turns=3",
        ),
        "retry": ("env.retry_prompt=no. Again.", "env.max_turns=2"),
        "game": ("env.dataset=null", f"env.environment={_HERE}:Game", "env.max_turns=3"),
        "rows": (f"env.environment={_HERE}:Rows", "env.max_turns=2"),
        "agent": (f"env.agent={_HERE}:play", "env.max_turns=2"),
        "compact": (f"env.agent={_HERE}:compact", "env.max_turns=2"),
        "tree": (f"env.agent={_HERE}:branch", "env.max_turns=3"),
        "dropped": (f"env.agent={_HERE}:branch", "env.max_turns=3", "env.abandoned=drop"),
    },
    "credit": {"sum": (), "per_turn": ("policy.turn_credit=per_turn",)},
    "reward": {
        "builtin": ("gsm8k",),
        "parts": (_PARTS,),
        "gdpo": (_PARTS, "env.reward_combination=gdpo"),
        "async": (f"{_HERE}:slow",),
        "failing": (f"{_HERE}:failing",),
        "trl": (f"{_HERE}:of_trl",),
        "group": (f"[{{fn: {_HERE}:right, weight: 0.5}}, {{fn: {_HERE}:ranking, weight: 0.5}}]",),
    },
    "workers": {"none": (), "two": ("env.reward_workers=2",)},
    "lora": {
        "off": (),
        "on": (_LORA, "train_model.lora.r=4"),
        "path": (_LORA, "train_model.lora.path=DATA/adapters"),
        "quantized": (_LORA, "train_model.quantization=nf4"),
    },
    "reference": {
        "loss": ("policy.kl_coef=0.05",),
        "none": ("policy.kl_coef=0",),
        "reward": ("policy.kl_coef=0.05", "policy.kl_in_reward=true"),
        "refresh": ("policy.kl_coef=0.05", "ref_model.refresh_every=1"),
        "sharded": ("policy.kl_coef=0.05", "ref_model.sharded=true"),
        "average": ("policy.kl_coef=0.05", "ref_model.refresh_every=1", "ref_model.decay=0.5"),
    },
    "teacher": {
        "none": (),
        "sampled": _TEACHER,
        "reverse": (*_TEACHER, "policy.teacher_divergence=reverse"),
        "top_k": (*_TEACHER, "policy.teacher_divergence=jsd", "policy.teacher_top_k=8"),
        "several": (
            "policy.teacher_coef=0.1",
            "teachers=[{model: DATA/teacher, datasets: [one]}, {model: starter, datasets: [two]}]",
        ),
        "own": ("policy.teacher_coef=0.1", "teacher.model=policy", "teacher.weights=ema"),
        "prompted": (*_TEACHER, f"teacher.prompt={_HERE}:hint", "policy.teacher_clip=2"),
    },
    "sft": {"off": (), "on": ("policy.sft_coef=0.1",)},
    "engine": {
        "float32": (),
        "bfloat16": ("inference_model.dtype=bfloat16",),
        "server": ("inference_model.backend=server", "inference_model.address=[SERVER]"),
    },
    "draw": {
        "uniform": (),
        "filter": ("env.difficulty_filter=[0.05,0.95]",),
        "pass_rate": ("env.sampling=pass_rate",),
        "curriculum": ("env.curriculum=0.5",),
    },
    "dynamic": {
        "off": ("policy.dynamic_sampling=false",),
        "on": ("policy.dynamic_sampling=true", "policy.max_sampling_rounds=2"),
    },
    "passes": {"large": (), "small": ("train.micro_batch_tokens=80",)},
    "checkpointing": {"off": (), "on": ("train_model.gradient_checkpointing=true",)},
    "compile": {"auto": (), "on": ("train_model.compile=true",)},
    "profile": {"off": (), "on": ("logging.profile_steps=[2]",)},
    "precision": {
        "full": (),
        "bf16": ("train.mixed_precision=bf16",),
        "fp16": ("train.mixed_precision=fp16",),
    },
    "steps": {"one": (), "epochs": ("train.epochs=2",), "two": ("train.optim_batch_size=8",)},
    "resume": {"off": (), "on": ("train.checkpoint_frequency=1",)},
    "tests": {
        "own": (),
        "sets": (
            "evaluation.frequency=1",
            f"evaluation.datasets=[{{dataset: DATA/test.jsonl, name: extra, columns: {{answer: answer}}, reward: "
            f"{_HERE}:right}}]",
        ),
        "off": ("evaluation.num_prompts=0",),
        "cut_off": ("evaluation.top_p=0.9", "evaluation.temperature=0.7"),
    },
    "truncated": {
        "kept": (),
        "masked": ("policy.mask_truncated=true", "inference_model.max_new_tokens=14"),
        "short": ("inference_model.max_new_tokens=9",),
    },
    "overlong": {"off": ("policy.overlong_buffer=null",), "on": ("policy.overlong_buffer=0.5",)},
    "stop": {"off": (), "on": ("inference_model.stop=[',','#### 1']",)},
    "proximal": {
        "preset": (),
        "recomputed": (
            "policy.proximal=recomputed",
            "policy.behaviour_weight=truncate",
            "policy.behaviour_level=sequence",
        ),
        "interpolated": ("policy.proximal=interpolated", "policy.behaviour_weight=mask"),
    },
    "advantage": {
        "preset": (),
        "whiten": ("policy.advantage_whiten=true",),
        "token": (
            "policy.advantage_level=token",
            "policy.gae_lambda=0.9",
            "policy.advantage_mean=batch",
            "policy.advantage_std=batch",
        ),
        "leave_one_out": ("policy.advantage_mean=leave_one_out", "policy.advantage_std=none"),
        "batch": ("policy.advantage_mean=batch", "policy.advantage_std=batch"),
        "length_weighted": ("policy.advantage_mean=length_weighted", "policy.advantage_std=none"),
        "second_best": ("policy.advantage_mean=second_best", "policy.advantage_std=group"),
        "nonzero": ("policy.advantage_mean=group", "policy.advantage_std=nonzero"),
    },
    "loss": {
        "preset": (),
        "gmpo": (f"{_LOSS}GMPOLoss",),
        "vespo": (f"{_LOSS}VESPOLoss",),
        "clip_cov": (
            f"{_LOSS}ClipCovLoss",
            "+policy.loss.covariance_share=0.2",
            "+policy.loss.covariance_low=0.01",
        ),
        "kl_cov": (f"{_LOSS}KLCovLoss", "+policy.loss.covariance_share=0.2"),
    },
    "mismatch": {
        "none": (),
        "sequences": ("policy.rejection={geometric: 1.5, off_policy: 0.5}",),
        "tokens": ("policy.rejection={token_ratio: 2, dppo_tv: 0.2}",),
        "top_entropy": ("policy.top_entropy_quantile=0.5", "policy.proximal=recomputed"),
        "centered": (
            "policy.score_centering=true",
            "policy.proximal=recomputed",
            "inference_model.top_k=20",
        ),
    },
    "entropy": {
        "fixed": (),
        "target": ("policy.entropy_coef=0.01", "policy.entropy_target=1.0"),
    },
    "terms": {"off": (), "on": ("policy.entropy_coef=0.01", "policy.kl_to_behaviour_coef=0.02")},
    "check": {
        "off": (),
        "exact": ("inference_model.exact=true",),
    },
    "kept": {"all": (), "some": ("inference_model.top_k=20", "inference_model.top_p=0.9")},
    "temperature": {"1": (), "0.8": ("inference_model.temperature=0.8",)},
    "shaping": {
        "off": (),
        "on": ("policy.reward_scale=2", "policy.reward_bias=-0.5", "policy.reward_clip=[-1,1]"),
    },
    "aggregation": {
        "preset": (),
        "constant": ("policy.aggregation=constant",),
        "token_mean": ("policy.aggregation=token_mean",),
    },
}

_OF_PROCESSES = ("script", "train", "samplers")
"""Factors whose other options mostly need Ray, which takes longer to start than all the rest."""

# The first option excludes each of the others; ! stands for all but those that follow.
_EXCLUDED = """
algo:sft  dialog:!single credit:per_turn dynamic:on draw:!uniform sft:on
          teacher:sampled,prompted,several,own overlong:on proximal:!preset advantage:!preset
          temperature:0.8 shaping:on terms:on reference:reward data:!file,two reward:gdpo
          loss:!preset mismatch:!none
algo:sapo  loss:!preset
mismatch:top_entropy,centered  proximal:interpolated
mismatch:centered  proximal:recomputed steps:epochs,two engine:server sft:on teacher:reverse,top_k
algo:distill  teacher:none dynamic:on reward:gdpo
algo:ppo  dynamic:on
algo:reinforce_pp,ppo  reward:gdpo advantage:leave_one_out,length_weighted,second_best,nonzero
          credit:per_turn dialog:agent,compact,tree,dropped
algo:rloo  reward:gdpo credit:per_turn
dialog:agent,compact,tree,dropped  advantage:token sft:on check:exact
dialog:game  data:!arithmetic sft:on check:exact draw:curriculum tests:sets
dialog:rows  data:!file sft:on check:exact
dialog:tools,retry  check:exact
teacher:prompted  dialog:game,rows,agent,compact,tree,dropped
teacher:several  data:!two dialog:game,rows
sft:on  dynamic:on teacher:reverse,top_k data:!file,two
credit:per_turn  advantage:token,leave_one_out,length_weighted,second_best,nonzero dynamic:on reward:gdpo
dynamic:on  teacher:!none reward:gdpo
reward:gdpo  overlong:on shaping:on reference:reward advantage:token,batch,length_weighted,second_best
lora:!off  train:split check:exact reference:refresh data:vision
lora:quantized  train:two,copies,offload
lora:path  data:images
check:exact  train:two,split,copies engine:!float32
engine:server  samplers:two stop:on profile:on
kept:some  algo:sft engine:server sft:on teacher:reverse,top_k
data:countdown  truncated:masked
data:images,vision  dialog:tools,agent,compact,tree,dropped train:split,offload engine:server
          teacher:sampled,reverse,top_k,prompted
data:vision  train:two,copies
draw:curriculum  data:!file,two
"""


def _named(text: str) -> tuple[str, set[str]]:
    factor, _, names = text.partition(":")
    named = set(names.removeprefix("!").split(","))
    assert named <= FACTORS[factor].keys(), text
    return factor, FACTORS[factor].keys() - named if names.startswith("!") else named


def _excluded_pairs() -> set[frozenset[tuple[str, str]]]:
    pairs = set()
    first = ""
    for line in _EXCLUDED.strip().splitlines():
        words = line.split()
        first = words.pop(0) if not line.startswith(" ") else first
        factor, names = _named(first)
        for word in words:
            other, others = _named(word)
            pairs |= {frozenset({(factor, a), (other, b)}) for a in names for b in others}
    return pairs


EXCLUDED = _excluded_pairs()


def pairs_of(options: Options) -> set[frozenset[tuple[str, str]]]:
    return {frozenset(pair) for pair in combinations(options.items(), 2)}


def all_pairs() -> set[frozenset[tuple[str, str]]]:
    """Return every pair of options that the documentation allows."""
    names = [(factor, name) for factor, options in FACTORS.items() for name in options]
    return {
        frozenset(pair) for pair in combinations(names, 2) if pair[0][0] != pair[1][0]
    } - EXCLUDED


def covering_array(seed: int, tries: int = 30) -> list[Options]:
    """Return runs in which every pair of options occurs; the first runs cover the most new pairs."""
    rng = random.Random(seed)
    missing = all_pairs()
    runs = []
    while missing:
        candidates = [run for _ in range(tries) if (run := _run(rng, missing)) is not None]
        if not candidates:
            break
        runs.append(max(candidates, key=lambda run: len(pairs_of(run) & missing)))
        missing -= pairs_of(runs[-1])
    assert not missing, f"no run can have {sorted(map(sorted, missing))}"
    return runs


def _run(rng: random.Random, missing: set[frozenset[tuple[str, str]]]) -> Options | None:
    """Return a run that contains a missing pair and greedily covers others, or None if that is
    impossible.
    """
    run = dict(rng.choice(sorted(map(sorted, missing))))
    factors = [factor for factor in FACTORS if factor not in run]
    for factor in rng.sample(factors, len(factors)):
        choices = {}
        for name in rng.sample(list(FACTORS[factor]), len(FACTORS[factor])):
            pairs = {frozenset({(factor, name), other}) for other in run.items()}
            if not pairs & EXCLUDED:
                choices[name] = len(pairs & missing)
        if not choices:
            return None
        best = max(choices.values())
        default = next(iter(FACTORS[factor]))
        cheap = factor in _OF_PROCESSES and choices.get(default, 0) >= best - 1
        run[factor] = default if cheap else max(choices, key=choices.__getitem__)
    return run


def is_local(options: Options) -> bool:
    """Return whether a run works without Ray."""
    return all(options[factor] == next(iter(FACTORS[factor])) for factor in _OF_PROCESSES) or (
        options["train"] == "offload"
        and options["script"] == "sync"
        and options["samplers"] == "one"
    )


def overrides_of(options: Options, data: str, server: str) -> list[str]:
    """Return the command-line overrides of a run."""
    values = {factor: list(FACTORS[factor][name]) for factor, name in options.items()}
    reward, *combination = values.pop("reward")
    algo = options["algo"]
    preset_in_reward = options["algo"] in ("rloo", "reinforce_pp", "ppo")
    texts = [*values.pop("algo"), *(text for own in values.values() for text in own), *combination]
    if algo == "distill":
        texts = [text for text in texts if not text.startswith("policy.teacher_coef")]
    if algo == "rloo" and options["aggregation"] == "token_mean":
        texts.append("policy.constant_length=null")
    if preset_in_reward and options["reference"] != "reward":
        texts.append("policy.kl_in_reward=false")
    demonstrated = algo == "sft" or options["sft"] == "on"
    if demonstrated and options["data"] == "file":
        texts.append("env.columns.completion=demo")
    if options["data"] == "two":
        texts = [text if demonstrated else text.replace(", completion: demo", "") for text in texts]
    elif options["reward"] != "builtin" or (
        options["data"] == "file" and options["dialog"] != "rows"
    ):
        texts.append(f"env.reward={reward.replace('W', '0.2')}")
    texts = [text.replace("REWARD", reward.replace("W", "0.2")) for text in texts]
    texts = [text.replace("OTHER", reward.replace("W", "-0.4")) for text in texts]
    return [text.replace("DATA", data).replace("SERVER", server) for text in texts]
