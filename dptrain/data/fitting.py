"""Networks with the shape of a data set, for commands that show data without training.

They are the values of `Source.probe`. `default_name` is the network that is trained if none is
chosen.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.data.adaptation import loss_for
from dptrain.data.preprocessing.layout import channels_first
from dptrain.data.sources.arrays import Pair, training_pair
from dptrain.data.sources.hdf5 import first_pair
from dptrain.data.sources.table import probed_table
from dptrain.data.sources.webdataset import shard_paths
from dptrain.data.spec import Request
from dptrain.network.layers import Dense, Flatten, Shape
from dptrain.network.losses import Loss, SoftmaxCrossEntropy
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


def network_of_table(request: Request) -> Network:
    """Return a linear network for the rows of a table."""
    width, loss = probed_table(request)
    return _linear((width,), loss)


def default_name(network: Network) -> str:
    """Return the name of the network that is trained on data if none is chosen.

    Args:
        network: with the shape and the loss of the data.

    Example:
        >>> [default_name(_linear(shape, SoftmaxCrossEntropy())) for shape in ((4,), IMAGES)]
        ['classifier-64-32', 'model0']
    """
    kind = network.loss.targets
    if len(network.input_shape) == 3:
        return {"classes": "model0", "binary": "model0-labels", "values": "model0-values"}[kind]
    return {"classes": "classifier", "binary": "multilabel", "values": "mlp"}[kind] + "-64-32"


def network_of_pair(x: Any, y: NDArray[Any], where: str, *, has_names: bool = False) -> Network:
    """Return a linear network for inputs and targets as they are stored.

    Args:
        x, y: inputs and targets.
        where: name of the data, for messages.
        has_names: True if the labels have names.
    """
    shape = tuple((channels_first(x, where) if isinstance(x, np.ndarray) else x).shape)
    return _linear(shape[1:], loss_for(y, has_names=has_names))


def _network_of_pair(request: Request, pair: Pair) -> Network:
    return network_of_pair(*pair, request.text, has_names=request.names is not None)


def _linear(shape: Shape, loss: Loss) -> Network:
    return Network.of_family(partial(_linear_for, loss), shape, 2)


def _linear_for(loss: Loss, shape: Shape, outputs: int) -> Network:
    flatten = [Flatten()] if len(shape) == 3 else []
    return Network(shape, [*flatten, Dense(outputs)], loss, name="linear")
