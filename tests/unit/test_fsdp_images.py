"""Two ranks that train on images compared with one process; one rank has no image at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerBase

from tests.support.pictures import picture
from tests.support.ranks import start_ranks
from tests.support.vision import MAKERS
from torchrl_grpo import keys
from torchrl_grpo.chat.template import ChatEncoder
from torchrl_grpo.images import Prompt, place_images
from torchrl_grpo.images.families import vision_parameters
from torchrl_grpo.learner import PolicyTrainer
from torchrl_grpo.learner.checkpoint import Checkpointer, read_checkpoint
from torchrl_grpo.learner.export import export_model
from torchrl_grpo.learner.writer import CheckpointWriter
from torchrl_grpo.models import loading
from torchrl_grpo.models.scoring import AdapterOffScorer, TokenScorer
from torchrl_grpo.models.sharding import init_mesh, loading_device, shard_model
from torchrl_grpo.objectives import GRPOLoss
from torchrl_grpo.transforms.kl_scoring import KLScoring

CPU = torch.device("cpu")
CASES = (
    ("idefics3", 1, 0),
    ("idefics3", 2, 0),
    ("qwen2_5_vl", 1, 0),
    ("gemma3", 1, 0),
    ("idefics3", 1, 3),
    ("qwen2_5_vl", 1, 3),
)
"""Families, the number of copies of the model that the two ranks hold, and the rank of adapters."""

pytestmark = pytest.mark.nightly  # test_fsdp.py has text on two ranks, test_images.py images on one


def make_trainer(
    path: Path, mesh: DeviceMesh | None, calls: list[int], adapters: int = 0
) -> PolicyTrainer:
    device = CPU if mesh is None else loading_device(mesh)
    model: Any = loading.load_model(str(path), dtype=torch.float32, device=device)
    loading.freeze_vision(model)
    if adapters:
        torch.manual_seed(1)
        model = loading.add_lora(model, r=adapters, alpha=8)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
    scorer = TokenScorer(model)
    if mesh is not None:
        shard_model(model, mesh)
    body = loading.base_model_of(model).model
    encode = body.get_image_features
    body.get_image_features = lambda *a, **k: calls.append(1) or encode(*a, **k)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.01)
    loss = GRPOLoss(scorer, kl_to_ref_coeff=0.1)
    return PolicyTrainer(loss, model, optimizer, optim_batch_size=4, micro_batch_tokens=30)


def make_batch(path: Path) -> TensorDictBase:
    """Return four sequences, the first of which has an image."""
    tokenizer = loading.load_tokenizer(str(path))
    encoder = loading.load_image_encoder(str(path), loading.load_config(str(path)), tokenizer)
    chats = ChatEncoder(tokenizer, {})
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(4):
        files = [] if number else [picture(1)]
        chat = place_images([{"role": "user", "content": "How many?"}], files)
        [ids] = chats.encode([chats.render(chat, add_generation_prompt=True)])
        prompt = encoder.expand(ids, files)
        images = prompt.images if isinstance(prompt, Prompt) else ()
        start = prompt.tokens if isinstance(prompt, Prompt) else torch.as_tensor(prompt)
        tokens = torch.cat([start, torch.randint(5, 261, (5 + number,), generator=generator)])
        mask = torch.arange(len(tokens)) >= len(start)
        log_probs = (torch.rand(2, len(tokens), generator=generator) - 6) * mask
        row = {
            keys.FULL: tokens,
            keys.ATTENTION_MASK: torch.ones_like(mask),
            keys.ASSISTANT_MASK: mask,
            keys.LOG_PROBS: log_probs[0],
            keys.REF_LOG_PROBS: log_probs[1],
            keys.ADVANTAGE: torch.tensor([(-1.0) ** number]),
            keys.REWARD_VALID: torch.tensor([True]),
            keys.IMAGES: NonTensorData(images),
        }
        rows.append(TensorDict(row))
    return lazy_stack(rows)


def trained(path: Path, mesh: DeviceMesh | None, folder: Path, adapters: int = 0) -> dict[str, Any]:
    """Train two steps, a checkpoint, a third step, the same step from the checkpoint, and an
    export.
    """
    batch = make_batch(path)
    calls = list[int]()
    trainer = make_trainer(path, mesh, calls, adapters)
    if adapters:  # the reference model is the policy without adapters
        scoring = KLScoring(AdapterOffScorer(trainer.model), max_tokens=30)
        batch = scoring(batch.exclude(keys.REF_LOG_PROBS))
    calls.clear()
    start = weights(trainer)
    metrics = [trainer.train_batch(batch) for _ in range(2)]
    checkpointer = Checkpointer(folder, {})
    writer = CheckpointWriter()
    writer.start(checkpointer, trainer, {})
    writer.finish()
    metrics.append(trainer.train_batch(batch))
    if mesh is not None:
        dist.barrier()
    again = make_trainer(path, mesh, [], adapters)
    saved = checkpointer.path(2)
    again.load_state_dict(read_checkpoint(saved)["trainer"], saved)
    resumed = [again.train_batch(batch)]
    export_model(trainer.model, loading.load_tokenizer(str(path)), folder / "model", "")
    base = loading.base_model_of(trainer.model)
    encoder = [parameter for _, parameter in vision_parameters(base)]
    named = trainer.model.named_parameters()
    return {
        "reference": torch.cat([row.get(keys.REF_LOG_PROBS) for row in batch.unbind(0)]),
        "trained": [name for name, parameter in named if parameter.requires_grad],
        "start": start,
        "metrics": metrics,
        "weights": weights(trainer),
        "resumed": resumed,
        "resumed_weights": weights(again),
        "encoded": len(calls),
        "whole": not any(isinstance(parameter, DTensor) for parameter in encoder),
        "sharded": sum(isinstance(p, DTensor) for p in trainer.model.parameters()),
        "of_encoder": len(encoder),
        "parameters": len(list(trainer.model.parameters())),
    }


def weights(trainer: PolicyTrainer) -> list[tuple[str, torch.Tensor]]:
    return [(name, weight.clone()) for name, weight in trainer.weights()]


def run_rank(rank: int, folder: str) -> None:
    """Run the training in one process."""
    torch.set_num_threads(1)
    path = Path(folder)
    for family, replicas, adapters in CASES:
        case = f"{family}_{replicas}_{adapters}"
        store = dist.FileStore(f"{folder}/meet_{case}", 2)
        mesh = init_mesh(rank, 2, store, device=CPU, timeout_s=600, replicas=replicas)
        out = trained(path / family, mesh, path / case, adapters)
        torch.save(out, path / f"{case}_{rank}.pt")
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    for family in {family for family, *_ in CASES}:
        MAKERS[family](folder / family, tokenizer)
    start_ranks(run_rank, 2, str(folder))
    return folder


@pytest.mark.parametrize(("family", "replicas", "adapters"), CASES)
def test_two_ranks_train_on_images_as_one_process_does(
    family: str, replicas: int, adapters: int, folder: Path
) -> None:
    case = f"{family}_{replicas}_{adapters}"
    expected = trained(folder / family, None, folder / f"{case}_single", adapters)
    ranks = [torch.load(folder / f"{case}_{rank}.pt") for rank in range(2)]
    assert sorted(rank["encoded"] for rank in ranks) == [0, 1]  # one rank has no image
    if adapters:  # two layers of the language model, with seven linear layers each
        assert len(expected["trained"]) == 2 * 7 * 2
    names = [name for name, _ in expected["weights"]]
    assert len(set(names)) == len(names)
    for rank in ranks:
        assert rank["whole"]
        assert rank["trained"] == expected["trained"]
        torch.testing.assert_close(rank["reference"], expected["reference"], atol=1e-5, rtol=0)
        assert rank["sharded"] == rank["parameters"] - rank["of_encoder"] > 0
        for key in ("start", "weights"):
            assert [name for name, _ in rank[key]] == names
            for (name, got), (_, weight) in zip(rank[key], expected[key], strict=True):
                torch.testing.assert_close(got, weight, atol=2e-5, rtol=0, msg=name)
        for got, metrics in zip(rank["metrics"], expected["metrics"], strict=True):
            for key in ("train/loss", "train/grad_norm", "train/kl_k3_to_ref"):
                assert got[key] == pytest.approx(metrics[key], rel=1e-5, abs=1e-6), key
        assert rank["metrics"][0] == ranks[0]["metrics"][0]
        [resumed] = rank["resumed"]
        assert resumed == pytest.approx(rank["metrics"][2], rel=0, abs=0, nan_ok=True)
        for (name, got), (_, weight) in zip(rank["resumed_weights"], rank["weights"], strict=True):
            assert torch.equal(got, weight), name
    start = dict(expected["start"])
    assert max((weight - start[name]).abs().max() for name, weight in expected["weights"]) > 1e-3
    exported = AutoModelForImageTextToText.from_pretrained(folder / case / "model")
    of_export = dict(exported.named_parameters())
    checkpoint = make_trainer(folder / case / "model", None, [])
    assert len(of_export) == ranks[0]["parameters"] - len(expected["trained"]) * bool(adapters)
    for (name, got), (_, weight) in zip(weights(checkpoint), ranks[0]["weights"], strict=True):
        assert torch.equal(got, weight), name
