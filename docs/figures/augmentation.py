"""Draw docs/images/augmentation.png: what each setting of augmentation does to a picture.

`python -m docs.figures.augmentation` overwrites it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from dptrain.data.loading.augmentation import Augmentation
from dptrain.data.loading.mixup import mix

SIZE, EPOCHS, GAP, LABEL = 96, 7, 6, 190
PATH = Path(__file__).resolve().parents[1] / "images" / "augmentation.png"
CHANGES: tuple[tuple[dict[str, Any], ...], ...] = (
    ({"crop": 16}, {"flip": True}),
    ({"resized_crop": 0.08},),
    ({"rotate": 30}, {"zoom": 0.4}),
    ({"brightness": 0.5}, {"contrast": 0.8}),
    ({"saturation": 1.0}, {"hue": 0.3}),
    ({"cutout": 48},),
    ({"erase": 0.5},),
    ({"randaugment": 2},),
    ({"mixup": 0.4},),
    ({"cutmix": 1.0},),
)
"""Settings of each row."""


def house() -> Image.Image:
    """Return a picture of a house."""
    scene = Image.new("RGB", (4 * SIZE, 4 * SIZE), (134, 190, 235))
    pen = ImageDraw.Draw(scene)
    pen.ellipse((300, 24, 364, 88), fill=(250, 214, 60))
    pen.polygon(
        [(0, 250), (110, 140), (250, 260), (384, 170), (384, 384), (0, 384)], (120, 150, 120)
    )
    pen.rectangle((0, 270, 384, 384), fill=(92, 160, 70))
    pen.rectangle((90, 170, 260, 320), fill=(232, 205, 165), outline=(120, 90, 60), width=4)
    pen.polygon([(70, 175), (175, 85), (280, 175)], fill=(185, 60, 50))
    pen.rectangle((190, 235, 235, 320), fill=(110, 70, 45))
    pen.rectangle((112, 205, 162, 250), fill=(90, 120, 180), outline=(250, 250, 250), width=5)
    pen.rectangle((310, 230, 324, 320), fill=(100, 70, 45))
    pen.ellipse((275, 140, 360, 250), fill=(45, 110, 55))
    return scene


def boat() -> Image.Image:
    """Return a picture of a boat."""
    scene = Image.new("RGB", (4 * SIZE, 4 * SIZE), (245, 200, 150))
    pen = ImageDraw.Draw(scene)
    pen.rectangle((0, 230, 384, 384), fill=(30, 90, 150))
    pen.polygon([(190, 40), (190, 220), (320, 220)], fill=(250, 250, 250))
    pen.polygon([(178, 70), (178, 220), (80, 220)], fill=(220, 80, 60))
    pen.polygon([(60, 235), (330, 235), (285, 300), (105, 300)], fill=(70, 45, 35))
    return scene


def as_input(scene: Image.Image) -> NDArray[np.float32]:
    """Return (3, H, W), from −1 to 1."""
    pixels = np.asarray(scene.resize((SIZE, SIZE), Image.Resampling.BOX), np.float32)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)) / 127.5 - 1.0


def changed(augmentation: Augmentation, epoch: int) -> NDArray[np.float32]:
    """Return the picture of the house in an epoch, (3, H, W)."""
    x, samples = np.stack([as_input(house()), as_input(boat())]), np.arange(2)
    augmentation.apply(x, seed=4, epoch=epoch, samples=samples)
    if augmentation.mixes:
        y, draws = np.zeros((2, 1), np.float32), augmentation.draw(4, epoch, samples)
        weights = augmentation.partner_weights(draws, x.shape[1:], y.dtype)
        mix(x, y, x[::-1].copy(), y[::-1].copy(), *weights)
    return np.asarray(x[0])


def main() -> None:
    """Write the figure."""
    width = LABEL + (EPOCHS + 1) * (SIZE + GAP) + GAP
    figure = Image.new("RGB", (width, len(CHANGES) * (SIZE + GAP) + 24), "white")
    pen, font = ImageDraw.Draw(figure), ImageFont.load_default(14)
    for column in range(EPOCHS + 1):
        text = f"epoch {column}" if column else "unchanged"
        pen.text((LABEL + column * (SIZE + GAP), 3), text, "black", font)
    for row, parts in enumerate(CHANGES):
        settings = {name: value for part in parts for name, value in part.items()}
        flags = [
            f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
            for name, value in settings.items()
        ]
        top = 24 + row * (SIZE + GAP)
        pen.text((GAP, top + SIZE // 3), "\n".join(flags), "black", font)
        tiles = [as_input(house()), *(changed(Augmentation(**settings), e) for e in range(EPOCHS))]
        for column, tile in enumerate(tiles):
            pixels = np.clip(np.rint((tile + 1.0) * 127.5), 0, 255).astype(np.uint8)
            left = LABEL + column * (SIZE + GAP)
            figure.paste(Image.fromarray(pixels.transpose(1, 2, 0)), (left, top))
    figure.quantize(128, dither=Image.Dither.NONE).save(PATH, optimize=True)
    print(PATH)


if __name__ == "__main__":
    main()
