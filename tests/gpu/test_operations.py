"""Compare every layer, loss and optimizer of the GPU backends with PyTorch, on a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest

from dptrain.backends import load_backend
from dptrain.backends.cuda.gpu import GPU
from tests.unit.backends import test_operations as shared

VARIANTS = ("backend", "precision")
HERE = [(name, p) for name in ("cuda", "cudnn") for p in load_backend(name).precisions]


@pytest.fixture(autouse=True)
def kernels_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not compile or time kernels for each of some hundred layers, a second each."""
    monkeypatch.setattr(GPU, "specializes", False)


def _tests_of_backends() -> Iterator[tuple[str, Callable[..., None]]]:
    """Yield the shared tests with a backend parameter, for the GPU backends only."""
    for name, test in vars(shared).items():
        if name.startswith("test_") and set(VARIANTS) <= set(inspect.signature(test).parameters):
            yield name, _for_gpus(test)


def _for_gpus(test: Any) -> Callable[..., None]:
    copy: Any = FunctionType(test.__code__, test.__globals__, test.__name__)
    copy.pytestmark = [_restricted(mark) for mark in test.pytestmark]
    return copy


def _restricted(mark: pytest.Mark) -> pytest.Mark:
    """Return a mark with those of its parameters whose backend is for GPUs."""
    if mark.name != "parametrize" or not set(VARIANTS) <= set(mark.args[0]):
        return mark
    names, sets = mark.args
    backend, precision = map(names.index, VARIANTS)

    def is_here(parameters: Any) -> bool:
        values = getattr(parameters, "values", parameters)
        return (values[backend], values[precision]) in HERE

    return pytest.mark.parametrize(names, list(filter(is_here, sets)), **mark.kwargs).mark


globals().update(_tests_of_backends())
