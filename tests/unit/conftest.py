"""Unit tests need no GPU: the `cuda` backend computes on the emulator."""

from __future__ import annotations

import pytest

from tests.emulator.emulator import Emulator

EMULATOR = Emulator()


@pytest.fixture(autouse=True)
def emulated_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the backend the emulator for a GPU."""
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda local_rank: EMULATOR)
