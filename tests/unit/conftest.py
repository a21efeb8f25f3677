"""Unit tests need no GPU: `cuda` and `cudnn` compute on the emulator, cuDNN by a stand-in."""

from __future__ import annotations

import gc
from functools import partial
from types import SimpleNamespace

import pytest

from tests.emulator.emulator import Emulator
from tests.emulator.fake_cudnn import Module
from tests.emulator.fake_cudnn_functions import Functions
from tests.run import QUICK
from tests.unit import examples

EMULATOR = Emulator()


def pytest_configure(config: pytest.Config) -> None:
    """Let property tests try few examples in the quick tier, and many in the parts."""
    examples.choose_number(quick=config.getoption("markexpr") == QUICK)


@pytest.fixture(autouse=True)
def emulated_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the backends the emulator for a GPU, and the stand-in for cuDNN."""
    monkeypatch.setattr("dptrain.backends.cuda.backend.open_device", lambda local_rank: EMULATOR)
    library = "dptrain.backends.cudnn.library"
    monkeypatch.setattr(f"{library}.load_library", lambda: "libcudnn.so.9")
    monkeypatch.setattr(f"{library}.open_functions", lambda path: Functions())
    monkeypatch.setattr(f"{library}.import_frontend", lambda: Module())


@pytest.fixture(autouse=True)
def young_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trainers search only new objects for unreachable ones.

    To search those of thousands of tests and of PyTorch takes longer than to train.
    """
    young = SimpleNamespace(collect=partial(gc.collect, 1), freeze=gc.freeze, unfreeze=gc.unfreeze)
    monkeypatch.setattr("dptrain.training.trainer.gc", young)
