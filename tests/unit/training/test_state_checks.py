"""Checks of the state: who is named, and what a single rank finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dptrain.backends.digests import Tensor
from dptrain.training.callbacks import AfterStep
from dptrain.training.digests.differences import difference_text, find_difference
from dptrain.training.digests.guard import CorruptedSliceError
from dptrain.training.persistence.rundir import RunDirectory
from dptrain.training.spec import RankSpec
from dptrain.training.trainer import Trainer

TENSORS = [Tensor("parameters", "fc.weight"), Tensor("momentum", "fc.weight")]


def ranks(count: int) -> list[RankSpec]:
    return [RankSpec(r, f"node{r}", "EPYC", "cpu", "numba", "fp32", 1, 1) for r in range(count)]


@pytest.mark.parametrize(
    ("digests", "named", "is_minority"),
    [
        ([[1, 2], [1, 2]], None, False),
        ([[1, 2], [1, 3]], (0, 1), False),
        ([[1, 2], [1, 3], [1, 2]], (1,), True),
        ([[5, 2], [1, 2], [1, 7], [1, 2], [1, 2]], (0, 2), True),
        ([[5, 2], [1, 7], [1, 2]], (0, 1), True),
        ([[1, 2], [1, 2], [1, 3], [1, 3]], (0, 1, 2, 3), False),
        ([[1, 2], [1, 3], [1, 4]], (0, 1, 2), False),
    ],
)
def test_the_minority_is_named(
    digests: list[list[int]], named: tuple[int, ...] | None, is_minority: bool
) -> None:
    replicas: dict[tuple[int, ...], NDArray[np.uint64]] = {
        (r,): np.array(each, np.uint64) for r, each in enumerate(digests)
    }
    found = find_difference(TENSORS, replicas)
    if named is None:
        assert found is None
        return
    assert found is not None
    assert (found.ranks, found.is_minority) == (named, is_minority)
    text = difference_text(found, ranks(len(digests)), "after step 300")
    assert "\n" not in text
    assert "after step 300" in text
    for rank in range(len(digests)):
        assert (f"rank {rank} on node{rank} (EPYC)" in text) == (rank in named)


def trainer(every: int, callback: AfterStep, run_dir: Path | None = None) -> Trainer:
    kept: dict[str, Any] = {} if run_dir is None else {"run_dir": run_dir, "checkpoint_every": 2}
    return Trainer(
        "mlp-5", "irradiance?samples=64", batch_size=16, steps=8, digest_every=every, threads=1,
        progress=False, callbacks=[callback], backend="reference", optimizer="sgd", momentum=0.9,
        **kept,
    )  # fmt: skip


def flip(trainer: Trainer, array: str, element: int, bit: int) -> None:
    arrays = trainer.job.replica.arrays
    flat = arrays.parameters if array == "parameters" else arrays.state[array]
    flat.view(np.uint32)[element] ^= np.uint32(1 << bit)


@pytest.mark.parametrize("array", ["parameters", "momentum"])
@pytest.mark.parametrize("bit", [0, 31])
def test_one_rank_finds_a_flipped_bit_before_the_next_update(
    array: str, bit: int, tmp_path: Path
) -> None:
    def change(trainer: Trainer, result: object) -> None:
        if trainer.step == 5:
            flip(trainer, array, 3, bit)

    run = tmp_path / "run"
    with trainer(1, AfterStep(change), run) as trained:
        last = trained.job.plan.layout.slots[0].name
        named = rf"{last} \({array}\).* step 5 .*train --resume {run} continues after step 4;"
        with pytest.raises(CorruptedSliceError, match=named) as caught:
            trained.fit()
    assert json.loads((run / "failure.json").read_text())["message"] == str(caught.value)
    assert RunDirectory.open(run).checkpoints.load().step == 4


def test_undisturbed_state_and_assigned_parameters_raise_no_alarm() -> None:
    def assign(trainer: Trainer, result: object) -> None:
        if trainer.step % 2:
            name = next(iter(trainer.parameters))
            trainer.job.replica.parameters[name] = 0.5 * trainer.parameters[name]

    trained = trainer(1, AfterStep(assign))
    trained.fit()
    assert trained.step == 8


def test_nothing_is_checked_without_the_setting() -> None:
    trained = trainer(0, AfterStep(lambda trainer, result: flip(trainer, "parameters", 3, 2)))
    trained.fit()
    assert trained.step == 8
