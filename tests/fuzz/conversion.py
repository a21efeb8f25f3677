"""What a network receives for raw pixels, computed from the documented rules in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from dptrain.data import Dataset, Samples
from dptrain.network import LOSSES, Dense, Flatten, Network
from tests.fuzz.outcome import WrongResultError, expect, expect_close

LUMA = (0.299, 0.587, 0.114)
KINDS = {loss.targets: loss for loss in reversed(LOSSES.values())}
Split = tuple[NDArray[Any], NDArray[Any]]
"""Inputs and targets of a split."""


def linear_network(shape: tuple[int, ...], outputs: int, targets: str) -> Network:
    """Return the smallest network with these inputs and outputs."""
    return Network(shape, [Flatten(), Dense(outputs)], loss=KINDS[targets](), name="linear")


def write_linear_network(path: Path, shape: tuple[int, ...], outputs: int, targets: str) -> None:
    """Write the network of `linear_network` as a TOML file."""
    path.write_text(
        f'name = "linear"\ninput = {list(shape)}\nloss = "{KINDS[targets].kind}"\n'
        f'[[layer]]\ntype = "flatten"\n[[layer]]\ntype = "dense"\nunits = {outputs}\n',
        encoding="utf-8",
    )


def expected_inputs(
    raw: NDArray[Any], shape: tuple[int, ...], *, crops: bool = False
) -> NDArray[np.float64]:
    """Return the inputs of a network for raw samples, (n, C, H, W) or (n, F).

    Args:
        raw: uint8 pixels become -1 to 1; numbers of another type are taken as they are.
        shape: of the input.
        crops: the centre is cut out; otherwise images are resized bilinearly.
    """
    values = raw.astype(np.float64)
    if raw.dtype == np.uint8:
        values = values * (2.0 / 255.0) - 1.0
    if len(shape) == 1:
        return values.reshape(len(values), *shape)
    if values.shape[1] == 3 and shape[0] == 1:
        values = sum(part * values[:, i : i + 1] for i, part in enumerate(LUMA))
    if crops:
        top, left = ((values.shape[2 + i] - shape[1 + i]) // 2 for i in range(2))
        values = values[:, :, top : top + shape[1], left : left + shape[2]]
    elif values.shape[2:] != shape[1:]:
        values = resized(values, shape[1:])
    return np.broadcast_to(values, (len(values), *shape)).copy()


def resized(images: NDArray[np.float64], size: tuple[int, ...]) -> NDArray[np.float64]:
    """Return images (n, C, H, W) in another size, computed pixel by pixel."""
    rows, columns = (_weights(images.shape[2 + axis], size[axis]) for axis in range(2))
    return np.einsum("ih,nchw,jw->ncij", rows, images, columns)


def _weights(source: int, target: int) -> NDArray[np.float64]:
    """Return the weights of a triangle that is as wide as a pixel of the source or the target."""
    weights = np.zeros((target, source))
    width = max(1.0, source / target)
    for i in range(target):
        for j in range(source):
            distance = abs((j + 0.5) / source - (i + 0.5) / target) * source
            weights[i, j] = max(0.0, 1.0 - distance / width)
        weights[i] /= weights[i].sum()
    return weights


def read_split(dataset: Dataset, samples: Samples) -> Split:
    """Return all inputs and targets of a split."""
    count = len(samples)
    x = np.full((count, *dataset.input_shape), np.nan, np.float32)
    y = np.full(
        (count, *dataset.target_shape), -7, np.float32 if dataset.target_shape else np.int32
    )
    samples.read(np.arange(count, dtype=np.int64), x, y)
    return x, dataset.preprocessing.to_values(y)


def check_split(found: Split, expected: Split, tolerance: float, name: str) -> None:
    """Compare a split with the expected one, in the same order."""
    expect_close(found[0], expected[0], tolerance, f"inputs of the {name} split")
    y = np.asarray(expected[1], np.float64).reshape(found[1].shape)
    scale = max(1.0, float(np.abs(y).max(initial=0.0)))
    expect_close(found[1], y, 1e-6 * scale, f"targets of the {name} split")


def check_union(
    found: list[Split], expected: Split, tolerance: float | NDArray[np.float64]
) -> NDArray[np.int64]:
    """Check that splits together have each of the expected samples once.

    Args:
        found: the splits.
        expected: all samples.
        tolerance: of the inputs; one number, or one for each expected sample.

    Returns:
        The expected sample that each of the found ones is, one split after the other.
    """
    x = np.concatenate([x.reshape(len(x), -1) for x, _ in found]).astype(np.float64)
    y = np.concatenate([y.reshape(len(y), -1) for _, y in found]).astype(np.float64)
    wanted = expected[0].reshape(len(expected[0]), -1)
    targets = np.asarray(expected[1], np.float64).reshape(len(wanted), -1)
    expect(len(x) == len(wanted), f"{len(x)} samples are read; expected {len(wanted)}")
    distances = np.abs(x[:, None] - wanted[None]).max(axis=2)
    scale = max(1.0, float(np.abs(targets).max(initial=0.0)))
    fits = distances <= np.broadcast_to(tolerance, len(wanted))
    fits &= np.abs(y[:, None] - targets[None]).max(axis=2) <= 1e-6 * scale
    _, rows = linear_sum_assignment(~fits)
    found_rows = np.arange(len(x))
    if not fits[found_rows, rows].all():
        i = int(np.argmin(fits[found_rows, rows]))
        near = int(distances[i].argmin())
        raise WrongResultError(
            f"sample {i} is none of the expected ones; the closest has number {near}, inputs that "
            f"differ by {distances[i, near]:.4g}, and targets {targets[near][:4]}, not {y[i][:4]}"
        )
    return np.asarray(rows, np.int64)


def check_stratified(labels: NDArray[Any], rows: NDArray[np.int64], num_train: int) -> None:
    """Check that the test split has a fifth of all samples, and of those of each class."""
    count = len(labels)
    expect(
        count - num_train == -(-count // 5),
        f"{count - num_train} of {count} samples are for the test; expected a fifth",
    )
    chosen = labels[rows[num_train:]]
    for label in np.unique(labels):
        total, tested = int((labels == label).sum()), int((chosen == label).sum())
        expect(
            total // 5 <= tested <= -(-total // 5),
            f"{tested} of the {total} samples of class {label} are for the test",
        )
