"""Tables of `Losses`."""

from __future__ import annotations

import math

from dptrain.measure.machine.load import load_line
from dptrain.measure.profile.known_tables import known_lines
from dptrain.measure.profile.losses import (
    ALONE,
    BATCH_STATISTICS,
    DELAYED_RANK,
    DURING,
    SAVED,
    Delay,
    Loss,
    Losses,
)
from dptrain.measure.profile.tables import ms_cell
from dptrain.measure.statistics import Estimate
from dptrain.tables import Table

MEANINGS = {
    "contention": "all ranks work, without sums or waiting",
    "load imbalance": "the slowest rank instead of the mean rank",
    "serialisation": "ranks meet in every step: a sum of one number",
    "latency": "of that sum, if no rank is late",
    BATCH_STATISTICS: "ranks sum batch statistics in each normalisation, and wait there",
    "sums": "gradients are summed after the backward pass",
    SAVED: "gradients are summed during the backward pass",
}
"""What changes from one row to the next."""

FACTOR_NAMES = {
    "parallel": "parallel efficiency",
    "load_balance": "load balance",
    "serialisation": "serialisation",
    "transfer": "transfer",
}


AGREE = {True: "yes", False: "no", None: "too few steps"}


def losses_report(losses: Losses) -> list[str | Table]:
    """Return the tables and lines of the experiments, in order."""
    scaling = losses.computation_scaling
    found: list[str | Table] = [*load_line(losses.other_cores, "the experiments")]
    if losses.withheld:
        found.append(f"the table of losses is withheld: {losses.withheld}")
    else:
        found.append(_losses_table(losses))
        if not losses.overlaps:
            found.append(no_overlap(losses))
    found += known_lines(losses.recoveries)
    found += [
        f"computation scaling: {scaling.value:.3f} ({scaling.low:.3f} – {scaling.high:.3f}), step "
        "of rank 0 alone / mean step without sums",
        _computation_line(losses),
        _factors_table(losses),
        *_disagreement(losses),
        _delays_table(losses),
        "95% intervals over rounds; they do not contain the differences between launches",
    ]
    return found


def _losses_table(losses: Losses) -> Table:
    job, alone = losses.step_ms[DURING], losses.step_ms[ALONE]
    rows: list[tuple[str, ...]] = [
        ("rank 0 alone", *_cells(alone), f"{alone.value / job.value:.1%}", "others are idle"),
        (),
    ]
    for loss in losses.losses[: num_rows(losses)]:
        sign = "+" if loss.time_ms.value >= 0 else "−"
        size = ms_cell(abs(loss.time_ms.value))
        cells = (f"{sign} {size}", _interval(loss.time_ms), f"{loss.share:.1%}")
        rows.append((shown_name(loss), *cells, MEANINGS[loss.name]))
    rows += [(), ("job", *_cells(job), "100.0%", "sum of the rows above")]
    title = (
        f"Losses of a step by experiment, {losses.job['ranks']} ranks ({losses.rounds} rounds of "
        f"{losses.steps} steps each)"
    )
    return Table(
        title, ("loss", "ms", "95% interval", "share", "change"), ("loss", "change"), rows=rows
    )


def _factors_table(losses: Losses) -> Table:
    rows = [
        (
            FACTOR_NAMES[factor.name],
            *_cells(factor.by_experiment),
            *_cells(factor.by_busy_times),
            AGREE[factor.agree],
        )
        for factor in losses.efficiencies
    ]
    columns = ("efficiency", "experiment", "95% interval", "busy times", "95% interval ", "agree")
    title = "Efficiencies by experiment and by busy times (POP)"
    return Table(title, columns, ("efficiency",), rows=rows)


def _computation_line(losses: Losses) -> str:
    """Return the factors of the computation scaling, or why they are missing."""
    if losses.counters_missing:
        return f"instructions and frequency not measured: {losses.counters_missing}"
    factors = (
        f"{name.replace('_', ' ')} {' '.join(_cells(value))}"
        for name, value in losses.computation_factors.items()
    )
    return f"product of {' × '.join(factors)}"


def _disagreement(losses: Losses) -> list[str]:
    """Return a line that explains a difference between serialisation and transfer, if any."""
    agree = {factor.name: factor.agree for factor in losses.efficiencies}
    if not agree["parallel"] or False not in (agree["serialisation"], agree["transfer"]):
        return []  # Nothing differs, the whole differs, or there are no intervals.
    return [
        "ranks that are interrupted while they communicate delay the others: the experiment counts "
        "this as serialisation, and busy times, which end before, as transfer"
    ]


def _delays_table(losses: Losses) -> Table:
    rows = [
        (
            delayed_ranks(delay),
            ms_cell(delay.delay_ms),
            ms_cell(delay.waiting_ms.value),
            _interval(delay.waiting_ms),
            ms_cell(delay.cost_ms.value),
            _interval(delay.cost_ms),
            f"{delay.load_balance.value:.3f}",
            f"{delay.serialisation.value:.3f}",
        )
        for delay in losses.delays
    ]
    columns = (
        "delay of",
        "ms",
        "waiting",
        "95% interval",
        "cost",
        "95% interval ",
        "balance",
        "serialisation",
    )
    title = "Injected delays: increase of the others' waiting and of the step, in ms"
    return Table(title, columns, ("delay of",), rows=rows)


def no_overlap(losses: Losses) -> str:
    """Return why overlap saves nothing."""
    return (
        f"saved by overlap: nothing; with transport {losses.job['transport']} all gradients are "
        "summed after the backward pass"
    )


def shown_name(loss: Loss) -> str:
    """Return the name of a loss; overlap may add time instead of saving it."""
    return "added by overlap" if loss.name == SAVED and loss.time_ms.value > 0 else loss.name


def num_rows(losses: Losses) -> int:
    """Return the number of losses to show: the last, `SAVED`, is 0 if the method cannot overlap."""
    return len(losses.losses) if losses.overlaps else len(losses.losses) - 1


def delayed_ranks(delay: Delay) -> str:
    """Return which ranks are delayed."""
    return "one rank" if delay.name == DELAYED_RANK else "ranks in turn"


def _cells(estimate: Estimate) -> tuple[str, str]:
    return ms_cell(estimate.value), _interval(estimate)


def _interval(estimate: Estimate) -> str:
    if not math.isfinite(estimate.high):
        return ""
    low, high = (f"{value:.3f}".replace("-", "−") for value in (estimate.low, estimate.high))
    return f"{low} – {high}"
