"""Synchronous data-parallel training of convolutional networks over MPI, written from scratch.

>>> import dptrain
>>> network = dptrain.get_network("model0")
>>> network.num_parameters
210998

`dptrain.Trainer` trains a network, `dptrain.load` loads a trained one, and `dptrain.make_replica`
returns a replica for a training loop of your own. Every public name is imported when it is first
used, so that ``import dptrain`` imports nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dptrain.api import make_replica as make_replica
    from dptrain.backends.replica import Replica as Replica
    from dptrain.data import open_data as open_data
    from dptrain.errors import UserError as UserError
    from dptrain.network import AveragePool2d as AveragePool2d
    from dptrain.network import Constant as Constant
    from dptrain.network import Conv2d as Conv2d
    from dptrain.network import Dense as Dense
    from dptrain.network import Dropout as Dropout
    from dptrain.network import Flatten as Flatten
    from dptrain.network import He as He
    from dptrain.network import LocalResponseNorm as LocalResponseNorm
    from dptrain.network import MaxPool2d as MaxPool2d
    from dptrain.network import MeanSquaredError as MeanSquaredError
    from dptrain.network import Network as Network
    from dptrain.network import Normal as Normal
    from dptrain.network import ReLU as ReLU
    from dptrain.network import Sigmoid as Sigmoid
    from dptrain.network import SigmoidBinaryCrossEntropy as SigmoidBinaryCrossEntropy
    from dptrain.network import SoftmaxCrossEntropy as SoftmaxCrossEntropy
    from dptrain.network import SumPool2d as SumPool2d
    from dptrain.network import get_network as get_network
    from dptrain.network import read_network as read_network
    from dptrain.network import write_network as write_network
    from dptrain.plan.optimizers import SGD as SGD
    from dptrain.plan.optimizers import Adam as Adam
    from dptrain.training.callbacks import AfterEpoch as AfterEpoch
    from dptrain.training.callbacks import AfterStep as AfterStep
    from dptrain.training.callbacks import Callback as Callback
    from dptrain.training.callbacks import Progress as Progress
    from dptrain.training.history import History as History
    from dptrain.training.model import TrainedModel as TrainedModel
    from dptrain.training.model import load as load
    from dptrain.training.trainer import Trainer as Trainer

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adam",
    "AfterEpoch",
    "AfterStep",
    "AveragePool2d",
    "Callback",
    "Constant",
    "Conv2d",
    "Dense",
    "Dropout",
    "Flatten",
    "He",
    "History",
    "LocalResponseNorm",
    "MaxPool2d",
    "MeanSquaredError",
    "Network",
    "Normal",
    "Progress",
    "ReLU",
    "Replica",
    "Sigmoid",
    "SigmoidBinaryCrossEntropy",
    "SoftmaxCrossEntropy",
    "SumPool2d",
    "TrainedModel",
    "Trainer",
    "UserError",
    "get_network",
    "load",
    "make_replica",
    "open_data",
    "read_network",
    "write_network",
]

_MODULES = {
    "SGD": "plan.optimizers",
    "Adam": "plan.optimizers",
    "AfterEpoch": "training.callbacks",
    "AfterStep": "training.callbacks",
    "Callback": "training.callbacks",
    "History": "training.history",
    "Progress": "training.callbacks",
    "Replica": "backends.replica",
    "TrainedModel": "training.model",
    "Trainer": "training.trainer",
    "UserError": "errors",
    "load": "training.model",
    "make_replica": "api",
    "open_data": "data",
}
"""Module of each public name that `dptrain.network` does not provide."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'dptrain' has no attribute '{name}'")
    module = importlib.import_module(f"dptrain.{_MODULES.get(name, 'network')}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
