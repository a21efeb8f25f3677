"""Targets, and how close the measurements come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.node import filters, inference, ranks, shards, sums, threads
from benchmarks.node.rows import Rows, relative_time, speedup, text_of, wall_ratio
from benchmarks.tables import make_table
from benchmarks.targets import Target
from benchmarks.timing import Ratio
from dptrain.tables import Table

TRAINING = {"model0": 4.0, "model2": 4.0, "cifar": 3.0, "solar": 3.0}
DOUBLED = Target(1.02, at_most=True)
COPIES = {16: Target(0.90)}
WEAK = {("model0", 8): 0.96, ("model0", 16): 0.94, ("cifar", 16): 0.96}
STRONG = {("model0", 16): 0.75}
TRAFFIC, MPI = Target(1.5, at_most=True), Target(4.0)
MPI_RANKS = (8, 16)
SHARDS = {
    "model0": Target(1.05, at_most=True),
    "cifar": Target(1.05, at_most=True),
    "solar": Target(1.10, at_most=True),
}
INFERENCE, EQUAL, OUTSIDE = Target(1.3), Target(1.0), Target(2.0)
OTHERS = {"resnet50": Target(1.5)}
"""Targets of other networks than those with `OUTSIDE`."""
FILTERS = Target(1.5, at_most=True)


@dataclass(frozen=True)
class Figure:
    """A measured figure and its target."""

    name: str
    value: Ratio
    target: Target

    @property
    def case(self) -> str:
        """What was measured: network, ranks, threads, size."""
        return self.name.partition(": ")[0]

    @property
    def quantity(self) -> str:
        """The quantity that has the target."""
        return self.name.partition(": ")[2]

    @property
    def bound(self) -> str:
        """The target as text."""
        return f"{'≤' if self.target.at_most else '≥'} {self.target.value:g}"

    @property
    def reached(self) -> bool:
        """Whether the median reaches the target."""
        return self.target.share(self.value.value) >= 1.0

    def row(self) -> tuple[str, ...]:
        """Return the row of the table."""
        verdict = self.target.verdict(self.value.value)
        return self.name, text_of(self.value), self.bound, verdict


def figures(rows: Mapping[str, Rows]) -> list[Figure]:
    """Return every figure of the run that has a target."""
    return [figure for found in figures_by_section(rows).values() for figure in found]


def figures_by_section(rows: Mapping[str, Rows]) -> dict[str, list[Figure]]:
    """Return the figures that have a target by section."""
    return {name: list(function(rows[name])) for name, function in SECTIONS.items() if name in rows}


def summary(rows: Mapping[str, Rows]) -> Table:
    """Return a short table: for each quantity the range, and the case farthest from the target."""
    lines = []
    for section, found in figures_by_section(rows).items():
        for quantity, bound in dict.fromkeys((f.quantity, f.bound) for f in found):
            group = [f for f in found if (f.quantity, f.bound) == (quantity, bound)]
            worst = min(group, key=lambda f: f.target.share(f.value.value))
            values = [f.value.value for f in group]
            lines.append((
                f"{section}: {quantity}", f"{min(values):.2f}–{max(values):.2f}", bound,
                f"{sum(f.reached for f in group)} of {len(group)}",
                f"{worst.case} ({worst.value.value:.2f})",
            ))  # fmt: skip
    columns = ("figure", "lowest–highest", "target", "reached", "farthest from it")
    return make_table("Summary", columns, lines)


def table(found: list[Figure]) -> Table:
    """Return the table of figures and targets."""
    columns = ("figure", "median (quartiles)", "target", "")
    return make_table("Targets", columns, tuple(figure.row() for figure in found))


def _figure(name: str, value: Ratio | None, target: Target) -> Iterator[Figure]:
    if value is not None:
        yield Figure(name, value, target)


def _threads(rows: Rows) -> Iterator[Figure]:
    for network in rows.values("network"):
        ours = rows.where(network=network, program=threads.OURS)
        counts = sorted(ours.values("threads"))
        for count in counts:
            here = rows.where(network=network, threads=count)
            mine = ours.one(threads=count)
            name = f"{network}, {count} threads"
            best = here.fastest(tuple(threads.PEERS))
            yield from _figure(
                f"{name}: times faster than the best peer", speedup(best, mine),
                Target(TRAINING.get(network, 3.0)),
            )  # fmt: skip
            half = ours.one(threads=count // 2) if count % 2 == 0 else None
            yield from _figure(
                f"{name}: step relative to {count // 2} threads", speedup(mine, half), DOUBLED
            )
            if count in COPIES:
                copies = here.one(program=threads.COPIES)
                yield from _figure(
                    f"{name}: efficiency relative to independent copies",
                    wall_ratio(copies, mine), COPIES[count],
                )  # fmt: skip


def _ranks(rows: Rows) -> Iterator[Figure]:
    for network, scaling, samples, count in dict.fromkeys(
        (r["network"], r["scaling"], r["samples"], r["ranks"]) for r in rows
    ):
        target = (WEAK if scaling == "weak" else STRONG).get((network, count))
        if target is None:
            continue
        here = rows.where(network=network, scaling=scaling, samples=samples, ranks=count)
        mine = here.one(program=ranks.OURS)
        name = f"{network}, {count} ranks: {scaling} efficiency"
        yield from _figure(
            f"{name} relative to independent copies",
            wall_ratio(here.one(program=ranks.COPIES), mine), Target(target),
        )  # fmt: skip
        yield from _figure(
            f"{name} relative to copies that meet after each step",
            wall_ratio(here.one(program=ranks.IN_STEP), mine), Target(target),
        )  # fmt: skip
        if scaling == "strong":
            alone = here.one(program=ranks.ALONE)
            yield from _figure(
                f"{name} relative to one rank", wall_ratio(alone, mine, 1.0 / count), Target(target)
            )


def _two_cores(rows: Rows) -> Iterator[Figure]:
    targets = {
        ("weak", 8): ("4 ranks on 2 cores, 8 samples each: weak efficiency", 1.0, 0.45),
        ("strong", 32): ("2 ranks, global batch 32: times faster than one", 1.0, 1.6),
        ("weak", 128): ("2 ranks, 128 samples each: weak efficiency", 1.0, 0.97),
    }
    for (scaling, samples), (name, factor, target) in targets.items():
        here = rows.where(scaling=scaling, samples=samples)
        alone, mine = here.one(program=ranks.ALONE), here.one(program=ranks.OURS)
        yield from _figure(name, wall_ratio(alone, mine, factor), Target(target))


def _sums(rows: Rows) -> Iterator[Figure]:
    for network, count in dict.fromkeys((r["network"], r["ranks"]) for r in rows):
        here = rows.where(network=network, ranks=count)
        mine = here.one(program=sums.OURS)
        name = f"sum and update of {4e-6 * sums.NETWORKS[network]:.2f} MB, {count} ranks"
        yield from _figure(
            f"{name}: time relative to traffic.c",
            speedup(mine, here.one(program=sums.TRAFFIC)), TRAFFIC,
        )  # fmt: skip
        if count in MPI_RANKS:
            best = here.fastest(sums.MPI_LIBRARIES)
            yield from _figure(
                f"{name}: times faster than the better MPI", speedup(best, mine), MPI
            )


def _shards(rows: Rows) -> Iterator[Figure]:
    for network, count, each in dict.fromkeys(
        (r["network"], r["ranks"], r["threads"]) for r in rows
    ):
        here = rows.where(network=network, ranks=count, threads=each)
        yield from _figure(
            f"{network}, {count} ranks × {each} threads: step with micro-shards relative to none",
            wall_ratio(here.one(program=shards.WITH), here.one(program=shards.WITHOUT)),
            SHARDS[network],
        )


def _inference(rows: Rows) -> Iterator[Figure]:
    for network, count, batch in dict.fromkeys(
        (r["network"], r["threads"], r["batch"]) for r in rows
    ):
        if network not in inference.NETWORKS:
            continue
        here = rows.where(network=network, threads=count, batch=batch)
        best, mine = here.fastest(inference.PEERS), here.one(program=inference.OURS)
        bound_by_memory = (network, batch) == ("solar", 1)
        yield from _figure(
            f"inference of {network} at batch {batch}, {count} threads: times faster than the "
            "best peer", speedup(best, mine), EQUAL if bound_by_memory else INFERENCE,
        )  # fmt: skip


def _outside(rows: Rows) -> Iterator[Figure]:
    for network, count in dict.fromkeys((r["network"], r["threads"]) for r in rows):
        here = rows.where(network=network, threads=count)
        best, mine = here.fastest(tuple(threads.PEERS)), here.one(program=threads.OURS)
        yield from _figure(
            f"training of {network}, {count} threads: times faster than the best peer",
            speedup(best, mine), OTHERS.get(network, OUTSIDE),
        )  # fmt: skip


def _filters(rows: Rows) -> Iterator[Figure]:
    for row in rows:
        whole = filters.next_multiple(row["filters"])
        if row["filters"] != whole:
            other = rows.one(layer=row["layer"], phase=row["phase"], filters=whole)
            yield from _figure(
                f"{row['layer']}, {row['phase']}, {row['filters']} filters: time per multiply-add "
                f"relative to {whole}", relative_time(row, other), FILTERS,
            )  # fmt: skip


SECTIONS = {
    "threads": _threads,
    "ranks": _ranks,
    "two-cores": _two_cores,
    "sums": _sums,
    "shards": _shards,
    "inference": _inference,
    "outside": _outside,
    "residual": _outside,
    "filters": _filters,
}
