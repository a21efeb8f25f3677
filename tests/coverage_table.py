"""The table of tests/README.md: what tests/unit/backends/test_operations.py computes, by tier.

python -m tests.coverage_table      write it
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dptrain.network import ACTIVATIONS, LAYERS, LOSSES
from dptrain.plan.optimizers import RULES
from tests.unit.backends.selection import QUICK_VARIANTS, VARIANTS, trials

PAGE = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- coverage: python -m tests.coverage_table -->\n", "<!-- end of coverage -->\n"


@dataclass
class Cell:
    """Numbers of tests in the quick tier and in the parts."""

    quick: int = 0
    parts: int = 0

    def __str__(self) -> str:
        return f"{self.quick} + {self.parts}"


def cells() -> dict[str, dict[tuple[str, str], Cell]]:
    """Return the numbers by layer, loss or update rule, and by backend and precision."""
    rules = [*RULES]
    names = dict.fromkeys((*map(row_of, LAYERS), *LOSSES, *rules))
    found = {name: {v: Cell() for v in VARIANTS} for name in names}
    for trial in trials():
        network = trial.case.network
        for kind in {network.loss.kind, *(row_of(node.layer.kind) for node in network.nodes)}:
            _count(found[kind][trial.backend, trial.precision], is_quick=trial.is_quick)
    for variant in VARIANTS:
        for rule in rules:
            _count(found[rule][variant], is_quick=variant in QUICK_VARIANTS)
    return found


def row_of(kind: str) -> str:
    """Return the row of a layer. Functions that no backend fuses have one, so that a new one does
    not change the table.
    """
    return "function" if kind in ACTIVATIONS and kind != "relu" else kind


def _count(cell: Cell, *, is_quick: bool) -> None:
    cell.quick += is_quick
    cell.parts += not is_quick


def table() -> str:
    """Return the cells as a Markdown table."""
    heads = [f"{backend} {precision}" for backend, precision in VARIANTS]
    lines = [f"| | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    for kind, row in cells().items():
        lines.append(f"| `{kind}` | {' | '.join(str(row[variant]) for variant in VARIANTS)} |")
    return "\n".join(lines) + "\n"


def updated(text: str) -> str:
    """Return the page with the table in its place."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
