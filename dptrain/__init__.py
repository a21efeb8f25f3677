"""Synchronous data-parallel training of convolutional networks over MPI, written from scratch.

>>> import dptrain
>>> network = dptrain.network("model0")
>>> network.num_parameters
210998

`dptrain.compile` makes a replica that computes; see its documentation for the rest. Everything
here is loaded when it is first used, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dptrain.api import compile as compile
    from dptrain.backends.replica import Replica as Replica
    from dptrain.data import open_data as open_data
    from dptrain.errors import UserError as UserError
    from dptrain.network.files import read_network as read_network
    from dptrain.network.files import write_network as write_network
    from dptrain.network.initializers import Constant as Constant
    from dptrain.network.initializers import He as He
    from dptrain.network.initializers import Normal as Normal
    from dptrain.network.layers import AveragePool2d as AveragePool2d
    from dptrain.network.layers import Conv2d as Conv2d
    from dptrain.network.layers import Dense as Dense
    from dptrain.network.layers import Dropout as Dropout
    from dptrain.network.layers import Flatten as Flatten
    from dptrain.network.layers import LocalResponseNorm as LocalResponseNorm
    from dptrain.network.layers import MaxPool2d as MaxPool2d
    from dptrain.network.layers import ReLU as ReLU
    from dptrain.network.layers import Sigmoid as Sigmoid
    from dptrain.network.layers import SumPool2d as SumPool2d
    from dptrain.network.losses import MeanSquaredError as MeanSquaredError
    from dptrain.network.losses import SigmoidBinaryCrossEntropy as SigmoidBinaryCrossEntropy
    from dptrain.network.losses import SoftmaxCrossEntropy as SoftmaxCrossEntropy
    from dptrain.network.network import Network as Network
    from dptrain.network.zoo import network as network
    from dptrain.plan.optimizers import SGD as SGD
    from dptrain.plan.optimizers import Adam as Adam

__version__ = "0.1.0"

_HOMES = {
    "SGD": "plan.optimizers",
    "Adam": "plan.optimizers",
    "AveragePool2d": "network",
    "Constant": "network",
    "Conv2d": "network",
    "Dense": "network",
    "Dropout": "network",
    "Flatten": "network",
    "He": "network",
    "LocalResponseNorm": "network",
    "MaxPool2d": "network",
    "MeanSquaredError": "network",
    "Network": "network",
    "Normal": "network",
    "ReLU": "network",
    "Replica": "backends.replica",
    "Sigmoid": "network",
    "SigmoidBinaryCrossEntropy": "network",
    "SoftmaxCrossEntropy": "network",
    "SumPool2d": "network",
    "UserError": "errors",
    "compile": "api",
    "open_data": "data",
    "read_network": "network.files",
    "write_network": "network.files",
}
"""Module of each public name."""


def __getattr__(name: str) -> Any:
    if name == "network":
        # The subpackage itself: it can be called, see its last lines.
        return importlib.import_module("dptrain.network")
    if name in _HOMES:
        return getattr(importlib.import_module(f"dptrain.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'dptrain' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, "network"})
