"""Weights of a network: in safetensors and ONNX files, run directories and checkpoints.

The arrays are the parameters and the statistics of the network by name, ``conv1.weight`` (K, C, R,
S), ``fc.weight`` (out, in), ``bn1.running_mean`` (C,). The networks of the zoo that torchvision has
use its names, so that ``safetensors.torch.save_file(model.state_dict(), path)`` writes such a file.
A prefix of all names, such as ``module.``, does not matter, and names of timm are known
(`dptrain.interchange.weight_names`). Weights of other programs for a network of ImageNet expect
inputs that are normalised by the numbers of ImageNet: `size_of_weights` states it, and the first
layer of the network does so.

Training loads what fits and reports the rest (`load_fitting_weights`). Evaluation and prediction
require that everything fits (`load_weights`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from dptrain.backends.replica import Replica
from dptrain.errors import UserError, shown
from dptrain.files import require_regular
from dptrain.foreign import SAFETENSORS, is_onnx, refuse_foreign
from dptrain.interchange.safetensors_files import write_arrays
from dptrain.interchange.weight_names import (
    IGNORED_SUFFIX,
    expected_shapes,
    has_shape,
    is_auxiliary,
    names_in,
    network_of_weights,
)
from dptrain.network.adaptation import NORMALIZATION, output_layer
from dptrain.network.layers import Shape
from dptrain.network.network import Network
from dptrain.network.normalization import BatchNorm2d
from dptrain.network.zoo import is_of_imagenet
from dptrain.network.zoo.recipes import IMAGENET_DEVIATION, IMAGENET_MEAN
from dptrain.training.averaging import averaged_arrays
from dptrain.training.persistence.checkpoints import STATISTICS
from dptrain.training.persistence.persistence import load_checkpoint

TYPES = ("F32", "F64", "F16")
"""Types of the arrays, as safetensors names them: float32, float64 and float16."""

OWN_METADATA = "dptrain."
"""Beginning of the keys of the metadata in files that dptrain wrote."""

MOST_NAMED = 4
"""Arrays that a report names; it counts the others."""


class _Source(NamedTuple):
    """Arrays of a file or a folder.

    Attributes:
        shapes, types: by name; types as in `TYPES`.
        read: returns the array with a name.
        is_foreign: True if another program wrote the file.
    """

    shapes: dict[str, Shape]
    types: dict[str, str]
    read: Callable[[str], NDArray[Any]]
    is_foreign: bool = False


@dataclass(frozen=True)
class _Match:
    """What a file has for each array of a network.

    Attributes:
        fitting: names in the file of the arrays that fit, by name in the network.
        shapes: in the file, of the arrays with another shape, by name in the network.
        types: of the arrays with another type than `TYPES`, by name in the network.
        known: values of the layer `NORMALIZATION` that the file lacks, by name in the network.
        missing: names of the other arrays that the file lacks.
        unused: names in the file of the arrays that the network lacks.
    """

    fitting: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    known: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)


def check_weights(network: Network, path: str | os.PathLike[str]) -> None:
    """Check that the arrays of a file have the names, shapes and types of a network's.

    Their numbers are not read.

    Raises:
        UserError: the file cannot be read, or its arrays do not fit the network; the message names
            the first array that differs.
    """
    path = Path(path)
    with _open(path) as source:
        mismatch = _mismatch(network, _match(network, source))
    if mismatch is not None:
        raise UserError(_do_not_fit(path, network, mismatch))


def check_fitting_weights(
    network: Network, path: str | os.PathLike[str], frozen: Collection[str] = ()
) -> None:
    """Check that some arrays of a file fit a network, and those of its frozen layers all do.

    Args:
        network: the network.
        path: a safetensors or ONNX file, a run directory or a checkpoint.
        frozen: names of parameters that training will not change.

    Raises:
        UserError: the file cannot be read, no parameter fits, an array has another type, one of a
            layer with frozen parameters does not fit, or the file is of another network of the zoo
            and lacks layers.
    """
    path = Path(path)
    with _open(path) as source:
        _require_some(network, path, _match(network, source), frozen)


class WeightsSize(NamedTuple):
    """What weights decide about a network of the zoo.

    Attributes:
        input_shape, outputs: of the network.
        is_normalised: True if its first layer normalises pixels (`with_normalization`).
    """

    input_shape: Shape
    outputs: int
    is_normalised: bool = False


def size_of_weights(network: Network, path: str | os.PathLike[str]) -> WeightsSize | None:
    """Return the input shape and the number of outputs that weights have for a network of the zoo.

    Raises:
        UserError: the file cannot be read.

    Returns:
        None if the first or the last layer with weights is missing.
    """
    with _open(Path(path)) as source:
        names = names_in(network, source.shapes)
        shapes = {name: source.shapes[own] for name, own in names.items()}
        ends = tuple(f"{NORMALIZATION}.{name}" for name in ("weight", "running_mean"))
        normalises = any(name.endswith(ends) for name in source.shapes)
    last = shapes.get(f"{output_layer(network)}.weight", ())
    first = next(node for node in network.nodes if node.parameters)
    weight, input_shape = shapes.get(f"{first.name}.weight", ()), network.input_shape
    if not last or len(weight) != len(first.parameters[0].shape) or len(weight) < 2:
        return None
    width = weight[1] * getattr(first.layer, "groups", 1)
    normalises = normalises or (
        source.is_foreign and width == 3 and is_of_imagenet(network, normalised=True)
    )
    return WeightsSize((width, *input_shape[1:]), last[0], normalises)


def load_weights(replica: Replica, path: str | os.PathLike[str]) -> None:
    """Set all parameters and statistics of a replica to those in a file.

    Args:
        replica: numbers are converted to its precision.
        path: a safetensors or ONNX file, a run directory or a checkpoint.

    Raises:
        UserError: as for `check_weights`, or a number is not finite or a variance negative; the
            replica is unchanged.
    """
    path, network = Path(path), replica.plan.network
    check_weights(network, path)
    with _open(path) as source:
        _load(replica, path, source, _match(network, source))


def load_fitting_weights(replica: Replica, path: str | os.PathLike[str]) -> str:
    """Set the parameters and statistics of a replica that fit to those in a file.

    Args:
        replica: numbers are converted to its precision.
        path: see `check_fitting_weights`.

    Returns:
        A line that states what was loaded, and what remains as it was.

    Raises:
        UserError: as for `check_fitting_weights`, or a number is not finite or a variance negative;
            the replica is unchanged.
    """
    path, network = Path(path), replica.plan.network
    with _open(path) as source:
        match = _match(network, source)
        _require_some(network, path, match)
        _load(replica, path, source, match)
    return _report(network, path, match)


def _load(replica: Replica, path: Path, source: _Source, match: _Match) -> None:
    network = replica.plan.network
    found: dict[str, NDArray[Any]] = {n: source.read(own) for n, own in match.fitting.items()}
    found |= match.known
    for name, values in found.items():
        if not np.isfinite(values).all():
            reason = f"{name} contains values that are not finite numbers"
            raise UserError(_do_not_fit(path, network, reason))
        if name.endswith(".running_var") and values.min() < 0:
            reason = f"{name} contains {values.min():g}; expected variances, which are not negative"
            raise UserError(_do_not_fit(path, network, reason))
    for arrays in (replica.parameters, replica.statistics):
        for name in arrays:
            if name in found:
                arrays[name] = found[name].reshape(arrays[name].shape)


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
    write_arrays(arrays, Path(path), {f"{OWN_METADATA}network": network.name})


@contextmanager
def _open(path: Path) -> Iterator[_Source]:
    """Open a file of weights or a checkpoint; a failure to read it is a `UserError`."""
    if not path.exists() and not is_onnx(path):
        raise UserError(
            f"weights {path} do not exist; expected a .safetensors or .onnx file, or a run "
            "directory"
        )
    if path.is_dir() and not is_onnx(path):
        checkpoint = load_checkpoint(path, best=True)
        arrays = checkpoint.arrays
        arrays = averaged_arrays(arrays) if checkpoint.facts.get("updates") else arrays
        yield _source_of({
            name.partition("/")[2]: values for name, values in arrays.items()
            if name.startswith(("parameters/", f"{STATISTICS}/"))
        })  # fmt: skip
    elif is_onnx(path):
        from dptrain.interchange.onnx_files import read_onnx_file

        found = read_onnx_file(path)
        yield _source_of(found.arrays, is_foreign=not found.is_own)
    else:
        with _safetensors(path) as file:
            names = [n for n in file.keys() if not n.endswith(IGNORED_SUFFIX)]  # noqa: SIM118
            slices = {name: file.get_slice(name) for name in names}
            keys = file.metadata() or {}
            yield _Source(
                {name: tuple(each.get_shape()) for name, each in slices.items()},
                {name: str(each.get_dtype()) for name, each in slices.items()},
                file.get_tensor,
                is_foreign=not any(key.startswith(OWN_METADATA) for key in keys),
            )


def _source_of(arrays: Mapping[str, NDArray[Any]], *, is_foreign: bool = False) -> _Source:
    shapes = {name: values.shape for name, values in arrays.items()}
    return _Source(shapes, dict.fromkeys(shapes, TYPES[0]), arrays.__getitem__, is_foreign)


@contextmanager
def _safetensors(path: Path) -> Iterator[Any]:
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


def _match(network: Network, source: _Source) -> _Match:
    """Return what a file has for each array of a network."""
    match, names = _Match(), names_in(network, source.shapes)
    for name, shape in expected_shapes(network).items():
        own, known = names.get(name), _imagenet_value(name, shape)
        if own is None and known is not None:
            match.known[name] = known
        elif own is None:
            match.missing.append(name)
        elif not has_shape(source.shapes[own], shape):
            match.shapes[name] = source.shapes[own]
        elif source.types[own] not in TYPES:
            match.types[name] = source.types[own]
        else:
            match.fitting[name] = own
    used = set(names.values())
    match.unused.extend(n for n in source.shapes if n not in used and not is_auxiliary(n))
    return match


def _imagenet_value(name: str, shape: Shape) -> NDArray[np.float64] | None:
    """Return an array of the layer that normalises pixels from -1 to 1 as ImageNet's are."""
    layer, _, kind = name.rpartition(".")
    if layer != NORMALIZATION or shape != (3,):
        return None
    mean, deviation = np.array(IMAGENET_MEAN), np.array(IMAGENET_DEVIATION)
    values = {
        "running_mean": 2.0 * mean - 1.0,
        "running_var": np.square(2.0 * deviation) - BatchNorm2d().epsilon,
        "weight": np.ones(3),
        "bias": np.zeros(3),
    }
    return values[kind]


def _do_not_fit(path: Path, network: Network, reason: str) -> str:
    return f"weights {path} do not fit {network.label}: {reason}"


def _mismatch(network: Network, match: _Match) -> str | None:
    """Describe the difference between the arrays of a file and a network; None if they fit."""
    missing, unused = match.missing, match.unused
    if missing:
        hint = f"; the file has {_first(unused)}, which the network lacks" if unused else ""
        return f"the file lacks {_first(missing)}{hint}"
    if unused:
        return f"the file also has {_first(unused)}"
    expected = expected_shapes(network)
    for name, shape in match.shapes.items():
        return f"{name} has shape {shape}; expected {expected[name]}"
    for name, kind in match.types.items():
        return f"{name} has type {kind}; expected {', '.join(TYPES)}"
    return None


def _require_some(
    network: Network, path: Path, match: _Match, frozen: Collection[str] = ()
) -> None:
    """Refuse a file of which too little fits: nothing, not all frozen layers, or a smaller network.

    A network of the zoo whose layers are among those of another one, such as resnet18 and resnet34,
    would leave the layers between them at random.
    """
    expected = expected_shapes(network)
    first = next(p for p in network.parameters if p.name not in match.known)
    for name, kind in match.types.items():
        reason = f"{name} has type {kind}; expected {', '.join(TYPES)}"
        raise UserError(_do_not_fit(path, network, reason))
    if not any(p.name in match.fitting for p in network.parameters):
        has = _first(match.unused or [*match.shapes])
        reason = (
            f"no array has the name and the shape of a parameter, such as {first.name} "
            f"{first.shape}; the file has {has}"
        )
        known = network_of_weights(path)
        if known not in (None, network.name):
            reason = f"they are of {known}; use --network {known}"
        raise UserError(_do_not_fit(path, network, reason))
    lacking = [n for n in match.missing if n.rpartition(".")[0] != output_layer(network)]
    if lacking and network.family is not None:
        known = network_of_weights(path)
        if known not in (None, network.name):
            reason = f"they are of {known}, and lack {_first(lacking)}; use --network {known}"
            raise UserError(_do_not_fit(path, network, reason))
    layers = {name.rpartition(".")[0] for name in frozen}
    for name in expected:
        is_frozen = name in frozen or (".running_" in name and name.rpartition(".")[0] in layers)
        if is_frozen and name not in match.fitting and name not in match.known:
            reason = f"{_difference(name, network, match)}, and --freeze would keep it at random"
            raise UserError(_do_not_fit(path, network, reason))


def _report(network: Network, path: Path, match: _Match) -> str:
    """Return a line that states what was loaded, and what was not."""
    kinds = {
        "parameters": [each.name for each in network.parameters],
        "running statistics": [each.name for each in network.statistics],
    }
    kinds = {
        kind: [name for name in names if name not in match.known] for kind, names in kinds.items()
    }
    counts = [
        f"{sum(name in match.fitting for name in names)} of {len(names)} {kind}"
        for kind, names in kinds.items()
        if names
    ]
    left = [n for n in expected_shapes(network) if n not in match.fitting and n not in match.known]
    parts = [f"weights: {' and '.join(counts)} from {path}"]
    if left:
        named = ", ".join(_difference(name, network, match) for name in left[:MOST_NAMED])
        more = f" and {len(left) - MOST_NAMED} more" if len(left) > MOST_NAMED else ""
        parts.append(f"initialised at random: {named}{more}")
    if match.unused:
        own = network_of_weights(path)
        hint = "" if own in (None, network.name) else f" (the file is of {own})"
        parts.append(f"not used: {_first(match.unused)}{hint}")
    if match.known:
        mean, deviation = (", ".join(map(str, x)) for x in (IMAGENET_MEAN, IMAGENET_DEVIATION))
        parts.append(
            f"layer {NORMALIZATION} normalises inputs as for ImageNet, red, green and blue from 0 "
            f"to 1 by mean {mean} and deviation {deviation}"
        )
    return "; ".join(parts)


def _difference(name: str, network: Network, match: _Match) -> str:
    """Return the name of an array that does not fit, with the reason."""
    if name not in match.shapes:
        return f"{name} (not in the file)"
    there, here = (
        "×".join(map(str, s)) for s in (match.shapes[name], expected_shapes(network)[name])
    )
    return f"{name} (shape {there} in the file, {here} here)"


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{shown(names[0])}{more}"
