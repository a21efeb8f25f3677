"""Which parameters are trained, and how fast: patterns over names, and what follows for layers.

A *frozen* parameter has no gradient, no optimizer state and no update. A layer whose output depends
on no trained parameter has no backward pass, and is computed as in inference unless it draws random
numbers. A batch normalisation whose weight and bias are frozen normalises by its running values and
does not change them; above trained parameters it is a `FrozenBatchNorm2d`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from fnmatch import fnmatchcase

from dptrain.errors import UserError, shown, suggest
from dptrain.network.adaptation import output_layer
from dptrain.network.network import Network, Node
from dptrain.network.normalization import BatchNorm2d, FrozenBatchNorm2d, Normalization
from dptrain.plan.optimizers import UpdateRule, parse_rate_factors, split_patterns

ALL_BUT_HEAD = "all-but-head"
"""The pattern that matches all parameters but those of the output layer."""


def rate_factors(network: Network, rule: UpdateRule) -> dict[str, float]:
    """Return the factor of the learning rate of each parameter by name; 0 if it is frozen.

    If several patterns of `UpdateRule.rate_factor` match a parameter, the last one counts.

    Raises:
        UserError: a pattern matches no parameter, or all parameters are frozen.

    Example:
        >>> from dptrain.network import get_network
        >>> from dptrain.plan.optimizers import SGD
        >>> factors = rate_factors(get_network("mlp-8"), SGD(freeze="dense1", rate_factor="*=0.5"))
        >>> factors["dense1.weight"], factors["dense2.weight"]
        (0.0, 0.5)
    """
    factors = {parameter.name: parameter.rate_factor for parameter in network.parameters}
    fixed = [parameter.name for parameter in network.parameters if not parameter.is_trained]
    for pattern, factor in parse_rate_factors(rule.rate_factor):
        factors.update(dict.fromkeys(_matching(network, pattern, "--rate-factor"), factor))
    for pattern in split_patterns(rule.freeze):
        factors.update(dict.fromkeys(_matching(network, pattern, "--freeze"), 0.0))
    factors.update(dict.fromkeys(fixed, 0.0))
    if factors and not any(factors.values()):
        raise UserError(
            f"--freeze {shown(rule.freeze)} freezes all parameters of {network.label}; leave some "
            f"to train, for example with --freeze {ALL_BUT_HEAD}"
        )
    return factors


def _matching(network: Network, pattern: str, flag: str) -> list[str]:
    """Return the names of the parameters whose name, or whose layer's, matches a pattern."""
    names = {p.name: node.name for node in network.nodes for p in node.parameters}
    if pattern == ALL_BUT_HEAD:
        head = output_layer(network)
        return [name for name, layer in names.items() if layer != head]
    found = [n for n, layer in names.items() if any(fnmatchcase(x, pattern) for x in (n, layer))]
    if found:
        return found
    layers = dict.fromkeys(names.values())
    near = suggest(pattern, [*_scopes(layers), *layers, *names], count=3)
    first = ", ".join([*layers][:4])
    raise UserError(
        f"{flag}: '{shown(pattern)}' matches no layer with parameters and no parameter of "
        f"{network.label}{near or f'; its layers are {first}, …'}"
    )


def _scopes(layers: Iterable[str]) -> dict[str, None]:
    """Return a pattern for each scope of layers, ``layer1.*`` and ``layer1.0.*``."""
    parts = [layer.split(".") for layer in layers]
    return {
        ".".join((*each[:length], "*")): None for each in parts for length in range(1, len(each))
    }


def planned_nodes(network: Network, rule: UpdateRule) -> tuple[Node, ...]:
    """Return the layers of a network as training by an update rule computes them.

    Their parameters have `Parameter.rate_factor`, and a batch normalisation without trained
    parameters, whose output depends on others, is a `FrozenBatchNorm2d`.
    """
    factors = rate_factors(network, rule)
    nodes = []
    for node in network.nodes:
        parameters = tuple(replace(p, rate_factor=factors[p.name]) for p in node.parameters)
        nodes.append(replace(node, parameters=parameters))
    trained = trained_nodes(nodes)
    return tuple(_as_frozen(node) if node.name in trained else node for node in nodes)


def trained_nodes(nodes: Sequence[Node]) -> frozenset[str]:
    """Return the names of the layers whose output depends on a trained parameter."""
    trained: set[str] = set()
    for node in nodes:
        if any(p.is_trained for p in node.parameters) or not trained.isdisjoint(node.inputs):
            trained.add(node.name)
    return frozenset(trained)


def _as_frozen(node: Node) -> Node:
    layer = node.layer
    if not isinstance(layer, BatchNorm2d) or any(p.is_trained for p in node.parameters):
        return node
    shared = {field.name: getattr(layer, field.name) for field in fields(Normalization)}
    return replace(node, layer=FrozenBatchNorm2d(**shared))
