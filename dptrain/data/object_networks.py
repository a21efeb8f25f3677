"""The network that is trained on Python objects if the user chooses none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dptrain.data.fitting import default_name, network_of_pair
from dptrain.data.preprocessing.layout import as_numbers
from dptrain.data.sources.objects import array_pairs, as_targets
from dptrain.data.spec import CLASSES


def default_network_of(data: Any, classes: Any = None) -> str:
    """Return the name of the network that is trained on an object if the user chooses none.

    Arrays decide as those of a file do, see `dptrain.data.default_network`; samples by index, which
    are mostly images, get ``model0``.

    Args:
        data: as for `dptrain.data.sources.objects.dataset_from`.
        classes: as for `dptrain.data.sources.objects.dataset_from`.

    Example:
        >>> import numpy as np
        >>> default_network_of((np.zeros((8, 3)), np.linspace(0, 1, 8)))
        'mlp-64-32'
    """
    arrays = array_pairs(data) if isinstance(data, tuple | Mapping) else None
    if arrays is None:
        return "model0"
    tail, (x, y) = next(iter(arrays.items()))
    has_names = classes is not None or (isinstance(data, Mapping) and CLASSES in data)
    numbers, targets = as_numbers(x, f"x{tail}"), as_targets(y, f"y{tail}")
    return default_name(network_of_pair(numbers, targets, "the data", has_names=has_names))
