"""Tensor maps: the arguments for the driver, and GPUs without them."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from dptrain.backends.cuda.device import tensor_maps


class Driver:
    """A driver that records its arguments, and writes a known map or refuses."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.recorded: dict[str, Any] = {}

    def cuTensorMapEncodeIm2col(self, target: Any, *known: Any) -> int:
        kind, rank, _, sizes, _, lower, upper, channels, positions, steps, *rest = known
        self.recorded = {
            "numbers": (kind.value, rest[1].value),
            "rank": rank.value,
            "box": (channels.value, positions.value),
            "lists": [list(sizes), list(lower), list(upper), list(steps)],
        }
        return self.error

    def cuTensorMapEncodeTiled(self, target: Any, *known: Any) -> int:
        kind, rank, address, sizes, strides, box, steps, interleave, swizzle, promotion, fill = (
            known
        )
        self.recorded = {
            "aligned": target.value % tensor_maps.ALIGNMENT == 0,
            "numbers": (kind.value, swizzle.value),
            "rank": rank.value,
            "address": address.value,
            # The driver expects one stride fewer than extents.
            "lists": [list(sizes), list(strides)[: rank.value - 1], list(box), list(steps)],
            "rest": (interleave.value, promotion.value, fill.value),
        }
        ctypes.memmove(target, bytes(range(128)), tensor_maps.MAP_BYTES)
        return self.error


def encoder(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> tensor_maps.Encoder:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    encode = tensor_maps.find_encoder(90)
    assert encode is not None
    return encode


@pytest.mark.parametrize(
    ("kind", "channels", "as_factors", "size", "numbers"),
    [
        ("tf32", 32, True, 4, (11, 3)), ("tf32", 8, True, 4, (11, 1)),
        ("bf16", 32, True, 2, (9, 2)), ("tf32", 16, False, 4, (7, 0)),
        ("bf16", 64, False, 2, (9, 0)), ("marks", 64, False, 1, (0, 0)),
    ],
)  # fmt: skip
def test_the_driver_receives_the_layout(
    kind: str, channels: int, as_factors: bool, size: int, numbers: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """CUDA Driver API: innermost extent first; strides in bytes, except the innermost."""
    driver = Driver()
    encode = encoder(monkeypatch, driver)
    known = encode.box(1 << 40, (7, 12, 13, 64), (1, 3, 10, channels), kind, as_factors)
    assert isinstance(known, np.void)
    assert known.tobytes() == bytes(range(128))
    assert driver.recorded["aligned"]
    assert (driver.recorded["numbers"], driver.recorded["address"]) == (numbers, 1 << 40)
    assert driver.recorded["rank"] == 4
    sizes, strides, box, steps = driver.recorded["lists"]
    assert sizes == [64, 13, 12, 7]
    assert strides == [64 * size, 64 * 13 * size, 64 * 13 * 12 * size]
    assert (box, steps) == ([channels, 10, 3, 1], [1, 1, 1, 1])
    assert driver.recorded["rest"] == (0, tensor_maps.PROMOTION, 0)


@pytest.mark.parametrize(
    ("counts", "first", "strides", "lower", "upper"),
    [
        ((12, 13), (-1, -1), (1, 1), [-1, -1], [-1, -1]),  # 3 × 3 taps, padding 1.
        ((6, 7), (-1, -1), (2, 2), [-1, -1], [-1, -2]),
        ((6, 7), (0, 0), (2, 2), [0, 0], [0, -1]),  # One tap.
        ((11, 12), (0, 1), (1, 1), [1, 0], [0, -1]),
    ],
)
def test_the_driver_receives_the_box_of_first_pixels(
    counts: tuple[int, int], first: tuple[int, int], strides: tuple[int, int],
    lower: list[int], upper: list[int], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Corners are (column, row), relative to the first and the last pixel of a 12 × 13 map.

    The last patch of a row begins at the last multiple of the stride within the box.
    """
    driver = Driver()
    grid = tensor_maps.PatchGrid(counts, first, strides)
    encoder(monkeypatch, driver).patches(1 << 40, (7, 12, 13, 64), grid, (128, 32), "tf32")
    assert driver.recorded["rank"] == 4
    assert (driver.recorded["numbers"], driver.recorded["box"]) == ((11, 3), (32, 128))
    across, down = strides[1], strides[0]
    assert driver.recorded["lists"] == [[64, 13, 12, 7], lower, upper, [1, across, down, 1]]
    for size, begin, end, stride, count in zip(
        (13, 12), lower, upper, (across, down), reversed(counts), strict=True
    ):
        assert len(range(begin, size + end, stride)) == count


def test_patches_far_outside_of_the_map_cannot_be_encoded() -> None:
    assert tensor_maps.PatchGrid((9, 9), (-128, 0), (1, 1)).is_encodable((9, 9))
    assert not tensor_maps.PatchGrid((9, 9), (-129, 0), (1, 1)).is_encodable((9, 9))
    assert not tensor_maps.PatchGrid((8, 9), (-128, 0), (1, 1)).is_encodable((9, 9))
    assert not tensor_maps.PatchGrid((1, 5), (0, 0), (9, 1)).is_encodable((9, 9))
    assert not tensor_maps.PatchGrid((0, 5), (0, 0), (1, 1)).is_encodable((9, 9))


def test_a_refused_map_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = encoder(monkeypatch, Driver(error=1))
    with pytest.raises(RuntimeError, match="with error 1"):
        encode.box(0, (1, 1, 1, 32), (1, 1, 1, 32), "tf32", True)


def test_other_gpus_have_no_tensor_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tensor_maps.find_encoder(89) is None
    assert tensor_maps.find_encoder(100) is None
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert tensor_maps.find_encoder(90) is None
