"""The options ``lags`` and ``window`` of tables: which rows are the inputs of a sample."""

from __future__ import annotations

from collections.abc import Sequence

from dptrain.data.spec import Request
from dptrain.errors import UserError, shown

MOST_LAG = 1_000_000
"""Largest lag that is accepted; a larger one is a mistake in typing."""


def lags_of(request: Request) -> tuple[int, ...]:
    """Return the lags that the options ``lags`` or ``window`` request, from the oldest row on.

    Raises:
        UserError: an option is not valid, both are given, or they differ from those of the model.
    """
    options, saved = request.options, request.preprocessing
    if "lags" in options and "window" in options:
        raise UserError(
            f"{request.text}: lags and window are both given; expected one of them: window=3 is "
            "lags=0,1,2"
        )
    if saved is not None and not options.keys() & {"lags", "window"}:
        return saved.lags
    if "window" in options:
        window = request.number("window", 1)
        if window > MOST_LAG:
            raise UserError(
                f"{request.name}: window is {window}; expected at most {MOST_LAG:,} rows"
            )
        found = tuple(range(window - 1, -1, -1))
    elif "lags" in options:
        found = _parse_lags(options["lags"], request.name)
    else:
        return ()
    if saved is not None and found != saved.lags:
        raise UserError(
            f"{request.text}: lags are {_list(found)}, but the network was trained with "
            f"{_list(saved.lags)}; leave them out"
        )
    return found


def _parse_lags(text: str, name: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    valid = all(part.isascii() and part.isdigit() and len(part) <= 7 for part in parts)
    lags = sorted(map(int, parts), reverse=True) if valid else []
    if not lags or len(set(lags)) < len(lags) or lags[0] > MOST_LAG:
        raise UserError(
            f"{name}: lags are '{shown(text)}'; expected different whole numbers of rows, at most "
            f"{MOST_LAG:,}, such as lags=0,1,5"
        )
    return tuple(lags)


def _list(lags: Sequence[int]) -> str:
    return ",".join(map(str, sorted(lags))) or "none"
