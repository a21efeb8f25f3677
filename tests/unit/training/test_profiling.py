"""Profiles of jobs of one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dptrain.comm.world import World
from dptrain.training.profiling.profiling import (
    LARGEST_SWEPT,
    ProfileOptions,
    profile,
    swept_counts,
)
from dptrain.training.settings import load_settings
from tests.unit.measure.test_trace import check_trace


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("samples", [8, 17, 85])
def test_as_many_steps_are_timed_as_were_asked_for(samples: int, steps: int) -> None:
    """Also where smaller minibatches put off when all is captured: every third, or the 11th."""
    flags = {
        "network": "mlp-5", "data": f"irradiance?samples={samples}", "backend": "cuda",
        "batch_size": "8",
    }  # fmt: skip
    options = ProfileOptions(steps=steps, skip=0, roofs=False)
    found = profile(load_settings(flags, {}), World.single(), options, quiet=True)
    assert found is not None
    assert found.steps == steps
    assert all(stage.time_ms.n == steps and stage.time_ms.mean > 0 for stage in found.stages)


@pytest.mark.parametrize("backend", ["reference", "cuda"])
def test_a_trace_of_one_rank_contains_no_sums(backend: str, tmp_path: Path) -> None:
    flags = {"network": "mlp-5", "backend": backend, "batch_size": "8"}
    options = ProfileOptions(steps=2, skip=0, roofs=False, output=tmp_path / "p", trace=True)
    assert profile(load_settings(flags, {}), World.single(), options, quiet=True) is not None
    threads = check_trace(json.loads((tmp_path / "p" / "trace.json").read_text()))
    assert threads[0, 0]
    assert (0, 1) not in threads


@pytest.mark.parametrize("mebibytes", [0.01, 1, 4, 4.01, 16, 20, 64, 256, 1024])
def test_nine_sizes_are_swept_for_every_bucket(mebibytes: float) -> None:
    largest = int(mebibytes * 2**18)
    counts = swept_counts(largest)
    assert len(counts) == 9
    assert 4 * counts[-1] <= LARGEST_SWEPT
    if 16 * largest <= LARGEST_SWEPT:
        assert (counts[0], counts[-1]) == (largest // 64, 4 * largest)
    else:
        assert 4 * counts[-1] > LARGEST_SWEPT / 2
