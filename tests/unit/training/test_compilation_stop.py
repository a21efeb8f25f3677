"""Starts of a run that a signal ends while kernels are compiled."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from dptrain.backends.base import Backend
from dptrain.errors import UserError
from dptrain.training import compilation_stop


def test_the_second_fruitless_start_in_a_row_is_refused(tmp_path: Path) -> None:
    def stop(is_fruitless: bool) -> None:
        compilation_stop._refuse_fruitless_starts(tmp_path, is_fruitless=is_fruitless)

    for is_fruitless in (True, False, True, False, False):
        stop(is_fruitless)
    stop(True)
    with pytest.raises(UserError, match=r"neither completed one.*--time=60"):
        stop(True)
    stop(True)  # Whoever starts again has changed something.


class Compiling:
    """A backend that completes its first of two kernels when it is asked the third time."""

    def __init__(self) -> None:
        self.calls = 0

    def compilation_progress(self) -> tuple[int, int]:
        self.calls += 1
        return int(self.calls > 2), 2


def test_a_start_without_a_kernel_waits_for_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    compiling = Compiling()
    backend = cast("Backend", compiling)
    compilation_stop._wait_for_first_kernel(backend)
    assert compiling.calls == 3
    compilation_stop._wait_for_first_kernel(backend)
    assert compiling.calls == 4
    compiling.calls = 0
    monkeypatch.setattr(compilation_stop, "FIRST_S", 0.0)
    compilation_stop._wait_for_first_kernel(backend)
    assert compiling.calls == 1
