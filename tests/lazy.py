"""Import what only some tests use when the first of them runs.

Importing PyTorch takes three seconds. Every process that collects tests would spend them, and
every rank.
"""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """A module that is imported when one of its public attributes is first read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks for marks of its own in all objects.
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
