"""Networks with the shape of a data set, for commands that show data without training.

They are the values of `Source.probe`.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from dptrain.data.preprocessing.classes import are_texts
from dptrain.data.preprocessing.layout import channels_first
from dptrain.data.sources.arrays import Pair, training_pair
from dptrain.data.sources.hdf5 import first_pair
from dptrain.data.sources.webdataset import shard_paths
from dptrain.data.spec import Request
from dptrain.network.layers import Dense, Flatten, Shape
from dptrain.network.losses import Loss, MeanSquaredError, SoftmaxCrossEntropy
from dptrain.network.network import Network

IMAGES = (3, 32, 32)
"""Input for image files, which may have any size."""


def network_of_images(request: Request) -> Network:
    """Return a linear network for the images of a folder; opening them determines the classes."""
    request.existing("directory")
    return _linear(IMAGES, SoftmaxCrossEntropy())


def network_of_shards(request: Request) -> Network:
    """Return a linear network for the images of tar files, as for those of a folder."""
    shard_paths(request)
    return _linear(IMAGES, SoftmaxCrossEntropy())


def network_of_arrays(request: Request) -> Network:
    """Return a linear network for the arrays of NumPy files."""
    return _network_of_pair(request, training_pair(request))


def network_of_datasets(request: Request) -> Network:
    """Return a linear network for the datasets of an HDF5 file."""
    return _network_of_pair(request, first_pair(request))


def _network_of_pair(request: Request, pair: Pair) -> Network:
    x, y = pair
    shape = tuple((channels_first(x, request.text) if isinstance(x, np.ndarray) else x).shape)
    are_labels = (
        (y.ndim == 1 and y.dtype.kind in "iub") or are_texts(y) or request.names is not None
    )
    return _linear(shape[1:], SoftmaxCrossEntropy() if are_labels else MeanSquaredError())


def _linear(shape: Shape, loss: Loss) -> Network:
    return Network.of_family(partial(_linear_for, loss), shape, 2)


def _linear_for(loss: Loss, shape: Shape, outputs: int) -> Network:
    flatten = [Flatten()] if len(shape) == 3 else []
    return Network(shape, [*flatten, Dense(outputs)], loss, name="linear")
