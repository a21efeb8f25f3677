"""Functions and losses of users in the metadata of exported files."""

from __future__ import annotations

import json
from collections.abc import Mapping

from dptrain.errors import UserError
from dptrain.files import parse_json
from dptrain.network.elementwise import Activation, parameters_of
from dptrain.network.files import is_own_loss
from dptrain.network.losses import LOSSES, Loss
from dptrain.network.network import Network
from dptrain.network.own_functions import (
    checked_parameters,
    define,
    define_loss,
    definition_of,
)

KEY, LOSS_KEY = "dptrain.functions", "dptrain.loss_function"


def functions_metadata(network: Network) -> dict[str, str]:
    """Return the functions and the loss of users in a network, with their parameters, as JSON."""
    layers = [each for each in network.layers if isinstance(each, Activation) and each.is_own]
    found = [
        {**definition_of(each), "values": parameters_of(each)} for each in dict.fromkeys(layers)
    ]
    own, loss = {KEY: json.dumps(found)} if found else {}, network.loss
    if is_own_loss(loss):
        own[LOSS_KEY] = json.dumps({**definition_of(loss), "values": loss.parameters})
    return own


def known_loss(metadata: Mapping[str, str]) -> Loss | None:
    """Return the loss that the metadata of a file names; None if it is none of dptrain's.

    Raises:
        UserError: the metadata is damaged.
    """
    if LOSS_KEY not in metadata:
        cls = LOSSES.get(metadata.get("dptrain.loss", ""))
        return None if cls is None else cls()
    try:
        table = parse_json(metadata[LOSS_KEY])
        names = table["name"], table["expression"], table.get("derivative", ""), table["targets"]
        parameters = checked_parameters(names[0], table.get("parameters", {}))
        loss: Loss = define_loss(*names, parameters)(**table["values"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged("loss in the metadata is", error) from None
    return loss


def _damaged(what: str, error: Exception) -> UserError:
    reason = f" ({error})" if isinstance(error, UserError) else ""
    return UserError(f"the {what} damaged{reason}; export the model again")


def known_functions(metadata: Mapping[str, str]) -> tuple[Activation, ...]:
    """Return the functions of users that the metadata of a file names.

    Raises:
        UserError: the metadata is damaged.
    """
    defined: dict[Activation, None] = {}
    try:
        tables = parse_json(metadata.get(KEY, "[]"))
        for table in tables:
            names = table["name"], table["expression"], table.get("derivative", "")
            cls = define(*names, checked_parameters(names[0], table.get("parameters", {})))
            defined[cls(**table["values"])] = None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged("functions in the metadata are", error) from None
    return tuple(defined)
