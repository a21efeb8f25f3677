"""The emulator computes what CUDA defines, and reports what CUDA leaves undefined."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.emulator.emulator import Emulator, EmulatorError

PLANTED = Path(__file__).parent / "planted"

in_any_order = pytest.mark.parametrize("seed", [0, 1, 2, 3], ids=["in order", "1", "2", "3"])


def put(device: Emulator, values: Any) -> Any:
    array = np.asarray(values)
    memory = device.zeros(array.shape, array.dtype)
    device.upload(memory, array)
    return memory


def numbers(count: int) -> Any:
    return np.arange(1, count + 1, dtype=np.float32)


# Behaviour that CUDA defines.


@in_any_order
@pytest.mark.parametrize("n", [1, 63, 64, 200])
def test_barriers_synchronise_the_threads_of_a_block(seed: int, n: int) -> None:
    device = Emulator(seed, PLANTED)
    x, y = put(device, np.arange(n, dtype=np.int32)), device.zeros((5,), np.int32)
    device.function("features.cu", "barrier")((5, 1, 1), (64, 1, 1), [x, y, np.int32(n)])
    expected = [sum(range(64 * b, min(64 * b + 64, n))) for b in range(5)]
    assert device.download(y).tolist() == expected


@in_any_order
def test_dynamic_shared_memory_has_the_requested_size(seed: int) -> None:
    device = Emulator(seed, PLANTED)
    x, y = put(device, numbers(50)), device.zeros((50,), np.float32)
    launch = device.function("features.cu", "dynamic")
    launch((1, 1, 1), (50, 1, 1), [x, y], shared_bytes=200)
    np.testing.assert_array_equal(device.download(y), numbers(50)[::-1])
    with pytest.raises(EmulatorError, match="outside of the device's memory"):
        launch((1, 1, 1), (50, 1, 1), [x, y], shared_bytes=196)


def test_accesses_beyond_a_buffer_are_reported_if_another_buffer_follows() -> None:
    device = Emulator(0, PLANTED)
    arena, y = device.zeros((100,), np.float32), device.zeros((50,), np.float32)
    launch = device.function("features.cu", "dynamic")
    launch((1, 1, 1), (50, 1, 1), [arena[:50], y], shared_bytes=200)
    with pytest.raises(EmulatorError, match="outside of the device's memory"):
        launch((1, 1, 1), (50, 1, 1), [arena[:49], y], shared_bytes=200)


@in_any_order
def test_lanes_of_a_warp_exchange_values(seed: int) -> None:
    device = Emulator(seed, PLANTED)
    y = device.zeros((64, 6), np.int32)
    device.function("features.cu", "shuffles")((1, 1, 1), (64, 1, 1), [y])
    lane = np.arange(64) % 32
    thirds, evens = sum(1 << i for i in range(0, 32, 3)), sum(1 << i for i in range(0, 16, 2))
    columns = [
        lane // 8 * 8 + 5,
        np.where(lane < 3, lane, lane - 3),
        np.where(lane % 16 > 12, lane, lane + 3),
        lane ^ 9,
        np.full(64, np.uint32(thirds).astype(np.int32)),
        np.where(lane < 16, evens, -1),
    ]
    np.testing.assert_array_equal(device.download(y), np.stack(columns, axis=1))


@in_any_order
def test_atomics_lose_no_update(seed: int) -> None:
    device = Emulator(seed, PLANTED)
    count, total = device.zeros((2,), np.int32), device.zeros((1,), np.float32)
    order = device.zeros((1025,), np.uint32)
    device.function("features.cu", "atomics")((8, 1, 1), (96, 1, 1), [count, total, order])
    assert device.download(count).tolist() == [768, 95]
    assert device.download(total).tolist() == [384.0]
    assert sorted(device.download(order)[:768]) == list(range(768))


@in_any_order
def test_every_thread_has_its_own_index(seed: int) -> None:
    device = Emulator(seed, PLANTED)
    y = device.zeros((2 * 3 * 2, 3 * 2 * 4), np.int32)
    device.function("features.cu", "indices", OFFSET=7)((2, 3, 2), (3, 2, 4), [y])
    expected = 1000 * np.arange(12)[:, None] + np.arange(24) + 7
    np.testing.assert_array_equal(device.download(y), expected)


def test_vectors_of_four_are_supported() -> None:
    device = Emulator(folder=PLANTED)
    x, y = put(device, numbers(80)), device.zeros((80,), np.float32)
    device.function("features.cu", "double_vectors")((4, 1, 1), (5, 1, 1), [x, y])
    np.testing.assert_array_equal(device.download(y), 2.0 * numbers(80))


def test_macros_create_different_kernels() -> None:
    device = Emulator(folder=PLANTED)
    y = device.zeros((1,), np.int32)
    for offset in (3, 5, 3):
        device.function("features.cu", "indices", OFFSET=offset)((1, 1, 1), (1, 1, 1), [y])
        assert device.download(y)[0] == offset


def test_only_the_instruction_permutes_bytes_with_replicated_signs() -> None:
    device = Emulator(0, PLANTED)
    y = device.zeros((3,), np.uint32)
    device.function("features.cu", "bytes")((1, 1, 1), (1, 1, 1), [y])
    assert [hex(each) for each in device.download(y)] == ["0x8800180", "0x80808080", "0xffffffff"]


# Behaviour that CUDA leaves undefined.


def launch(
    name: str,
    *more: np.int32,
    threads: int = 64,
    blocks: int = 1,
    seed: int = 0,
    kind: Any = np.float32,
) -> Any:
    """Run a kernel of ``mistakes.cu`` on an input array, if it has one, and an output array."""
    device = Emulator(seed, PLANTED)
    x, y = put(device, numbers(256)), device.zeros((256,), kind)
    one = name in ("blocks_share", "divergent_barriers", "beyond_the_tile", "unwritten_tile")
    args = [y, *more] if one or more or kind is np.int32 else [x, y]
    device.function("mistakes.cu", name)((blocks, 1, 1), (threads, 1, 1), args)
    return device.download(y)


@in_any_order
@pytest.mark.parametrize("name", ["missing_barrier", "early_reuse"])
def test_a_missing_barrier_is_reported(name: str, seed: int) -> None:
    with pytest.raises(EmulatorError, match=r"race: .* in shared memory"):
        launch(name, seed=seed)


@in_any_order
def test_blocks_that_write_to_the_same_address_are_reported(seed: int) -> None:
    assert launch("blocks_share", seed=seed)[0] == 1.0
    with pytest.raises(EmulatorError, match=r"race: .* in global memory"):
        launch("blocks_share", blocks=2, seed=seed)


@in_any_order
def test_a_barrier_of_the_warp_orders_its_lanes(seed: int) -> None:
    result = launch("lanes_with_barrier", threads=32, seed=seed, kind=np.int32)
    assert result[:32].tolist() == [i ^ 1 for i in range(32)]
    with pytest.raises(EmulatorError, match="race"):
        launch("lanes_without_barrier", threads=32, seed=seed, kind=np.int32)


@in_any_order
def test_halves_of_a_word_are_separate_and_parts_of_it(seed: int) -> None:
    result = launch("parts_of_words", np.int32(3), seed=seed)
    assert result[:64].tolist() == [i + 1 if i % 2 == 0 else i - 1 for i in range(64)]
    for missing in range(3):
        with pytest.raises(EmulatorError, match=r"race: .* in shared memory"):
            launch("parts_of_words", np.int32(missing), seed=seed)


def test_threads_that_wait_at_different_barriers_are_reported() -> None:
    with pytest.raises(EmulatorError, match="a different __syncthreads than other threads"):
        launch("divergent_barriers")


def test_a_deadlock_is_reported() -> None:
    with pytest.raises(EmulatorError, match="lanes of its warp that never arrive"):
        launch("lonely_shuffle", threads=2, kind=np.int32)


def test_lanes_that_wait_at_different_operations_are_reported() -> None:
    with pytest.raises(EmulatorError, match="a different operation of its warp than other lanes"):
        launch("mixed_operations", threads=32, kind=np.int32)


def test_accesses_outside_of_memory_are_reported() -> None:
    device = Emulator(folder=PLANTED)
    x, y = put(device, numbers(100)), device.zeros((100,), np.float32)
    run = device.function("mistakes.cu", "beyond_the_end")
    run((5, 1, 1), (20, 1, 1), [x, y, np.int32(100)])
    with pytest.raises(EmulatorError, match=r"block \(5, 0, 0\), thread \(0, 0, 0\): reads 4 b"):
        run((6, 1, 1), (20, 1, 1), [x, y, np.int32(100)])
    with pytest.raises(EmulatorError, match="index 32 is outside its array"):
        launch("beyond_the_tile", threads=32)


def test_vectors_must_be_aligned() -> None:
    device = Emulator(folder=PLANTED)
    x, y = put(device, numbers(256)), device.zeros((256,), np.float32)
    device.function("mistakes.cu", "vectors")((1, 1, 1), (32, 1, 1), [x[4:], y])
    with pytest.raises(EmulatorError, match=r"not aligned, .*mistakes.cu:\d"):
        device.function("mistakes.cu", "vectors")((1, 1, 1), (32, 1, 1), [x[1:], y])


def test_unwritten_shared_memory_is_nan() -> None:
    result = launch("unwritten_tile", threads=32)[:32]
    assert np.flatnonzero(np.isnan(result)).tolist() == [28]


def test_a_failed_launch_leaves_the_device_working() -> None:
    for _ in range(3):
        with pytest.raises(EmulatorError):
            launch("missing_barrier")
        launch("lanes_with_barrier", threads=32, kind=np.int32)


def test_orders_are_random_and_repeatable() -> None:
    """Results that depend on the order differ between seeds and repeat with the same seed."""

    def turns(seed: int) -> list[int]:
        device = Emulator(seed, PLANTED)
        turn, y = device.zeros((1,), np.int32), device.zeros((64,), np.int32)
        device.function("mistakes.cu", "first_come")((2, 1, 1), (32, 1, 1), [turn, y])
        return list(device.download(y))

    assert turns(0) == list(range(64))
    assert turns(5) == turns(5)
    assert len({tuple(turns(seed)) for seed in range(4)}) == 4


# Requirements of a launch.


def test_launches_that_a_gpu_would_refuse_are_refused() -> None:
    device = Emulator(folder=PLANTED)
    x, y = put(device, numbers(64)), device.zeros((64,), np.float32)
    run = device.function("features.cu", "dynamic")
    for grid, block, shared in (
        ((0, 1, 1), (1, 1, 1), 0),
        ((1, 1, 1), (1025, 1, 1), 0),
        ((1, 70000, 1), (1, 1, 1), 0),
        ((1, 1, 1), (1, 1, 1), 1 << 20),
    ):
        with pytest.raises(EmulatorError):
            run(grid, block, [x, y], shared_bytes=shared)


def test_arguments_must_match_the_parameter_types() -> None:
    device = Emulator(folder=PLANTED)
    x, y = put(device, np.arange(4, dtype=np.int32)), device.zeros((4,), np.int32)
    run = device.function("features.cu", "barrier")
    for args in (
        [x, y],
        [x, y, 4],
        [x, y, np.int64(4)],
        [x, y, np.float32(4)],
        [x, device.zeros((4,), np.float32), np.int32(4)],
        [np.arange(4, dtype=np.int32), y, np.int32(4)],
        [x[::2], y, np.int32(2)],
    ):
        with pytest.raises(EmulatorError):
            run((1, 1, 1), (64, 1, 1), args)


def test_the_host_cannot_access_device_memory() -> None:
    device = Emulator(folder=PLANTED)
    x = put(device, numbers(6))
    for attempt in (
        lambda: x + 1.0,
        lambda: np.add(1.0, x),
        lambda: np.isfinite(x),
        lambda: np.concatenate([x, x]),
        lambda: x.__setitem__(0, 1.0),
        lambda: float(x[0]),
        lambda: list(x),
    ):
        with pytest.raises(EmulatorError, match="upload or download"):
            attempt()
    rows = x.reshape(2, 3)[1:]
    device.upload(rows, np.zeros((1, 3)))
    assert device.download(x).tolist() == [1.0, 2.0, 3.0, 0.0, 0.0, 0.0]
    assert device.download(x.view(np.int32)).dtype == np.int32
