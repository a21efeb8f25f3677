"""The tables of one profile: stages, kinds of stages, ranks, all-reduces, memory."""

from __future__ import annotations

from collections.abc import Sequence

from dptrain.measure.loss_tables import FACTOR_NAMES
from dptrain.measure.pop import Pop
from dptrain.measure.profile import Profile, StageProfile
from dptrain.measure.profile_tables import LOST_IF
from dptrain.scaling.report.tables import (
    Column,
    Number,
    Table,
    counts,
    estimates,
    spreads,
    texts,
    times,
    values,
)


def profile_tables(profile: Profile, file: str, suffix: str = "") -> list[Table]:
    """Return all tables of a profile.

    Args:
        profile: the profile.
        file: path of its file, relative to the page.
        suffix: suffix of the names of the tables.
    """
    tables = [
        _stages(f"stages{suffix}", "Stages", file, profile, "stages"),
        _stages(f"kinds{suffix}", "Stages by kind", file, profile, "kinds"),
        _ranks(f"ranks{suffix}", file, profile),
    ]
    if profile.pop is not None:
        tables += _efficiencies(suffix, file, profile.pop)
    if profile.sums:
        tables.append(_sums(f"sums{suffix}", file, profile))
    tables.append(_memory(f"memory{suffix}", file, profile))
    return tables


def _stages(name: str, title: str, file: str, profile: Profile, where: str) -> Table:
    stages: Sequence[StageProfile] = getattr(profile, where)
    at = [f"{where}.{i}" for i in range(len(stages))]

    def column(head: str, unit: str, field: str, **options: float) -> Column:
        found = [getattr(stage, field) for stage in stages]
        decimals = int(options["decimals"]) if "decimals" in options else None
        return values(head, unit, found, [f"{a}.{field}" for a in at], decimals=decimals,
                      scale=options.get("scale", 1.0))  # fmt: skip

    columns = [
        texts("stage" if where == "stages" else "kind", [s.name for s in stages], kind="prose"),
        spreads("median", "ms (quartiles)", [s.time_ms for s in stages],
                [f"{a}.time_ms" for a in at]),
        column("typical", "ms", "typical_ms"),
        column("share", "%", "share", decimals=1, scale=100),
        column("cumulative", "%", "cumulative_share", decimals=1, scale=100),
        column("rate", "GFLOP/s", "gflops", decimals=1),
        column("bandwidth", "GB/s", "gb_per_s", decimals=1),
        column("roofline", "% of limit", "roofline_share", decimals=0, scale=100),
        column("memory", "MB", "memory_bytes", scale=1e-6),
    ]  # fmt: skip
    if len(profile.ranks) > 1:
        numbers = [s.slowest_rank for s in stages], [f"{a}.slowest_rank" for a in at]
        columns[3:3] = (
            column("slowest rank", "ms", "slowest_ms"),
            counts("slowest rank", *numbers, "number"),
        )
    if any(stage.calls > 1 for stage in stages):
        columns.append(counts("calls", [s.calls for s in stages], [f"{a}.calls" for a in at]))
    if where == "stages" and any(stage.note for stage in stages):
        columns.append(texts("algorithm", [stage.note for stage in stages], kind="prose"))
    note = (
        "Typical: mean of the half of the steps around the median step; shares and rates are of "
        "these."
    )
    return Table(name, title, file, tuple(columns), note)


def _ranks(name: str, file: str, profile: Profile) -> Table:
    ranks = profile.ranks
    at = [f"ranks.{i}" for i in range(len(ranks))]
    fields = {
        "step": "step_ms", "busy": "busy_ms", "computation": "compute_ms",
        "data wait": "data_wait_ms", "communication and waiting": "exposed_ms",
        "waiting": "imbalance_ms", "delay": "delay_ms",
    }  # fmt: skip
    columns = [
        counts("rank", [r.rank for r in ranks], [f"{a}.rank" for a in at]),
        texts("host", [r.host for r in ranks]),
        texts("device", [r.device for r in ranks]),
        values("samples", "", [r.samples for r in ranks], [f"{a}.samples" for a in at]),
        *times(fields, ranks, at),
    ]  # fmt: skip
    note = (
        "Means of typical steps. Busy: step without communication and waiting. Delay: busy time "
        "minus that of the median rank."
    )
    return Table(name, "Ranks", file, tuple(columns), note)


def _efficiencies(suffix: str, file: str, pop: Pop) -> list[Table]:
    """Return the factors of the parallel efficiency, the busy shares of ranks, and the balance of
    layers.
    """
    names = list(LOST_IF)
    factors = (
        texts("efficiency", [FACTOR_NAMES[name] for name in names], kind="prose"),
        estimates("value", "(95%)", [getattr(pop, name) for name in names],
                  [f"pop.{name}" for name in names], decimals=3),
        texts("is less than 1 if", list(LOST_IF.values()), kind="prose"),
    )  # fmt: skip
    numbers = range(len(pop.ranks))
    ranks = (
        texts("rank", list(numbers)),
        estimates("busy", "share of wall time (95%)", pop.ranks,
                  [f"pop.ranks.{i}" for i in numbers], decimals=3),
    )  # fmt: skip
    at = [f"pop.layers.{i}" for i in range(len(pop.layers))]
    layers = (
        texts("layers", [layer.name for layer in pop.layers], kind="prose"),
        estimates("load balance", "(95%)", [layer.load_balance for layer in pop.layers],
                  [f"{a}.load_balance" for a in at], decimals=3),
        estimates("serialisation", "(95%)", [layer.serialisation for layer in pop.layers],
                  [f"{a}.serialisation" for a in at], decimals=3),
    )  # fmt: skip
    return [
        Table(f"pop{suffix}", "Parallel efficiency (POP)", file, factors,
              "Busy: time of a step without exposed communication."),
        Table(f"pop-ranks{suffix}", "Busy share of ranks", file, ranks),
        Table(f"pop-layers{suffix}", "Balance of the ranks by layers", file, layers),
    ]  # fmt: skip


def _sums(name: str, file: str, profile: Profile) -> Table:
    sums = profile.sums
    at = [f"sums.{i}" for i in range(len(sums))]
    columns = (
        values("bucket", "MB", [s.bucket_bytes for s in sums], [f"{a}.bucket_bytes" for a in at],
               scale=1e-6),
        counts("buckets", [s.buckets for s in sums], [f"{a}.buckets" for a in at]),
        spreads("one all-reduce", "ms (median, quartiles)", [s.time_ms for s in sums],
                [f"{a}.time_ms" for a in at]),
    )  # fmt: skip
    note = "Timed after the steps, without computation; all ranks start together."
    return Table(name, "Gradient all-reduce alone", file, columns, note)


def _memory(name: str, file: str, profile: Profile) -> Table:
    names = list(profile.memory)
    found = [profile.memory[key] for key in names]
    cells = values("bytes", "MB", found, [f"memory.{key}" for key in names], scale=1e-6)
    assert all(isinstance(cell[0], Number) for cell in cells.cells)
    columns = (texts("purpose", [key.replace("_", " ") for key in names]), cells)
    return Table(name, "Memory of a rank", file, columns)
