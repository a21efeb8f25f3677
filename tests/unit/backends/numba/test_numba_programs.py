"""Programs: all launches of a step in one native call."""

from __future__ import annotations

import time

import numpy as np
import pytest

from dptrain import make_replica
from dptrain.backends.numba.programs import Program, StageKernel
from dptrain.backends.replica import Context, Replica
from dptrain.batch import Batch
from dptrain.native.jit import KernelError, kernel
from dptrain.native.threads import ThreadPool
from dptrain.network import Conv2d, Dense, Dropout, Flatten, MaxPool2d, Network, ReLU

NETWORK = Network(
    (2, 8, 8),
    [
        Conv2d(4), ReLU(), MaxPool2d(2), Dropout(0.3), Flatten(), Dense(12), ReLU(), Dropout(0.5),
        Dense(3),
    ],
)  # fmt: skip


def make(**settings: bool) -> Replica:
    return make_replica(NETWORK, batch_size=9, seed=2, threads=2, backend="numba", **settings)


def batch(n: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(n)
    return random.normal(size=(n, 2, 8, 8)).astype(np.float32), random.integers(0, 3, n)


def test_a_program_computes_what_its_stages_compute() -> None:
    """With changing numbers of samples, and stages that also run alone and in other programs."""
    program, stages = make(), make()
    for n in (9, 4, 4, 9, 1, 9):
        x, y = batch(n)
        for replica in (program, stages):
            replica.load(Batch.of(x, y))
        program.run()
        stages.run(listener=lambda stage: None)
        assert program.flat_gradients.tobytes() == stages.flat_gradients.tobytes()
        for replica in (program, stages):
            replica.update(0.1)
        assert program.evaluate(*batch(7)) == stages.evaluate(*batch(7))
        program.load(Batch.of(*batch(2)))
        for _, stage in program.stages:
            stage(program.context)
    assert program.flat_parameters.tobytes() == stages.flat_parameters.tobytes()


def test_forward_loads_all_samples_after_another_number_was_loaded() -> None:
    replica = make()
    replica.forward(batch(7)[0])
    replica.forward_backward(*batch(3))
    x = batch(7)[0] + 1
    found = replica.forward(x)
    np.testing.assert_allclose(found, make().forward(x), rtol=1e-6)


def test_dropout_applies_in_training_only() -> None:
    replica = make()
    x, _ = batch(5)
    outputs = [replica.forward(x) for _ in range(2)]
    inference = make(training=False)
    inference.flat_parameters[:] = replica.flat_parameters
    np.testing.assert_array_equal(outputs[0], outputs[1])
    np.testing.assert_array_equal(outputs[0], inference.forward(x))


def test_the_ends_of_stages_are_on_the_clock_of_the_recorder() -> None:
    replica = make()
    replica.load(Batch.of(*batch(9)))
    begin = time.perf_counter_ns()
    ends = replica.run_timed()()
    end = time.perf_counter_ns()
    assert len(ends) == len(replica.stages)
    assert [begin, *ends, end] == sorted([begin, *ends, end])
    assert begin < ends[0]


def test_replaced_stages_are_run_one_by_one() -> None:
    replica, ran = make(), []

    def counting(name: str, stage: StageKernel) -> object:
        def run(context: Context) -> None:
            ran.append(name)
            stage(context)

        return run

    replica.stages = [(s, counting(s.name, kernel)) for s, kernel in replica.stages]
    replica.load(Batch.of(*batch(3)))
    replica.run()
    names = [stage.name for stage, _ in replica.stages]
    assert ran == names
    assert len(replica.run_timed()()) == len(names)
    assert ran == 2 * names


@kernel
def fail_at_seven(items, values):  # type: ignore[no-untyped-def]
    for i in range(items.start, items.stop):
        values[i] = i
        if i == 7:
            raise ValueError


def test_a_failing_kernel_is_named() -> None:
    values = np.full(10, -1)
    launches = [ThreadPool(1).bind(fail_at_seven, values) for _ in range(3)]
    for launch, items in zip(launches, (2, 9, 10), strict=True):
        launch.set(items)
    program = Program([StageKernel((launch,), lambda context: None) for launch in launches])
    with pytest.raises(KernelError, match="kernel fail_at_seven raised an exception"):
        program.run(Context(seed=0))
    assert values.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, -1, -1]
