"""Tables of `Losses`."""

from __future__ import annotations

import math
from dataclasses import replace

from dptrain.measure.machine.load import load_line
from dptrain.measure.profile.known_tables import VERDICTS, known_lines
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
from dptrain.measure.statistics import Estimate
from dptrain.tables import Records, Table, computed, texts
from dptrain.vocabulary import find_term, label_of

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

AGREE = {True: "yes", False: "no", None: "too few steps"}


def losses_report(losses: Losses) -> list[str | Table]:
    """Return the tables and lines of the experiments, in order."""
    scaling = losses.computation_scaling
    found: list[str | Table] = [*load_line(losses.other_cores, "the experiments")]
    if losses.withheld:
        found.append(f"the table of losses is withheld: {losses.withheld}")
    else:
        found.append(_losses_table(losses))
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


def loss_tables(losses: Losses, file: str = "") -> list[Table]:
    """Return all tables of losses; `file` is the path of their file, relative to the page."""
    shown = [] if losses.withheld else [_losses_table(losses, file)]
    known = [_known_table(losses, file)] if losses.known else []
    return [*shown, *known, _factors_table(losses, file), _delays_table(losses, file)]


def _losses_table(losses: Losses, file: str = "") -> Table:
    found = losses.losses[: num_rows(losses)]
    at = [f"losses.{i}" for i in range(len(found))]
    times = Records(
        [losses.step_ms[ALONE], *(loss.time_ms for loss in found), losses.step_ms[DURING]],
        [f"step_ms.{ALONE}", *(f"{each}.time_ms" for each in at), f"step_ms.{DURING}"],
    )
    alone = losses.step_ms[ALONE].value / losses.step_ms[DURING].value
    shares = Records(
        [alone, *(loss.share for loss in found), 1.0], ["", *(f"{each}.share" for each in at), ""]
    )
    changes = [MEANINGS[loss.name] for loss in found]
    columns = (
        texts("loss", ["rank 0 alone", *map(shown_name, found), "job"], kind="prose"),
        replace(times.estimates("", "time", "ms"), term=find_term("losses"), name="time_ms"),
        replace(shares.values("", "share", "%"), term=find_term("share"), name="share"),
        texts("change", ["others are idle", *changes, "sum of the rows above"], kind="prose"),
    )
    note = (
        f"{losses.job['ranks']} ranks, {losses.rounds} rounds of {losses.steps} steps of each "
        "experiment, interleaved in one launch. The intervals do not contain the differences "
        "between launches."
    )
    if not losses.overlaps:
        reason = no_overlap(losses)
        note += f" {reason[:1].upper()}{reason[1:]}."
    title = "Losses of a step by experiment"
    rules = frozenset([1, len(found) + 1])
    return Table(title, columns, note, "losses", file, rules=rules)


def _known_table(losses: Losses, file: str) -> Table:
    found = losses.recoveries
    recovered = Records([recovery.recovered_ms for recovery in found], [""] * len(found))
    injected, term = find_term("injected_ms"), find_term("recovered_ms")
    columns = (
        texts("known loss", [recovery.name for recovery in found]),
        texts("verdict", [VERDICTS[recovery.is_recovered] for recovery in found]),
        computed("injected", "ms", [each.injected_ms for each in found], decimals=2, term=injected),
        replace(recovered.estimates("", "recovered", "ms", decimals=2), term=term, kind="computed"),
        texts("reason", [recovery.reason for recovery in found], kind="prose"),
    )
    return Table("Known losses that were injected", columns, "", "known", file)


def _factors_table(losses: Losses, file: str = "") -> Table:
    factors = Records.of(losses.efficiencies, "efficiencies")
    columns = (
        texts("efficiency", [label_of("pop", each.name) for each in factors.items], kind="prose"),
        factors.estimates("by_experiment"),
        factors.estimates("by_busy_times"),
        texts("agree", [AGREE[factor.agree] for factor in factors.items]),
    )
    title = "Efficiencies by experiment and by busy times (POP)"
    return Table(title, columns, "Sums after the backward pass.", "loss-efficiencies", file)


def _delays_table(losses: Losses, file: str = "") -> Table:
    delays = Records.of(losses.delays, "delays")
    columns = (
        texts("delay of", [delayed_ranks(delay) for delay in losses.delays], kind="prose"),
        delays.values("delay_ms"),
        delays.estimates("waiting_ms"),
        delays.estimates("cost_ms"),
        delays.estimates("load_balance"),
        delays.estimates("serialisation"),
    )
    note = "Increase of the waiting of the other ranks, and of the step."
    return Table("Injected delays", columns, note, "delays", file)


def _computation_line(losses: Losses) -> str:
    """Return the factors of the computation scaling, or why they are missing."""
    if losses.counters_missing:
        return f"instructions and frequency not measured: {losses.counters_missing}"
    factors = (
        f"{name.replace('_', ' ')} {value.value:.3f} {_interval(value)}"
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


def _interval(estimate: Estimate) -> str:
    if not math.isfinite(estimate.high):
        return ""
    low, high = (f"{value:.3f}".replace("-", "−") for value in (estimate.low, estimate.high))
    return f"{low} – {high}"
