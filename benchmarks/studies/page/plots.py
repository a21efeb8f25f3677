"""The plots of the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from benchmarks.studies.claims.judge_a import speed_up
from benchmarks.studies.claims.judge_b import calls, perceptron_ms, ranks_of, strategy
from benchmarks.studies.claims.judge_d import accuracy, total_ms, trained
from benchmarks.studies.claims.published import (
    INFERENCE_S,
    LOG_SECONDS,
    PERCEPTRON_COUNTS,
    PERCEPTRON_S,
    SOLAR_BATCHES,
    SOLAR_S,
    SPEED_UP,
    VARIANTS,
)
from benchmarks.studies.claims.spreads import ratio
from benchmarks.studies.claims.verdicts import MissingResultError, Results, times
from benchmarks.studies.networks import STUDY_A
from benchmarks.studies.solar import MAPS
from dptrain.report.elements.canvas import (
    Plot,
    colour,
    plot,
    set_ranks_axis,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PREFIX = "studies-"
HEIGHT = 190.0
COLOURS = ("blue", "green", "purple", "orange", "ink", "sky")
AXIS_BATCHES = (2, 8, 32, 128, 512, 2048)
MARKERS = ("o", "s", "^", "D", "v", "P")


def draw_plots(results: Results) -> Iterator[Plot]:
    """Yield the plots for which there are results."""
    for make in (_threads, _batches, _crossover, _strategies, _inference, _variants):
        try:
            yield make(results)
        except (MissingResultError, KeyError):
            continue


def _threads(results: Results) -> Plot:
    steps = results.values("speed-up")["steps"]
    counts = sorted(int(name.split()[1]) for name in steps["model0"] if name.startswith("threads"))
    if len(counts) < 3:
        raise MissingResultError("it needs more than two cores")
    lines = {
        name: [max(speed_up(results, name, f"{unit} {n}").value
                   for unit in (("threads", "ranks") if n > 1 else ("threads",)))
               for n in counts]
        for name in STUDY_A
    }  # fmt: skip

    def draw(axes: Axes) -> None:
        axes.plot(counts, counts, color=colour("grid"), linewidth=2, label="linear")
        for (name, values), role, marker in zip(lines.items(), COLOURS, MARKERS, strict=False):
            axes.plot(counts, values, marker=marker, color=colour(role), label=name)
        axes.plot([8], [SPEED_UP], "*", color=colour("orange"), markersize=10,
                  label="study A, model0")  # fmt: skip
        log = sorted(n for n in LOG_SECONDS if n in counts)
        axes.plot(log, [LOG_SECONDS[1] / LOG_SECONDS[n] for n in log], "--",
                  color=colour("grey"), marker="x", label="study A, log")  # fmt: skip
        set_ranks_axis(axes, counts, "threads or ranks")
        axes.set_ylim(0)
        axes.set_yticks(range(0, max(counts) + 1, 4))

    best = max(counts)
    alt = "; ".join(f"{name} {times(values[-1])}" for name, values in lines.items())
    return plot(
        f"{PREFIX}threads", "Speed-up of study A's networks",
        "times faster than one thread, batch 32", draw,
        caption="", alt=f"Speed-up with {best} threads or ranks: {alt}; study A: {times(SPEED_UP)} "
        "with 8 threads",
        height=HEIGHT, legend=2, lines=True,
    )  # fmt: skip


def _batches(results: Results) -> Plot:
    series = {}
    for name in ("solar", "solar-gpu"):
        if results.has(name):
            rows = results.values(name)["rows"]
            series[f"ours, {results.hardware(name)}"] = {
                row["samples"]: MAPS / row["samples"] * row["median_ms"] / 1e3
                for row in rows if "median_ms" in row
            }  # fmt: skip
    if not series:
        raise MissingResultError("`solar` was not measured yet")
    published = {}
    for device in ("2 × Xeon E5-2695 v3", "GTX 1080"):
        values = zip(SOLAR_BATCHES, SOLAR_S[device], strict=True)
        published[f"study B, {device}"] = {n: s for n, s in values if s is not None}

    def draw(axes: Axes) -> None:
        for (name, values), role, marker in zip(series.items(), COLOURS, MARKERS, strict=False):
            axes.plot(*_sorted(values), marker=marker, color=colour(role), label=name)
        for (name, values), role in zip(published.items(), ("grey", "amber"), strict=True):
            axes.plot(*_sorted(values), "--", marker="x", color=colour(role), label=name)
        set_ranks_axis(axes, AXIS_BATCHES, "batch size")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:,.0f}")

    alt = "; ".join(f"{name}: {values[2]:.0f} s at batch 2, {values[512]:.1f} s at batch 512"
                    for name, values in series.items() if {2, 512} <= values.keys())  # fmt: skip
    return plot(
        f"{PREFIX}batch", "An epoch of the solar CNN", "seconds for 145,028 maps (log scale)",
        draw, caption="", alt=f"Time of an epoch falls with the batch size. {alt}",
        height=HEIGHT, legend=1, lines=True, left=36,
    )  # fmt: skip


def _sorted(values: dict[int, float]) -> tuple[Sequence[int], Sequence[float]]:
    keys = sorted(values)
    return keys, [values[key] for key in keys]


def _crossover(results: Results) -> Plot:
    cpu, gpu = perceptron_ms(results, "perceptrons"), perceptron_ms(results, "perceptrons-gpu")
    ours = {PERCEPTRON_COUNTS[n]: cpu[n] / gpu[n] for n in cpu if n in gpu}
    theirs = {
        PERCEPTRON_COUNTS[n]: xeon / gtx
        for n, (_, xeon, gtx) in PERCEPTRON_S.items()
        if xeon is not None and gtx is not None
    }
    title = f"ours: {results.hardware('perceptrons')} ÷ {results.hardware('perceptrons-gpu')}"

    def draw(axes: Axes) -> None:
        axes.axhline(1, color=colour("ink"), linewidth=0.8)
        axes.plot(*_sorted(ours), "o", color=colour("blue"), label=title)
        axes.plot(*_sorted(theirs), "x", color=colour("grey"),
                  label="study B: 2 × Xeon E5-2695 v3 ÷ GTX 1080")  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("parameters (log scale)", labelpad=2)
        axes.yaxis.set_major_formatter("{x:g}")

    return plot(
        f"{PREFIX}crossover", "CPU against GPU, perceptrons",
        "CPU time ÷ GPU time of a step; above 1 the GPU is faster",
        draw, caption="",
        alt="CPU time divided by GPU time rises with the parameters, from "
        f"{min(ours.values()):.2g} to {max(ours.values()):.3g}",
        height=HEIGHT, legend=1, lines=True,
    )  # fmt: skip


def _strategies(results: Results) -> Plot:
    counts = ranks_of(results)
    one = strategy(results, "", 1)
    names = ("mirrored, shared memory", "mirrored, MPI", "central, MPI")
    lines = {name: [ratio(one, strategy(results, name, n)) for n in counts] for name in names}
    batch = results.values("strategies")["batch"]

    def draw(axes: Axes) -> None:
        axes.plot(counts, counts, color=colour("grid"), linewidth=2, label="linear")
        for index, (name, gains) in enumerate(lines.items()):
            role, marker = COLOURS[index], MARKERS[index]
            values = [gain.value for gain in gains]
            around = ([g.value - g.low for g in gains], [g.high - g.value for g in gains])
            # Intervals of the same number of ranks would cover each other.
            at = [n * 1.05 ** (index - 1) for n in counts]
            axes.errorbar(at, values, yerr=around, marker=marker, color=colour(role), capsize=3,
                          label=name)  # fmt: skip
        set_ranks_axis(axes, counts, "ranks")
        axes.set_ylim(0)
        axes.set_yticks(range(0, max(counts) + 1, 4))

    alt = "; ".join(f"{name} {times(gains[-1].value)}" for name, gains in lines.items())
    return plot(
        f"{PREFIX}strategies", "Mirrored and central training of the solar CNN",
        f"times faster than one rank, {batch} maps, 95% intervals", draw,
        caption="", alt=f"Speed-up with {counts[-1]} ranks: {alt}", height=HEIGHT, legend=2,
        lines=True,
    )  # fmt: skip


def _inference(results: Results) -> Plot:
    ours = {
        f"ours, {results.hardware(name)}": {n: row["median_ms"] / 1e3
                                            for n, row in calls(results, name).items()}
        for name in ("inference", "inference-gpu") if results.has(name)
    }  # fmt: skip
    if not ours:
        raise MissingResultError("`inference` was not measured yet")
    columns = {"study B, 2 × Xeon": 1, "study B, GTX 1080": 2}
    published = {
        name: {n: seconds for n, row in INFERENCE_S.items() if (seconds := row[column]) is not None}
        for name, column in columns.items()
    }

    def draw(axes: Axes) -> None:
        axes.axhline(1, color=colour("ink"), linewidth=0.8)
        for (name, values), role, marker in zip(ours.items(), COLOURS, MARKERS, strict=False):
            axes.plot(*_sorted(values), marker=marker, color=colour(role), label=name)
        for (name, values), role in zip(published.items(), ("grey", "amber"), strict=True):
            axes.plot(*_sorted(values), "--", marker="x", color=colour(role), label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("maps of a call (log scale)", labelpad=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:g}")

    alt = "; ".join(f"{name}: {values[1024] * 1e3:.3g} ms for 1,024 maps"
                    for name, values in ours.items())  # fmt: skip
    return plot(
        f"{PREFIX}inference", "Inference of the solar CNN",
        "seconds of a call (log scale); the line is 1 s", draw, caption="",
        alt=f"Time of a call by number of maps. {alt}", height=HEIGHT, legend=1, lines=True,
        left=36,
    )  # fmt: skip


def _variants(results: Results) -> Plot:
    found, _ = trained(results)
    names = list(found["variants"])
    base = total_ms(results, "base")
    ours = {n: (total_ms(results, n) / base, 100 * accuracy(results, n)) for n in names}
    theirs = {n: (v.total_ms / VARIANTS["base"].total_ms, 100 * v.precision)
              for n, v in VARIANTS.items()}  # fmt: skip
    short = {"larger pooling": "pooling", "32 filters": "32"}

    def label(axes: Axes, points: dict[str, tuple[float, float]], role: str, text: str,
              marker: str) -> None:  # fmt: skip
        axes.plot([p[0] for p in points.values()], [p[1] for p in points.values()], marker,
                  color=colour(role), label=text)  # fmt: skip
        for n, (x, y) in points.items():
            if points is theirs and not n.startswith("stride"):
                continue  # They lie next to ours.
            written = short.get(n, n.replace("stride ", "").replace(" filters", ""))
            # Labels of points that lie next to others are below them.
            offset = (-4, -10) if "," in n or n == "base" else (3, 4)
            axes.annotate(written, (x, y), xytext=offset, textcoords="offset points",
                          fontsize=7, color=colour("faint"))  # fmt: skip

    def draw(axes: Axes) -> None:
        label(axes, ours, "blue", f"ours, {found['data']}, {found['steps']:,} steps", "o")
        label(axes, theirs, "grey", "study D, CIFAR-10, up to 100,000 steps", "x")
        axes.set_xscale("log")
        axes.set_xlabel("time of inference relative to the base (log scale)", labelpad=2)
        axes.set_xlim(right=2.6)
        axes.margins(y=0.12)

    alt = "; ".join(f"{n}: {x:.2f} of the time, {y:.1f}%" for n, (x, y) in ours.items())
    return plot(
        f"{PREFIX}variants", "Variants of study D's network",
        "accuracy in %; labels: stride, 32 filters, larger pooling", draw,
        caption="", alt=f"Accuracy of variants over their time. {alt}", height=HEIGHT,
        legend=1, lines=True,
    )  # fmt: skip
