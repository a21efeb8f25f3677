"""An `Efficiency` as people read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dptrain.measure.tables import plain_table
from dptrain.scaling.efficiency import Efficiency
from dptrain.scaling.statistics import Estimate

if TYPE_CHECKING:
    from rich.table import Table


def efficiency_table(efficiency: Efficiency, *, size: int, steps: int) -> Table:
    """Weak and strong efficiency with their intervals."""
    table = plain_table(
        f"Scaling efficiency at {size} {'rank' if size == 1 else 'ranks'} (measured)"
    )
    table.add_column("scaling")
    table.add_column("E", justify="right")
    table.add_column("95% interval", justify="right")
    table.add_column("definition")
    table.add_column("steps alone / together", justify="right")

    def row(name: str, value: Estimate | None, definition: str) -> None:
        if value is not None:
            interval = f"{value.low:.3f} – {value.high:.3f}"
            table.add_row(name, f"{value.value:.3f}", interval, definition, f"{value.n} / {steps}")

    row("weak", efficiency.weak, "T(1) / T(p), same work a rank")
    row("strong", efficiency.strong, "T(1) / (p T(p)), same minibatch")
    if efficiency.possible < 1:
        table.caption = (
            f"The ranks share cores: at most {efficiency.possible:.2f} is possible on this machine."
        )
        table.caption_justify = "left"
    return table
