"""Networks by name, each with default training settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from dptrain.errors import UserError, shown, suggest
from dptrain.network.layers import Shape
from dptrain.network.network import Network
from dptrain.network.zoo import (
    alexnet,
    convnext,
    densenet,
    inception,
    inverted_residuals,
    mobilenet,
    regnet,
    resnet,
    shufflenet,
    squeezenet,
    studies,
    vgg,
    wide_resnet,
)
from dptrain.network.zoo.recipes import (
    ADAMW_DECAY,
    BINARY,
    CLASSES,
    IMAGENET_SIZE,
    LAYER_RATES,
    TABLES,
    VALUES,
    Entry,
    Recipe,
    fine_tuning,
)

NETWORKS: Mapping[str, Entry] = MappingProxyType(
    {
        **studies.NETWORKS,
        **resnet.NETWORKS,
        **wide_resnet.NETWORKS,
        **regnet.NETWORKS,
        **vgg.NETWORKS,
        **mobilenet.NETWORKS,
        **densenet.NETWORKS,
        **inception.NETWORKS,
        **convnext.NETWORKS,
        **inverted_residuals.NETWORKS,
        **shufflenet.NETWORKS,
        **alexnet.NETWORKS,
        **squeezenet.NETWORKS,
        **studies.PERCEPTRONS,
    }
)
"""The networks by name. ``mlp-A-B-C``, ``classifier-A-B-C`` and ``multilabel-A-B-C`` with any
positive numbers are networks as well. Each is a function of the shape of its input and of its
number of outputs."""


_WIDTH = re.compile(r"[1-9][0-9]{0,8}")


def build_network(
    name: str, input_shape: Shape | None = None, outputs: int | None = None
) -> Network:
    """Build the network called `name`; `dptrain.get_network` also reads files.

    Args:
        name: one of `NETWORKS`, or ``mlp-``, ``classifier-`` or ``multilabel-`` and the widths of
            the hidden layers.
        input_shape: (C, H, W) or (F,); None for that of the published network.
        outputs: number of outputs; None for that of the published network.

    Raises:
        UserError: there is no such network; the message suggests the closest name.
    """
    if name in NETWORKS:
        return NETWORKS[name].build(input_shape, outputs)
    kind, *widths = name.split("-")
    if kind in studies.KINDS and widths and all(map(_WIDTH.fullmatch, widths)):
        entry = studies.perceptron([int(width) for width in widths], kind)
        return entry.build(input_shape, outputs)
    names = [known for known in NETWORKS if not known.startswith("mlp-")]
    raise UserError(
        f"no network '{shown(name)}'; expected {', '.join(names)}, mlp-A-B-C, "
        "classifier-A-B-C, multilabel-A-B-C, or the path of a file that ends in .toml or .onnx"
        f"{suggest(name, NETWORKS)}"
    )


def recipe(
    network: Network,
    optimizer: str | None = None,
    data: str | None = None,
    *,
    begins_with_weights: bool = False,
) -> Recipe:
    """Return the default training settings of `network`.

    Args:
        network: a network; one that is not in the zoo gets settings that fit its loss.
        optimizer: the name of an update rule; if it is not that of the recipe, learning rate,
            momentum and weight decay are replaced by defaults for this optimizer. Adam, AdamW and
            RMSProp have the same learning rate, LARS and LAMB the same for all networks.
        data: specification of the data; None for the data of the recipe.
        begins_with_weights: True if training does not begin at random: networks of ImageNet are
            then trained by `fine_tuning`.
    """
    # Only perceptrons for values have data of their own.
    own = str(VALUES.data)
    is_own = network.loss.targets == "values" and (data or own).startswith(own)
    if _is_perceptron(network) and not is_own:
        chosen = TABLES
    elif network.name in NETWORKS:
        chosen = NETWORKS[network.name].recipe
        if begins_with_weights and is_of_imagenet(network):
            chosen = fine_tuning(chosen)
    else:
        chosen = {"classes": CLASSES, "binary": BINARY, "values": VALUES}[network.loss.targets]
    if optimizer in (None, chosen.optimizer):
        return chosen
    again = partial(recipe, network, data=data, begins_with_weights=begins_with_weights)
    if optimizer == "adamw":
        return replace(again("adam"), optimizer=optimizer, weight_decay=ADAMW_DECAY)
    # That of AdamW multiplies the weights.
    weight_decay = None if chosen.optimizer == "adamw" else chosen.weight_decay
    if optimizer in LAYER_RATES:
        return replace(
            chosen,
            optimizer=optimizer,
            learning_rate=LAYER_RATES[optimizer],
            momentum=CLASSES.momentum if optimizer == "lars" else 0.0,
            nesterov=False,
            weight_decay=ADAMW_DECAY if optimizer == "lamb" else weight_decay,
        )
    if optimizer == "rmsprop":
        return replace(again("adam"), optimizer=optimizer)
    default = CLASSES if optimizer == CLASSES.optimizer else VALUES
    return replace(
        chosen,
        optimizer=optimizer,
        learning_rate=default.learning_rate,
        momentum=default.momentum,
        nesterov=False,
        # That of AdamW multiplies the weights.
        weight_decay=None if chosen.optimizer == "adamw" else chosen.weight_decay,
    )


def is_of_imagenet(network: Network, *, normalised: bool = False) -> bool:
    """Return True for a network of the zoo that was published with images of ImageNet.

    Args:
        network: a network.
        normalised: True for those alone whose published weights expect normalised images.
    """
    entry = NETWORKS.get(network.name)
    if entry is None or network.family is None or entry.outputs != IMAGENET_SIZE[1]:
        return False
    return entry.normalises or not normalised


def _is_perceptron(network: Network) -> bool:
    """Return True for a perceptron of the zoo."""
    return network.family is not None and network.name.partition("-")[0] in studies.KINDS


__all__ = ["NETWORKS", "Entry", "Recipe", "build_network", "is_of_imagenet", "recipe"]
