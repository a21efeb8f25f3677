"""The algorithms of convolutions on a GPU that a test selects from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from dptrain.backends.cuda.convolution import algorithms
from dptrain.backends.cuda.convolution.algorithms import Product
from dptrain.backends.cuda.convolution.bound_convolution import Case

FEW, FEW_GRADIENT, GATHER, HALO, HALO_GRADIENT, WGMMA = (
    row.name for row in algorithms.CONVOLUTION
)  # fmt: skip


def change(monkeypatch: pytest.MonkeyPatch, function: Callable[[Product], Product | None]) -> None:
    """Replace each row of the table by another one, or leave it out."""
    rows = (function(row) for row in algorithms.CONVOLUTION)
    monkeypatch.setattr(algorithms, "CONVOLUTION", tuple(row for row in rows if row is not None))


def exclude(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Leave out some algorithms."""
    change(monkeypatch, lambda row: None if row.name in names else row)


def prefer(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Select some algorithms for every case that they support."""

    def preferred(row: Product) -> Product:
        def estimate(case: Case) -> list[tuple[float, Any]]:
            found = row.estimate(case)
            least = min((time for time, _ in found), default=0.0)
            return [(time - least - 1.0, configuration) for time, configuration in found]

        return replace(row, estimate=estimate) if row.name in names else row

    change(monkeypatch, preferred)


def best(ranked: Iterable[tuple[float, Any]]) -> Any:
    """Return the configuration with the lowest estimate; None if there is none."""
    return min(ranked, key=lambda pair: pair[0], default=(0.0, None))[1]
