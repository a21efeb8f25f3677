"""Divides the cases of a test between the quick tier and the parts."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def tiered(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return cases as parameters, of which only those in `quick` are in the quick tier.

    A case is a tuple if a test has several parameters.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in quick else pytest.mark.more,
        )
        for case in cases
    ]
