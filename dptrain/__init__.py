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
    from dptrain.comm.deadline import RankTimeoutError as RankTimeoutError
    from dptrain.comm.signals import StoppedError as StoppedError
    from dptrain.comm.world import AgreedError as AgreedError
    from dptrain.comm.world import CorruptedError as CorruptedError
    from dptrain.comm.world import DivergedError as DivergedError
    from dptrain.data import open_data as open_data
    from dptrain.errors import ArgumentError as ArgumentError
    from dptrain.errors import ReadOnlyError as ReadOnlyError
    from dptrain.errors import UserError as UserError
    from dptrain.network import Add as Add
    from dptrain.network import AveragePool2d as AveragePool2d
    from dptrain.network import BatchNorm2d as BatchNorm2d
    from dptrain.network import ChannelShuffle as ChannelShuffle
    from dptrain.network import ChannelSlice as ChannelSlice
    from dptrain.network import Concatenate as Concatenate
    from dptrain.network import Constant as Constant
    from dptrain.network import Conv2d as Conv2d
    from dptrain.network import Crop2d as Crop2d
    from dptrain.network import Dense as Dense
    from dptrain.network import Dilate2d as Dilate2d
    from dptrain.network import Dropout as Dropout
    from dptrain.network import Flatten as Flatten
    from dptrain.network import GlobalAveragePool2d as GlobalAveragePool2d
    from dptrain.network import GlobalMaxPool2d as GlobalMaxPool2d
    from dptrain.network import GroupNorm as GroupNorm
    from dptrain.network import He as He
    from dptrain.network import Input as Input
    from dptrain.network import LayerNorm as LayerNorm
    from dptrain.network import LocalResponseNorm as LocalResponseNorm
    from dptrain.network import MaxPool2d as MaxPool2d
    from dptrain.network import MeanSquaredError as MeanSquaredError
    from dptrain.network import Multiply as Multiply
    from dptrain.network import Network as Network
    from dptrain.network import Normal as Normal
    from dptrain.network import Pad2d as Pad2d
    from dptrain.network import Reshape as Reshape
    from dptrain.network import Resize2d as Resize2d
    from dptrain.network import SigmoidBinaryCrossEntropy as SigmoidBinaryCrossEntropy
    from dptrain.network import SoftmaxCrossEntropy as SoftmaxCrossEntropy
    from dptrain.network import SoftmaxSquaredError as SoftmaxSquaredError
    from dptrain.network import StochasticDepth as StochasticDepth
    from dptrain.network import SumPool2d as SumPool2d
    from dptrain.network import Tensor as Tensor
    from dptrain.network import Uniform as Uniform
    from dptrain.network import get_network as get_network
    from dptrain.network import name_scope as name_scope
    from dptrain.network import read_network as read_network
    from dptrain.network import write_network as write_network
    from dptrain.network.activations import *  # noqa: F403
    from dptrain.network.own_functions import activation as activation
    from dptrain.network.own_functions import loss as loss
    from dptrain.plan.optimizers import LAMB as LAMB
    from dptrain.plan.optimizers import LARS as LARS
    from dptrain.plan.optimizers import SGD as SGD
    from dptrain.plan.optimizers import Adam as Adam
    from dptrain.plan.optimizers import AdamW as AdamW
    from dptrain.plan.optimizers import RMSProp as RMSProp
    from dptrain.runs.records import list_runs as list_runs
    from dptrain.training.callbacks import AfterEpoch as AfterEpoch
    from dptrain.training.callbacks import AfterStep as AfterStep
    from dptrain.training.callbacks import Callback as Callback
    from dptrain.training.callbacks import Progress as Progress
    from dptrain.training.evaluation.model import TrainedModel as TrainedModel
    from dptrain.training.evaluation.model import load as load
    from dptrain.training.history import History as History
    from dptrain.training.persistence.rundir import RunDirectoryLostError as RunDirectoryLostError
    from dptrain.training.trainer import Trainer as Trainer

__version__ = "0.2.0"

_NAMES = [
    "SGD",
    "Adam",
    "AdamW",
    "LAMB",
    "LARS",
    "RMSProp",
    "Add",
    "AfterEpoch",
    "AfterStep",
    "AgreedError",
    "ArgumentError",
    "AveragePool2d",
    "BatchNorm2d",
    "Callback",
    "ChannelShuffle",
    "ChannelSlice",
    "Concatenate",
    "Constant",
    "Conv2d",
    "CorruptedError",
    "Crop2d",
    "Dense",
    "DivergedError",
    "Dilate2d",
    "Dropout",
    "Flatten",
    "GlobalAveragePool2d",
    "GlobalMaxPool2d",
    "GroupNorm",
    "He",
    "History",
    "Input",
    "LayerNorm",
    "LocalResponseNorm",
    "MaxPool2d",
    "MeanSquaredError",
    "Multiply",
    "Network",
    "Normal",
    "Pad2d",
    "Reshape",
    "Resize2d",
    "Progress",
    "RankTimeoutError",
    "ReadOnlyError",
    "Replica",
    "RunDirectoryLostError",
    "SigmoidBinaryCrossEntropy",
    "SoftmaxCrossEntropy",
    "SoftmaxSquaredError",
    "StoppedError",
    "StochasticDepth",
    "SumPool2d",
    "Tensor",
    "TrainedModel",
    "Trainer",
    "Uniform",
    "UserError",
    "activation",
    "get_network",
    "list_runs",
    "load",
    "loss",
    "make_replica",
    "name_scope",
    "open_data",
    "read_network",
    "write_network",
]

"""The public names, except the functions of `dptrain.network.activations`."""

_MODULES = {
    "SGD": "plan.optimizers",
    "Adam": "plan.optimizers",
    "AdamW": "plan.optimizers",
    "LAMB": "plan.optimizers",
    "LARS": "plan.optimizers",
    "RMSProp": "plan.optimizers",
    "AfterEpoch": "training.callbacks",
    "AgreedError": "comm.world",
    "ArgumentError": "errors",
    "CorruptedError": "comm.world",
    "DivergedError": "comm.world",
    "RankTimeoutError": "comm.deadline",
    "ReadOnlyError": "errors",
    "RunDirectoryLostError": "training.persistence.rundir",
    "StoppedError": "comm.signals",
    "AfterStep": "training.callbacks",
    "Callback": "training.callbacks",
    "History": "training.history",
    "Progress": "training.callbacks",
    "Replica": "backends.replica",
    "TrainedModel": "training.evaluation.model",
    "Trainer": "training.trainer",
    "UserError": "errors",
    "activation": "network.own_functions",
    "loss": "network.own_functions",
    "list_runs": "runs.records",
    "load": "training.evaluation.model",
    "make_replica": "api",
    "open_data": "data",
}
"""Module of each public name that `dptrain.network` does not provide."""


def _public_names() -> list[str]:
    """Return the names in `_NAMES` and those of functions of single elements."""
    from dptrain.network.activations import ACTIVATIONS

    return sorted([*_NAMES, *(cls.__name__ for cls in ACTIVATIONS.values())])


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return _public_names()
    # Other names of functions begin with a capital letter.
    if name not in _NAMES and not (name[:1].isupper() and name in _public_names()):
        raise AttributeError(f"module 'dptrain' has no attribute '{name}'")
    module = importlib.import_module(f"dptrain.{_MODULES.get(name, 'network')}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_public_names()})
