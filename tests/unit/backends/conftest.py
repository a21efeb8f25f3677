"""What a backend or a precision takes over from another is tested there, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dptrain.network import Conv2d, Dense, Layer

OWN: dict[tuple[str, str], tuple[type[Layer], ...]] = {
    ("cuda", "tf32"): (Conv2d, Dense),
    ("cudnn", "fp32"): (Conv2d,),
    ("cudnn", "tf32"): (Conv2d,),
    ("cudnn", "bf16"): (Conv2d,),
}
"""Layers by which a variant differs from ``cuda`` in fp32 or bf16, which are tested whole."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what would run the same kernels a second time."""
    folder = Path(__file__).parent
    same = [item for item in items if folder in item.path.parents and _is_repeated(item)]
    config.hook.pytest_deselected(items=same)
    left = set(map(id, same))
    items[:] = [item for item in items if id(item) not in left]


def _is_repeated(item: pytest.Item) -> bool:
    parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    own = OWN.get((parameters.get("backend", ""), parameters.get("precision", "")))
    if own is None:
        return False
    case = parameters.get("case")
    if case is None:
        return parameters["precision"] == "tf32"
    # The first layer of every case is the same, see `cases`.
    return not any(isinstance(layer, own) for layer in case.network.layers[1:])
