"""The tables of losses by experiment."""

from __future__ import annotations

from dptrain.measure.profile.known_tables import VERDICTS
from dptrain.measure.profile.loss_tables import (
    AGREE,
    FACTOR_NAMES,
    MEANINGS,
    delayed_ranks,
    no_overlap,
    num_rows,
    shown_name,
)
from dptrain.measure.profile.losses import ALONE, DURING, Losses
from dptrain.report.elements.tables import MISSING, Column, Records, Table, texts


def loss_tables(losses: Losses, file: str) -> list[Table]:
    """Return all tables of losses; `file` is the path of their file, relative to the page."""
    shown = [] if losses.withheld else [_losses(losses, file)]
    known = [_known(losses, file)] if losses.known else []
    return [*shown, *known, _efficiencies(losses, file), _delays(losses, file)]


def _known(losses: Losses, file: str) -> Table:
    found = losses.recoveries
    columns = (
        texts("known loss", [recovery.name for recovery in found]),
        texts("verdict", [VERDICTS[recovery.is_recovered] for recovery in found]),
        texts("injected, ms", [_ms(r.injected_ms) for r in found]),
        texts(
            "recovered, ms", [_ms(r.recovered_ms.value if r.recovered_ms else None) for r in found]
        ),
        texts("reason", [recovery.reason for recovery in found], kind="prose"),
    )
    return Table("known", "Known losses that were injected", file, columns)


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _losses(losses: Losses, file: str) -> Table:
    found = losses.losses[: num_rows(losses)]
    shares = Records.of(found, "losses").values("share", "%", "share").cells
    times = Records(
        [losses.step_ms[ALONE], *(loss.time_ms for loss in found), losses.step_ms[DURING]],
        [
            f"step_ms.{ALONE}",
            *(f"losses.{i}.time_ms" for i in range(len(found))),
            f"step_ms.{DURING}",
        ],
    )
    changes = [MEANINGS[loss.name] for loss in found]
    columns = (
        texts("loss", ["rank 0 alone", *map(shown_name, found), "job"], kind="prose"),
        times.estimates("time", "ms", ""),
        Column("share", "%", ((MISSING,), *shares, (MISSING,))),
        texts("change", ["others are idle", *changes, "sum of the rows above"], kind="prose"),
    )
    note = (
        f"{losses.rounds} rounds of {losses.steps} steps of each experiment, interleaved in one "
        "launch. The intervals do not contain the differences between launches."
    )
    if not losses.overlaps:
        reason = no_overlap(losses)
        note += f" {reason[:1].upper()}{reason[1:]}."
    return Table("losses", "Losses of a step by experiment", file, columns, note)


def _efficiencies(losses: Losses, file: str) -> Table:
    factors = Records.of(losses.efficiencies, "efficiencies")
    columns = (
        texts("efficiency", [FACTOR_NAMES[factor.name] for factor in factors.items], kind="prose"),
        factors.estimates("by experiment", "%", "by_experiment"),
        factors.estimates("by busy times", "%", "by_busy_times"),
        texts("agree", [AGREE[factor.agree] for factor in factors.items]),
    )
    title = "Efficiencies by experiment and by busy times"
    return Table("loss-efficiencies", title, file, columns, "Sums after the backward pass.")


def _delays(losses: Losses, file: str) -> Table:
    delays = Records.of(losses.delays, "delays")
    columns = (
        texts("delay of", [delayed_ranks(delay) for delay in losses.delays], kind="prose"),
        delays.values("delay", "ms", "delay_ms"),
        delays.estimates("waiting", "ms", "waiting_ms"),
        delays.estimates("longer step", "ms", "cost_ms"),
        delays.estimates("load balance", "%", "load_balance"),
        delays.estimates("serialisation", "%", "serialisation"),
    )
    note = "Increase of the waiting of the other ranks, and of the step."
    return Table("delays", "Injected delays", file, columns, note)
