"""Starts of a run that a signal ends while kernels are compiled."""

from __future__ import annotations

from pathlib import Path

import pytest

from dptrain.errors import UserError
from dptrain.training import compilation_stop


def test_the_second_fruitless_start_in_a_row_is_refused(tmp_path: Path) -> None:
    def stop(done: int) -> None:
        compilation_stop._refuse_fruitless_starts(tmp_path, done)

    for done in (0, 3, 0, 1, 2):
        stop(done)
    stop(0)
    with pytest.raises(UserError, match=r"neither completed one.*--time=60"):
        stop(0)
    stop(0)  # Whoever starts again has changed something.
