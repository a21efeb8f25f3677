"""The names and shapes of the arrays in files of weights, and the network that they are of."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open

from dptrain.errors import UserError
from dptrain.files import MAX_TEXT_BYTES, parse_json, read_regular, require_regular
from dptrain.foreign import is_onnx
from dptrain.network.adaptation import NORMALIZATION, output_layer
from dptrain.network.layers import Shape
from dptrain.network.network import Network
from dptrain.network.zoo import NETWORKS
from dptrain.runs.names import SPECIFICATION

IGNORED_SUFFIX = ".num_batches_tracked"
"""Ending of the names of PyTorch's step counters, which nothing here needs."""

ALIASES = {
    "pre_logits.fc1.": "classifier.0.", "pre_logits.fc2.": "classifier.3.",
    "head.fc.": "classifier.6.",
}  # fmt: skip
"""Names of layers in timm's VGG, and in torchvision's; its ResNets have those of torchvision."""

LAYER_SCALE = "layer_scale"
"""Name of a factor per channel: an array in torchvision's ConvNeXt, here the weight of a depthwise
1×1 convolution of this name."""

AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")
"""Beginnings of the names in torchvision's GoogLeNet and Inception v3 of auxiliary classifiers,
which inference does not use and the networks of the zoo lack."""


def expected_shapes(network: Network) -> dict[str, Shape]:
    """Return the shapes of the parameters and the statistics of a network by name."""
    parameters = {each.name: each.shape for each in network.parameters}
    return parameters | {each.name: each.shape for each in network.statistics}


def names_in(network: Network, found: Collection[str]) -> dict[str, str]:
    """Return the names in a file of the arrays of a network that it has, by name in the network.

    PyTorch's DistributedDataParallel (``module.``), ``torch.compile`` (``_orig_mod.``) and
    Lightning (``model.``) put a prefix before all names, and so does a model that is an attribute
    of another one. The prefix with which most arrays have a name of the network counts.
    """
    own = expected_shapes(network)
    ends = {name: name for name in own}
    ends |= {n.removesuffix(".weight"): n for n in own if n.endswith(f"{LAYER_SCALE}.weight")}
    for alias, layer in ALIASES.items():
        ends |= {f"{alias}{n.removeprefix(layer)}": n for n in own if n.startswith(layer)}
    prefixes: Counter[str] = Counter()
    for name in found:
        starts = (0, *(at + 1 for at, letter in enumerate(name) if letter == "."))
        prefixes.update(name[:at] for at in starts if name[at:] in ends)
    if not prefixes:
        return {}
    prefix = max(sorted(prefixes, key=len), key=lambda each: prefixes[each])
    known = set(found)
    return {name: prefix + end for end, name in reversed(ends.items()) if prefix + end in known}


def has_shape(shape: Shape, expected: Shape) -> bool:
    """Return whether an array has a shape, but for the form of the layer that it belongs to.

    It may be a convolution (K, C, R, S) over a whole map for a dense layer, and a dense layer
    (K, C) or a factor per channel for a 1×1 convolution.

    Example:
        >>> has_shape((10, 8, 2, 2), (10, 32)), has_shape((10, 8), (10, 8, 1, 1))
        (True, True)
    """
    if len(expected) == 2 and len(shape) == 4:
        return (shape[0], math.prod(shape[1:])) == expected
    return shape + (1,) * (len(expected) - len(shape)) == expected


def is_auxiliary(name: str) -> bool:
    """Return True for an array of a part of a network that only some trainings use."""
    return any(f".{part}" in f".{name}" for part in AUXILIARY)


def network_of_weights(path: str | os.PathLike[str]) -> str | None:
    """Return the name of the network of the zoo that weights are of.

    The input channels and the number of outputs may differ. A file that cannot be read is of none:
    reading its numbers raises the error.

    Args:
        path: a safetensors or ONNX file, or a run directory.

    Returns:
        None if they are of none, or of several.
    """
    path = Path(path)
    with suppress(OSError, ValueError, KeyError, TypeError, SafetensorError, UserError):
        if path.is_dir():
            found = parse_json(read_regular(path / SPECIFICATION, MAX_TEXT_BYTES))["job"]["network"]
            return found if found in NETWORKS else None
        shapes = _shapes(path)
        known = [name for name, entry in NETWORKS.items() if _is_of(entry.build(), shapes)]
        return known[0] if len(known) == 1 else None
    return None


def _shapes(path: Path) -> dict[str, Shape]:
    """Return the shapes of the arrays of a safetensors or ONNX file by name."""
    if is_onnx(path):
        from dptrain.interchange.onnx_files import read_onnx_file

        return {name: values.shape for name, values in read_onnx_file(path).arrays.items()}
    require_regular(path)
    with safe_open(path, framework="numpy") as file:
        names = [name for name in file.keys() if not name.endswith(IGNORED_SUFFIX)]  # noqa: SIM118
        return {name: tuple(file.get_slice(name).get_shape()) for name in names}


def _is_of(network: Network, shapes: Mapping[str, Shape]) -> bool:
    """Return True if arrays are those of a network with any input channels and outputs."""
    expected, names = expected_shapes(network), names_in(network, shapes)
    own = set(names.values())
    left = [name for name in shapes if name not in own and not is_auxiliary(name)]
    if names.keys() != expected.keys() or not all(NORMALIZATION in name for name in left):
        return False
    first = next(node for node in network.nodes if node.parameters)
    free = {f"{first.name}.weight": (0, *range(2, 9)), f"{output_layer(network)}.weight": (1,)}
    last = f"{output_layer(network)}.bias"
    for name, shape in expected.items():
        there = shapes[names[name]]
        if name == last or has_shape(there, shape):
            continue
        kept = free.get(name)
        if kept is None or len(there) != len(shape):
            return False
        if any(there[axis] != shape[axis] for axis in kept if axis < len(shape)):
            return False
    return True
