"""What a regression says: worse than the mean, and targets of another scale."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dptrain.data.sources.objects import dataset_from
from dptrain.network.files import get_network
from dptrain.training.evaluation.quality import ValueQuality
from dptrain.training.evaluation.regression import LARGE, SMALL, r2_remark, target_warning
from dptrain.training.trainer import Trainer

REMARK = "worse than predicting the mean of the targets"


def test_worse_than_the_mean_is_what_has_larger_errors_than_the_mean() -> None:
    """Random predictions, from perfect to wrong, of one or several outputs."""
    worse = 0
    for seed in range(300):
        random_ = np.random.default_rng(seed)
        shape = random_.integers(2, 50), random_.integers(1, 4)
        expected = random_.normal(random_.normal(), 1, shape)
        predicted = expected + random_.normal(0, 10 ** random_.uniform(-2, 1), expected.shape)
        found = ValueQuality(tuple("abc"), expected, predicted).results()
        is_worse = np.mean((predicted - expected) ** 2) > np.mean(
            (expected - expected.mean(axis=0)) ** 2
        )
        assert (REMARK in r2_remark(found["r2"])) == is_worse, seed
        worse += int(is_worse)
    assert 50 < worse < 250


def dataset(targets: np.ndarray, network: str = "mlp-2") -> Any:
    x = np.zeros((len(targets), 50), np.float32)
    return dataset_from((x, targets.astype(np.float32)), get_network(network))


@pytest.mark.more
def test_the_scale_of_targets_is_that_of_numpy() -> None:
    warned = 0
    for seed in range(200):
        random_ = np.random.default_rng(seed)
        centre, spread = (
            random_.normal() * 10 ** random_.uniform(-3, 3),
            10 ** random_.uniform(-3, 3),
        )
        y = random_.normal(centre, spread, (400, 1))
        # The mean of a sample of targets has an error; only clear cases are compared.
        mean, deviation = y.mean(), y.std()
        text = target_warning(dataset(y))
        if max(abs(mean), deviation) > 1.3 * LARGE or deviation < SMALL / 1.3:
            assert text, seed
            words = text.replace(";", "").split()
            printed = float(words[words.index("deviation") + 2])
            assert printed == pytest.approx(deviation, rel=0.2), seed
            warned += 1
        elif max(abs(mean), deviation) < LARGE / 1.3 and deviation > 1.3 * SMALL:
            assert not text, seed
    assert warned > 50


@pytest.mark.parametrize("y", [np.zeros((9, 1)), np.full((9, 1), np.inf), np.full((9, 1), 5.0)])
def test_targets_without_a_deviation_have_no_warning(y: np.ndarray) -> None:
    from types import SimpleNamespace

    samples: Any = SimpleNamespace(known_targets=lambda: y)
    found: Any = SimpleNamespace(targets="values", train=samples, input_shape=(50,), num_outputs=1)
    assert not target_warning(found)


def test_a_run_prints_both(capsys: pytest.CaptureFixture[str]) -> None:
    x = np.random.default_rng(0).standard_normal((200, 50), dtype=np.float32)
    y = 150 + 77 * x[:, :1]
    trainer = Trainer("mlp-2", (x, y), steps=2, backend="reference", progress=True)
    trainer.fit()
    text = capsys.readouterr().out
    assert "warning: the targets have a mean of 1" in text
    assert REMARK in text
