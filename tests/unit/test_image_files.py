"""Images as files of any mode and orientation, whole, broken and too large."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.pictures import broken_pictures, encoded
from torchrl_grpo.images import ImageFile
from torchrl_grpo.tasks.dataset import DatasetTask

RANDOM = np.random.default_rng(0)
COLORS = Image.fromarray(RANDOM.integers(0, 256, (9, 7, 3), np.uint8))
GRAY = COLORS.convert("L")
ALPHA = Image.fromarray(RANDOM.integers(0, 256, (9, 7), np.uint8))


def with_alpha(image: Image.Image) -> Image.Image:
    image = image.copy()
    image.putalpha(ALPHA)
    return image


def on_white(image: Image.Image) -> Image.Image:
    white = Image.new("RGB", image.size, "white")
    white.paste(image.convert("RGB"), mask=ALPHA)
    return white


PALETTE = COLORS.quantize(8)
COLORED_PALETTE = PALETTE.convert("PA")
COLORED_PALETTE.putalpha(ALPHA)
MODES: dict[str, tuple[Image.Image, Image.Image, int]] = {
    "RGBA": (with_alpha(COLORS), on_white(COLORS), 0),
    "RGBa": (with_alpha(COLORS).convert("RGBa"), on_white(COLORS), 1),
    "LA": (with_alpha(GRAY), on_white(GRAY), 0),
    "PA": (COLORED_PALETTE, on_white(PALETTE), 0),
    "1": (COLORS.convert("1"), COLORS.convert("1"), 0),
    "L": (GRAY, GRAY, 0),
    "P": (PALETTE, PALETTE, 0),
    "CMYK": (COLORS.convert("CMYK"), COLORS, 0),
    "YCbCr": (COLORS.convert("YCbCr"), COLORS, 3),
    "HSV": (COLORS.convert("HSV"), COLORS, 5),
    "LAB": (COLORS.convert("LAB"), COLORS, 20),
    "F": (COLORS.convert("F"), GRAY, 1),
    "I": (GRAY.convert("I"), GRAY, 0),
    "I of 16 bits": (GRAY.convert("I").point(lambda value: value * 257), GRAY, 0),
    "I;16": (Image.fromarray(np.array(GRAY).astype(np.uint16) * 257), GRAY, 0),
    "I;16B": (Image.fromarray((np.array(GRAY).astype(np.uint16) * 257).astype(">u2")), GRAY, 0),
}
"""A PIL image of each mode, its colors, and the largest difference that rounding may make."""


@pytest.mark.parametrize("mode", MODES)
def test_a_pil_image_of_any_mode_keeps_its_colors(mode: str) -> None:
    image, expected, rounding = MODES[mode]
    shown = np.array(ImageFile.of(image).open()).astype(int)
    assert np.abs(shown - np.array(expected.convert("RGB"))).max() <= rounding


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "P with bytes", "RGB", "L", "1"])
def test_transparency_of_a_file_is_white(mode: str) -> None:
    black = Image.new("RGB", (4, 4))
    black.putpixel((1, 1), (255, 0, 0))  # transparent, but for the modes with a mask
    alpha = Image.new("L", (4, 4), 255)
    alpha.putpixel((1, 1), 0)
    options: dict[str, Any] = {}
    if mode in ("RGBA", "LA"):
        black.putalpha(alpha)
        image = black.convert(mode)
    elif mode.startswith("P"):
        image = Image.new("P", (4, 4))
        image.putpalette([0, 0, 0, 255, 0, 0])
        image.putpixel((1, 1), 1)
        options = {"transparency": bytes([255, 0]) if "bytes" in mode else 1}
    else:
        image = black.convert(mode, dither=Image.Dither.NONE)
        if mode == "1":
            image.putpixel((1, 1), 255)
        color = image.getpixel((1, 1))
        options = {"transparency": 1 if mode == "1" else color}
    shown = ImageFile(encoded(image, "PNG", **options)).open()
    assert shown.getpixel((1, 1)) == (255, 255, 255) and shown.getpixel((0, 0)) == (0, 0, 0)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_files_and_pil_images_are_turned_alike(kind: str) -> None:
    photo = Image.fromarray(np.kron(np.array(GRAY), np.ones((8, 8), np.uint8)))
    turns = {5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE", 8: "ROTATE_90"}
    turns |= {2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM"}
    for orientation, name in turns.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = encoded(photo, kind, exif=exif)
        expected = photo.transpose(Image.Transpose[name])
        for file in (ImageFile(data), ImageFile.of(Image.open(io.BytesIO(data)))):
            assert file.size == file.open().size == expected.size
            gap = np.array(file.open().convert("L")).astype(int) - np.array(expected)
            assert np.abs(gap).mean() < 4, (orientation, kind)  # of the compression


@pytest.mark.parametrize("name", ["undefined orientation", "no exif"])
def test_broken_exif_data_turn_nothing(name: str) -> None:
    file = ImageFile(broken_pictures()[name])
    assert file.size == file.open().size == (64, 48)


def test_the_size_of_a_png_file_is_read_without_its_pixels() -> None:
    assert ImageFile(broken_pictures()["too large"]).size == (9000, 9000)
    assert ImageFile(broken_pictures()["no pixels"]).size == (64, 48)


def test_any_error_of_pillow_becomes_a_value_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise KeyError("a tag")

    file = ImageFile(encoded(COLORS, "PNG"))
    lazy = Image.open(io.BytesIO(file.data))
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", fails)
    with pytest.raises(ValueError, match="a tag"):
        file.open()
    with pytest.raises(ValueError, match="a tag"):
        ImageFile.of(lazy)


@pytest.mark.parametrize("options", [{}, {"test_fraction": 0.5}], ids=["all rows", "a share"])
def test_images_know_their_row(tmp_path: Path, options: dict[str, Any]) -> None:
    rows = []
    for number in range(8):
        (tmp_path / f"{number}.jpg").write_bytes(broken_pictures()["no pixels"])
        rows.append(json.dumps({"question": f"{number}?", "image": f"{number}.jpg"}))
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    task = DatasetTask(str(tmp_path / "data.jsonl"), images_column="image", **options)
    for problem in (*task.problems("train"), task.problems("train")[1]):
        line = int(problem.query[0]) + 1
        with pytest.raises(ValueError, match=rf"data\.jsonl:{line} must be a file"):
            problem.images[0].open()
