"""Unit tests need no GPU: `cuda` and `cudnn` compute on the emulator, cuDNN by a stand-in."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial

import pytest

from dptrain.report.elements import canvas
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
def young_objects(frozen_tests: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trainers search only new objects: those of PyTorch take longer than training."""
    monkeypatch.setattr("dptrain.training.trainer.gc.collect", partial(gc.collect, 1))


@pytest.fixture(scope="module", autouse=True)
def small_pictures() -> Iterator[None]:
    """Draw PNG files of few pixels, which saves 40% of the time of a plot."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(canvas, "PNG_DPI", 30)
        yield
