"""What a file for other programs contains: network, preprocessing, parameters and facts."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dptrain import __version__
from dptrain.data.preprocessing.preprocessing import Preprocessing
from dptrain.interchange.own_functions import functions_metadata
from dptrain.network.network import Network

if TYPE_CHECKING:
    from dptrain.training.evaluation.model import TrainedModel


@dataclass(frozen=True)
class ModelContents:
    """A trained network, independent of the backend that holds it.

    Attributes:
        network: the network.
        preprocessing: how raw samples become inputs of the network, and what its outputs mean.
        arrays: float32, parameters and statistics by name in canonical shape, ``conv1.weight``
            (K, C, R, S), ``bn1.running_mean`` (C,).
        data: the data set of the training run, without the folders in which it is stored.
        seed: seed of the training run.
        step: number of updates that made the parameters.
    """

    network: Network
    preprocessing: Preprocessing
    arrays: Mapping[str, NDArray[np.float32]]
    data: str = ""
    seed: int = 0
    step: int = 0

    @classmethod
    def of(cls, model: TrainedModel) -> ModelContents:
        """Return the contents of a trained model."""
        network = model.network
        named = {p.name: model.parameters for p in network.parameters}
        named |= {s.name: model.statistics for s in network.statistics}
        arrays = {
            name: np.ascontiguousarray(values[name], np.float32) for name, values in named.items()
        }
        facts, source = model.facts, without_folders(model.preprocessing.source)
        preprocessing = replace(model.preprocessing, source=source)
        data = without_folders(facts.data)
        return cls(network, preprocessing, arrays, data, facts.seed, model.step)

    @property
    def digest(self) -> str:
        """SHA-256 of the names and values of all arrays, in hexadecimal digits."""
        found = hashlib.sha256()
        for name, values in self.arrays.items():
            found.update(name.encode())
            found.update(np.ascontiguousarray(values, "<f4").tobytes())
        return found.hexdigest()

    def metadata(self) -> dict[str, str]:
        """Return the facts that a file stores as text; structured values are JSON."""
        network, preprocessing = self.network, self.preprocessing
        return {
            "dptrain.version": __version__,
            "dptrain.network": network.name,
            "dptrain.loss": network.loss.kind,
            **functions_metadata(network),
            "dptrain.outputs": json.dumps(preprocessing.output_names(network)),
            "dptrain.preprocessing": json.dumps(preprocessing.to_dict()),
            "dptrain.data": self.data,
            "dptrain.seed": str(self.seed),
            "dptrain.step": str(self.step),
            "dptrain.digest": self.digest,
        }


def without_folders(data: str) -> str:
    """Return the name of a data set without the folders of its files.

    Models are passed on, and paths contain names of users and projects.

    Example:
        >>> without_folders("csv:/home/me/cells.csv?target=a/b")
        'csv:cells.csv?target=a/b'
    """
    files, mark, options = data.partition("?")
    return re.sub(r"[^,:]*/(?=[^,])", "", files) + mark + options
