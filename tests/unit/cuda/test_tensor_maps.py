"""Tensor maps: the arguments for the driver, and GPUs without them."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from dptrain.backends.cuda import tensor_maps


class Driver:
    """A driver that records its arguments, and writes a known map or refuses."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.recorded: dict[str, Any] = {}

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


def encoder(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> tensor_maps.Encode:
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
    known = encode(1 << 40, (7, 12, 13, 64), (1, 3, 10, channels), kind, as_factors)
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


def test_a_refused_map_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = encoder(monkeypatch, Driver(error=1))
    with pytest.raises(RuntimeError, match="CUDA error 1"):
        encode(0, (1, 1, 1, 32), (1, 1, 1, 32), "tf32", True)


def test_other_gpus_have_no_tensor_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tensor_maps.find_encoder(89) is None
    assert tensor_maps.find_encoder(100) is None
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert tensor_maps.find_encoder(90) is None
