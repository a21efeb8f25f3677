"""The tables of losses by experiment."""

from __future__ import annotations

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
from dptrain.report.elements.tables import Table, estimates, texts, values


def loss_tables(losses: Losses, file: str) -> list[Table]:
    """Return all tables of losses; `file` is the path of their file, relative to the page."""
    return [_losses(losses, file), _efficiencies(losses, file), _delays(losses, file)]


def _losses(losses: Losses, file: str) -> Table:
    found, steps = losses.losses[: num_rows(losses)], losses.step_ms
    columns = (
        texts("loss", ["rank 0 alone", *map(shown_name, found), "job"], kind="prose"),
        estimates(
            "time",
            "ms",
            [steps[ALONE], *(loss.time_ms for loss in found), steps[DURING]],
            [
                f"step_ms.{ALONE}",
                *(f"losses.{i}.time_ms" for i in range(len(found))),
                f"step_ms.{DURING}",
            ],
        ),
        values(
            "share",
            "%",
            [None, *(loss.share for loss in found), None],
            ["", *(f"losses.{i}.share" for i in range(len(found))), ""],
            decimals=1,
            scale=100,
        ),
        texts(
            "change",
            ["others are idle", *(MEANINGS[loss.name] for loss in found), "sum of the rows above"],
            kind="prose",
        ),
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
    found = losses.efficiencies
    at = [f"efficiencies.{i}" for i in range(len(found))]
    columns = (
        texts("efficiency", [FACTOR_NAMES[factor.name] for factor in found], kind="prose"),
        estimates("by experiment", "%", [factor.by_experiment for factor in found],
                  [f"{a}.by_experiment" for a in at], decimals=1, scale=100),
        estimates("by busy times", "%", [factor.by_busy_times for factor in found],
                  [f"{a}.by_busy_times" for a in at], decimals=1, scale=100),
        texts("agree", [AGREE[factor.agree] for factor in found]),
    )  # fmt: skip
    title = "Efficiencies by experiment and by busy times"
    return Table("loss-efficiencies", title, file, columns, "Sums after the backward pass.")


def _delays(losses: Losses, file: str) -> Table:
    found = losses.delays
    at = [f"delays.{i}" for i in range(len(found))]
    columns = (
        texts("delay of", [delayed_ranks(delay) for delay in found], kind="prose"),
        values("delay", "ms", [delay.delay_ms for delay in found], [f"{a}.delay_ms" for a in at]),
        estimates("waiting", "ms", [delay.waiting_ms for delay in found],
                  [f"{a}.waiting_ms" for a in at]),
        estimates("longer step", "ms", [delay.cost_ms for delay in found],
                  [f"{a}.cost_ms" for a in at]),
        estimates("load balance", "%", [delay.load_balance for delay in found],
                  [f"{a}.load_balance" for a in at], decimals=1, scale=100),
        estimates("serialisation", "%", [delay.serialisation for delay in found],
                  [f"{a}.serialisation" for a in at], decimals=1, scale=100),
    )  # fmt: skip
    note = "Increase of the waiting of the other ranks, and of the step."
    return Table("delays", "Injected delays", file, columns, note)
