"""Marks for Nsight: every stage in a range of its name, on every backend, all ranges closed."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from dptrain.comm.world import World
from dptrain.errors import UserError
from dptrain.measure.nvtx import LIBRARIES, load_ranges
from dptrain.training.profiling.profiling import ProfileOptions, profile
from dptrain.training.settings import load_settings


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is told to a stand-in for the package ``nvtx``; "" closes a range."""
    told: list[str] = []
    module = ModuleType("nvtx")
    module.push_range = told.append  # type: ignore[attr-defined]
    module.pop_range = lambda: told.append("")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy.cuda.nvtx", None)
    monkeypatch.setitem(sys.modules, "nvtx", module)
    return told


@pytest.mark.parametrize("backend", ["reference", "cuda"])
def test_stages_have_ranges_of_their_names(backend: str, marks: list[str]) -> None:
    flags = {"network": "mlp-5", "backend": backend, "batch_size": 100}
    options = ProfileOptions(steps=3, skip=1, roofs=False, nvtx=True)
    record = profile(load_settings(flags, {}), World.single(), options, quiet=True)
    assert record is not None
    depth = 0
    for mark in marks:
        depth += 1 if mark else -1
        assert depth >= 0
    assert depth == 0
    opened = [mark for mark in marks if mark]
    names = [stage.name for stage in record.stages]
    # The order of the last step, which on a device is one whose stages are started one by one.
    last = opened[len(opened) - opened[::-1].index("data_wait") :]
    # A device takes a batch in two places: when it comes, and as a part of the step.
    assert list(dict.fromkeys(mark for mark in last if mark in names)) == names
    # One before those that are measured; on a device those that are marked come behind them.
    assert opened.count("data_wait") == (3 if backend == "cuda" else 4)


def test_without_a_library_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, *_ in LIBRARIES:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match="--nvtx requires NVTX, which is missing"):
        load_ranges()
