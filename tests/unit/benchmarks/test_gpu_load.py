"""The measurement of loading, as far as the emulator runs it."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import gpu_load
from dptrain.backends.cuda.backend import CudaBackend
from dptrain.network import Dense, Flatten, Network
from tests.emulator.emulator import Emulator


def test_every_variant_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("IMAGES", 20), ("STEPS", 6), ("REPEATS", 1)):
        monkeypatch.setattr(gpu_load, name, value)
    network = Network((3, 9, 8), [Flatten(), Dense(3)], name="small")
    backend = CudaBackend(Emulator())
    lines = list(gpu_load.report(network, 4, "fp32", backend))
    assert lines[0].split() == ["small,", "batch", "4,", "fp32:", "µs", "from", "host", "copied"]
    assert len(lines) == 7
    for line in lines[1:]:
        assert min(float(time) for time in line.split()[-2:]) > 0.0
    load = gpu_load.Load(network, 4, "fp32", backend)
    load.during()
    replica = load.replica
    assert not replica.memory.download(replica._input).any()
    loaded = replica.memory.download(load._other)
    load.before()
    np.testing.assert_array_equal(replica.memory.download(replica._input), loaded)
    assert loaded.any()
