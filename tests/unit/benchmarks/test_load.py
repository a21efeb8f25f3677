"""The measurement of loading, as far as the emulator runs it."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.step import load as measured
from dptrain.backends.cuda.backend import CudaBackend
from dptrain.network import Dense, Flatten, Network
from tests.emulator.emulator import Emulator

pytestmark = pytest.mark.more


def test_every_variant_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("IMAGES", 20), ("STEPS", 6), ("REPEATS", 1)):
        monkeypatch.setattr(measured, name, value)
    network = Network((3, 9, 8), [Flatten(), Dense(3)], name="small")
    backend = CudaBackend(Emulator())
    lines = list(measured.report(network, 4, "fp32", backend))
    assert lines[0].split() == ["small,", "batch", "4,", "fp32:", "µs", "from", "host", "copied"]
    assert len(lines) == 10
    for line in lines[1:]:
        assert min(float(time) for time in line.split()[-2:]) >= 0.0


def test_the_load_of_the_next_minibatch_leaves_the_present_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measured, "IMAGES", 20)
    network = Network((3, 9, 8), [Flatten(), Dense(3)], name="small")
    load = measured.Load(network, 4, "fp32", CudaBackend(Emulator()))
    replica = load.replica
    present = replica._input
    before = replica.memory.download(present)
    load.stage()
    assert replica._input is not present
    assert not replica.memory.download(replica._input).any()
    with replica.load_stream():
        replica.unpack_staged_batch()
    np.testing.assert_array_equal(replica.memory.download(replica._input), before)
    np.testing.assert_array_equal(replica.memory.download(present), before)
    assert before.any()
