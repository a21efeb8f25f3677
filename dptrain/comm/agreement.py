"""The agreement at start-up: all ranks run the same command with the same settings.

Each rank calls `agree` with a flat mapping of named values. The values are gathered on every rank,
so all ranks find the same differences and raise the same error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import dptrain
from dptrain.comm.world import AgreedError, World
from dptrain.errors import UserError

MAX_LISTED = 3
"""Settings that one message names; the others are counted."""

MAX_VALUE_LENGTH = 60
"""Characters that a message shows of one value."""

ADVICE = "start all ranks with the same flags, DPTRAIN_* variables and files"

NOT_SET = "not set"
NONE = "none"


def agree(world: World, facts: Mapping[str, Any], error: UserError | None = None) -> None:
    """Compare named values of all ranks; raise the same error on every rank if they differ.

    The project's version is compared too, under the name ``version``.

    Args:
        world: the ranks; every rank calls this function.
        facts: values that JSON can hold, by name. Values that legitimately differ between ranks
            (threads, devices) do not belong here.
        error: the mistake that this rank found, for example while it parsed its flags.

    Raises:
        AgreedError: on every rank. If a rank passes an error, it is the error of the lowest such
            rank, with the rank's number unless all ranks pass the same one. Otherwise it names each
            value that differs, and the ranks that have it.

    Example:
        >>> agree(World.single(), {"learning_rate": 0.02})
    """
    message = None if error is None else str(error)
    own = {"error": message, "facts": {"version": dptrain.__version__, **facts}}
    reports = world.all_gather_json(own)
    errors = [report["error"] for report in reports]
    if any(text is not None for text in errors):
        raise AgreedError.of(errors)
    found = describe_differences([report["facts"] for report in reports])
    if found is not None:
        raise AgreedError(found)


def describe_differences(facts: Sequence[Mapping[str, Any]]) -> str | None:
    """Return one line that names the values in which ranks differ; None if there are none.

    Args:
        facts: the named values of each rank, in the order of ranks.

    Example:
        >>> describe_differences([{"seed": 1}, {"seed": 2}, {"seed": 1}]).partition(";")[0]
        'the ranks differ in seed: 1 on ranks 0, 2'
    """
    names = dict.fromkeys(name for values in facts for name in values)
    different = []
    for name in names:
        groups: dict[str, list[int]] = {}
        for rank, values in enumerate(facts):
            text = _encode(values[name]) if name in values else NOT_SET
            groups.setdefault(text, []).append(rank)
        if len(groups) > 1:
            different.append(_describe(name, groups))
    if not different:
        return None
    listed = ", and in ".join(different[:MAX_LISTED])
    more = len(different) - MAX_LISTED
    rest = f", and {more} more" if more > 0 else ""
    return f"the ranks differ in {listed}{rest}; {ADVICE}"


def _describe(name: str, groups: Mapping[str, Sequence[int]]) -> str:
    shortest = min(map(len, groups))
    differs = (i for i in range(shortest) if len({text[i] for text in groups}) > 1)
    prefix = next(differs, shortest)
    values = (f"{_shorten(text, prefix)} on {_ranks(ranks)}" for text, ranks in groups.items())
    return f"{name}: {'; '.join(values)}"


def _ranks(ranks: Sequence[int]) -> str:
    """``rank 1`` or ``ranks 0, 2-3``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


def _shorten(text: str, prefix: int) -> str:
    """Cut a long text so that what follows the common prefix of all values is shown."""
    if len(text) <= MAX_VALUE_LENGTH:
        return text
    first = max(min(prefix - MAX_VALUE_LENGTH // 3, len(text) - MAX_VALUE_LENGTH + 2), 0)
    middle = text[first : first + MAX_VALUE_LENGTH - 2]
    return f"{'…' * (first > 0)}{middle}{'…' * (first + len(middle) < len(text))}"


def _encode(value: Any) -> str:
    """Return a value as a message shows it; different values have different texts."""
    if isinstance(value, str) and value.isprintable() and value not in ("", NOT_SET, NONE):
        try:
            json.loads(value)
        except ValueError:
            return value
    return NONE if value is None else json.dumps(value, sort_keys=True)
