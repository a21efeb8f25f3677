"""Unit tests need no GPU: `cuda` and `cudnn` compute on the emulator, cuDNN by a stand-in."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from dptrain.report.elements import canvas
from tests.emulator.emulator import Emulator
from tests.emulator.fake_cudnn import Module
from tests.emulator.fake_cudnn_functions import Functions
from tests.run import QUICK
from tests.unit import examples

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


@pytest.fixture(scope="module", autouse=True)
def small_pictures() -> Iterator[None]:
    """Leave out the pixels of PNG files, which saves half of the time of a plot.

    The SVG of the same drawing is complete.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(canvas, "_png", empty_picture)
        yield


def empty_picture(figure: Figure, title: str) -> bytes:
    """Return an empty PNG file with the proportions and the facts of a plot."""
    facts, buffer = PngInfo(), io.BytesIO()
    facts.add_text("Software", "dptrain report")
    facts.add_text("Title", title)
    size = tuple(round(30 * inches) for inches in figure.get_size_inches())
    Image.new("RGB", size).save(buffer, format="PNG", pnginfo=facts)
    return buffer.getvalue()
