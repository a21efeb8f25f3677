"""Data: what can be trained on, and how it reaches the ranks.

``open_data("digits", network)`` gives a `Dataset` whose samples fit the network.
"""

from __future__ import annotations

import shlex

from dptrain.data.arrays import open_npy, open_npz
from dptrain.data.augmentation import Augmentation
from dptrain.data.base import Dataset, Samples
from dptrain.data.cifar10 import open_cifar10
from dptrain.data.digits import open_digits
from dptrain.data.folder import open_folder
from dptrain.data.irradiance import open_irradiance
from dptrain.data.loader import Batch, Loader
from dptrain.data.mnist import open_mnist
from dptrain.data.spec import Source, parse
from dptrain.data.synthetic import open_synthetic
from dptrain.data.table import open_csv
from dptrain.errors import UserError
from dptrain.network.network import Network

_FIT = {"fit": "resize|crop"}

SOURCES: dict[str, Source] = {
    "digits": Source(
        open_digits, "1,797 handwritten digits that come with dptrain, 8×8 grey", "digits"
    ),
    "cifar10": Source(
        open_cifar10,
        "CIFAR-10, binary version (data_batch_1.bin …)",
        "cifar10:cifar-10-batches-bin?fit=crop",
        "DIR",
        _FIT,
    ),
    "mnist": Source(
        open_mnist, "MNIST and its relatives, IDX files, gzipped or not", "mnist:mnist", "DIR", _FIT
    ),
    "npz": Source(
        open_npz,
        "arrays x_train, y_train, x_test, y_test, or x and y",
        "npz:cells.npz",
        "FILE",
        _FIT,
    ),
    "npy": Source(
        open_npy,
        "inputs and targets, mapped: may be larger than memory",
        "npy:x.npy,y.npy",
        "X.npy,Y.npy",
        _FIT,
    ),
    "folder": Source(
        open_folder,
        "pictures, one folder a class; or such folders in train and test",
        "folder:flowers",
        "DIR",
    ),
    "csv": Source(
        open_csv,
        "predict a column ROWS ahead from the other numeric columns (columns=*: from all)",
        "csv:field.csv?target=roof&horizon=10",
        "FILE",
        {"target": "COLUMN", "horizon": "ROWS", "columns": "A,B,…"},
        ("target",),
    ),
    "synthetic": Source(
        open_synthetic,
        "random numbers of any shape, for timing",
        "synthetic?samples=4096",
        options={"samples": "N"},
    ),
    "irradiance": Source(
        open_irradiance,
        "simulated cloud shadow over 50 sensors: rows for 50 inputs, maps for (1, 50, 50)",
        "irradiance?horizon=10",
        options={"samples": "N", "horizon": "SECONDS", "seed": "N"},
    ),
}
"""Every kind of data by the name that users say."""


def _help() -> str:
    lines = []
    for name, source in SOURCES.items():
        lines += [
            source.form(name),
            f"    {source.summary}",
            f"    e.g. {shlex.quote(source.example)}",
        ]
    return "\n".join(lines)


DATA_HELP = _help()
"""Every form of a data spec, with an example of each, quoted for a shell."""


def open_data(spec: str, network: Network, *, seed: int = 0, ranks_per_node: int = 1) -> Dataset:
    """Open a data set and bring it to a network's input and output.

    Args:
        spec: ``name``, ``name:path`` or ``name:path?key=value&key=value``; see `DATA_HELP`.
        network: what the data is for; `dptrain.data.images` says how pictures are fitted.
        seed: of the run; generated data starts from it. Splits never depend on it.
        ranks_per_node: ranks on this node that open the data set. Each holds its own copy if all
            copies together fit into `dptrain.data.stored.HOST_SHARE` of the available memory.

    Raises:
        UserError: whatever a user can get wrong, in one line.

    Example:
        >>> from dptrain.network import Dense, Flatten, Network
        >>> data = open_data("digits", Network((1, 8, 8), [Flatten(), Dense(10)], name="tiny"))
        >>> len(data.train), len(data.test)
        (1437, 360)
    """
    request = parse(spec, SOURCES, network, seed, ranks_per_node)
    try:
        return SOURCES[request.name].open(request)
    except MemoryError:
        raise UserError(
            f"data '{spec}' does not fit in memory; take less of it, or npy files, which are mapped"
        ) from None
    except OSError as error:
        raise UserError(
            f"{error.filename or request.path} cannot be read: {error.strerror or error}"
        ) from None


__all__ = [
    "DATA_HELP",
    "SOURCES",
    "Augmentation",
    "Batch",
    "Dataset",
    "Loader",
    "Samples",
    "open_data",
]
