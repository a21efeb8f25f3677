"""Functions of users in the metadata of exported files."""

from __future__ import annotations

import json
from collections.abc import Mapping

from dptrain.errors import UserError
from dptrain.network.elementwise import Activation, parameters_of
from dptrain.network.network import Network
from dptrain.network.own_functions import define, definition_of

KEY = "dptrain.functions"


def functions_metadata(network: Network) -> dict[str, str]:
    """Return the functions of users in a network, with the parameters of each layer, as JSON."""
    layers = [each for each in network.layers if isinstance(each, Activation) and each.is_own]
    if not layers:
        return {}
    found = [
        {**definition_of(each), "values": parameters_of(each)} for each in dict.fromkeys(layers)
    ]
    return {KEY: json.dumps(found)}


def known_functions(metadata: Mapping[str, str]) -> tuple[Activation, ...]:
    """Return the functions of users that the metadata of a file names.

    Raises:
        UserError: the metadata is damaged.
    """
    defined: dict[Activation, None] = {}
    try:
        tables = json.loads(metadata.get(KEY, "[]"))
        for table in tables:
            names = table["name"], table["expression"], table.get("derivative", "")
            cls = define(*names, tuple(table.get("parameters", {}).items()))
            defined[cls(**table["values"])] = None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f" ({error})" if isinstance(error, UserError) else ""
        raise UserError(
            f"the functions in the metadata are damaged{reason}; export the model again"
        ) from None
    return tuple(defined)
