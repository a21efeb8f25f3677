"""Data sets: what can be trained on, and how samples reach the ranks.

``open_data("digits", network)`` returns a `Dataset` whose samples fit the network.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dptrain.batch import Batch
from dptrain.data import spec as spec_of
from dptrain.data.base import Dataset, Samples
from dptrain.data.fitting import (
    default_name,
    network_of_arrays,
    network_of_datasets,
    network_of_images,
    network_of_shards,
    network_of_table,
)
from dptrain.data.loading.augmentation import Augmentation
from dptrain.data.loading.crop_windows import CropWindowLoader
from dptrain.data.loading.loader import BatchSource, Loader
from dptrain.data.loading.sharding import Sampler
from dptrain.data.preprocessing.preprocessing import Preprocessing
from dptrain.data.sources.arrays import open_npy, open_npz
from dptrain.data.sources.cifar10 import open_cifar10
from dptrain.data.sources.digits import open_digits
from dptrain.data.sources.folder import open_folder
from dptrain.data.sources.hdf5 import open_hdf5
from dptrain.data.sources.irradiance import open_irradiance
from dptrain.data.sources.mnist import open_mnist
from dptrain.data.sources.shapes import open_shapes
from dptrain.data.sources.synthetic import open_synthetic
from dptrain.data.sources.table import open_csv, open_maps
from dptrain.data.sources.webdataset import open_webdataset
from dptrain.data.spec import Source, parse
from dptrain.errors import UserError
from dptrain.network.layers import Dense
from dptrain.network.network import Network
from dptrain.notes import show_notes

_FIT = {"fit": "resize|crop"}
_CLASSES = {"classes": "NAMES"}
_CLASSES_HELP = (
    "classes=cat,dog names the labels 0 and 1, classes=1:cat,2:dog the labels 1 and 2,",
    "classes=FILE.txt has a name on each line. A label without a name is the class that has the",
    "number as its name.",
)
_FIT_HELP = "fit=resize scales images to the network's input, fit=crop cuts out their centre."

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
        details=(_FIT_HELP,),
    ),
    "mnist": Source(
        open_mnist,
        "MNIST and data sets in its format: four IDX files, gzipped or not",
        "mnist:mnist",
        "DIR",
        {**_FIT, **_CLASSES},
        details=(
            "Files: train-images-idx3-ubyte, train-labels-idx1-ubyte and the same for t10k.",
            *_CLASSES_HELP,
        ),
    ),
    "npz": Source(
        open_npz,
        "NumPy arrays x_train, y_train, x_test, y_test, or x and y",
        "npz:cells.npz",
        "FILE",
        {**_FIT, **_CLASSES},
        details=(
            "x: images (n, C, H, W), (n, H, W, C) or (n, H, W), or vectors (n, F). Pixels 0…255",
            "become -1…1: uint8, and images of another type if their numbers look so. Other",
            "numbers are taken as they are up to 16, and rows beyond are standardised; images of",
            "larger whole numbers are refused.",
            "y: labels 0, 1, … (n,), one-hot rows (n, classes), or values (n,) or (n, F).",
            "With x and y only, a fifth of the samples, always the same, is the test split.",
            "x_val and y_val next to the four arrays are the validation split. An array classes",
            "has the names of the labels 0, 1, …. sample_weight (n,), or sample_weight_train, has",
            "the weights of the training samples in the loss.",
            *_CLASSES_HELP,
        ),
        probe=network_of_arrays,
    ),
    "npy": Source(
        open_npy,
        "inputs and targets in two files, memory-mapped: may be larger than memory",
        "npy:x.npy,y.npy",
        "X.npy,Y.npy",
        {**_FIT, **_CLASSES},
        details=(
            "Shapes and types are those of x and y in npz. npy:DIR reads the folder that `dptrain",
            "data convert` writes: x_train.npy, y_train.npy, x_test.npy, y_test.npy and",
            "classes.txt, one name on each line, and perhaps sample_weight_train.npy.",
            *_CLASSES_HELP,
        ),
        probe=network_of_arrays,
        paths=True,
    ),
    "hdf5": Source(
        open_hdf5,
        "datasets of an HDF5 file: each rank reads the rows of its samples when it needs them",
        "hdf5:cells.h5?x=images&y=labels",
        "FILE",
        {"x": "NAME", "y": "NAME", **_FIT, **_CLASSES},
        details=(
            "Without x= and y=, inputs are the dataset x, images or data, and targets y, labels or",
            "targets. A split is an ending of the names, x_train, y_train, x_test and y_test, or",
            "groups: train/x, train/y, test/x, test/y; val is the validation split. Shapes and",
            "types are those of npz. It needs the extra hdf5.",
        ),
        probe=network_of_datasets,
    ),
    "folder": Source(
        open_folder,
        "images, one folder for each class; or such folders in train/ and test/",
        "folder:flowers",
        "DIR",
        details=(
            "DIR/rose/1.jpg, DIR/tulip/7.png, …: the folders' names are the classes. Images in",
            "their sub-folders belong to them: DIR/rose/2024/1.jpg. Files without the suffix of an",
            "image are read if their content is one; what is left out is counted by reason.",
            "DIR/train/rose/…, DIR/test/rose/…: a split. DIR/val/rose/… (or valid, validation) is",
            "the validation split; without a folder test it is the test split.",
            "Without a split, a fifth of the images, always the same, is the test split.",
        ),
        probe=network_of_images,
    ),
    "webdataset": Source(
        open_webdataset,
        "images and labels in tar files, read at their offset without extracting them",
        "webdataset:shards/train-{000..009}.tar",
        "TAR",
        {"label": "NAME", "image": "SUFFIX", **_CLASSES},
        details=(
            "TAR is an archive, archives with the numbers of a range, or a folder of archives. The",
            "files of a sample have the same name up to the first dot: 0001.jpg and 0001.cls with",
            "a whole number or the name of a class, or 0001.json with a field label.",
            "label= is another suffix or field. image= is needed if samples have several images,",
            "such as image=rgb.png. Shards with train and test, or val, in their names or folders",
            "are the splits; otherwise a fifth of the samples, always the same, is the test split.",
            *_CLASSES_HELP,
        ),
        probe=network_of_shards,
    ),
    "csv": Source(
        open_csv,
        "predict a column ROWS ahead from other numeric columns of a table",
        "csv:field.csv?target=roof&horizon=10",
        "FILE",
        {
            "target": "COLUMN,…",
            "horizon": "ROWS",
            "columns": "A,B,…",
            "lags": "0,1,…",
            "window": "ROWS",
            "weight": "COLUMN",
            "max_features": "N",
            **_CLASSES,
        },
        ("target",),
        details=(
            "The first line contains the column names. target= names the predicted column,",
            "or several, such as target=a,b: values, classes (text, or a few whole numbers), or",
            "several labels of 0 and 1. Without --network, they decide about the network.",
            "horizon= is the number of rows from inputs to target (default 0: the same row);",
            "columns= names the inputs (default: all numeric columns except the target; *: all). A",
            "column is numeric if it has a number in every row; what is left out is named.",
            "lags=0,1,5 takes these columns from the same row and from 1 and 5 rows before;",
            "window=N from the last N rows, the same as lags=0,1,…,N-1. With L rows of F columns,",
            "a network with an input of (L·F,) receives the rows one after the other, the oldest",
            "first, (1, L, F) a map with time on the vertical axis, (F, 1, L) a channel for each",
            "column. No row of a training sample is in a test sample.",
            "weight= names a column with the weights of the rows in the training loss.",
            "max_features= chooses N of the input columns at random, by the seed of the run.",
            "Inputs are standardised. The last fifth of the rows is the test split.",
            "classes= names the labels of a target that is a class, as for npz.",
        ),
        probe=network_of_table,
    ),
    "maps": Source(
        open_maps,
        "a table like csv whose columns are sensors, interpolated to maps such as solar's",
        "maps:field.csv,sensors.csv?target=roof&horizon=10",
        "TABLE.csv,POSITIONS.csv",
        {
            "target": "COLUMN,…",
            "horizon": "ROWS",
            "columns": "A,B,…",
            "lags": "0,1,…",
            "window": "ROWS",
            "weight": "COLUMN",
            "max_features": "N",
        },
        ("target",),
        details=(
            "POSITIONS.csv has a line for each sensor: sensor,x,y (any unit of length), or sensor,",
            "longitude,latitude. The inputs are all sensors with a position, or those of columns=.",
            "A row becomes a map of the network's size that covers the sensors; the weights of",
            "sensors are inversely proportional to squared distances. With lags= or window=, each",
            "row is a channel: (L, H, W). Other options are those of csv.",
        ),
        paths=True,
    ),
    "synthetic": Source(
        open_synthetic,
        "random numbers of any shape, for timing",
        "synthetic?samples=4096",
        options={"samples": "N"},
        details=("samples= is the number of training samples.",),
    ),
    "shapes": Source(
        open_shapes,
        "generated curves in noise with the shape of CIFAR-10, for networks without a download",
        "shapes",
        options={"samples": "N", "seed": "N", **_FIT},
        details=(
            "50,000 training and 10,000 test images, 3×32×32; the 10 classes are filled curves and",
            "outlines with 2 to 6 lobes. samples= is the number of training images; seed= (default",
            "0) is that of the images, not of the run.",
            _FIT_HELP,
        ),
    ),
    "irradiance": Source(
        open_irradiance,
        "simulated cloud shadow over 50 sensors: rows for 50 inputs, maps for (1, 50, 50)",
        "irradiance?horizon=10",
        options={"samples": "N", "horizon": "SECONDS", "seed": "N"},
    ),
}
"""Every kind of data by its name in a spec."""


def _help() -> str:
    lines = []
    for name, source in SOURCES.items():
        lines += [
            source.form(name),
            f"    {source.summary}",
            *(f"    {line}" for line in source.details),
            f"    Example: {shlex.quote(source.example)}",
        ]
    return "\n".join(lines)


DATA_HELP = _help()
"""Every form of a data spec with its format and an example, quoted for a shell."""


def open_data(
    spec: str,
    network: Network,
    *,
    seed: int = 0,
    ranks_per_node: int = 1,
    preprocessing: Preprocessing | None = None,
    split: bool = True,
) -> Dataset:
    """Open a data set and preprocess it for a network.

    Args:
        spec: ``name``, ``name:path`` or ``name:path?key=value&key=value``; see `DATA_HELP`.
        network: for which the data is preprocessed; `dptrain.data.preprocessing.images` describes
            how images are converted. A network of the zoo is adapted to the data: the result has
            the input shape and the number of outputs of `dptrain.network.adaptation.resize`.
        seed: of the run; generated data depends on it. Splits never depend on it.
        ranks_per_node: ranks on this node that open the data set. Each holds its own copy if all
            copies together fit into `dptrain.data.stored.HOST_SHARE` of the available memory.
        preprocessing: saved with a trained model. The data is then preprocessed as the training
            data was, classes are matched as `dptrain.data.preprocessing.classes` describes, and
            data that does not match is refused. None: it is determined from this data.
        split: False uses a data set that has no split of its own as a whole: both splits of the
            result contain all samples.

    Raises:
        UserError: the spec is wrong, a file is missing or damaged, or the data does not match the
            network or the preprocessing.

    Examples:
        >>> from dptrain.network import Dense, Flatten, Network
        >>> data = open_data("digits", Network((1, 8, 8), [Flatten(), Dense(10)], name="tiny"))
        >>> data
        <Dataset digits: 1,437 training and 360 test samples of 1×8×8>
    """
    request = parse(
        spec,
        SOURCES,
        network,
        seed,
        ranks_per_node=ranks_per_node,
        preprocessing=preprocessing,
        split=split,
    )
    with _readable(spec):
        dataset = SOURCES[request.name].open(request)
    show_notes(dataset.notes)
    return dataset


@contextmanager
def _readable(spec: str) -> Iterator[None]:
    """Raise `UserError` if memory does not suffice, or a file cannot be read."""
    try:
        yield
    except MemoryError:
        raise UserError(
            f"data '{spec}' does not fit in memory; use less of it, or npy files, which are "
            "memory-mapped"
        ) from None
    except OSError as error:
        raise UserError(
            f"{error.filename or spec} cannot be read: {error.strerror or error}"
        ) from None


def network_for(spec: str) -> Network | None:
    """Return a network with the shape of a data set; None if other networks fit it, too.

    Args:
        spec: as for `open_data`.

    Raises:
        UserError: as for `open_data`.
    """
    request = parse(spec, SOURCES, Network((1,), [Dense(2)]), seed=0)
    probe = SOURCES[request.name].probe
    with _readable(spec):
        return None if probe is None else probe(request)


def default_network(spec: str) -> str:
    """Return the name of the network that is trained on data if the user chooses none.

    Images get `model0`, rows of numbers a perceptron, each with the loss that fits the targets.

    Args:
        spec: as for `open_data`.

    Raises:
        UserError: as for `open_data`.

    Example:
        >>> default_network("digits")
        'model0'
    """
    kind = spec.partition(":")[0].partition("?")[0]
    if kind in ("maps", "irradiance"):
        return "solar"
    network = network_for(spec)
    return "model0" if network is None else default_name(network)


def absolute(spec: str, base: Path | None = None) -> str:
    """Return the specification of data with absolute paths, relative to `base`.

    Args:
        spec: as for `open_data`.
        base: None for the current directory.
    """
    return spec_of.absolute(spec, SOURCES, base)


__all__ = [
    "DATA_HELP",
    "SOURCES",
    "Augmentation",
    "Batch",
    "BatchSource",
    "CropWindowLoader",
    "Dataset",
    "Loader",
    "Preprocessing",
    "Sampler",
    "Samples",
    "default_network",
    "network_for",
    "open_data",
]
