"""Networks as TOML files.

::

    name = "tiny"
    input = [3, 32, 32]
    loss = "softmax_cross_entropy"

    [[layer]]
    type = "conv"
    filters = 16
    weight_init = {type = "normal", std = 0.05}

    [[layer]]
    type = "relu"

The keys of a layer are the fields of its class. An initialiser is a table with a type, or the type
alone if all of its fields have their defaults: ``weight_init = "he"``.

A file may define functions of single elements, which are then types of layers with their parameters
as keys; see `dptrain.network.own_functions.activation`::

    [[function]]
    name = "swish"
    expression = "x * sigmoid(beta * x)"
    parameters = {beta = 1.0}

    [[layer]]
    type = "swish"
    beta = 1.5

and a loss, see `dptrain.network.own_functions.loss`::

    loss = {type = "huber", delta = 0.5}

    [loss_function]
    name = "huber"
    expression = "where(abs(z - y) < delta, (z - y)**2 / 2, delta * (abs(z - y) - delta / 2))"
    parameters = {delta = 1.0}

A layer reads the output of the layer before it. ``inputs = ["conv1"]`` names other inputs, and
``name = "stem"`` another name than kind and running number::

    [[layer]]
    type = "conv"
    filters = 16
    name = "stem"
    inputs = ["input"]
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeGuard, cast, get_args, get_origin, get_type_hints

from dptrain.bounds import as_number
from dptrain.errors import UserError, shown, suggest
from dptrain.foreign import ONNX, is_onnx, refuse_foreign
from dptrain.network.elementwise import Activation
from dptrain.network.field_types import type_options
from dptrain.network.kinds import LAYERS
from dptrain.network.layers import Layer, Shape
from dptrain.network.losses import LOSSES, ElementwiseLoss, Loss
from dptrain.network.network import (
    INPUT,
    Network,
    NodeSpec,
    check_layer_count,
    default_names,
)
from dptrain.network.own_functions import (
    OWN,
    OWN_LOSSES,
    checked_parameters,
    define,
    define_loss,
    definition_of,
)
from dptrain.network.zoo import build_network
from dptrain.toml import read_toml

ONNX_READER = "dptrain.interchange.onnx_files"
"""The module that reads ONNX files; networks themselves know only TOML."""
KEYS = ("name", "input", "loss", "loss_function", "function", "layer")
"""Keys at the top of a network file."""

FUNCTION_KEYS = ("name", "expression", "derivative", "parameters")
"""Keys of a function."""

LOSS_KEYS = (*FUNCTION_KEYS[:3], "targets", "parameters")
"""Keys of a loss that the file defines."""

NODE_KEYS = ("name", "inputs")
"""Keys of a layer that belong to its node, not to its class."""


def get_network(
    name_or_path: str | Path,
    *,
    input_shape: Shape | None = None,
    outputs: int | None = None,
) -> Network:
    """Return a network by its name, or read it from a TOML or ONNX file.

    Training adapts a network that was named to the data, see `dptrain.network.adaptation`.

    Args:
        name_or_path: a name in `dptrain.network.zoo.NETWORKS`, ``mlp-A-B-C`` for a perceptron with
            hidden layers of A, B and C units, ``classifier-A-B-C`` for one that predicts classes,
            ``multilabel-A-B-C`` for one that predicts several labels, or the path of a file that
            ends in ``.toml`` or ``.onnx``; see `dptrain.interchange.onnx_import`.
        input_shape: (C, H, W) or (F,) of a network that is named; None for the published one.
        outputs: number of outputs of a network that is named; None for the published one.

    Raises:
        UserError: there is no network of this name or size, the file does not exist, or the file
            does not describe a network.

    Examples:
        >>> get_network("model0").num_parameters
        210998
        >>> get_network("model0", input_shape=(1, 28, 28), outputs=5).output_shape
        (5,)
    """
    text = str(name_or_path)
    refuse_foreign(Path(text), ONNX)
    is_file = is_onnx(Path(text)) or text.endswith(".toml")
    if is_file and not (input_shape is None and outputs is None):
        raise UserError(f"{text} describes one network; change the sizes in the file")
    if is_onnx(Path(text)):
        # Only these files need the packages of interchange.
        found: Network = importlib.import_module(ONNX_READER).read_onnx_file(Path(text)).network
        return found.read_from(text, "onnx")
    return read_network(text) if is_file else build_network(text, input_shape, outputs)


def read_network(path: Path | str) -> Network:
    """Read a network from a TOML file.

    Args:
        path: the file; its stem is the network's name unless the file states one.

    Raises:
        UserError: the file does not exist or does not describe a network; the message names the
            file, the layer, the key and the expected value.
    """
    path = Path(path)
    values = read_toml(path)
    try:
        return _network(values, path.stem).read_from(str(path), "toml")
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def write_network(network: Network, path: Path | str) -> None:
    """Write a network to a TOML file, from which `read_network` returns an equal network.

    Fields that have their defaults are omitted, and so are names and inputs of a chain.
    """
    Path(path).write_text(network_to_toml(network), encoding="utf-8")


def network_to_toml(network: Network) -> str:
    """Return the text that `write_network` writes."""
    import tomli_w

    return tomli_w.dumps(network_to_dict(network))


def network_to_dict(network: Network) -> dict[str, Any]:
    """Return a network as plain values, as its TOML file holds them.

    Examples:
        >>> network_from_dict(network_to_dict(get_network("model0"))) == get_network("model0")
        True
    """
    return {
        "name": network.name,
        "input": list(network.input_shape),
        "loss": _plain(network.loss, network.loss.kind),
        **({"loss_function": definition_of(network.loss)} if is_own_loss(network.loss) else {}),
        **({"function": functions} if (functions := _function_tables(network)) else {}),
        "layer": _layer_tables(network),
    }


def network_from_dict(values: Mapping[str, Any]) -> Network:
    """Return the network that `network_to_dict` described.

    Raises:
        UserError: the values do not describe a network.
    """
    return _network(values, "network")


# Reading.


def _network(values: Mapping[str, Any], name: str) -> Network:
    for key in values:
        if key not in KEYS:
            raise UserError(
                f"unknown key '{shown(key)}'; expected {', '.join(KEYS)}{suggest(key, KEYS)}"
            )
    for key in ("input", "layer"):
        if key not in values:
            raise UserError(f"key '{key}' is missing")
    shape = values["input"]
    if not (isinstance(shape, list) and shape and all(type(size) is int for size in shape)):
        raise UserError(f"input is {_show(shape)}; expected whole numbers, [C, H, W] or [F]")
    tables = values["layer"]
    if not (isinstance(tables, list) and all(isinstance(table, dict) for table in tables)):
        raise UserError("layer is not a list of tables; write [[layer]] above the keys of a layer")
    check_layer_count(len(tables))
    name = _value(values.get("name", name), str, "name")
    own_losses = {**OWN_LOSSES, **_own_loss(values.get("loss_function"))}
    known = {**LOSSES, **own_losses}
    loss: Loss = _description(values.get("loss", "softmax_cross_entropy"), known, "loss")
    classes = {**LAYERS, **OWN, **_functions(values.get("function", []))}
    nodes = [_node(table, f"layer {number}", classes) for number, table in enumerate(tables, 1)]
    return Network.from_nodes(tuple(shape), nodes, loss, name)


def _functions(tables: Any) -> dict[str, type[Layer]]:
    """Return the classes that the tables under ``[[function]]`` define, by name."""
    if not (isinstance(tables, list) and all(isinstance(table, dict) for table in tables)):
        raise UserError("function is not a list of tables; write [[function]] above its keys")
    found: dict[str, type[Layer]] = {}
    for number, table in enumerate(tables, 1):
        where = f"function {number}"
        name = _defined_name(table, FUNCTION_KEYS, where)
        if name in found:
            raise UserError(f"{where}: a function {name} exists already; choose another name")
        found[name] = _defined(define, table, FUNCTION_KEYS, where)
    return found


def is_own_loss(loss: Loss) -> TypeGuard[ElementwiseLoss]:
    """Return True if a program or a network file defined a loss."""
    return isinstance(loss, ElementwiseLoss) and loss.is_own


def _own_loss(table: Any) -> dict[str, type[Loss]]:
    """Return the class that the table ``[loss_function]`` defines by its name, if there is one."""
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise UserError("loss_function is no table; write [loss_function] above its keys")
    where = "loss_function"
    name = _defined_name(table, LOSS_KEYS, where)
    return {name: _defined(define_loss, {"targets": "values", **table}, LOSS_KEYS, where)}


def _defined_name(table: Mapping[str, Any], keys: tuple[str, ...], where: str) -> str:
    """Return the name in the table of a definition, whose keys are checked."""
    for key in table:
        if key not in keys:
            raise UserError(
                f"{where}: unknown key '{shown(key)}'; expected {', '.join(keys)}"
                f"{suggest(key, keys)}"
            )
    for key in ("name", "expression"):
        if key not in table:
            raise UserError(f"{where}: key '{key}' is missing")
    name: str = _value(table["name"], str, f"{where}: name")
    return name


def _defined(
    define: Callable[..., Any], table: Mapping[str, Any], keys: tuple[str, ...], where: str
) -> Any:
    """Return the class that a table defines; all keys but the last have texts."""
    texts = [_value(table.get(key, ""), str, f"{where}: {key}") for key in keys[:-1]]
    parameters = table.get("parameters", {})
    if not isinstance(parameters, dict):
        raise UserError(f"{where}: parameters is {_show(parameters)}; expected a table")
    try:
        return define(*texts, checked_parameters(texts[0], parameters))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _node(table: dict[str, Any], where: str, classes: Mapping[str, type[Layer]]) -> NodeSpec:
    """Return the node that a table under ``[[layer]]`` describes."""
    rest = {key: value for key, value in table.items() if key not in NODE_KEYS}
    listed, cls = table.get("inputs"), classes.get(str(table.get("type")), Layer)
    if isinstance(listed, list) and len(listed) > 1 and "num_inputs" in _settable(cls):
        rest.setdefault("num_inputs", len(listed))
    layer: Layer = _description(rest, classes, where, more_keys=NODE_KEYS)
    name, inputs = table.get("name"), table.get("inputs")
    if not isinstance(name, str | None):
        raise UserError(f"{where}: name is {_show(name)}; expected text")
    if inputs is None:
        return NodeSpec(layer, name)
    if not (isinstance(inputs, list) and all(isinstance(item, str) for item in inputs)):
        raise UserError(
            f"{where}: inputs is {_show(inputs)}; expected a list of names of layers, such as "
            '["conv1"]'
        )
    return NodeSpec(layer, name, tuple(inputs))


def _description(
    value: Any, classes: Mapping[str, type[Any]], where: str, more_keys: tuple[str, ...] = ()
) -> Any:
    """Return the object that a type, or a table with a type, describes.

    Args:
        value: the TOML value.
        classes: classes by type.
        where: start of error messages.
        more_keys: further keys for the list of keys in an error message.
    """
    table = {"type": value} if isinstance(value, str) else value
    if not isinstance(table, dict):
        raise UserError(f"{where} is {_show(value)}; expected a type or a table with a type")
    if "type" not in table:
        raise UserError(f"{where} has no type; expected one of {', '.join(classes)}")
    kind = table["type"]
    if not isinstance(kind, str) or kind not in classes:
        hint = suggest(kind, classes) if isinstance(kind, str) else ""
        raise UserError(f"{where}: unknown type {_show(kind)}; expected {', '.join(classes)}{hint}")
    cls = classes[kind]
    where = f"{where} ({kind})"
    settable = _settable(cls)
    items = {key: item for key, item in table.items() if key != "type"}
    for key in items:
        if key not in settable:
            expected = (*settable, *more_keys)
            raise UserError(
                f"{where}: unknown key '{shown(key)}'; expected "
                f"{', '.join(expected) or 'no key except type'}{suggest(key, expected)}"
            )
    for key, field in settable.items():
        if field.default is MISSING and key not in items:
            raise UserError(f"{where}: key '{key}' is missing")
    hints = _hints(cast(Hashable, cls))
    arguments = {key: _value(item, hints[key], f"{where}: {key}") for key, item in items.items()}
    try:
        return cls(**arguments)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


@cache
def _hints(cls: Hashable) -> Mapping[str, Any]:
    """Return the annotations of a class, whose evaluation takes time."""
    return get_type_hints(cls)


def _show(value: Any) -> str:
    """Return a TOML value as text for an error message."""
    return f"'{shown(value)}'" if isinstance(value, str) else shown(value)


def _settable(cls: type[Any]) -> dict[str, Field[Any]]:
    """Return the fields of a description by name; a plain class has none."""
    return {f.name: f for f in fields(cls) if f.init} if is_dataclass(cls) else {}


def _value(value: Any, hint: Any, where: str) -> Any:
    """Convert a TOML value to the type that the annotation `hint` states."""
    options = type_options(hint)
    described = {
        option.__name__.lower(): option
        for option in options
        if isinstance(option, type) and is_dataclass(option)
    }
    if described:
        return _description(value, described, where)
    for option in options:
        if get_origin(option) is Literal:
            if value in get_args(option):
                return value
        elif get_origin(option) is tuple:
            if isinstance(value, list) and _is_row(value, get_args(option)):
                return tuple(value)
        elif type(value) is option:
            return value
        elif option is float and type(as_number(value, float)) is float:
            return as_number(value, float)
    expected = " or ".join(text for option in options if (text := _expected(option)))
    choices = [
        choice for option in options if get_origin(option) is Literal for choice in get_args(option)
    ]
    hint_text = suggest(value, choices) if isinstance(value, str) else ""
    raise UserError(f"{where} is {_show(value)}; expected {expected}{hint_text}")


def _is_row(value: list[Any], types: tuple[Any, ...]) -> bool:
    return len(value) == len(types) and all(
        type(item) is expected for item, expected in zip(value, types, strict=True)
    )


def _expected(option: Any) -> str:
    """Describe one member of a union; TOML has no None, for which the text is empty."""
    if get_origin(option) is Literal:
        return ", ".join(get_args(option))
    if get_origin(option) is tuple:
        return f"[{', '.join(_expected(item) for item in get_args(option))}]"
    texts = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return texts.get(option, "")


# Writing.


def _function_tables(network: Network) -> list[dict[str, Any]]:
    """Return a table for each function of users, in the order of the first layers that have it."""
    found: dict[str, Activation] = {}
    for layer in network.layers:
        if isinstance(layer, Activation) and layer.is_own:
            other = found.setdefault(layer.kind, layer)
            if type(other) is not type(layer):
                raise UserError(
                    f"two functions of {network.label} are called {layer.kind}; rename one"
                )
    return [definition_of(layer) for layer in found.values()]


def _layer_tables(network: Network) -> list[dict[str, Any]]:
    """Return one table for each layer; names and inputs that are the default are omitted."""
    tables = []
    before = INPUT
    for node, default in zip(network.nodes, default_names(network.layers), strict=True):
        table = {"type": node.layer.kind, **_changed(node.layer)}
        if node.name != default:
            table["name"] = node.name
        if node.inputs != (before,):
            table["inputs"] = list(node.inputs)
        tables.append(table)
        before = node.name
    return tables


def _changed(description: Any) -> dict[str, Any]:
    """Return the fields that differ from their defaults, as TOML values."""
    changed = {}
    for key, field in _settable(type(description)).items():
        value = getattr(description, key)
        if field.default is MISSING or value != field.default:
            assert value is not None, f"{key}: TOML has no None, so None can only be a default"
            changed[key] = _plain(value, type(value).__name__.lower())
    return changed


def _plain(value: Any, kind: str) -> Any:
    """Return `value` as a TOML value: a description is a type or a table, a tuple a list."""
    if isinstance(value, tuple):
        return list(value)
    if not (is_dataclass(value) or isinstance(value, (Layer, Loss))):
        return value
    changed = _changed(value)
    return {"type": kind, **changed} if changed else kind
