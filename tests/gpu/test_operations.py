"""Compare every layer, loss and optimizer of the GPU backends with PyTorch, on a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest

from dptrain.backends import load_backend
from dptrain.backends.cuda.device.gpu import GPU
from tests.unit.backends import test_operations as shared

VARIANTS = ("backend", "precision")
HERE = [(name, p) for name in ("cuda", "cudnn") for p in load_backend(name).precisions]
CASES = [
    pytest.param(case, *variant, id="-".join((case.name, *variant)))
    for case in shared.CASES for variant in HERE if case.is_implemented(variant[0])
]  # fmt: skip
"""All cases in all precisions, because a GPU is fast."""


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
    """Return a mark with the parameters for GPUs."""
    for names, values in ((VARIANTS, HERE), (("case", *VARIANTS), CASES)):
        if mark.args[:1] == (names,):
            return pytest.mark.parametrize(names, values).mark
    return mark


globals().update(_tests_of_backends())
