"""Weights of a network in one safetensors file, as PyTorch names and shapes them.

The arrays are the parameters and the statistics of the network by name, ``conv1.weight`` (K, C, R,
S), ``fc.weight`` (out, in), ``bn1.running_mean`` (C,). The networks of the zoo that torchvision has
use its names, so that ``safetensors.torch.save_file(model.state_dict(), path)`` writes such a file.
A prefix of all names, such as ``module.``, does not matter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from dptrain.backends.replica import Replica
from dptrain.errors import UserError, shown
from dptrain.files import require_regular
from dptrain.foreign import SAFETENSORS, is_onnx, refuse_foreign
from dptrain.interchange.safetensors_files import write_arrays
from dptrain.network.adaptation import output_layer, resize
from dptrain.network.layers import Shape
from dptrain.network.network import Network

IGNORED_SUFFIX = ".num_batches_tracked"
"""Ending of the names of PyTorch's step counters, which nothing here needs."""

TYPES = ("F32", "F64", "F16")
"""Types of the arrays, as safetensors names them: float32, float64 and float16."""


def check_weights(network: Network, path: str | os.PathLike[str]) -> None:
    """Check that the arrays of a file have the names, shapes and types of a network's.

    Their numbers are not read.

    Raises:
        UserError: the file cannot be read, or its arrays do not fit the network; the message names
            the first array that differs.
    """
    path = Path(path)
    mismatch = _mismatch(network, *_contents(path, network))
    if mismatch is not None:
        raise UserError(_do_not_fit(path, network, mismatch))


def size_of_weights(network: Network, path: str | os.PathLike[str]) -> tuple[Shape, int] | None:
    """Return the input shape and the number of outputs with which weights fit a network of the zoo.

    Raises:
        UserError: the file cannot be read.

    Returns:
        None if they fit no size of the network; `check_weights` then names the difference.
    """
    shapes, types = _contents(Path(path), network)
    last = shapes.get(f"{output_layer(network)}.weight", ())
    first = next(node for node in network.nodes if node.parameters)
    weight, input_shape = shapes.get(f"{first.name}.weight", ()), network.input_shape
    if not last or len(weight) < 2:
        return None
    width = weight[1] * getattr(first.layer, "groups", 1)
    size = ((width, *input_shape[1:]), last[0])
    try:
        fits = _mismatch(resize(network, *size), shapes, types) is None
    except UserError:
        return None
    return size if fits else None


def _contents(path: Path, network: Network) -> tuple[dict[str, Shape], dict[str, str]]:
    """Return the shapes and the types of the arrays in a file, without reading their numbers."""
    if is_onnx(path):
        shapes = {name: values.shape for name, values in _onnx_arrays(path, network).items()}
        return shapes, dict.fromkeys(shapes, TYPES[0])
    with _open(path) as file:
        names = [n for n in file.keys() if not n.endswith(IGNORED_SUFFIX)]  # noqa: SIM118
        prefix = _prefix(names, network)
        slices = {name.removeprefix(prefix): file.get_slice(name) for name in names}
        shapes = {name: tuple(each.get_shape()) for name, each in slices.items()}
        types = {name: str(each.get_dtype()) for name, each in slices.items()}
    return shapes, types


def _prefix(names: Sequence[str], network: Network) -> str:
    """Return what precedes the names of all parameters in a file, such as ``module.``; else "".

    PyTorch's DistributedDataParallel and ``torch.compile`` (``_orig_mod.``) add such a prefix, and
    so does a model that is an attribute of another one.
    """
    own = [parameter.name for parameter in network.parameters]
    known = set(names)
    found = [name.removesuffix(own[0]) for name in names if name.endswith(f".{own[0]}")]
    if known.issuperset(own):
        return ""
    return next((text for text in found if all(text + name in known for name in own)), "")


def load_weights(replica: Replica, path: str | os.PathLike[str]) -> None:
    """Set all parameters and statistics of a replica to those in a file.

    Args:
        replica: numbers are converted to its precision.
        path: a safetensors or ONNX file.

    Raises:
        UserError: as for `check_weights`, or a number is not finite or a variance negative; the
            replica is unchanged.
    """
    path, network = Path(path), replica.plan.network
    check_weights(network, path)
    names = [p.name for p in network.parameters] + [s.name for s in network.statistics]
    if is_onnx(path):
        found = _onnx_arrays(path, network)
    else:
        with _open(path) as file:
            prefix = _prefix(list(file.keys()), network)
            found = {name: file.get_tensor(prefix + name) for name in names}
    for name, values in found.items():
        if not np.isfinite(values).all():
            reason = f"{name} contains values that are not finite numbers"
            raise UserError(_do_not_fit(path, network, reason))
        if name.endswith(".running_var") and values.min() < 0:
            reason = f"{name} contains {values.min():g}; expected variances, which are not negative"
            raise UserError(_do_not_fit(path, network, reason))
    for parameter in network.parameters:
        replica.parameters[parameter.name] = found[parameter.name]
    for statistic in network.statistics:
        replica.statistics[statistic.name] = found[statistic.name]


def save_weights(replica: Replica, path: str | os.PathLike[str]) -> None:
    """Write all parameters and statistics of a replica to a file that `load_weights` reads.

    PyTorch loads it by ``model.load_state_dict(safetensors.torch.load_file(path), strict=False)``.

    Raises:
        UserError: the file cannot be written.
    """
    network = replica.plan.network
    arrays = {p.name: np.ascontiguousarray(replica.parameters[p.name]) for p in network.parameters}
    for statistic in network.statistics:
        arrays[statistic.name] = np.ascontiguousarray(replica.statistics[statistic.name])
    write_arrays(arrays, Path(path))


def _onnx_arrays(path: Path, network: Network) -> dict[str, NDArray[Any]]:
    from dptrain.interchange.onnx_files import read_onnx_file

    arrays = read_onnx_file(path).arrays
    prefix = _prefix(list(arrays), network)
    return {name.removeprefix(prefix): values for name, values in arrays.items()}


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """Open a file of weights; a failure to read it is a `UserError`."""
    if not path.exists():
        raise UserError(f"weights {path} do not exist; expected a .safetensors or .onnx file")
    refuse_foreign(path, SAFETENSORS)
    try:
        require_regular(path)
        with safe_open(path, framework="numpy") as file:
            yield file
    except OSError as error:
        raise UserError(f"weights {path} cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise UserError(
            f"weights {path} cannot be read as safetensors: {shown(str(error))}; write them with "
            "safetensors.torch.save_file(model.state_dict(), path)"
        ) from None


def _do_not_fit(path: Path, network: Network, reason: str) -> str:
    return f"weights {path} do not fit {network.label}: {reason}"


def _mismatch(
    network: Network, shapes: Mapping[str, Shape], types: Mapping[str, str]
) -> str | None:
    """Describe the difference between the arrays of a file and a network; None if they fit."""
    expected: dict[str, Shape] = {p.name: p.shape for p in network.parameters}
    expected |= {s.name: s.shape for s in network.statistics}
    missing = [name for name in expected if name not in shapes]
    additional = [name for name in shapes if name not in expected]
    if missing:
        hint = f"; the file has {_first(additional)}, which the network lacks" if additional else ""
        return f"the file lacks {_first(missing)}{hint}"
    if additional:
        return f"the file also has {_first(additional)}"
    for name, shape in expected.items():
        if shapes[name] != shape:
            return f"{name} has shape {shapes[name]}; expected {shape}"
        if types[name] not in TYPES:
            return f"{name} has type {types[name]}; expected {', '.join(TYPES)}"
    return None


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{shown(names[0])}{more}"
