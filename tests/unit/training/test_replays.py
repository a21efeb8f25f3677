"""Steps that are computed twice: by whom, and what a single rank finds before an update."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain import CorruptedError, DivergedError, Trainer, UserError
from dptrain.network import BatchNorm2d, Conv2d, Dense, Dropout, Flatten, Network, ReLU
from dptrain.training.callbacks import AfterStep
from dptrain.training.digests.replay import draw_checkers

NETWORK = Network(
    (2, 6, 6),
    [Conv2d(3), BatchNorm2d(), ReLU(), Dropout(0.3), Conv2d(4), Flatten(), Dense(3)],
)
WITHOUT_STATISTICS = Network((2, 6, 6), [Conv2d(3), ReLU(), Flatten(), Dense(3)])

AT = 3
"""Step after which a bit is flipped, in a replay of the next one."""


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=9), st.integers(0, 2**40))
def test_every_part_is_computed_again_on_the_same_hardware(ranks: list[str], step: int) -> None:
    checkers = draw_checkers(7, step, ranks)
    assert sorted(checkers) == list(range(len(ranks)))
    for rank, checker in enumerate(checkers):
        assert ranks[checker] == ranks[rank]
        assert (checker == rank) == (ranks.count(ranks[rank]) == 1)
    assert draw_checkers(7, step, ranks) == checkers


def test_every_other_rank_is_a_checker_at_times() -> None:
    drawn = [draw_checkers(7, step, ["a"] * 5)[0] for step in range(400)]
    counts = np.bincount(drawn, minlength=5)
    # Four numbers that occur with a probability of 1/4 each: 100 ± 5 standard deviations.
    assert counts[0] == 0
    assert (abs(counts[1:] - 100) < 5 * (400 * 3 / 16) ** 0.5).all()


def trainer(callback: AfterStep | None = None, **settings: Any) -> Trainer:
    random = np.random.default_rng(1)
    x = random.standard_normal((40, 2, 6, 6)).astype(np.float32)
    given: dict[str, Any] = {
        "network": NETWORK,
        "batch_size": 10, "shards": 4, "steps": 6, "replay_every": 2, "backend": "reference",
        "baseline_steps": 0, "validation": 0.0, "schedule": "constant", **settings,
    }  # fmt: skip
    data = x, random.integers(0, 3, 40)
    return Trainer(
        data=data, threads=1, progress=False, callbacks=[callback] if callback else [], **given
    )


def parameters(trained: Trainer) -> bytes:
    return np.concatenate([each.reshape(-1) for each in trained.parameters.values()]).tobytes()


def flipping(array: str, element: int, bit: int, stage: str) -> AfterStep:
    """Return a callback that flips a bit after a stage of the step that follows step `AT`."""

    def after_step(trained: Trainer, result: object) -> None:
        if trained.step == AT:
            cast("Any", trained.job.engine)._run = lambda: run(trained)

    def run(trained: Trainer) -> None:
        replica = trained.job.replica
        for each, kernel in replica.stages:
            kernel(replica.context)
            if each.name == stage:
                flat = replica._views[array] if array else replica.gradient_slots
                flat.reshape(-1).view(np.uint64)[element] ^= np.uint64(1 << bit)
        del cast("Any", trained.job.engine)._run

    return AfterStep(after_step)


@pytest.mark.parametrize(
    ("array", "stage", "named"),
    [
        ("", "conv1.backward_weight", "dense1.weight \\(gradient\\) of rank 0 "),
        ("conv1", "conv1.forward", " more of rank 0 "),
        ("conv2", "conv2.forward", "dense1.weight \\(gradient\\)"),
        ("ddropout1", "conv2.backward_input", "conv1.weight \\(gradient\\)"),
    ],
)
@pytest.mark.parametrize("bit", [40, 52])
def test_a_flipped_bit_is_found_before_the_update(
    array: str, stage: str, named: str, bit: int
) -> None:
    trained, whole = trainer(flipping(array, 1, bit, stage)), trainer(steps=AT)
    whole.fit()
    with pytest.raises(CorruptedError, match=f"before the update of step {AT + 1}, .*{named}"):
        trained.fit()
    assert parameters(trained) == parameters(whole)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"backend": "numba", "recompute": True},
        {"batch_size": 7, "shards": 5},
        {"batch_size": 9, "shards": 8},  # The last minibatch has 4 samples.
        {"clip_norm": 0.1, "freeze": "conv1", "mixup": 0.5, "class_weights": "balanced"},
        {"network": WITHOUT_STATISTICS, "accumulate": 2, "optimizer": "lamb"},
        {"backend": "numba", "average_weights": 0.9, "optimizer": "adam"},
    ],
)
def test_replays_change_nothing(settings: dict[str, Any]) -> None:
    with_replays, without = trainer(**settings), trainer(**{**settings, "replay_every": 0})
    for each in (with_replays, without):
        each.fit()
    assert with_replays.job.memory_bytes["replays"] > 0
    assert without.job.replay is None
    assert parameters(with_replays) == parameters(without)
    for name, values in without.statistics.items():
        np.testing.assert_array_equal(with_replays.statistics[name], values)


def test_replays_need_micro_shards() -> None:
    with pytest.raises(UserError, match="--replay-every is 2, but there are no micro-shards"):
        trainer(shards=0)


def test_a_longer_run_begins_to_replay() -> None:
    trained = trainer(flipping("", 1, 62, "conv1.backward_weight"), steps=1, replay_every=4)
    trained.fit()
    assert trained.job.replay is None
    with pytest.raises(CorruptedError, match=f"of step {AT + 1}, "):
        trained.fit(epochs=1)


@pytest.mark.parametrize("backend", ["numba", "reference"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_loss_that_is_not_finite_is_no_corruption(backend: str) -> None:
    def grow(trained: Trainer, result: object) -> None:
        for name, values in trained.parameters.items():
            trained.job.replica.parameters[name] = values * 1e25

    trained = trainer(AfterStep(grow), backend=backend, replay_every=1)
    with pytest.raises(DivergedError, match="the loss is "):
        trained.fit()
