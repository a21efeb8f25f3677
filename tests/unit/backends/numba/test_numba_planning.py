"""Division of samples among threads, and sizes of caches."""

from __future__ import annotations

import pytest

from dptrain.backends.numba.convolution.planning import rows_of_partial_sums, units_per_item
from dptrain.native.caches import DEFAULTS, cache_bytes


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 16, 24, 48])
@pytest.mark.parametrize("items", [1, 2, 5, 31, 32, 33, 100, 256])
def test_threads_are_busy(items, threads):
    units = units_per_item(items, threads, most=64)
    total = items * units
    assert total / (threads * -(-total // threads)) > 0.9


def test_units_are_no_smaller_than_needed():
    assert units_per_item(256, 2, most=64) == 1
    assert units_per_item(32, 24, most=64) == 3
    assert units_per_item(1, 24, most=8) == 8
    assert units_per_item(256, 2, most=64, least=4) == 4


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 24])
@pytest.mark.parametrize("batch_size", [1, 5, 31, 32, 33, 256])
def test_rows_of_partial_sums_have_as_few_samples_as_possible(batch_size, threads):
    rows = rows_of_partial_sums(batch_size, threads)
    assert 1 <= rows <= min(batch_size, threads)
    assert -(-batch_size // rows) == -(-batch_size // threads)


def test_caches_are_read_from_the_system(tmp_path):
    for index, (level, kind, size) in enumerate(
        [(1, "Instruction", "64K"), (1, "Data", "48K"), (2, "Unified", "2M"), (3, "Unified", "?")]
    ):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, text in {"level": level, "type": kind, "size": size}.items():
            (folder / name).write_text(f"{text}\n")
    assert cache_bytes(1, str(tmp_path)) == 48 * 1024
    assert cache_bytes(2, str(tmp_path)) == 2 * 1024**2
    assert cache_bytes(3, str(tmp_path)) == DEFAULTS[3]
    assert cache_bytes(2, str(tmp_path / "missing")) == DEFAULTS[2]
