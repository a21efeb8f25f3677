"""A table for each section."""

from __future__ import annotations

from benchmarks.node import filters, inference, ranks, shards, sums, threads
from benchmarks.node.rows import Rows, relative_time, speedup, text_of, time_of, wall_ratio
from benchmarks.node.sum_parts import PARTS
from benchmarks.tables import make_table
from dptrain.tables import Table


def threads_table(rows: Rows) -> Table:
    """Return training steps by network and number of threads."""
    lines = []
    for network in rows.values("network"):
        batch = rows.where(network=network).values("batch")[0]
        single = rows.one(network=network, threads=1, program=threads.OURS)
        for count in sorted(rows.where(network=network).values("threads")):
            here = rows.where(network=network, threads=count)
            mine, copies = here.one(program=threads.OURS), here.one(program=threads.COPIES)
            best = here.fastest(tuple(threads.PEERS))
            lines.append((
                f"{network}@{batch}", str(count), time_of(mine), time_of(best),
                "" if best is None else str(best["program"]), text_of(speedup(best, mine)),
                time_of(copies, wall=True), text_of(wall_ratio(single, mine, 1.0 / count)),
                text_of(wall_ratio(copies, mine)),
            ))  # fmt: skip
    columns = (
        "network", "threads", "dptrain ms", "best peer ms", "peer", "times faster", "copies ms",
        "efficiency", "of copies'",
    )  # fmt: skip
    return make_table("Training step by threads: median (quartiles)", columns, lines)


def stages_table(rows: Rows) -> Table:
    """Return the stages by network and number of threads, and what waiting would cost copies."""
    lines = []
    for network in rows.values("network"):
        of_network = rows.where(network=network)
        for count in sorted(set(of_network.values("threads")) - {1}):
            here = of_network.where(threads=count)
            for stage in here.values("stage"):
                case = here.where(stage=stage)
                single = of_network.one(program=threads.OURS, threads=1, stage=stage, kind="mean")
                copies = case.where(program=threads.COPIES)
                lines.append((
                    f"{network}@{case.values('batch')[0]}", str(count), stage, time_of(single),
                    time_of(case.one(program=threads.OURS, kind="mean")),
                    "" if single is None else f"{single['median_ms'] / count:.3g}",
                    time_of(copies.one(kind="mean")), time_of(copies.one(kind="slowest")),
                    time_of(copies.one(kind="slowest step")),
                ))  # fmt: skip
    columns = (
        "network", "threads", "stage", "1 thread ms", "ms", "ideal ms", "copies ms",
        "waiting by stage ms", "by step ms",
    )  # fmt: skip
    return make_table(
        "Stages of a training step by threads: median (quartiles)", columns, tuple(lines)
    )


def outside_table(rows: Rows) -> Table:
    """Return training steps of the networks outside the benchmark set."""
    lines = []
    for network, batch, count in dict.fromkeys(
        (r["network"], r["batch"], r["threads"]) for r in rows
    ):
        here = rows.where(network=network, threads=count)
        mine, best = here.one(program=threads.OURS), here.fastest(tuple(threads.PEERS))
        lines.append((
            f"{network}@{batch}", str(count), time_of(mine), time_of(best),
            "" if best is None else str(best["program"]), text_of(speedup(best, mine)),
        ))  # fmt: skip
    columns = ("network", "threads", "dptrain ms", "best peer ms", "peer", "times faster")
    return make_table("Training step of other networks: median (quartiles)", columns, lines)


def inference_table(rows: Rows) -> Table:
    """Return inference passes by network, number of threads and batch size."""
    lines = []
    for network, count, batch in dict.fromkeys(
        (r["network"], r["threads"], r["batch"]) for r in rows
    ):
        here = rows.where(network=network, threads=count, batch=batch)
        mine, best = here.one(program=inference.OURS), here.fastest(inference.PEERS)
        lines.append((
            network, str(count), str(batch), time_of(mine), time_of(best),
            "" if best is None else str(best["program"]), text_of(speedup(best, mine)),
        ))  # fmt: skip
    columns = ("network", "threads", "batch", "dptrain ms", "best peer ms", "peer", "times faster")
    return make_table("Inference: median (quartiles)", columns, lines)


def shards_table(rows: Rows) -> Table:
    """Return the cost of micro-shards."""
    lines = []
    for network, count, each in dict.fromkeys(
        (r["network"], r["ranks"], r["threads"]) for r in rows
    ):
        here = rows.where(network=network, ranks=count, threads=each)
        with_, without = here.one(program=shards.WITH), here.one(program=shards.WITHOUT)
        lines.append((
            network, f"{count} × {each}", time_of(without, wall=True), time_of(with_, wall=True),
            text_of(wall_ratio(with_, without)),
        ))  # fmt: skip
    columns = ("network", "ranks × threads", "without ms", "with shards ms", "with / without")
    title = f"{shards.SHARDS} micro-shards of {shards.SAMPLES} samples: median (quartiles)"
    return make_table(title, columns, lines)


def filters_table(rows: Rows) -> Table:
    """Return the time per multiply-add, relative to the next multiple of 16 filters."""
    lines = []
    for layer, phase in dict.fromkeys((r["layer"], r["phase"]) for r in rows):
        here = rows.where(layer=layer, phase=phase)
        for row in here:
            whole = here.one(filters=filters.next_multiple(row["filters"]))
            low, high = (1e3 * value for value in row["quartiles"])
            lines.append((
                layer, phase, str(row["filters"]),
                f"{1e3 * row['ns_per_product']:.3g} ({low:.3g}–{high:.3g})",
                text_of(relative_time(row, whole)),
            ))  # fmt: skip
    columns = ("convolution", "phase", "filters", "ps per multiply-add", "relative")
    title = f"Numbers of filters at batch {filters.BATCH}, one thread: median (quartiles)"
    return make_table(title, columns, lines)


def ranks_table(title: str, rows: Rows) -> Table:
    """Return the steps and efficiencies of ranks by case."""
    lines = []
    cases = dict.fromkeys((r["network"], r["scaling"], r["samples"], r["ranks"]) for r in rows)
    for network, scaling, samples, count in sorted(cases, key=lambda c: (c[1] != "weak", *c)):
        case = rows.where(network=network, scaling=scaling, samples=samples)
        here = case.where(ranks=count)
        mine, copies = here.one(program=ranks.OURS), here.one(program=ranks.COPIES)
        meeting = here.one(program=ranks.IN_STEP)
        factor = 1.0 if scaling == "weak" else 1.0 / count
        ddp = here.fastest(ranks.DDP_MODES)
        ddp_alone = case.where(ranks=1).fastest(ranks.DDP_MODES)
        lines.append((
            f"{network}, {scaling}, {samples}", str(count), time_of(mine, wall=True),
            time_of(here.one(program=ranks.OVER_MPI), wall=True), time_of(copies, wall=True),
            time_of(meeting, wall=True),
            text_of(wall_ratio(here.one(program=ranks.ALONE), mine, factor)),
            text_of(wall_ratio(copies, mine)), text_of(wall_ratio(meeting, mine)),
            time_of(ddp, wall=True),
            text_of(wall_ratio(ddp_alone, ddp, factor)),
        ))  # fmt: skip
    columns = (
        "case", "ranks", "dptrain ms", "over MPI ms", "copies ms", "meeting ms", "efficiency",
        "of copies'", "of meeting",
        "PyTorch DDP ms", "its efficiency",
    )  # fmt: skip
    return make_table(
        f"{title}: wall time divided by steps, median (quartiles)", columns, tuple(lines)
    )


def sums_table(rows: Rows) -> Table:
    """Return the times of sums with update."""
    lines = []
    others = [p for p in rows.values("program") if p not in (sums.OURS, sums.TRAFFIC)]
    for network in rows.values("network"):
        for count in sorted(rows.where(network=network).values("ranks")):
            here = rows.where(network=network, ranks=count)
            mine, traffic = here.one(program=sums.OURS), here.one(program=sums.TRAFFIC)
            parts = (mine or {}).get("parts_us", {})
            lines.append((
                f"{4e-6 * sums.NETWORKS[network]:.2f} MB", str(count), time_of(mine, unit=1e3),
                " + ".join(f"{parts[part]:.0f}" for part in PARTS[:3]) if parts else "",
                f"{parts[PARTS[3]]:.0f}" if parts else "",
                time_of(traffic, unit=1e3), text_of(speedup(mine, traffic)),
                text_of(speedup(here.fastest(sums.MPI_LIBRARIES), mine)),
                *(time_of(here.one(program=other), unit=1e3) for other in others),
            ))  # fmt: skip
    columns = (
        "gradients", "ranks", "dptrain µs", "arrive + work + release",
        "mean work", "traffic.c µs", "dptrain / traffic.c",
        "times faster than MPI", *(f"{other} µs" for other in others),
    )  # fmt: skip
    return make_table("Sum and update alone: median (quartiles)", columns, lines)
