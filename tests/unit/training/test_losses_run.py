"""How the experiments of `dptrain profile --losses` use counters, and how they wait."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.measure import losses as measure
from dptrain.measure.counters import NO_CYCLES
from dptrain.training import losses


@pytest.mark.parametrize("name", [measure.ALONE, measure.UNSUMMED])
def test_cycles_of_a_counter_that_never_ran_are_missing(name: str) -> None:
    # Other ranks than 0 make no steps in the experiment `ALONE`.
    times = {
        f"{measure.CYCLES} {measure.ALONE}": np.array([[5.0, 0.0], [6.0, 0.0]]),
        f"{measure.CYCLES} {measure.UNSUMMED}": np.full((2, 2), 4.0),
    }
    assert not losses._missing_cycles(times)
    times[f"{measure.CYCLES} {name}"][1, 0] = 0
    assert losses._missing_cycles(times) == NO_CYCLES
