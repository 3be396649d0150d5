"""The files of a run: strict JSON, and exact after a resume."""

from __future__ import annotations

import errno
import io
import json
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.pictures import broken_pictures
from torchrl_grpo.images import ImageFile
from torchrl_grpo.reporting.metrics import MetricsLogger, read_jsonl
from torchrl_grpo.reporting.trackers import Tracker


def make_logger(directory: Path, **kwargs: object) -> MetricsLogger:
    return MetricsLogger(directory, **({"tensorboard": False, "config": {}} | kwargs))


def strict(line: str) -> dict:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_a_step_is_one_line_of_strict_json_with_null_for_non_finite(tmp_path: Path) -> None:
    with make_logger(tmp_path) as logger:
        values = {
            "train/loss": torch.tensor(0.25),
            "train/kl_k3": float("nan"),
            "train/grad_norm": torch.tensor(torch.inf),
        }
        logger.log(7, values | {"rollout/sequences": torch.tensor(64), "eval/pass@1": 1.0})
        # Read before close, because each line is flushed.
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    expected = {"step": 7, "train/loss": 0.25, "train/kl_k3": None, "train/grad_norm": None}
    assert [strict(line) for line in lines] == [
        expected | {"rollout/sequences": 64, "eval/pass@1": 1.0}
    ]


def test_samples_keep_every_character_and_lists(tmp_path: Path) -> None:
    row = {
        "split": "test",
        "query": "a\nb\u2028c",
        "response": '"<b>\x1b[1m\ud83d',
        "reward": float("nan"),
        "correct": True,
    }
    with make_logger(tmp_path) as logger:
        logger.log_samples(3, [row | {"tokens": torch.tensor([1, 2])}, row])
    rows = read_jsonl(tmp_path / "samples.jsonl")
    assert rows[0] == {"step": 3} | row | {"reward": None, "tokens": [1, 2]}
    assert len(rows) == 2


def test_samples_name_images_whose_thumbnails_are_written_once(tmp_path: Path) -> None:
    files = [ImageFile.of(Image.new("RGB", size, "red")) for size in ((400, 200), (32, 24))]
    row = {"split": "train", "query": "<image><image>?", "response": "1", "images": files}
    with make_logger(tmp_path) as logger:
        logger.log_samples(1, [row, row, {"split": "train", "query": "?", "response": "1"}])
    samples = read_jsonl(tmp_path / "samples.jsonl")
    hashes = [file.hash for file in files]
    assert [sample.get("images") for sample in samples] == [hashes, hashes, None]
    paths = [tmp_path / f"images/{digest[:16]}.png" for digest in hashes]
    assert sorted(paths) == sorted((tmp_path / "images").iterdir())
    assert [Image.open(path).size for path in paths] == [(128, 64), (32, 24)]
    assert Image.open(paths[0]).getpixel((0, 0)) == (255, 0, 0)
    # A resumed run keeps the existing rows and writes the missing ones.
    paths[0].write_bytes(b"kept")
    paths[1].unlink()
    with make_logger(tmp_path) as logger:
        logger.log_samples(2, [row])
    assert paths[0].read_bytes() == b"kept" and Image.open(paths[1]).size == (32, 24)


def test_a_thumbnail_has_no_color_profile() -> None:
    file = io.BytesIO()
    profile = np.random.default_rng(0).bytes(200_000)
    Image.new("RGB", (8, 8)).save(file, "PNG", icc_profile=profile)
    assert len(ImageFile(file.getvalue()).thumbnail()) < 1000


def test_an_image_that_cannot_be_read_has_no_thumbnail(tmp_path: Path) -> None:
    file = ImageFile(broken_pictures()["no pixels"])
    with make_logger(tmp_path) as logger:
        logger.log_samples(1, [{"split": "train", "query": "?", "response": "", "images": [file]}])
    assert read_jsonl(tmp_path / "samples.jsonl")[0]["images"] == [file.hash]
    assert not list((tmp_path / "images").iterdir())


def test_a_full_disk_leaves_thumbnails_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = ImageFile.of(Image.new("RGB", (8, 8)))
    with make_logger(tmp_path) as logger:
        monkeypatch.setattr(Path, "write_bytes", fail)
        logger.log_samples(1, [{"split": "train", "query": "?", "response": "", "images": [file]}])
    assert read_jsonl(tmp_path / "samples.jsonl")[0]["images"] == [file.hash]


def test_resumed_run_leaves_the_same_files_as_an_uninterrupted_one(tmp_path: Path) -> None:
    def train(logger: MetricsLogger, steps: range) -> None:
        for step in steps:
            logger.log(step, {"train/loss": 1 / (step + 1)})
            logger.log_samples(
                step, [{"split": "train", "query": str(step), "response": "é", "reward": 1.0}]
            )

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    with make_logger(whole) as logger:
        train(logger, range(10))
    with make_logger(broken) as logger:
        train(logger, range(7))
    # The crash comes in the middle of a line, and the last checkpoint is that of step 4.
    with (broken / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "train/lo')
    with make_logger(broken) as logger:
        logger.truncate(5)
        train(logger, range(5, 10))
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()


def test_reopened_logger_appends_after_the_last_whole_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a/b": 2.0}\n{"step": 2, "a')
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 1, "a/b": 2.0}]
    with make_logger(tmp_path) as logger:
        logger.log(2, {"a/b": 3.0})
    assert read_jsonl(tmp_path / "metrics.jsonl") == [
        {"step": 1, "a/b": 2.0},
        {"step": 2, "a/b": 3.0},
    ]
    assert read_jsonl(tmp_path / "nothing.jsonl") == []


def test_tensorboard_has_the_same_numbers_and_forgets_truncated_steps(tmp_path: Path) -> None:
    with make_logger(tmp_path, tensorboard=True, config={"optimizer": {"lr": 0.5}}) as logger:
        for step in range(4):
            logger.log(step, {"train/loss": torch.tensor(float(step))})
    time.sleep(1.1)  # TensorBoard orders files by the second in their names
    with make_logger(tmp_path, tensorboard=True) as logger:
        logger.truncate(2)
        logger.log(2, {"train/loss": 20.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (0, 0.0),
        (1, 1.0),
        (2, 20.0),
    ]
    assert b'"lr": 0.5' in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


def test_close_may_be_called_twice_and_ends_logging(tmp_path: Path) -> None:
    logger = make_logger(tmp_path, tensorboard=True)
    logger.close()
    logger.close()
    with pytest.raises(RuntimeError, match="is closed"):
        logger.log(1, {"train/loss": 0.0})
    with pytest.raises(RuntimeError, match="is closed"):
        logger.log_samples(1, [{"query": ""}])


def test_metric_without_a_section_is_refused(tmp_path: Path) -> None:
    with make_logger(tmp_path) as logger, pytest.raises(AssertionError, match="section/name"):
        logger.log(1, {"loss": 0.0})


def test_environment_names_the_versions_that_ran(tmp_path: Path) -> None:
    make_logger(tmp_path).close()
    facts = json.loads((tmp_path / "environment.json").read_text())
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()


def test_a_service_that_fails_gets_nothing_more_and_the_run_goes_on(tmp_path: Path) -> None:
    class Broken(Tracker):
        def __init__(self) -> None:
            self.told: list[int] = []

        def log(self, step: int, values: Mapping[str, float]) -> None:
            self.told.append(step)
            if step == 2:
                raise ConnectionError("nobody there")

        def close(self) -> None:
            raise AssertionError("it failed before")

    broken = Broken()
    with MetricsLogger(tmp_path, tensorboard=False, config={}) as logger:
        logger._trackers.append(broken)
        for step in (1, 2, 3):
            logger.log(step, {"train/loss": 1.0 / step})
    assert broken.told == [1, 2]
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3]
