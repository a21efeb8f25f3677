"""Tests on a GPU. On other machines they are skipped with the reason."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from dptrain.backends import load_backend
from dptrain.errors import UserError


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder whose backend is not available."""
    folder = Path(__file__).parent
    for item in items:
        if folder not in item.path.parents:
            continue
        reason = _unavailable("cudnn" if "cudnn" in item.nodeid else "cuda")
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@cache
def _unavailable(backend: str) -> str | None:
    """Return why a backend is not available, or None."""
    try:
        load_backend(backend).choose_device(0)
    except UserError as error:
        return str(error)
    return None
