"""Accuracies over several seeds, next to published ones and PyTorch's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from benchmarks import accuracy
from benchmarks.accuracy import Score, _changed, agree, main, network_for, recipes_of, row

CROP = 4


def scores(*accuracies: float) -> list[Score]:
    return [Score(accuracy, 2.0) for accuracy in accuracies]


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ((0.90, 0.92, 0.91), (0.91, 0.92, 0.90), True),
        ((0.90, 0.92, 0.91), (0.93, 0.94, 0.95), False),
        ((0.95, 0.97, 0.96), (0.93, 0.91, 0.92), False),
        ((0.5, 0.9), (0.6, 0.6), True),
    ],
)
def test_means_agree_within_the_spread(
    ours: tuple[float, ...], theirs: tuple[float, ...], expected: bool
) -> None:
    assert agree(scores(*ours), scores(*theirs)) is expected


def test_changed_images_are_windows_of_padded_images() -> None:
    torch.manual_seed(0)
    x = torch.arange(1, 1 + 40 * 2 * 5 * 6, dtype=torch.float32).reshape(40, 2, 5, 6)
    padded = torch.nn.functional.pad(x, (CROP,) * 4)
    found, mirrored = _changed(x, CROP), 0
    for image, source in zip(found, padded, strict=True):
        windows = [
            source[:, i : i + 5, j : j + 6]
            for i in range(2 * CROP + 1)
            for j in range(2 * CROP + 1)
        ]
        if any(torch.equal(image, window) for window in windows):
            continue
        assert any(torch.equal(image.flip(2), window) for window in windows)
        mirrored += 1
    assert 0 < mirrored < 40


def test_a_row_has_the_mean_with_its_interval() -> None:
    network = network_for("resnet8", (1, 28, 28))
    recipe = recipes_of("fashion-mnist", "resnet8", 0, backend="numba")["resnet8"]
    found = row(network, "dptrain", recipe, scores(0.90, 0.92, 0.94))
    # 4.303, Student's quantile for two degrees of freedom, times 0.02 / √3.
    assert found[4:6] == ("90.00 92.00 94.00", "92.00 ± 4.97")
    assert found[2] == "77,754"


@pytest.mark.more
def test_a_short_comparison_writes_both_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = {"epochs": 1, "learning_rate": 0.1, "crop": 1, "published": ""}
    known = {"shapes": {"shape": [1, 8, 8], "networks": {"model-small": recipe}}}
    monkeypatch.setattr(accuracy, "sets", lambda: known)
    line = "shapes --data digits --samples 64 --seeds 3 --pytorch --output"
    found = CliRunner().invoke(main, [*line.split(), str(tmp_path)])
    assert found.exit_code in (0, 1), found.output
    assert "PyTorch" in found.output
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".md"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("cifar10", "cifar10 is not installed; download"),
        ("cifar10 --data cifar10:nowhere --networks resnet8", "no recipe of 'resnet8' for cifar10"),
        ("fashion-mnist --data mnist:nowhere", "nowhere does not exist"),
    ],
)
def test_a_mistake_is_one_line(arguments: str, expected: str) -> None:
    found = CliRunner().invoke(main, arguments.split())
    assert found.exit_code == 2
    assert expected in found.output.splitlines()[-1]


def write_cifar10(folder: Path) -> None:
    """Write images of CIFAR-10's binary version: dark ones of class 0, light ones of class 1."""
    rng, names = np.random.default_rng(0), [f"data_batch_{i}.bin" for i in range(1, 6)]
    for name in [*names, "test_batch.bin"]:
        labels = rng.integers(0, 2, 12, dtype=np.uint8)
        pixels = rng.integers(0, 100, (12, 3072), dtype=np.uint8) + 150 * labels[:, None]
        (folder / name).write_bytes(np.column_stack([labels, pixels]).astype(np.uint8).tobytes())


def write_idx(folder: Path) -> None:
    """Write images in the format of Fashion-MNIST, of the same two classes."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 200), ("t10k", 40)):
        labels = rng.integers(0, 2, count, dtype=np.uint8)
        pixels = rng.integers(0, 100, (count, 28, 28), dtype=np.uint8)
        pixels += 150 * labels[:, None, None]
        for what, values in (("images", pixels), ("labels", labels)):
            header = bytes((0, 0, 8, values.ndim)) + np.array(values.shape, ">u4").tobytes()
            name = f"{split}-{what}-idx{values.ndim}-ubyte"
            (folder / name).write_bytes(header + values.tobytes())


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "kind", "network", "write"),
    [
        ("fashion-mnist", "mnist", "model0", write_idx),
        ("cifar10", "cifar10", "cifar", write_cifar10),
    ],
)
def test_small_files_in_the_real_formats_are_learnt(
    tmp_path: Path, name: str, kind: str, network: str, write: Callable[[Path], None]
) -> None:
    write(tmp_path)
    line = f"{name} --networks {network} --epochs 16 --seeds 3 --data {kind}:{tmp_path}"
    found = CliRunner().invoke(main, [*line.split(), "--output", str(tmp_path / "results")])
    assert found.exit_code == 0, found.output
    (path,) = (tmp_path / "results").glob("*.json")
    scores = json.loads(path.read_text())["scores"][network]["dptrain"]
    assert len(scores) == 3
    assert min(score["accuracy"] for score in scores) > 0.9
    assert f"| {network} |" in path.with_suffix(".md").read_text()
