"""Coverage of the intervals of the time to accuracy, which is known to an epoch."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.measure.profile.profile import Profile
from dptrain.scaling.accuracy import Training, find_time_to_accuracy
from dptrain.scaling.points import Measured
from tests.unit.scaling.synthetic import Law, make_profile

TRIALS = 400


def launches(profile: Profile, epochs: np.ndarray, epoch_s: float) -> list[Measured]:
    """Launches that reach the accuracy after so many epochs, evaluated after whole ones."""
    ranks = profile.job["ranks"]
    found = []
    for k, reached in enumerate(np.ceil(epochs).tolist()):
        training = Training(0.9, reached, int(1000 * reached), reached * epoch_s)
        found.append(Measured(f"launches/weak-r{ranks}-t1-{k + 1}", k, profile, training))
    return found


@pytest.mark.parametrize("epochs", [2.5, 4.1, 12.0])
@pytest.mark.parametrize("spread", [0.02, 0.3])
def test_intervals_contain_the_mean_time(epochs: float, spread: float) -> None:
    random = np.random.default_rng(7)
    one, two = (make_profile(Law(), ranks=ranks, batch_size=32 * ranks) for ranks in (1, 2))
    held = np.zeros(3)
    for _ in range(TRIALS):
        # The seed of a round has the same effect on both.
        common = spread * random.standard_normal(5)
        base = epochs * np.exp(common + spread * random.standard_normal(5))
        own = 1.3 * epochs * np.exp(common + spread * random.standard_normal(5))
        found = find_time_to_accuracy(launches(two, own, 1.0), launches(one, base, 2.0))
        assert found is not None
        assert found.epochs is not None
        assert found.time_s is not None
        assert found.speed_up is not None
        mean = 1.3 * epochs
        truths = mean, mean, 2 / 1.3
        estimates = found.epochs, found.time_s, found.speed_up
        held += [e.low <= truth <= e.high for e, truth in zip(estimates, truths, strict=True)]
    assert (held >= 0.93 * TRIALS).all()


def test_a_base_that_does_not_reach_the_accuracy_gives_no_speed_up() -> None:
    profile = make_profile(Law(), ranks=2, batch_size=64)
    own = launches(profile, np.full(3, 2.0), 1.0)
    never = [Measured(m.folder, m.order, profile, Training(0.9, None, None, None)) for m in own]
    found = find_time_to_accuracy(own, never)
    assert found is not None
    assert found.time_s is not None
    assert found.speed_up is None
    unreached = find_time_to_accuracy([*own[:2], never[2]], own)
    assert unreached is not None
    assert (unreached.reached, unreached.trainings, unreached.time_s) == (2, 3, None)
    untrained = [Measured(m.folder, m.order, profile) for m in own]
    assert find_time_to_accuracy(untrained, own) is None
