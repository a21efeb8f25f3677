"""Ranks with unequal shares: they train to the result of one rank, and shares follow speeds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dptrain import Trainer
from dptrain.comm.signals import StopRequest
from dptrain.comm.sums import peer
from dptrain.comm.world import AgreedError, World
from dptrain.measure.machine.energy import EnergyMeter
from dptrain.measure.recorder import StepRecorder
from dptrain.network import BatchNorm2d, Conv2d, Dense, Flatten, MaxPool2d, Network, ReLU, Sigmoid
from dptrain.plan.measured_shares import MeasuredShares
from dptrain.plan.shares import Counts, equal_counts
from dptrain.training import balance
from dptrain.training.balance import Balancer, Shares
from dptrain.training.callbacks import AfterStep, Callback
from dptrain.training.engines import alone as alone_engines
from dptrain.training.profiling import energy
from tests.ranks.test_peer import Device
from tests.tiers import tiered

pytestmark = pytest.mark.mpi

NETWORK = Network((6,), [Dense(17), Sigmoid(), Dense(9), Sigmoid(), Dense(3)])
NORMALIZED = Network(
    (2, 6, 6), [Conv2d(3), BatchNorm2d(), ReLU(), MaxPool2d(2), Flatten(), Dense(3)]
)
BATCH, STEPS = 12, 42
OPTIONS: dict[str, Any] = {
    "batch_size": BATCH, "steps": STEPS, "momentum": 0.9, "learning_rate": 0.05, "threads": 1,
    "schedule": "constant", "seed": 3, "validation": 0.0,
}  # fmt: skip


def _data(network: Network, count: int = 41) -> tuple[Any, ...]:
    """Samples whose last minibatch of an epoch is smaller."""
    random = np.random.default_rng(5)
    x = random.normal(size=(count, *network.input_shape)).astype(np.float32)
    y = random.integers(0, 3, size=count)
    return x, y, x[:8], y[:8]


def _trained(world: World, network: Network = NETWORK, **settings: Any) -> Trainer:
    options = {**OPTIONS, **settings}
    callbacks = options.pop("callbacks", ())
    trainer = Trainer(
        network, _data(network), world=world, progress=False, callbacks=callbacks, **options
    )
    trainer.fit()
    return trainer


def _parameters(trainer: Trainer) -> np.ndarray:
    trainer.job.world.barrier()  # Another rank may own the shared parameters.
    return np.concatenate([values.reshape(-1) for values in trainer.parameters.values()])


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace measured shares by those of a list, one after another."""

    def use(shares: Sequence[Counts]) -> None:
        left = iter(shares)

        def next_shares(self: Balancer, step: int) -> Shares | None:
            self.due = step + 9
            counts = next(left, None)
            return None if counts is None else Shares(counts)

        monkeypatch.setattr(Balancer, "next_shares", next_shares)

    return use


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace the times that this rank measures by those of a known speed; blocks are steps."""

    def use(sample_ms: Callable[[], float]) -> None:
        measured = StepRecorder.busy_times

        def busy_times(self: StepRecorder, first: int, *, only_timed: bool) -> Any:
            rows = measured(self, first, only_timed=only_timed)
            rows[:, 1] = rows[:, 0] * (1e6 * sample_ms())
            return rows

        monkeypatch.setattr(StepRecorder, "busy_times", busy_times)
        monkeypatch.setattr(balance, "WINDOW_S", 0.0)

    return use


def _changes(total: int, ranks: int, least: int = 0) -> list[Counts]:
    """Shares that end with equal ones; without a least one, the last and the first rank are alone.

    Each rank has a part in the first ones, which are as unequal as possible.
    """
    first = (total - ranks + 1, *(1 for _ in range(ranks - 1)))
    single = [] if least else [(total, *(0,) * (ranks - 1)), (*(0,) * (ranks - 1), total)]
    return [first, *single, first[::-1], equal_counts(total, ranks)]


@pytest.mark.parametrize(
    ("transport", "network"),
    [
        pytest.param("auto", NORMALIZED, id="auto-normalised"),
        pytest.param("auto", NETWORK, id="auto-dense", marks=pytest.mark.more),
        pytest.param("mpi", NORMALIZED, id="mpi-normalised", marks=pytest.mark.more),
    ],
)
def test_any_shares_train_to_the_result_of_one_rank(
    connected: World, scripted: Any, transport: str, network: Network
) -> None:
    numeric = {"backend": "reference", "precision": "fp64"}
    expected = _trained(World.single(), network, **numeric)
    scripted(_changes(BATCH, connected.size))
    samples = []

    def count(trainer: Trainer, result: Any) -> None:
        own = np.array([trainer.job.recorder.busy_times(0, only_timed=False)[-1, 0]], float)
        connected.all_reduce(own)
        samples.append((result.step, result.samples, own[0]))

    trainer = _trained(
        connected, network, balance="measured", transport=transport, callbacks=[AfterStep(count)],
        **numeric,
    )  # fmt: skip
    # Only the order of additions differs; see `test_equals_one_rank`. Seen: 1e-15.
    found, wanted = _parameters(trainer), _parameters(expected)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-11 * np.abs(wanted).max())
    losses = trainer.history["train_loss"], expected.history["train_loss"]
    np.testing.assert_allclose(*losses, rtol=1e-11)
    assert [step for step, _, _ in samples] == list(range(STEPS))
    assert all(own == BATCH for _, size, own in samples if size == BATCH)
    if connected.size > 1:
        assert trainer.job.shares.counts == equal_counts(BATCH, connected.size)


@pytest.mark.parametrize(
    ("transport", "backend"),
    tiered(
        [("auto", "numba"), ("auto", "reference"), ("mpi", "reference")], [("auto", "reference")]
    ),
)
def test_with_micro_shards_any_shares_compute_the_same_bits(
    connected: World, scripted: Any, transport: str, backend: str
) -> None:
    expected = _trained(World.single(), NORMALIZED, shards=8, backend=backend)
    scripted(_changes(8, connected.size, least=1))
    trainer = _trained(
        connected, NORMALIZED, shards=8, balance="measured", transport=transport, backend=backend
    )
    np.testing.assert_array_equal(_parameters(trainer), _parameters(expected))
    assert trainer.history["train_loss"] == expected.history["train_loss"]
    for name, values in expected.statistics.items():
        np.testing.assert_array_equal(trainer.statistics[name], values)


def _num_segments() -> int:
    """Return how many segments of shared memory this process has."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:dptrain" in line for line in lines)


@pytest.mark.more
def test_replicas_of_former_shares_are_released(connected: World, scripted: Any) -> None:
    if connected.size == 1:
        pytest.skip("one rank shares no memory")
    numbers: list[int] = []

    class Count(Callback):
        def on_shares(self, trainer: Trainer) -> None:
            numbers.append(_num_segments())

    scripted(_changes(8, connected.size, least=1))
    _trained(connected, shards=8, balance="measured", callbacks=[Count()])
    assert len(numbers) == 4
    assert numbers[1:] == numbers[:1] * 3


@pytest.mark.more
def test_engines_of_former_calls_of_fit_are_released(connected: World) -> None:
    if connected.size == 1:
        pytest.skip("one rank shares no memory")
    numbers, stop = list[int](), StopRequest()

    def note(trainer: Trainer, result: Any) -> None:
        numbers.append(_num_segments())
        stop._receive(15, None)

    trainer = Trainer(
        NORMALIZED, _data(NORMALIZED), world=connected, progress=False,
        callbacks=[AfterStep(note)], **OPTIONS,
    )  # fmt: skip
    for _ in range(4):
        stop = StopRequest()
        trainer.fit(stop=stop)
    assert set(numbers) == {2}, "parameters, and sums of statistics"


@pytest.mark.more
@pytest.mark.parametrize("shards", tiered([0, 8], [0]))
def test_shares_follow_the_speeds(connected: World, paced: Any, shards: int) -> None:
    """Rank 0 takes a third of the time of the others for a sample."""
    if connected.size == 1:
        pytest.skip("one rank has all samples")
    paced(lambda: 3.0 if connected.is_rank_zero else 9.0)
    made: list[Counts] = []
    _trained(
        connected, backend="reference", balance="measured", shards=shards, batch_size=24, steps=60,
        callbacks=[AfterStep(lambda trainer, _: made.append(trainer.job.shares.counts))],
    )  # fmt: skip
    total = shards or 24
    assert all(sum(counts) == total for counts in made)
    # On a busy machine, equal shares may have come back at the end to compare the ranks again.
    assert any(
        abs(counts[0] - total * 3 / (2 + connected.size)) < 1.5
        and max(counts[1:]) - min(counts[1:]) <= 1
        for counts in made
    )


def _note_counts(counts: list[Counts]) -> Callback:
    return AfterStep(lambda trainer, _: counts.append(trainer.job.shares.counts))


@pytest.mark.more
def test_ranks_that_are_much_slower_have_no_sample_if_steps_are_faster(
    connected: World, paced: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if connected.size == 1:
        pytest.skip("one rank has all samples")
    last, counts = connected.size - 1, list[Counts]()
    add_block = MeasuredShares.add_block

    def faster_without(self: MeasuredShares, times: Sequence[float], *_: float) -> Counts:
        return add_block(self, times, 1.0 if min(self.counts) else 0.5)

    monkeypatch.setattr(MeasuredShares, "add_block", faster_without)
    paced(lambda: 0.01 if connected.rank == last else 50.0)
    trainer = _trained(
        connected, backend="reference", balance="measured", steps=42,
        callbacks=[_note_counts(counts)],
    )  # fmt: skip
    connected.check_equal(_parameters(trainer), "parameters")
    assert (*(1,) * last, BATCH - last) in counts
    assert (*(0,) * last, BATCH) in counts


@pytest.mark.more
def test_a_rank_keeps_a_micro_shard(connected: World, paced: Any) -> None:
    if connected.size == 1:
        pytest.skip("one rank has all samples")
    last, counts = connected.size - 1, list[Counts]()
    paced(lambda: 0.01 if connected.rank == last else 50.0)
    _trained(
        connected, backend="reference", balance="measured", shards=8,
        callbacks=[_note_counts(counts)],
    )  # fmt: skip
    assert min(min(found) for found in counts) == 1


@pytest.mark.more
def test_a_rank_that_becomes_faster_has_its_share_again(connected: World, paced: Any) -> None:
    if connected.size == 1:
        pytest.skip("one rank has all samples")
    last, counts = connected.size - 1, list[Counts]()
    paced(lambda: 50.0 if connected.rank != last and len(counts) < 20 else 0.5)
    _trained(
        connected, backend="reference", balance="measured", steps=120,
        callbacks=[_note_counts(counts)],
    )  # fmt: skip
    assert (*(1,) * last, BATCH - last) in counts
    assert counts[-1] == equal_counts(BATCH, connected.size)


@pytest.mark.more
def test_fewer_samples_than_ranks(connected: World) -> None:
    """The last ranks have no part, and the second one has a part but no sample."""
    x, y = _data(NETWORK, 1)[:2]
    options = {**OPTIONS, "batch_size": 2}
    trainer = Trainer(
        NETWORK, (x, y, x, y), world=connected, progress=False, balance="measured", **options
    )
    trainer.fit()
    assert sum(trainer.job.shares.counts) == (2 if connected.size > 1 else 0)


@pytest.mark.more
def test_more_parts_than_samples(connected: World) -> None:
    """The last ranks have no sample, so they have measured no speed."""
    network, count = NETWORK, 5
    x, y = _data(network, count)[:2]
    trainer = Trainer(
        network, (x, y, x, y), world=connected, progress=False, balance="measured", shards=12,
        **OPTIONS,
    )  # fmt: skip
    trainer.fit()
    assert sum(trainer.job.shares.counts) == (12 if connected.size > 1 else 0)


def _only_last(ranks: int) -> str:
    return ",".join(["0"] * (ranks - 1) + ["1"])


@pytest.mark.parametrize("every_s", tiered([0.0, 100.0], [0.0]))
def test_a_rank_with_all_samples_computes_the_bits_of_one_rank(
    connected: World, monkeypatch: pytest.MonkeyPatch, every_s: float
) -> None:
    monkeypatch.setattr(alone_engines, "REPORT_EVERY_S", every_s)
    steps: list[int] = []
    expected = _trained(World.single(), NORMALIZED)
    trainer = _trained(
        connected, NORMALIZED, balance=_only_last(connected.size),
        callbacks=[AfterStep(lambda trainer, result: steps.append(result.step), every=7)],
    )  # fmt: skip
    np.testing.assert_array_equal(_parameters(trainer), _parameters(expected))
    assert trainer.history["train_loss"] == expected.history["train_loss"]
    assert steps == list(range(6, STEPS, 7))
    assert trainer.job.recorder.steps == STEPS
    for name, values in expected.statistics.items():
        np.testing.assert_array_equal(trainer.statistics[name], values)


@pytest.mark.more
def test_parameters_do_not_change_while_ranks_without_samples_read_them(connected: World) -> None:
    changes: list[float] = []

    def read(trainer: Trainer, result: Any) -> None:
        before = trainer.parameters["dense1.weight"]
        time.sleep(0.0 if connected.rank == connected.size - 1 else 0.05)
        changes.append(np.abs(trainer.parameters["dense1.weight"] - before).max())

    _trained(connected, balance=_only_last(connected.size), callbacks=[AfterStep(read, every=7)])
    assert changes == [0.0] * (STEPS // 7)


@pytest.mark.more
def test_energy_is_not_measured_on_ranks_that_do_not_know_when_steps_end(
    connected: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counter:
        name = "counter"

        def joules(self) -> float:
            return 1.0

    monkeypatch.setattr(energy, "open_job_meter", lambda job, gpu: EnergyMeter([Counter()]))
    trainer = _trained(connected, balance=_only_last(connected.size))
    meter, is_last = trainer.job.meter, connected.rank == connected.size - 1
    assert meter.names == (["counter"] if is_last else [])
    assert bool(meter.readings) is is_last
    assert meter.missing == ([] if is_last else [energy.LATE])


@pytest.mark.parametrize("rank", tiered([0, -1], [-1]))
def test_any_rank_can_stop_the_rank_with_all_samples(
    connected: World, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setattr(alone_engines, "REPORT_EVERY_S", 0.0)
    trainer = Trainer(
        NETWORK, _data(NETWORK), world=connected, progress=False,
        balance=_only_last(connected.size), **OPTIONS,
    )  # fmt: skip
    stop = StopRequest()
    if connected.rank == rank % connected.size:
        stop._receive(15, None)
    trainer.fit(stop=stop)
    assert trainer.progress.stopped
    # The rank with the samples receives a request with the report after a step.
    steps = connected.all_gather_json(trainer.step)
    assert steps == [steps[0]] * connected.size
    assert steps[0] <= 2


def test_a_loss_that_is_not_finite_ends_all_ranks(connected: World) -> None:
    with pytest.raises(AgreedError, match="training diverged"):
        _trained(
            connected, Network((6,), [Dense(9), ReLU(), Dense(3)]), learning_rate=1e30,
            balance=_only_last(connected.size),
        )  # fmt: skip


@pytest.mark.parametrize("shares", tiered(["2,1", "1,0"], ["2,1"]))
def test_different_backends_train_to_the_result_of_one_rank(
    connected: World, shares: str, scripted: Any
) -> None:
    ranks = connected.size
    if ranks == 1:
        pytest.skip("one rank has one backend")
    numeric = {"precision": "fp32", "steps": 30}
    expected = _trained(World.single(), **numeric)
    trainer = _trained(
        connected, balance=",".join([shares, *["1"] * (ranks - 2)]),
        backend="numba" if connected.rank % 2 else "reference", **numeric,
    )  # fmt: skip
    found, wanted = _parameters(trainer), _parameters(expected)
    # 30 steps, each counted ten times by momentum 0.9, with errors of a few units of rounding.
    np.testing.assert_allclose(found, wanted, rtol=0, atol=300 * 2.0**-24 * np.abs(wanted).max())
    assert [rank.backend for rank in trainer.spec.ranks][:2] == ["reference", "numba"]
    assert trainer.spec.job.backend == "reference"


@pytest.mark.more
@pytest.mark.parametrize("backends", [("numba", "cuda"), ("cuda", "cuda")], ids=str)
@pytest.mark.parametrize("counts", [(5, 7), (12, 0), (0, 12)], ids=str)
def test_gpus_train_with_any_shares(
    connected: World, monkeypatch: pytest.MonkeyPatch, scripted: Any, counts: Counts,
    backends: tuple[str, str],
) -> None:  # fmt: skip
    if connected.size != 2:
        pytest.skip("two ranks have both backends; more emulated GPUs take long")
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: Device())
    monkeypatch.setattr(peer, "THREADS", 32)
    monkeypatch.setattr(peer, "BLOCKS", 3)
    expected = _trained(World.single(), steps=14)
    scripted([counts])
    backend = backends[connected.rank]
    trainer = _trained(connected, balance="measured", backend=backend, steps=14)
    transport = "peer" if backends[0] == "cuda" else "host"
    assert trainer.spec.job.transport == transport
    assert trainer.job.shares.counts == counts
    found, wanted = _parameters(trainer), _parameters(expected)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.more
@pytest.mark.parametrize("backends", [("numba", "cuda"), ("cuda", "cuda")], ids=str)
def test_gpus_measure_speeds(
    connected: World, monkeypatch: pytest.MonkeyPatch, paced: Any, backends: tuple[str, str]
) -> None:
    """One step of a block is timed stage by stage, because only these separate sums."""
    if connected.size != 2:
        pytest.skip("two ranks have both backends; more emulated GPUs take long")
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda rank: Device())
    monkeypatch.setattr(peer, "THREADS", 32)
    monkeypatch.setattr(peer, "BLOCKS", 3)
    paced(lambda: 1.0 if connected.is_rank_zero else 3.0)
    made: set[Counts] = set()

    def note(trainer: Trainer, _: object) -> None:
        made.add(trainer.job.shares.counts)
        if (9, 3) in made:
            trainer.stop()

    # A window takes 2 s, which are many steps on a fast machine.
    _trained(
        connected, balance="measured", backend=backends[connected.rank], steps=2000,
        callbacks=[AfterStep(note)],
    )  # fmt: skip
    assert made == {(6, 6), (9, 3)}


@pytest.mark.more
def test_a_resumed_run_continues_with_its_shares(
    connected: World, scripted: Any, tmp_path: Path
) -> None:
    ranks, folder = connected.size, connected.broadcast_json(str(tmp_path / "run"))
    counts = _changes(8, ranks, least=1)[0]
    scripted([counts])
    options = {"shards": 8, "balance": "measured"}
    with _trained(connected, steps=20, run_dir=folder, **options) as first:
        assert first.job.shares.counts == (counts if ranks > 1 else ())
    connected.barrier()
    with Trainer.resume(
        folder, _data(NETWORK), world=connected, progress=False, steps=STEPS
    ) as trainer:
        assert trainer.job.shares == first.job.shares
        trainer.fit()
    expected = _trained(World.single(), shards=8)
    np.testing.assert_array_equal(_parameters(trainer), _parameters(expected))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"balance": "1,2,3,4,5"}, "has 5 shares, but the number of ranks is"),
        ({"balance": "measured", "shards": 8}, "--shards 8 needs the same backend"),
        ({"balance": "measured", "strategy": "central"}, "--strategy central needs the same"),
        ({"balance": "measured", "transport": "shared"}, "--transport shared needs the same"),
        ({"balance": "1,1", "accumulate": 2}, "--accumulate 2 divides equal shares into passes"),
        ({"balance": "off"}, "the ranks differ in backend"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    connected: World, settings: dict[str, Any], message: str
) -> None:
    if connected.size == 1:
        pytest.skip("one rank has one backend")
    backend = "numba" if connected.is_rank_zero else "null"
    with pytest.raises(AgreedError, match=message):
        _trained(connected, backend=backend, **settings)


def test_constants_leave_time_to_measure() -> None:
    assert balance.WARM_UP < balance.FIRST_STEPS < balance.MAX_STEPS
