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

The keys of a layer are the fields of its class, so a new class of layer needs no change here. An
initialiser (any field that is itself a description) is a table with a type, or the type alone
where everything else is left as it is: ``weight_init = "he"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from dptrain.errors import UserError, suggest
from dptrain.network.layers import LAYERS, Layer
from dptrain.network.losses import LOSSES, Loss
from dptrain.network.network import Network
from dptrain.network.zoo import build_network
from dptrain.toml import read_toml

KEYS = ("name", "input", "loss", "layer")
"""What may stand at the top of a network file."""


def get_network(name_or_path: str | Path) -> Network:
    """Return a network by its name, or read it from a TOML file.

    Args:
        name_or_path: a name in `dptrain.network.zoo.NETWORKS`, ``mlp-A-B-C`` for a perceptron with
            hidden layers of A, B and C units, or the path of a file that ends in ``.toml``.

    Raises:
        UserError: there is no network of this name, the file does not exist, or the file does not
            describe a network.

    Example:
        >>> get_network("model0").num_parameters
        210998
    """
    text = str(name_or_path)
    return read_network(text) if text.endswith(".toml") else build_network(text)


def read_network(path: Path | str) -> Network:
    """Read a network.

    Raises:
        UserError: the file is absent or describes no network; the message names the file, the
            layer, the key and what was expected.
    """
    path = Path(path)
    values = read_toml(path)
    try:
        return _network(values, path.stem)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def write_network(network: Network, path: Path | str) -> None:
    """Write `network`; `read_network` gives an equal one. Fields at their default are left out."""
    import tomli_w

    values: dict[str, Any] = {
        "name": network.name,
        "input": list(network.input_shape),
        "loss": _plain(network.loss, network.loss.kind),
        "layer": [{"type": layer.kind, **_changed(layer)} for layer in network.layers],
    }
    Path(path).write_text(tomli_w.dumps(values), encoding="utf-8")


# Reading.


def _network(values: Mapping[str, Any], name: str) -> Network:
    for key in values:
        if key not in KEYS:
            raise UserError(f"unknown key '{key}'; expected {', '.join(KEYS)}{suggest(key, KEYS)}")
    for key in ("input", "layer"):
        if key not in values:
            raise UserError(f"key '{key}' is missing")
    shape = values["input"]
    if not (isinstance(shape, list) and shape and all(type(size) is int for size in shape)):
        raise UserError(f"input is {shape!r}; expected whole numbers, [C, H, W] or [F]")
    tables = values["layer"]
    if not (isinstance(tables, list) and all(isinstance(table, dict) for table in tables)):
        raise UserError("layer is no list of tables; write [[layer]] above the keys of each layer")
    name = _value(values.get("name", name), str, "name")
    loss: Loss = _description(values.get("loss", "softmax_cross_entropy"), LOSSES, "loss")
    layers: list[Layer] = [
        _description(table, LAYERS, f"layer {number}") for number, table in enumerate(tables, 1)
    ]
    return Network(tuple(shape), layers, loss, name)


def _description(value: Any, classes: Mapping[str, type[Any]], where: str) -> Any:
    """Make the object that a table with a type, or a type alone, describes."""
    table = {"type": value} if isinstance(value, str) else value
    if not isinstance(table, dict):
        raise UserError(f"{where} is {value!r}; expected a type or a table with one")
    if "type" not in table:
        raise UserError(f"{where} has no type; expected one of {', '.join(classes)}")
    kind = table["type"]
    if not isinstance(kind, str) or kind not in classes:
        hint = suggest(str(kind), classes)
        raise UserError(f"{where}: unknown type {kind!r}; expected {', '.join(classes)}{hint}")
    cls = classes[kind]
    where = f"{where} ({kind})"
    known = _settable(cls)
    given = {key: item for key, item in table.items() if key != "type"}
    for key in given:
        if key not in known:
            expected = ", ".join(known) or "no keys but type"
            raise UserError(f"{where}: unknown key '{key}'; expected {expected}"
                            f"{suggest(key, known)}")  # fmt: skip
    for key, field in known.items():
        if field.default is MISSING and key not in given:
            raise UserError(f"{where}: key '{key}' is missing")
    hints = get_type_hints(cls)
    arguments = {key: _value(item, hints[key], f"{where}: {key}") for key, item in given.items()}
    try:
        return cls(**arguments)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _settable(cls: type[Any]) -> dict[str, Field[Any]]:
    """Fields that a user may set, by name; `cls` may be a plain class without any."""
    return {f.name: f for f in fields(cls) if f.init} if is_dataclass(cls) else {}


def _value(value: Any, hint: Any, where: str) -> Any:
    """Convert a TOML value to what the annotation `hint` asks for."""
    options = _options(hint)
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
        elif option is float and type(value) is int:
            return float(value)
    expected = " or ".join(text for option in options if (text := _expected(option)))
    words = [word for option in options if get_origin(option) is Literal
             for word in get_args(option)]  # fmt: skip
    hint_text = suggest(value, words) if isinstance(value, str) else ""
    raise UserError(f"{where} is {value!r}; expected {expected}{hint_text}")


def _options(hint: Any) -> tuple[Any, ...]:
    """Members of a union, else the hint alone."""
    is_union = get_origin(hint) is not None and get_origin(hint) not in (tuple, Literal)
    return get_args(hint) if is_union else (hint,)


def _is_row(value: list[Any], types: tuple[Any, ...]) -> bool:
    return len(value) == len(types) and all(
        type(item) is wanted for item, wanted in zip(value, types, strict=True)
    )


def _expected(option: Any) -> str:
    """Words for one member of a union; nothing for None, which TOML cannot say."""
    if get_origin(option) is Literal:
        return ", ".join(get_args(option))
    if get_origin(option) is tuple:
        return f"[{', '.join(_expected(item) for item in get_args(option))}]"
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return words.get(option, "")


# Writing.


def _changed(description: Any) -> dict[str, Any]:
    """Fields that differ from their default, as TOML can say them."""
    changed = {}
    for key, field in _settable(type(description)).items():
        value = getattr(description, key)
        if field.default is MISSING or value != field.default:
            assert value is not None, f"{key}: TOML has no None, so None can only be a default"
            changed[key] = _plain(value, type(value).__name__.lower())
    return changed


def _plain(value: Any, kind: str) -> Any:
    """A value as TOML knows it: descriptions become a type or a table, tuples lists."""
    if isinstance(value, tuple):
        return list(value)
    if not (is_dataclass(value) or isinstance(value, (Layer, Loss))):
        return value
    changed = _changed(value)
    return {"type": kind, **changed} if changed else kind
