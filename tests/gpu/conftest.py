"""Tests on a GPU; elsewhere each is skipped and says why."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from dptrain.backends import load_backend
from dptrain.errors import UserError


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder whose backend lacks something here."""
    folder = Path(__file__).parent
    for item in items:
        if folder not in item.path.parents:
            continue
        reason = _lacks("cudnn" if "cudnn" in item.nodeid else "cuda")
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@cache
def _lacks(backend: str) -> str | None:
    """What is missing for a backend, if anything."""
    try:
        load_backend(backend).place(0)
    except UserError as error:
        return str(error)
    return None
