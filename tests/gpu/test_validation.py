"""Validation during training, whose minibatches a GPU keeps and repeats as one program."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain import Trainer
from dptrain.comm.world import World
from dptrain.network import BatchNorm2d, Conv2d, Dense, Dropout, Flatten, MaxPool2d, Network, ReLU
from dptrain.training.evaluation.evaluation import score

NETWORK = Network(
    (3, 12, 12),
    [Conv2d(16), BatchNorm2d(), ReLU(), MaxPool2d(2), Dropout(0.2), Flatten(), Dense(4)],
    name="pictures",
)


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp32"])
@pytest.mark.parametrize("backend", ["cuda", "cudnn"])
@pytest.mark.parametrize("size", [12, 17])
def test_kept_minibatches_score_as_others(backend: str, precision: str, size: int) -> None:
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (400, 3, size, size), dtype=np.uint8)
    trainer = Trainer(
        NETWORK, (x, np.arange(400) % 4), backend=backend, precision=precision, validation=0.3,
        evaluate_every=1, epochs=6, batch_size=32, progress=False,
    )  # fmt: skip
    trainer.fit()
    job, validation = trainer.job, trainer.data.validation
    assert validation is not None
    assert job.validation_at is not None
    for factor in (1.0, 1.0, 3.0):
        job.replica.parameters["conv1.weight"] = factor * job.replica.parameters["conv1.weight"]
        found = score(job.replica, validation, World.single(), first=job.validation_at)
        assert found == score(job.replica, validation, World.single())
    # Steps between evaluations are those of a run without them.
    other = Trainer(
        NETWORK, (x, np.arange(400) % 4), backend=backend, precision=precision, validation=0.3,
        evaluate_every=0, best_by="none", epochs=6, batch_size=32, progress=False,
    )  # fmt: skip
    other.fit()
    assert other.history[-1]["train_loss"] == trainer.history[-1]["train_loss"]
