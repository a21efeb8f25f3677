"""All stored results, and what a path such as ``solar/rows/samples=512`` selects of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.studies.claims.spreads import median_of
from benchmarks.studies.measuring import MEASUREMENTS
from benchmarks.studies.published import published
from benchmarks.studies.store import Result

PUBLISHED = "published"
"""First part of a path that selects of the published figures instead of our results."""
ONE_CORE = frozenset({
    "additivity", "gradients", "keras", "ladder", "layers-by-accuracy", "minibatches", "profile",
    "profiling-cost", "update-share", "variant-steps",
})  # fmt: skip
"""Measurements of a single thread, whatever the number of cores."""


class MissingResultError(Exception):
    """A result that a verdict needs was not measured yet."""


class Results:
    """All results, by kind of machine and name of the measurement."""

    def __init__(self, results: Iterable[Result]) -> None:
        self.all = list(results)

    def find(self, name: str) -> Result:
        """Return a result; of those of several machines, that of the most cores.

        Measurements of one thread come from the machine with the least load per core.

        Args:
            name: name of the measurement; ``name@kind`` chooses the kind of machine.

        Raises:
            MissingResultError: there is none.
        """
        name, _, kind = name.partition("@")
        found = [r for r in self.all if r.name == name and kind in ("", r.kind)]
        if not found:
            needs = MEASUREMENTS[name].needs if name in MEASUREMENTS else "measurement"
            raise MissingResultError(f"`{name}` was not measured yet; it needs: {needs}")
        if name in ONE_CORE:
            return min(found, key=_load_of_a_core)
        return max(found, key=lambda r: (_cores(r.kind), r.kind))

    def machines(self, name: str) -> list[str]:
        """Return ``name@kind`` of all machines that made a measurement, the least loaded first."""
        found = sorted((r for r in self.all if r.name == name), key=_load_of_a_core)
        return [f"{name}@{r.kind}" for r in found]

    def has(self, name: str) -> bool:
        """Return True if the measurement was made on some machine."""
        return any(r.name == name.partition("@")[0] for r in self.all)

    def first(self, names: str) -> str:
        """Return the first of names separated by ``|`` that was measured, else the last."""
        choices = names.split("|")
        return next((name for name in choices if self.has(name)), choices[-1])

    def hardware(self, *names: str) -> str:
        """Return the hardware of results, each once."""
        return ", ".join(dict.fromkeys(hardware(self.find(name)) for name in names))

    def at(self, path: str) -> Any:
        """Return what a path selects.

        The first part is a measurement, or several separated by ``|`` of which the first that was
        made is used. Each other part selects one of

        - a mapping: a key; ``a|b`` the fastest of several, which must all exist; ``name*`` also
          the keys with this beginning, if there are any; ``+name`` the sum of numbers with it,
        - a list: an index; ``key=value;key=value`` the first row with these values; ``key>value``
          the row with a larger value that takes the least time for each,
        - either: ``*`` all, as a mapping; ``*!key`` all others.

        Raises:
            MissingResultError: the measurement was not made, or has no such value.
        """
        name, *parts = path.split("/")
        if name == PUBLISHED:
            value: Any = published(parts.pop(0))
        else:
            name = self.first(name)
            value = self.find(name).values
        try:
            return _select(value, parts)
        except (KeyError, IndexError, ValueError) as missing:
            raise MissingResultError(f"`{name.partition('@')[0]}` has no value {missing}") from None


def _select(value: Any, parts: Sequence[str]) -> Any:
    for number, part in enumerate(parts):
        if part.startswith("*"):
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            rest = parts[number + 1 :]
            return {key: _select(each, rest) for key, each in items if key != part[2:]}
        value = _of_mapping(value, part) if isinstance(value, Mapping) else _of_list(value, part)
    return value


def _of_mapping(value: Mapping[str, Any], part: str) -> Any:
    if part.startswith("+"):
        found = [each for key, each in value.items() if key.startswith(part[1:])]
        return sum(found) if found else value[part]
    if part in value or not ("|" in part or "*" in part):
        return value[part]
    names = part.split("|")
    found = [value[name] for name in names if not name.endswith("*")]
    found += [row for name in names if name.endswith("*") for key, row in value.items()
              if key.startswith(name[:-1])]  # fmt: skip
    return min(found, key=median_of)


def _of_list(value: Sequence[Any], part: str) -> Any:
    if part.lstrip("-").isdigit():
        return value[int(part)]
    if ">" in part:
        key, least = part.split(">")
        larger = [row for row in value if row[key] > float(least) and not row.get("why")]
        return min(larger, key=lambda row: median_of(row) / row[key])
    wanted = [each.split("=") for each in part.split(";")]
    found = [row for row in value if all(str(row.get(key)) == text for key, text in wanted)]
    # A case of `dptrain bench` that did not fit has no time.
    if not found or found[0].get("why"):
        raise KeyError(part)
    return found[0]


def _load_of_a_core(result: Result) -> float:
    return float(result.about["load"][0]) / _cores(result.kind)


def _cores(kind: str) -> int:
    match = re.search(r"cpu-(\d+)", kind)
    return int(match[1]) if match else 1


def hardware(result: Result) -> str:
    """Return the hardware of a result in a few words."""
    if result.kind == "exact":
        return "any"
    if result.kind.startswith("gpu"):
        return result.kind.removeprefix("gpu-").upper()
    cores = 1 if result.name in ONE_CORE else int(result.about["cores"])
    return f"{cores} cores" if cores > 1 else "1 core"
