"""Read the results and claims of the studies from TOML files, and judge them.

Each table of a file is a result or a claim, named by its identifier:

- ``title``, ``published`` and ``origin``: the statement, the published value and its mark,
- ``values``: values by name (`values.Values.compute`),
- ``decide``: conditions, each with a ``rule`` of `judgements.RULES`, the name ``of`` a value, a
  ``limit`` (a number, the name of a value or a path; default 1) and the rule's options,
- ``verdict``: a verdict that holds if no condition fails, ``unless`` a value is something else,
- ``ours`` and ``reason``: texts with values (`texts.Template`); ``{matches}`` counts equal values,
- ``needs``: what was not measured, if a result is missing or ``unless`` does not hold,
- ``as``: the identifier of the result or claim whose verdict this has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any

from benchmarks.studies.claims.judgements import (
    CONFIRMED,
    NOT_MEASURED,
    REFUTED,
    RULES,
    VERDICTS,
    combined,
    differences,
)
from benchmarks.studies.claims.results import PUBLISHED, MissingResultError, Results
from benchmarks.studies.claims.texts import MISSING, filled
from benchmarks.studies.claims.values import KEYS, REDUCTIONS, Values
from dptrain.errors import UserError
from dptrain.toml import read_toml

FOLDER = Path(__file__).parent
ROW_KEYS = frozenset({"title", "published", "origin", "ours", "reason", "values", "decide",
                      "verdict", "unless", "as", "needs"})  # fmt: skip
MATCHES = "matches"


@dataclass(frozen=True)
class Verdict:
    """What our measurements say about a published result.

    Attributes:
        verdict: one of `VERDICTS`; ours: our value; reason: why.
        hardware: what measured it; used: the measurements.
    """

    verdict: str
    ours: str
    reason: str = ""
    hardware: str = ""
    used: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """A published result or claim.

    Attributes:
        id: identifier, such as ``A1`` or ``Q7``; study: ``A``, ``B`` or ``D``.
        spec: its table in the file.
    """

    id: str
    study: str
    spec: Mapping[str, Any] = field(repr=False)

    @property
    def is_claim(self) -> bool:
        """Whether it is a claim in words."""
        return self.id.startswith("Q")

    @property
    def rules(self) -> set[str]:
        """The names of the rules that decide it."""
        return {condition["rule"] for condition in self.spec.get("decide", ())}

    @property
    def measurements(self) -> set[str]:
        """The measurements whose results it needs."""
        if "as" in self.spec:
            return find_row(self.spec["as"]).measurements
        found = set[str]()
        for spec in self.spec.get("values", {}).values():
            found |= set(_measurements(spec))
        return found

    def judge(self, results: Results) -> Verdict:
        """Return the verdict; `NOT_MEASURED` with the reason if a result is missing."""
        if "as" in self.spec:
            other = find_row(self.spec["as"]).judge(results)
            reason = other.reason if other.verdict == NOT_MEASURED else self.spec.get("reason", "")
            return Verdict(other.verdict, f"as {self.spec['as']}", reason, used=other.used)
        values = Values(results)
        try:
            values.add(self.spec.get("values", {}))
            verdict, matches = self._decided(values)
        except MissingResultError as missing:
            return Verdict(NOT_MEASURED, MISSING, self.spec.get("needs", str(missing)))
        known = {**values.known, MATCHES: matches}
        ours, reason = (filled(self.spec.get(key, ""), known) for key in ("ours", "reason"))
        used = tuple(values.used)
        return Verdict(verdict, ours, reason, results.hardware(*used), used)

    def _decided(self, values: Values) -> tuple[str, str]:
        """Return the verdict, and how many values match or which do not."""
        found, count, different = [], 0, list[str]()
        for condition in self.spec.get("decide", ()):
            options = {k: v for k, v in condition.items() if k not in ("rule", "of", "limit")}
            own, limit = values.known[condition["of"]], _limit(condition.get("limit", 1), values)
            found.append(RULES[condition["rule"]](own, limit, **options))
            if condition["rule"] == "equal":
                count += len(own) if isinstance(own, Mapping) else 1
                different += differences(own, limit, **options)
        verdict = combined(found)
        fixed, unless = self.spec.get("verdict"), self.spec.get("unless")
        if fixed and not (unless and values.known[unless["of"]] == unless["is"]):
            verdict = REFUTED if verdict == REFUTED and not unless else fixed
        if different:
            return verdict, "these counts differ: " + "; ".join(different)
        return verdict, f"all {count} values match to the digit"


def _limit(limit: Any, values: Values) -> Any:
    if not isinstance(limit, str):
        return limit
    return values.known[limit] if limit in values.known else (
        values.at(limit) if "/" in limit else limit)  # fmt: skip


def _measurements(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield the measurements in the paths of a value."""
    cases = spec.get("cases", ())
    if isinstance(cases, str) and cases.startswith("machines "):
        yield from cases.split()[1:]
        cases = ()
    paths = [spec[key] for key in ("of", "over") if key in spec] + spec.get("pair", [])
    for path in [each for p in paths for each in ([p] if isinstance(p, str) else p)]:
        first = path.partition("/")[0]
        listed = cases if first.startswith("{case") and not isinstance(cases, str) else [first]
        for case in listed:
            name = case if isinstance(case, str) else case[0]
            yield from (n for n in name.split("|") if n != PUBLISHED and "{" not in n)


def read_rows(path: Path) -> list[Row]:
    """Return the results and claims of a file.

    Raises:
        UserError: the file is not TOML, or a table has a mistake; names the table.
    """
    study = path.stem.rpartition("-")[2].upper()
    rows = [Row(name, study, spec) for name, spec in read_toml(path).items()]
    for row in rows:
        if problem := _mistake(row.spec):
            raise UserError(f"{path}: [{row.id}]: {problem}")
    return rows


def _mistake(spec: Mapping[str, Any]) -> str:
    """Return what is wrong with a table; empty if nothing is."""
    if unknown := spec.keys() - ROW_KEYS:
        return f"unknown key '{min(unknown)}'; expected one of {', '.join(sorted(ROW_KEYS))}"
    if missing := {"title", "origin"} - spec.keys():
        return f"'{min(missing)}' is missing; expected a text"
    if "as" not in spec and "decide" not in spec and "verdict" not in spec:
        return "nothing decides it; expected 'decide', 'verdict' or 'as'"
    if spec.get("verdict", CONFIRMED) not in VERDICTS:
        return f"unknown verdict '{spec['verdict']}'; expected one of {', '.join(VERDICTS)}"
    values = spec.get("values", {})
    for name, value in values.items():
        if unknown := value.keys() - KEYS:
            return f"value '{name}' has an unknown key '{min(unknown)}'"
        if value.get("reduce", "mean") not in REDUCTIONS:
            return f"value '{name}' has an unknown 'reduce'; expected {', '.join(REDUCTIONS)}"
        if not value.keys() & {"of", "pair", "count"}:
            return f"value '{name}' has no 'of'; expected a path"
    for condition in spec.get("decide", ()):
        if condition.get("rule") not in RULES:
            return f"unknown rule '{condition.get('rule')}'; expected one of {', '.join(RULES)}"
        if condition.get("of") not in values:
            return f"a condition is 'of' {condition.get('of')!r}; expected the name of a value"
    for text in (spec.get("ours", ""), spec.get("reason", "")):
        for _, name, _, _ in Formatter().parse(text):
            if name is not None and name.partition("[")[0] not in (*values, MATCHES):
                return f"a text has {{{name}}}; expected the name of a value"
    return ""


@cache
def all_rows() -> tuple[Row, ...]:
    """Return the results and claims of all studies, results first."""
    rows = [row for path in sorted(FOLDER.glob("study-*.toml")) for row in read_rows(path)]
    return tuple(sorted(rows, key=lambda row: row.is_claim))


def find_row(name: str) -> Row:
    """Return the result or claim with an identifier."""
    return next(row for row in all_rows() if row.id == name)
