"""Tables of a study of variants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dptrain.experiments.measuring import size_text
from dptrain.experiments.tables import digits, duration
from dptrain.network.network import Network
from dptrain.tables import Table
from dptrain.training.settings import Settings

if TYPE_CHECKING:
    from dptrain.experiments.study import VariantResult


def study_report(
    network: Network, config: Settings, results: Sequence[VariantResult]
) -> Iterator[Table | str]:
    """Yield the table of variants, the impossible ones with reasons, and the times by operation."""
    yield variants_table(network, config, results)
    refused = [f"{result.variant}: {result.why}" for result in results if not result.possible]
    if refused:
        yield "\n".join(["Not possible:", *refused, ""])
    if any(result.possible for result in results):
        yield kinds_table(results)


def variants_table(network: Network, config: Settings, results: Sequence[VariantResult]) -> Table:
    """Return accuracy, time per step and memory, a row for each variant."""
    classifies = any(result.accuracy is not None for result in results)
    score = "accuracy" if classifies else "test loss"
    columns = ("variant", score, "time per step", "conv forward", "share", "100k steps", "memory")
    rows: list[tuple[str, ...]] = []
    for r in results:
        if not r.possible:
            rows.append((r.variant, "–"))
            continue
        shown = f"{r.test_loss:.4g}" if r.accuracy is None else f"{r.accuracy:.1%}"
        spread = f"±{(r.step_q3_ms - r.step_q1_ms) / 2 / r.step_ms:.0%}"
        rows.append((
            r.variant,
            shown,
            f"{digits(r.step_ms)} ms {spread}",
            f"{digits(r.conv_forward_ms)} ms",
            f"{r.conv_forward_share:.0%}",
            duration(r.many_steps_s),
            size_text(r.memory_bytes),
        ))  # fmt: skip
    steps = max((r.steps for r in results), default=0)
    note = f"conv forward, share: stages with a convolution in a forward pass; {steps:,} steps"
    title = f"{network.name} on {config.data}"
    return Table.of_rows(title, columns, rows, text=("variant",), note=note)


def kinds_table(results: Sequence[VariantResult]) -> Table:
    """Return the times of a forward pass, a row for each variant and kind of operation."""
    columns = ("variant", "kind", "time ms", "share", "cumulative", "read + written")
    rows: list[tuple[str, ...]] = []
    for result in results:
        rows += [()] if rows and result.kinds else []
        for kind in result.kinds:
            rows.append((
                result.variant,
                kind.kind,
                f"{kind.forward_ms:.3f}",
                f"{kind.share:.1%}",
                f"{kind.cumulative_share:.1%}",
                size_text(kind.forward_bytes),
            ))  # fmt: skip
    title = "A forward pass by kind of operation"
    return Table.of_rows(title, columns, rows, text=columns[:2], keys=2)
