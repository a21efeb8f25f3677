"""A term: the name of a quantity in files, its unit, its heading, and its definition."""

from __future__ import annotations

from dataclasses import dataclass

SHOWN_UNITS = {"1": "", "bytes": "MB"}
"""Units in tables that differ from those in files."""


@dataclass(frozen=True)
class Term:
    """The definition of a name.

    Attributes:
        name: key in JSON, column in CSV, name or category in a trace. If a key has several
            meanings, the enclosing key precedes it: ``memory.parameters``.
        unit: ``ms``, ``bytes``, ``1`` (a number or a share), or "" for texts and records.
        meaning: the definition.
        heading: name in tables and plots [default: the last key, without its unit].
        shown: unit in tables [default: `unit`, and MB for bytes].

    Example:
        >>> Term("points.step_ms", "ms", "Mean step.").label
        'step'
    """

    name: str
    unit: str
    meaning: str
    heading: str = ""
    shown: str = ""

    @property
    def label(self) -> str:
        """The name in tables and plots."""
        last = self.name.rpartition(".")[2]
        return self.heading or last.removesuffix(f"_{self.unit}").replace("_", " ")

    @property
    def shown_unit(self) -> str:
        """The unit in tables."""
        return self.shown or SHOWN_UNITS.get(self.unit, self.unit)
