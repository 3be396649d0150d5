"""Several ranks compared with one process: real processes, real gloo, real FSDP2.

Processes take seconds to start, so each world size starts once. They run every check and write the
results into files, and the tests compare these with one process.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tests.support.families import make_family
from tests.support.models import make_tiny_model
from tests.support.ranks import start_ranks
from tests.support.runs import whole_state_of
from tests.support.training import make_batch
from torchrl_grpo import keys
from torchrl_grpo.learner import NonFiniteError, PolicyTrainer
from torchrl_grpo.learner.checkpoint import Checkpointer, read_checkpoint
from torchrl_grpo.learner.export import export_model
from torchrl_grpo.learner.writer import CheckpointWriter
from torchrl_grpo.models import loading
from torchrl_grpo.models.divergence import Teacher
from torchrl_grpo.models.layout import Layout
from torchrl_grpo.models.scoring import AdapterOffScorer, AverageScorer, TokenScorer
from torchrl_grpo.models.sharding import (
    init_mesh,
    loading_device,
    mesh_of,
    num_replicas,
    shard_model,
)
from torchrl_grpo.objectives import DemonstrationLoss, GRPOLoss
from torchrl_grpo.transforms import GroupAdvantage
from torchrl_grpo.transforms.kl_scoring import KLScoring
from torchrl_grpo.transforms.teacher import TeacherStates
from torchrl_grpo.weights import ObjectSender

LENGTHS = (9, 14, 6, 11, 8, 12, 7, 10, 30, 5, 17)
CPU = torch.device("cpu")
FIRST_SCALE = 2.0**19
"""Of the losses in float16: a few steps overflow."""
OF_THE_SPLIT = {"train/micro_batches", "train/token_efficiency"}
"""Metrics that differ with the number of ranks."""

pytestmark = pytest.mark.slow


def make_trainer(
    mesh: DeviceMesh | None,
    *,
    lora: bool = False,
    tied: bool = True,
    family: str | None = None,
    checkpointing: bool = False,
    dtype: torch.dtype = torch.float32,
    param_dtype: torch.dtype | None = None,
    loss: Callable[[TokenScorer], GRPOLoss] | None = None,
    critic: bool = False,
    **settings: Any,
) -> PolicyTrainer:
    with CPU if mesh is None else loading_device(mesh):
        model: Any = make_tiny_model(tie_word_embeddings=tied).to(dtype)
        if family is not None:
            model = make_family(family, vocab_size=261)
    if lora:
        torch.manual_seed(1)
        model = loading.add_lora(model, r=3, alpha=8)  # 3 rows: a rank of 4 has none
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
    if checkpointing:
        loading.enable_gradient_checkpointing(model)
    scorer = TokenScorer(model)
    if critic:
        scorer.add_critic()
        loss = functools.partial(GRPOLoss, value_coeff=0.5, value_clip=0.2)
    if mesh is not None:
        shard_model(model, mesh, param_dtype=param_dtype)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.01, fused=True)
    defaults = {"optim_batch_size": len(LENGTHS), "micro_batch_tokens": 30, "clip_grad_norm": 0.5}
    trainer = (
        GRPOLoss(scorer, kl_to_ref_coeff=0.1, entropy_coeff=0.01) if loss is None else loss(scorer)
    )
    return PolicyTrainer(trainer, model, optimizer, **(defaults | settings))


def weights(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.weights()}


def three_steps(mesh: DeviceMesh | None, repeats: int = 1, **settings: Any) -> dict[str, Any]:
    trainer = make_trainer(mesh, **settings)
    batch = make_batch(LENGTHS, spread=0.3, repeats=repeats)
    start = weights(trainer)
    metrics = [trainer.train_batch(batch) for _ in range(3)]
    return {"start": start, "metrics": metrics, "weights": weights(trainer)}


def with_a_teacher(scorer: TokenScorer) -> GRPOLoss:
    """Return the divergence over the vocabulary from a teacher with states of three numbers."""
    head = torch.randn(
        scorer.model.config.vocab_size, 3, generator=torch.Generator().manual_seed(1)
    )
    scorer.distill_from(Teacher(0.5, head.double()))
    return GRPOLoss(scorer, teacher_coeff=0.5)


def with_likely_tokens(scorer: TokenScorer) -> GRPOLoss:
    """Return the divergence from a teacher with known top tokens."""
    scorer.distill_from(Teacher(0.5))
    return GRPOLoss(scorer, teacher_coeff=0.5)


def taught(mesh: DeviceMesh | None, loss: Callable[[TokenScorer], GRPOLoss]) -> dict[str, Any]:
    """Train two steps on groups with a demonstration, an advantage per token, and a teacher's
    states.
    """
    trainer = make_trainer(mesh, loss=loss, dtype=torch.float64)
    batch = make_batch(LENGTHS, spread=0.3, repeats=3)
    generator = torch.Generator().manual_seed(2)
    for number, row in enumerate(batch.unbind(0)):
        mask = row[keys.ASSISTANT_MASK]
        row.set(keys.TEACHER_STATES, torch.randn(int(mask.sum()), 3, generator=generator).double())
        row.set(keys.ADVANTAGE, torch.randn(len(mask), generator=generator))
        columns = slice(
            0, 0 if number % 3 else 7 + 9 * number
        )  # the last one is longer than every sampled one
        tokens = torch.cat([row[keys.FULL][:3], torch.randint(5, 261, (100,), generator=generator)])
        row.set(keys.DEMONSTRATION, tokens[columns])
        row.set(keys.DEMONSTRATION_MASK, (torch.arange(103) > 2)[columns])
    start = weights(trainer)
    metrics = [trainer.train_batch(batch) for _ in range(2)]
    return {"start": start, "metrics": metrics, "weights": weights(trainer)}


def criticized(mesh: DeviceMesh | None, **settings: Any) -> dict[str, Any]:
    """Train three steps of PPO with a critic; return its values before each step and its weights."""
    trainer = make_trainer(mesh, critic=True, **settings)
    batch = make_batch(LENGTHS, spread=0.3, repeats=3)
    generator = torch.Generator().manual_seed(2)
    for number, row in enumerate(batch.unbind(0)):
        row.set(keys.TOKEN_REWARD, torch.randn(len(row[keys.FULL]), generator=generator))
        row.set(keys.GROUP_ID, torch.tensor([number]))
    advantage = GroupAdvantage(1, level="token", mean="batch", std="batch", lmbda=0.9)
    metrics, values = [], {}
    for step in range(3):
        batch = advantage(trainer.score(batch))
        for number, row in enumerate(batch.unbind(0)):
            values[f"{step}/{number}"] = row[keys.STATE_VALUE].clone()
        metrics.append(trainer.train_batch(batch))
    return {
        "values": values,
        "metrics": metrics,
        "weights": weights(trainer) | critic_of(trainer),
        "sent": [name for name, _ in trainer.weights()],
    }


def critic_of(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    """Return the whole weights of a critic."""
    named = loading.base_model_of(trainer.model).critic.named_parameters()
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in named}
    return {f"critic.{name}": weight.detach().clone() for name, weight in whole.items()}


def likely_tokens_of_a_teacher(mesh: DeviceMesh | None, **settings: Any) -> dict[str, Any]:
    """Train a step in mixed precision on a teacher's top tokens; return the arguments of scorer and
    layers too.
    """
    trainer = make_trainer(
        mesh, dtype=torch.float32, loss=with_likely_tokens, micro_batch_tokens=10**6, **settings
    )
    batch = make_batch(LENGTHS, spread=0.3)
    generator = torch.Generator().manual_seed(2)
    for row in batch.unbind(0):
        count = int(row[keys.ASSISTANT_MASK].sum())
        log_probs = torch.randn(count, 2, generator=generator).log_softmax(-1) - 0.1
        ids = torch.tensor([257.0, 259.0]).expand(count, 2)  # bfloat16 can represent neither
        row.set(keys.TEACHER_STATES, torch.cat([log_probs, ids], -1))
    scorer: Any = trainer.loss.actor_network
    score = scorer._score
    ids = []
    layouts = []

    def spy(layout: Layout, values: Any, *more: Any) -> Any:
        ids.append(values[keys.TEACHER_STATES][:, 2:])
        return score(layout, values, *more)

    scorer._score = spy
    for layer in loading.base_model_of(trainer.model).model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, __, kw: layouts.append(kw["layout"]), with_kwargs=True
        )
    metrics = trainer.train_batch(batch)
    return {
        "metrics": [metrics],
        "weights": weights(trainer),
        "ids": torch.cat(ids).unique(dim=0).tolist(),
        "passes": len(ids),
        "calls": len(layouts),
        "layouts": len({id(layout) for layout in layouts}),
    }


def two_sequences(mesh: DeviceMesh | None) -> dict[str, Any]:
    """Train fewer sequences than 4 ranks."""
    trainer = make_trainer(mesh, dtype=torch.float64)
    return {"metrics": [trainer.train_batch(make_batch((9, 5)))], "weights": weights(trainer)}


def one_bad_sequence(mesh: DeviceMesh | None) -> dict[str, Any]:
    """Train a step with NaN in a single sequence, then a good one."""
    trainer = make_trainer(mesh, dtype=torch.float64, max_nonfinite_steps=2)
    batch = make_batch(LENGTHS)
    bad = batch.clone()
    bad[4].get(keys.ADVANTAGE).fill_(math.nan)
    start = weights(trainer)
    skipped = trainer.train_batch(bad)
    after_bad = weights(trainer)
    metrics = trainer.train_batch(batch)
    after_good = weights(trainer)
    raised = False
    try:
        for _ in range(2):
            trainer.train_batch(bad)
    except NonFiniteError:
        raised = True
    return {
        "start": start,
        "after_bad": after_bad,
        "weights": after_good,
        "skipped": skipped["train/skipped_steps"],
        "metrics": [metrics],
        "raised": raised,
    }


def overflow(mesh: DeviceMesh | None) -> dict[str, Any]:
    """Train steps that start with a loss scale that is too large."""
    trainer = make_trainer(mesh, autocast_dtype=torch.float16)
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=FIRST_SCALE)
    start = weights(trainer)
    metrics = [trainer.train_batch(make_batch(LENGTHS)) for _ in range(5)]
    for step in metrics:
        step["train/grad_norm"] = 0.0  # not finite, so not equal to itself
    return {
        "start": start,
        "metrics": metrics,
        "scale": trainer.scaler.get_scale(),
        "weights": weights(trainer),
    }


def adapters_off_first(mesh: DeviceMesh | None, **settings: Any) -> dict[str, Any]:
    """Score the reference with the adapters off before training the adapters."""
    trainer = make_trainer(mesh, lora=True, **settings)
    batch = make_batch(LENGTHS)
    batch = batch.exclude(keys.REF_LOG_PROBS)
    KLScoring(AdapterOffScorer(trainer.model), max_tokens=40)(batch)
    metrics = trainer.train_batch(batch)
    adapters = {name: delta.tensor(torch.float64) for name, delta in trainer.adapters()}
    return {"metrics": [metrics], "weights": weights(trainer), "adapters": adapters}


def scored_first(mesh: DeviceMesh | None, *, lora: bool, **settings: Any) -> dict[str, Any]:
    """Share scoring among the ranks before a step: with the policy itself, or with its adapters
    off.
    """
    trainer = make_trainer(mesh, lora=lora, **settings)
    batch = make_batch(LENGTHS, spread=0.3, repeats=3)
    key = keys.REF_LOG_PROBS if lora else keys.PROX_LOG_PROBS
    scorer = AdapterOffScorer(trainer.model) if lora else trainer.loss.actor_network
    computed: list[int] = []
    score = scorer.score_rows

    def counted(layout: Layout, *values: Any) -> Any:
        computed.append(len(layout.targets))
        return score(layout, *values)

    scorer.score_rows = counted
    scored = KLScoring(scorer, max_tokens=30, out_key=key)(batch.exclude(key))
    del scorer.score_rows
    if not lora:
        trainer.loss.proximal = "recomputed"
    metrics = trainer.train_step(scored)
    rows = {str(n): row.get(key) for n, row in enumerate(scored.unbind(0))}
    return {"scored": rows, "computed": computed, "metrics": [metrics], "weights": weights(trainer)}


def averaged(mesh: DeviceMesh | None, **settings: Any) -> dict[str, Any]:
    """Train three steps, before each of which an average of the weights scores as reference and
    teacher.
    """
    trainer = make_trainer(mesh, **settings)
    batch = make_batch(LENGTHS, spread=0.3)
    start = weights(trainer)
    metrics = []
    scored = {}
    average = AverageScorer(trainer.model, decay=0.5)
    trainer.averages = {"reference": average}
    for step in range(3):
        batch = KLScoring(average)(batch.exclude(keys.REF_LOG_PROBS))
        likely = TeacherStates(average, top_k=3)(batch.exclude(keys.TEACHER_STATES))
        for number, row in enumerate(likely.unbind(0)):
            scored[f"{step}/{number}"] = torch.cat(
                [row[keys.REF_LOG_PROBS], row[keys.TEACHER_STATES][:, :3].flatten()]
            )
        metrics.append(trainer.train_batch(batch))
    return {"start": start, "metrics": metrics, "weights": weights(trainer), "scored": scored}


def recomputed_layers(mesh: DeviceMesh | None) -> int:
    """Return how often an MLP runs in one micro-batch: twice if its layer is recomputed."""
    trainer = make_trainer(mesh, checkpointing=True, micro_batch_tokens=10**6)
    calls = []
    loading.base_model_of(trainer.model).model.layers[0].mlp.register_forward_pre_hook(
        lambda *_: calls.append(1)
    )
    trainer.train_batch(make_batch(LENGTHS))
    return len(calls)


def share_of_memory(mesh: DeviceMesh) -> float:
    """Return this rank's share of all parameters and moments between two steps."""
    trainer = make_trainer(mesh)
    trainer.train_batch(make_batch(LENGTHS))
    held = [parameter for parameter in trainer.model.parameters() if isinstance(parameter, DTensor)]
    moments = [state["exp_avg"] for state in trainer.optimizer.state.values()]
    assert len(held) == len(list(trainer.model.parameters())) == len(moments)
    return sum(t.to_local().numel() for t in held + moments) / sum(
        t.numel() for t in held + moments
    )


def sent_in_bfloat16(mesh: DeviceMesh) -> dict[str, Any]:
    """Return the weights for an engine in bfloat16, and the dtypes in which ranks gather them."""
    trainer = make_trainer(mesh)
    dtypes = set[torch.dtype]()
    full_tensor = DTensor.full_tensor
    expected = weights(trainer)

    def noted(tensor: DTensor) -> torch.Tensor:
        dtypes.add(tensor.dtype)
        return full_tensor(tensor)

    DTensor.full_tensor = noted  # type: ignore[method-assign, assignment]
    sent = ObjectSender(torch.bfloat16).send(trainer, 0, keep=mesh.get_local_rank("shard") == 0)
    DTensor.full_tensor = full_tensor  # type: ignore[method-assign]
    got = {} if sent is None else {name: weight.clone() for name, weight in sent.weights()}
    return {"dtypes": dtypes, "sent": got, "expected": expected}


def bfloat16(check: Callable[..., dict[str, Any]], mesh: DeviceMesh | None) -> dict[str, Any]:
    """Run a check in mixed precision."""
    param_dtype = None if mesh is None else torch.bfloat16
    return check(mesh, param_dtype=param_dtype, autocast_dtype=torch.bfloat16)


ON_ALL_WORLD_SIZES = ("full", "groups", "full_float64", "lora", "lora_float64", "two_sequences",
                     "policy_first", "policy_first_float64", "adapters_off_shared")  # fmt: skip
COMPARED: dict[str, Callable[[DeviceMesh | None], Any]] = {
    "full": three_steps,
    "full_float64": functools.partial(three_steps, dtype=torch.float64, tied=False),
    "groups": functools.partial(three_steps, repeats=3),
    "hybrid": functools.partial(three_steps, repeats=3, family="jamba"),
    "lora": functools.partial(three_steps, lora=True, checkpointing=True, repeats=3),
    "lora_float64": functools.partial(three_steps, lora=True, dtype=torch.float64),
    "bfloat16": functools.partial(bfloat16, three_steps),
    "likely_tokens": functools.partial(bfloat16, likely_tokens_of_a_teacher),
    "teacher": functools.partial(taught, loss=with_a_teacher),
    "sft": functools.partial(
        taught, loss=functools.partial(DemonstrationLoss, aggregation="token_mean")
    ),
    "sft_beside": functools.partial(taught, loss=functools.partial(GRPOLoss, sft_coeff=0.5)),
    "two_sequences": two_sequences,
    "one_bad_sequence": one_bad_sequence,
    "overflow": overflow,
    "adapters_off_first": functools.partial(adapters_off_first, dtype=torch.float64),
    "adapters_off_first_bfloat16": functools.partial(bfloat16, adapters_off_first),
    "recomputed_layers": recomputed_layers,
    "policy_first": functools.partial(scored_first, lora=False),
    "policy_first_float64": functools.partial(scored_first, lora=False, dtype=torch.float64),
    "adapters_off_shared": functools.partial(scored_first, lora=True),
    "critic": functools.partial(criticized, dtype=torch.float64),
    "critic_lora": functools.partial(criticized, lora=True, dtype=torch.float64),
    "average": functools.partial(averaged, dtype=torch.float64),
    "average_lora": functools.partial(averaged, lora=True, dtype=torch.float64),
}


def save_and_go_on(mesh: DeviceMesh | None, path: Path, *, lora: bool) -> dict[str, Any]:
    """Train two steps, save a checkpoint, train a third step; ranks write their state before and
    after it.

    The reference is an average of the weights, which is part of the checkpoint.
    """
    trainer = with_average(make_trainer(mesh, lora=lora, critic=True))
    for _ in range(2):
        trainer.train_batch(of_average(trainer))
    writer = CheckpointWriter()
    trained = threading.Event()
    writer._thread.submit(trained.wait)
    writer.start(Checkpointer(path, {}), trainer, {})
    at_save = weights(trainer) | critic_of(trainer)
    metrics = trainer.train_batch(of_average(trainer))
    after = weights(trainer) | critic_of(trainer)
    out = {"at_save": at_save, "metrics": metrics, "weights": after}
    trained.set()
    writer.finish()
    return out


def with_average(trainer: PolicyTrainer) -> PolicyTrainer:
    trainer.averages = {"reference": AverageScorer(trainer.model, decay=0.5)}
    return trainer


def of_average(trainer: PolicyTrainer) -> TensorDictBase:
    batch = make_batch(LENGTHS, spread=0.3).exclude(keys.REF_LOG_PROBS)
    for row in batch.unbind(0):
        row.set(keys.VALUE_TARGET, row[keys.ASSISTANT_MASK].float())
    return KLScoring(trainer.averages["reference"])(trainer.score(batch))


def saved_in(folder: Path) -> Path:
    return folder / "checkpoint_000002"


def load_and_go_on(mesh: DeviceMesh | None, path: Path, *, lora: bool) -> dict[str, Any]:
    """Repeat the third step of ``save_and_go_on`` with a new trainer."""
    trainer = with_average(make_trainer(mesh, lora=lora, critic=True))
    trainer.load_state_dict(read_checkpoint(saved_in(path))["trainer"], saved_in(path))
    at_save = weights(trainer) | critic_of(trainer)
    metrics = trainer.train_batch(of_average(trainer))
    return {
        "at_save": at_save,
        "metrics": metrics,
        "weights": weights(trainer) | critic_of(trainer),
        "version": trainer.version,
    }


def run_rank(rank: int, world_size: int, folder: str) -> None:
    """Run all checks in a process of 2 ranks, and in one of 4 ranks those that depend on their
    number.
    """
    torch.set_num_threads(1)
    path = Path(folder)
    store = dist.FileStore(f"{folder}/meet_{world_size}", world_size)
    mesh = init_mesh(rank, world_size, store, device=CPU, timeout_s=600)
    names = COMPARED.keys() if world_size == 2 else ON_ALL_WORLD_SIZES
    out: dict[str, Any] = {name: COMPARED[name](mesh) for name in names}
    out["share"] = share_of_memory(mesh)
    out["sent"] = sent_in_bfloat16(mesh)
    out["loads_on"] = loading_device(mesh).type
    for lora in (False, True):
        saved = path / f"ranks_{world_size}_{lora}"
        out[f"save_{lora}"] = save_and_go_on(mesh, saved, lora=lora)
        if world_size == 2:
            dist.barrier()
            out[f"load_{lora}"] = load_and_go_on(mesh, saved, lora=lora)
        out[f"load_single_{lora}"] = load_and_go_on(mesh, path / f"single_{lora}", lora=lora)
    if world_size == 2:
        model = make_trainer(mesh, lora=True).model
        export_model(model, _NoTokenizer(), path / "export" / "model", "")  # type: ignore[arg-type]
    torch.save(out, path / f"rank_{world_size}_{rank}.pt")
    dist.destroy_process_group()


def run_grid_rank(rank: int, world_size: int, folder: str) -> None:
    """Run the checks in a process of 2 x 2, where pairs split the layers between them."""
    torch.set_num_threads(1)
    path = Path(folder)
    store = dist.FileStore(f"{folder}/meet_grid", 4)
    mesh = init_mesh(rank, 4, store, device=CPU, timeout_s=600, tensor_parallel_size=2)
    names = ("full", "full_float64", "two_sequences", "overflow", "recomputed_layers")
    out: dict[str, Any] = {name: COMPARED[name](mesh) for name in names}
    out["share"] = share_of_memory(mesh)
    out["loads_on"] = loading_device(mesh).type
    out["save_False"] = save_and_go_on(mesh, path / "ranks_grid", lora=False)
    dist.barrier()
    out["load_False"] = load_and_go_on(mesh, path / "ranks_grid", lora=False)
    out["load_single_False"] = load_and_go_on(mesh, path / "single_False", lora=False)
    out["refused"] = []
    for model in (
        loading.add_lora(make_tiny_model(), r=2, alpha=4),
        make_tiny_model(num_key_value_heads=1),
    ):
        with pytest.raises(ValueError) as error:
            shard_model(model, mesh)
        out["refused"].append(str(error.value))
    torch.save(out, path / f"rank_grid_{rank}.pt")
    dist.destroy_process_group()


def run_two_ranks(rank: int, world_size: int, folder: str) -> None:
    """Run the checks in one of two processes: as one group, and then with a whole copy of the model
    each.
    """
    run_rank(rank, world_size, folder)
    store = dist.FileStore(f"{folder}/meet_whole_copies", 2)
    mesh = init_mesh(rank, 2, store, device=CPU, timeout_s=600, replicas=2)
    out = {name: COMPARED[name](mesh) for name in ("full_float64", "lora_float64")}
    torch.save(out | {"share": share_of_memory(mesh)}, f"{folder}/rank_whole_copies_{rank}.pt")
    dist.destroy_process_group()


def run_copies_rank(rank: int, world_size: int, folder: str) -> None:
    """Run the checks in a process of 2 x 2, where each pair shards a copy of the model."""
    torch.set_num_threads(1)
    path = Path(folder)
    store = dist.FileStore(f"{folder}/meet_copies", 4)
    mesh = init_mesh(rank, 4, store, device=CPU, timeout_s=600, replicas=2)
    out: dict[str, Any] = {name: COMPARED[name](mesh) for name in ON_ALL_WORLD_SIZES}
    out["share"] = share_of_memory(mesh)
    out["replicas"] = num_replicas(make_trainer(mesh).model)
    out["save_False"] = save_and_go_on(mesh, path / "ranks_copies", lora=False)
    dist.barrier()
    out["load_False"] = load_and_go_on(mesh, path / "ranks_copies", lora=False)
    out["load_single_False"] = load_and_go_on(mesh, path / "single_False", lora=False)
    torch.save(out, path / f"rank_copies_{rank}.pt")
    dist.destroy_process_group()


def run_two_by_two(rank: int, world_size: int, folder: str) -> None:
    """Run the checks in one of four processes: layers split over pairs, then a copy of the model
    for each pair.
    """
    run_grid_rank(rank, world_size, folder)
    run_copies_rank(rank, world_size, folder)


class _NoTokenizer:
    def save_pretrained(self, folder: os.PathLike[str]) -> None:
        """Write nothing."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def single(folder: Path) -> dict[str, Any]:
    """Return the results of one process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the ranks: ``make_batch`` computes
    out: dict[str, Any] = {
        name: check(None) for name, check in COMPARED.items() if name != "overflow"
    }
    for lora in (False, True):
        out[f"save_{lora}"] = save_and_go_on(None, folder / f"single_{lora}", lora=lora)
    torch.set_num_threads(threads)
    return out


def given_by(name: str, world_size: int, folder: Path) -> list[dict[str, Any]]:
    """Return the results of each rank of a group."""
    return [torch.load(folder / f"rank_{name}_{rank}.pt") for rank in range(world_size)]


@pytest.fixture(scope="module")
def two(folder: Path, single: dict[str, Any]) -> list[dict[str, Any]]:
    start_ranks(run_two_ranks, 2, 2, str(folder))
    return given_by("2", 2, folder)


@pytest.fixture(scope="module")
def four(folder: Path, single: dict[str, Any]) -> list[dict[str, Any]]:
    start_ranks(run_rank, 4, 4, str(folder))
    return given_by("4", 4, folder)


@pytest.fixture(scope="module")
def two_by_two(folder: Path, single: dict[str, Any]) -> None:
    start_ranks(run_two_by_two, 4, 4, str(folder))


@pytest.fixture(scope="module")
def grid(folder: Path, two_by_two: None) -> list[dict[str, Any]]:
    return given_by("grid", 4, folder)


@pytest.fixture(scope="module")
def copies(folder: Path, two_by_two: None) -> list[dict[str, Any]]:
    return given_by("copies", 4, folder)


@pytest.fixture(params=["two", pytest.param("four", marks=pytest.mark.nightly)])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return request.getfixturevalue(request.param)


def distance(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference of all weights over the norm of all weights."""
    assert list(got) == list(expected)
    pairs = [(got[name].double(), expected[name].double()) for name in expected]
    difference = sum((a - b).square().sum() for a, b in pairs)
    return float((difference / sum(b.square().sum() for _, b in pairs)).sqrt())


def worst(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest absolute difference of a weight."""
    return max(float((got[name] - expected[name]).detach().abs().max()) for name in expected)


@pytest.mark.parametrize(
    ("name", "weights_within", "metrics_within"),
    [
        ("full", 1e-6, 5e-6),
        ("groups", 1e-6, 5e-6),
        ("lora", 1e-7, 5e-6),
        ("full_float64", 1e-15, 1e-6),
        ("lora_float64", 1e-14, 1e-6),
    ],
)
def test_three_steps_on_several_ranks_are_those_of_one_process(
    name: str,
    weights_within: float,
    metrics_within: float,
    ranks: list[dict[str, Any]],
    single: dict[str, Any],
) -> None:
    """In float64 to rounding, so that the sums are exact; the metrics are float32 in both. A group
    of three sequences may be on two ranks.

    Observed in float32: 5e-7 of the weights' norm, 2e-8 with LoRA. Adam amplifies rounding in a
    gradient that should be 0 (a bias of the keys has none except through the rotary embedding), so
    single weights may differ by more.
    """
    expected = single[name]
    assert distance(ranks[0][name]["start"], expected["start"]) == 0
    assert distance(ranks[0][name]["weights"], expected["weights"]) < weights_within
    assert distance(expected["weights"], expected["start"]) > 1e-3
    assert expected["metrics"][0]["train/grad_norm"] > 2 * 0.5  # clipped
    for got, metrics in zip(ranks[0][name]["metrics"], expected["metrics"], strict=True):
        assert metrics["train/micro_batches"] > got["train/micro_batches"] > 1
        for key in metrics.keys() - OF_THE_SPLIT:
            assert got[key] == pytest.approx(
                metrics[key], rel=metrics_within, abs=metrics_within
            ), key


def test_recurrent_layers_on_two_ranks_are_packed_as_rank_0_has_checked(
    two: list[dict[str, Any]], single: dict[str, Any]
) -> None:
    got, expected = two[0]["hybrid"], single["hybrid"]
    assert distance(got["weights"], expected["weights"]) < 3e-6
    assert got["metrics"][0]["train/token_efficiency"] > 1


@pytest.mark.parametrize("name", ["teacher", "sft", "sft_beside"])
def test_a_teacher_and_demonstrations_on_two_ranks_are_those_of_one(
    name: str, two: list[dict[str, Any]], single: dict[str, Any]
) -> None:
    got, expected = two[0][name], single[name]
    assert distance(got["weights"], expected["weights"]) < 1e-14
    assert distance(expected["weights"], expected["start"]) > 1e-3
    for step, metrics in zip(got["metrics"], expected["metrics"], strict=True):
        assert {"teacher": "train/loss_teacher", "sft_beside": "train/loss_sft"}.get(
            name, "train/loss"
        ) in metrics
        for key in metrics.keys() - OF_THE_SPLIT:
            assert step[key] == pytest.approx(metrics[key], rel=1e-6, abs=1e-6), key


@pytest.mark.parametrize("name", ["critic", "critic_lora"])
def test_a_critic_on_two_ranks_is_that_of_one_process(
    name: str, two: list[dict[str, Any]], single: dict[str, Any]
) -> None:
    expected = single[name]
    for rank in two:
        assert worst(rank[name]["values"], expected["values"]) < 1e-6
        assert rank[name]["sent"] == expected["sent"] == [*single["full"]["start"]]
    assert distance(two[0][name]["weights"], expected["weights"]) < 1e-8
    assert expected["values"]["2/0"].abs().max() > 1e-3
    for step, metrics in zip(two[0][name]["metrics"], expected["metrics"], strict=True):
        for key in metrics.keys() - OF_THE_SPLIT:
            assert step[key] == pytest.approx(metrics[key], rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize("name", ["average", "average_lora"])
def test_an_average_of_the_weights_on_two_ranks_is_that_of_one(
    name: str, two: list[dict[str, Any]], single: dict[str, Any]
) -> None:
    for rank in two:
        assert worst(rank[name]["scored"], single[name]["scored"]) < 1e-6
    assert distance(two[0][name]["weights"], single[name]["weights"]) < 1e-8
    assert distance(single[name]["weights"], single[name]["start"]) > 1e-3
    first, last = (single[name]["scored"][f"{step}/0"] for step in (0, 2))
    assert (first - last).abs().max() > 1e-4


def test_all_ranks_have_the_same_metrics_and_weights_bit_for_bit(
    ranks: list[dict[str, Any]],
) -> None:
    results = ranks[0].items()
    names = [name for name, value in results if isinstance(value, dict) and "metrics" in value]
    assert set(ON_ALL_WORLD_SIZES) < set(names)
    for rank in ranks[1:]:
        for name in names:
            # As text, because a noise scale may be NaN.
            assert str(rank[name]["metrics"]) == str(ranks[0][name]["metrics"])
            assert worst(rank[name]["weights"], ranks[0][name]["weights"]) == 0


def test_ranks_without_a_sequence_take_part_and_change_nothing(
    ranks: list[dict[str, Any]], single: dict[str, Any]
) -> None:
    assert worst(ranks[0]["two_sequences"]["weights"], single["two_sequences"]["weights"]) < 1e-12


@pytest.mark.parametrize("name", ["policy_first", "policy_first_float64", "adapters_off_shared"])
def test_ranks_share_out_what_is_scored_before_a_step(
    name: str, ranks: list[dict[str, Any]], single: dict[str, Any]
) -> None:
    expected = single[name]
    for rank in ranks:
        assert worst(rank[name]["scored"], ranks[0][name]["scored"]) == 0
        assert (
            worst(rank[name]["scored"], expected["scored"]) < 3e-6
        )  # observed: 1.5e-6, because batches differ
        assert len(rank[name]["computed"]) < len(expected["computed"])
        assert sum(rank[name]["computed"]) < 1.5 * sum(expected["computed"]) / len(ranks)
    assert sum(sum(rank[name]["computed"]) for rank in ranks) == sum(expected["computed"])
    # In the passes of the step, for the same rounding.
    assert len(ranks[0][name]["computed"]) == ranks[0][name]["metrics"][0]["train/micro_batches"]


def test_a_bad_sequence_on_one_rank_makes_all_ranks_skip_the_step(
    two: list[dict[str, Any]], single: dict[str, Any]
) -> None:
    for rank in two:
        got = rank["one_bad_sequence"]
        assert got["skipped"] == 1
        assert got["raised"]
        assert worst(got["after_bad"], got["start"]) == 0
        assert worst(got["weights"], single["one_bad_sequence"]["weights"]) < 1e-12
        assert worst(got["weights"], got["start"]) > 1e-4


def test_the_loss_scaler_lowers_its_scale_on_all_ranks_alike(two: list[dict[str, Any]]) -> None:
    for rank in two:
        got = rank["overflow"]
        skipped = got["metrics"][-1]["train/skipped_steps"]
        assert got["scale"] == two[0]["overflow"]["scale"] == FIRST_SCALE / 2**skipped
        assert 1 <= skipped < len(got["metrics"])
        assert worst(got["weights"], got["start"]) > 0


def test_the_reference_with_adapters_off_does_not_freeze_the_adapters(
    two: list[dict[str, Any]], single: dict[str, Any]
) -> None:
    got, expected = two[0]["adapters_off_first"], single["adapters_off_first"]
    assert worst(got["weights"], expected["weights"]) < 1e-12
    assert len(expected["adapters"]) == 14 and worst(got["adapters"], expected["adapters"]) < 1e-12
    assert got["metrics"][0]["train/kl_k3_to_ref"] == pytest.approx(
        expected["metrics"][0]["train/kl_k3_to_ref"]
    )
    [mixed], [on_one] = (
        two[0]["adapters_off_first_bfloat16"]["metrics"],
        single["adapters_off_first_bfloat16"]["metrics"],
    )
    assert on_one["train/grad_norm"] > 0
    assert mixed["train/grad_norm"] == pytest.approx(on_one["train/grad_norm"], rel=0.05)


def test_checkpointed_layers_are_computed_twice_when_they_are_sharded(
    two: list[dict[str, Any]],
) -> None:
    assert [rank["recomputed_layers"] for rank in two] == [2] * len(two)


def test_rank_0_alone_loads_a_model_that_is_not_split_in_layers(
    ranks: list[dict[str, Any]],
) -> None:
    assert [rank["loads_on"] for rank in ranks] == ["cpu"] + ["meta"] * (len(ranks) - 1)


@pytest.mark.nightly
def test_each_rank_loads_a_model_whose_layers_are_split(grid: list[dict[str, Any]]) -> None:
    assert [rank["loads_on"] for rank in grid] == ["cpu"] * 4


def test_each_rank_holds_its_part_of_weights_and_moments(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["share"] == pytest.approx(1 / len(ranks), rel=0.05)
    assert sum(rank["share"] for rank in ranks) == pytest.approx(1)


def test_ranks_gather_weights_in_the_dtype_of_the_engine(ranks: list[dict[str, Any]]) -> None:
    assert [rank["sent"]["dtypes"] for rank in ranks] == [{torch.bfloat16}] * len(ranks)
    sent, expected = ranks[0]["sent"]["sent"], ranks[0]["sent"]["expected"]
    assert sent.keys() == expected.keys()
    assert all(torch.equal(sent[name], weight.bfloat16()) for name, weight in expected.items())
    assert not any(rank["sent"]["sent"] for rank in ranks[1:])


def test_bfloat16_parameters_train_close_to_autocast_and_stay_float32(
    two: list[dict[str, Any]], single: dict[str, Any]
) -> None:
    got, expected = two[0]["bfloat16"], single["bfloat16"]
    assert {value.dtype for value in got["weights"].values()} == {torch.float32}
    assert got["metrics"][0]["train/grad_norm"] == pytest.approx(
        expected["metrics"][0]["train/grad_norm"], rel=0.05
    )
    for step, reference in zip(got["metrics"], expected["metrics"], strict=True):
        assert step["train/loss"] == pytest.approx(reference["train/loss"], abs=0.02)


def test_mixed_precision_leaves_token_ids_and_layouts_as_they_are(
    two: list[dict[str, Any]], single: dict[str, Any]
) -> None:
    expected = single["likely_tokens"]["metrics"][0]
    for rank in (single["likely_tokens"], *(rank["likely_tokens"] for rank in two)):
        assert rank["ids"] == [[257.0, 259.0]]
        assert (rank["passes"], rank["calls"], rank["layouts"]) == (1, 2, 1)
        assert rank["metrics"][0]["train/loss_teacher"] == pytest.approx(
            expected["train/loss_teacher"], rel=0.01
        )


@pytest.mark.parametrize("lora", [False, True])
def test_a_checkpoint_goes_on_exactly_on_as_many_ranks(
    lora: bool, two: list[dict[str, Any]]
) -> None:
    saved, loaded = two[0][f"save_{lora}"], two[0][f"load_{lora}"]
    assert (
        worst(loaded["at_save"], saved["at_save"])
        == worst(loaded["weights"], saved["weights"])
        == 0
    )
    assert repr(loaded["metrics"]) == repr(saved["metrics"])  # NaN equals NaN
    assert loaded["version"] == 3


@pytest.mark.parametrize("lora", [False, True])
def test_a_checkpoint_goes_from_any_number_of_ranks_to_any(
    lora: bool, ranks: list[dict[str, Any]], single: dict[str, Any], folder: Path
) -> None:
    """Loading restores the saved state bit by bit; the next step then differs by rounding."""
    to_ranks, from_ranks = ranks[0][f"load_single_{lora}"], ranks[0][f"save_{lora}"]
    of_single = single[f"save_{lora}"]
    assert worst(to_ranks["at_save"], of_single["at_save"]) < 1e-7  # LoRA is merged part by part
    assert distance(to_ranks["weights"], of_single["weights"]) < 1e-6
    to_single = load_and_go_on(None, folder / f"ranks_{len(ranks)}_{lora}", lora=lora)
    assert worst(to_single["at_save"], from_ranks["at_save"]) < 1e-7
    assert distance(to_single["weights"], from_ranks["weights"]) < 1e-6


def test_a_checkpoint_of_ranks_has_the_entries_of_one_of_a_single_process(
    ranks: list[dict[str, Any]], folder: Path
) -> None:
    got = whole_state_of(saved_in(folder / f"ranks_{len(ranks)}_True"))["trainer"]
    expected = whole_state_of(saved_in(folder / "single_True"))["trainer"]

    def layout(state: Any) -> Any:
        if isinstance(state, dict):
            return {key: layout(value) for key, value in state.items()}
        if isinstance(state, list):
            return [layout(value) for value in state]
        return (state.dtype, state.shape) if isinstance(state, torch.Tensor) else state

    assert layout(got) == layout(expected)


def test_the_exported_model_is_the_merged_one(two: list[dict[str, Any]], folder: Path) -> None:
    exported = AutoModelForCausalLM.from_pretrained(folder / "export" / "model")
    assert exported.config.architectures == ["Qwen2ForCausalLM"]
    expected = dict(make_trainer(None, lora=True).weights())
    assert worst(dict(exported.named_parameters()), expected) < 1e-7


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "within"), [("full", 1e-6), ("full_float64", 1e-15), ("two_sequences", 1e-15)]
)
def test_layers_split_over_pairs_train_like_one_process(
    name: str, within: float, grid: list[dict[str, Any]], single: dict[str, Any]
) -> None:
    for rank in grid:
        assert distance(rank[name]["weights"], single[name]["weights"]) < within
        assert worst(rank[name]["weights"], grid[0][name]["weights"]) == 0
        assert repr(rank[name]["metrics"]) == repr(grid[0][name]["metrics"])
    for got, metrics in zip(grid[0][name]["metrics"], single[name]["metrics"], strict=True):
        for key in metrics.keys() - OF_THE_SPLIT:
            assert got[key] == pytest.approx(metrics[key], rel=5e-6, abs=5e-6), key


@pytest.mark.nightly
def test_two_sharded_copies_train_like_one_process(
    copies: list[dict[str, Any]], single: dict[str, Any]
) -> None:
    for name in ("full_float64", "lora_float64"):
        expected = single[name]
        assert distance(copies[0][name]["weights"], expected["weights"]) < 1e-14
        for got, metrics in zip(copies[0][name]["metrics"], expected["metrics"], strict=True):
            for key in metrics.keys() - OF_THE_SPLIT:
                assert got[key] == pytest.approx(metrics[key], rel=5e-6, abs=5e-6), key
    without_a_sequence = copies[0]["two_sequences"]["weights"]
    assert worst(without_a_sequence, single["two_sequences"]["weights"]) < 1e-12
    names = [
        name for name, value in copies[0].items() if isinstance(value, dict) and "metrics" in value
    ]
    for rank in copies:
        assert rank["replicas"] == 2
        assert rank["share"] == pytest.approx(1 / 2, rel=0.05)
        for name in names:
            assert repr(rank[name]["metrics"]) == repr(copies[0][name]["metrics"])
            assert worst(rank[name]["weights"], copies[0][name]["weights"]) == 0


def test_a_whole_copy_on_each_of_two_ranks_trains_like_one_process(
    two: list[dict[str, Any]], single: dict[str, Any], folder: Path
) -> None:
    for rank in given_by("whole_copies", 2, folder):
        assert rank["share"] == 1
        for name in ("full_float64", "lora_float64"):
            assert distance(rank[name]["weights"], single[name]["weights"]) < 1e-14


@pytest.mark.nightly
def test_a_checkpoint_of_sharded_copies_is_one_of_any_number_of_ranks(
    copies: list[dict[str, Any]], single: dict[str, Any], folder: Path
) -> None:
    saved, loaded = copies[0]["save_False"], copies[0]["load_False"]
    assert (
        worst(loaded["at_save"], saved["at_save"])
        == worst(loaded["weights"], saved["weights"])
        == 0
    )
    assert (
        distance(copies[0]["load_single_False"]["weights"], single["save_False"]["weights"]) < 1e-6
    )
    to_single = load_and_go_on(None, folder / "ranks_copies", lora=False)
    assert worst(to_single["at_save"], saved["at_save"]) == 0
    assert distance(to_single["weights"], saved["weights"]) < 1e-6


@pytest.mark.nightly
def test_split_layers_are_scaled_recomputed_and_held_like_whole_ones(
    grid: list[dict[str, Any]],
) -> None:
    for rank in grid:
        assert rank["overflow"]["scale"] == grid[0]["overflow"]["scale"] < FIRST_SCALE
        assert rank["overflow"]["metrics"] == grid[0]["overflow"]["metrics"]
        assert rank["recomputed_layers"] == 2
        assert (
            1 / 4 < rank["share"] < 1 / 2
        )  # the embedding is in two parts, the layers are in four


@pytest.mark.nightly
def test_a_checkpoint_of_split_layers_is_one_of_any_number_of_ranks(
    grid: list[dict[str, Any]], single: dict[str, Any], folder: Path
) -> None:
    saved, loaded = grid[0]["save_False"], grid[0]["load_False"]
    assert worst(loaded["weights"], saved["weights"]) == 0
    assert distance(grid[0]["load_single_False"]["weights"], single["save_False"]["weights"]) < 1e-6
    to_single = load_and_go_on(None, folder / "ranks_grid", lora=False)
    assert worst(to_single["at_save"], saved["at_save"]) == 0
    assert distance(to_single["weights"], saved["weights"]) < 1e-6


@pytest.mark.nightly
def test_what_cannot_be_split_is_refused(grid: list[dict[str, Any]]) -> None:
    adapters, heads = grid[0]["refused"]
    assert (
        adapters
        == "tensor_parallel_size=2 must be 1 with LoRA adapters: shard over more ranks instead."
    )
    assert heads.startswith("tensor_parallel_size=2 must divide") and heads.endswith(": use 1.")
    with pytest.raises(
        ValueError,
        match=r"world_size=3 .*tensor_parallel_size=2: use 2 or 4",
    ):
        init_mesh(0, 3, dist.HashStore(), device=CPU, timeout_s=5, tensor_parallel_size=2)


def test_a_group_of_one_rank_shards_nothing() -> None:
    mesh = init_mesh(0, 1, dist.HashStore(), device=CPU, timeout_s=30)
    try:
        model = shard_model(make_tiny_model(), mesh)
        assert mesh_of(model) is None
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    finally:
        dist.destroy_process_group()
