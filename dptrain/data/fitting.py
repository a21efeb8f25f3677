"""Networks with the shape of a data set, for commands that show data without training."""

from __future__ import annotations

import numpy as np

from dptrain.data.arrays import training_pair
from dptrain.data.folder import class_folders, split_folders
from dptrain.data.layout import channels_first
from dptrain.data.spec import Request
from dptrain.data.table import linear_network
from dptrain.network.layers import Dense, Flatten, Shape
from dptrain.network.losses import Loss, MeanSquaredError, SoftmaxCrossEntropy
from dptrain.network.network import Network

IMAGES = (3, 32, 32)
"""Input for image files, which may have any size."""


def fitting_network(request: Request) -> Network | None:
    """Return a linear network for the samples of a data set; None if any network's shape will do.

    Raises:
        UserError: a file is missing or damaged.
    """
    if request.name == "csv":
        return linear_network(request)
    if request.name == "folder":
        folder = request.existing("directory")
        classes = class_folders(next(iter(split_folders(folder)), folder))
        return _linear(IMAGES, max(len(classes), 2), SoftmaxCrossEntropy())
    if request.name in ("npz", "npy"):
        x, y = training_pair(request)
        shape = tuple((channels_first(x, request.text) if isinstance(x, np.ndarray) else x).shape)
        if y.ndim == 1 and y.dtype.kind in "iub":
            return _linear(shape[1:], max(int(y.max(initial=1)) + 1, 2), SoftmaxCrossEntropy())
        return _linear(shape[1:], int(np.prod(y.shape[1:])), MeanSquaredError())
    return None


def _linear(shape: Shape, outputs: int, loss: Loss) -> Network:
    flatten = [Flatten()] if len(shape) == 3 else []
    return Network(shape, [*flatten, Dense(outputs)], loss, name="linear")
