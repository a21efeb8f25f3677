"""Definitions of the terms of a report: of studies here, of profiles from the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dptrain.measure.vocabulary import SECTIONS, Term
from dptrain.report.elements.canvas import part_name

STUDY = (
    Term("point", "", "Weak or strong scaling with one number of ranks and threads: `weak-r4-t1`."),
    Term("launch", "", "One start of the job at a point, with all its steps. All intervals are "
         "over launches, not over steps."),
    Term("compute threads", "1", "Ranks × threads per rank."),
    Term("weak", "", "The global minibatch grows with the number of ranks, so that the work of a "
         "rank is constant."),
    Term("strong", "", "The global minibatch is constant, so that the work of a rank shrinks."),
    Term("step_ms", "ms", "Wall time of the steps of a launch divided by their number; mean over "
         "launches."),
    Term("median_step_ms", "ms", "Median step of a launch. Slow steps hardly change it."),
    Term("interval", "", "95% confidence interval over launches, which are compared within rounds "
         "for speed-up and efficiency: Student's t for the logarithm of a ratio, with the "
         "standard error of the jackknife. It includes interruptions that are too rare to be seen "
         "in the steps. Below three launches there is no efficiency. If launches fall into two "
         "groups, it is their range."),
    Term("speed_up", "1", "Throughput in samples/s over that of the smallest point."),
    Term("efficiency", "1", "Parallel efficiency: speed-up over the ratio p of compute threads. "
         "Weak: E = T(1) / T(p); strong: E = T(1) / (p T(p)). 1 is ideal."),
    Term("possible", "1", "Core limit: the upper bound of the efficiency if ranks share cores, "
         "cores over compute threads, at most 1."),
    Term("karp_flatt", "1", "Serial fraction that explains the speed-up S by Amdahl's law: "
         "(1/S − 1/p) / (1 − 1/p), where p counts cores. If it grows with p, the cause is "
         "overhead, not serial work."),
    Term("ideal", "ms", "The step of the smallest point; for strong scaling divided by the ratio "
         "of compute threads."),
    Term("computation_scaling", "1", "Busy time at the smallest point over busy time, for the same "
         "work. It is lost to contention for cores, caches and memory, and to small batches."),
    Term("cost", "ms", "Step time × ratio of compute threads, which is constant for ideal strong "
         "scaling."),
    Term("loss", "ms", "Step time beyond the ideal step, by part."),
    Term("shared_ms", "ms", "Shared cores: part of the loss of compute that is due to ranks "
         "sharing cores."),
    Term("contention_ms", "ms", "Part of the loss of compute that is due to other competition of "
         "ranks, such as for memory and caches."),
    Term("small_batch_ms", "ms", "Smaller batch: part of the loss of compute that is due to the "
         "smaller batch of a rank."),
    Term("hindcast_error", "1", "Relative error of the prediction of the largest measured point "
         "from the smaller ones."),
    Term("forecast", "", "Efficiencies at more ranks by an ensemble of models, with intervals; "
         "wide if the upper limit is more than 1.3 times the lower one, unknown if it is more than "
         "twice the lower one."),
    Term("outlier", "", "A launch whose distance from the median of its point is more than 3 "
         "scaled median absolute deviations. It is not removed."),
)  # fmt: skip

OF_PROFILES = (
    "Parts of a step",
    "Phases of a stage",
    "Of a stage, or of all stages of a kind",
    "Of a rank",
    "Of parallel efficiency",
    "Of sums, roofs and memory",
)
"""Sections of the vocabulary that define the terms of a profile in the report."""
OF_RUNS = (
    "Of training",
    "Parts of a step",
    "Phases of a stage",
    "Of a stage, or of all stages of a kind",
    "Of parallel efficiency",
)
"""Sections of the vocabulary that define the terms of a training run in the report."""
OF_STUDIES = ("Scaling study", *OF_PROFILES)

SHOWN = {
    "Of training": (
        "epoch", "metrics.loss", "learning_rate", "train_loss", "train_accuracy",
        "validation_loss", "validation_accuracy", "test_loss", "test_accuracy",
        "time_to_accuracy", "weak", "strong", "other_cores",
    ),
}  # fmt: skip
"""Names of the terms that a report shows, of sections that contain others, too."""

LABELS = {
    "busy_ms": "busy",
    "bytes_moved": "data read and written",
    "communication.exposed": "communication and waiting",
    "communication.hidden": "sums in progress during computation",
    "compute_ms": "computation",
    "contention_ms": "contention",
    "cumulative_share": "cumulative",
    "data_wait_ms": "waiting for data",
    "delay_ms": "delay",
    "exposed_ms": "communication and waiting",
    "gb_per_s": "bandwidth",
    "gflops": "rate",
    "hidden_ms": "sums in progress during computation",
    "imbalance_ms": "waiting",
    "karp_flatt": "serial fraction",
    "load_imbalance": "load imbalance",
    "memory_bytes": "memory",
    "note": "algorithm",
    "other_cores": "cores of other programs",
    "parallel": "parallel efficiency",
    "possible": "core limit",
    "roofline_share": "roofline",
    "samples_per_s": "throughput",
    "shared_ms": "shared cores",
    "slowest_ms": "slowest rank, ms",
    "slowest_rank": "slowest rank, number",
    "small_batch_ms": "smaller batch",
    "step_ms": "step",
    "median_step_ms": "median step",
    "time_ms": "median",
    "train_accuracy": "training accuracy",
    "train_loss": "training loss",
    "typical_ms": "typical",
}
"""Labels of plots and tables that differ from the names in files."""


@dataclass(frozen=True)
class Definition:
    """A definition: the label of plots and tables, the name in files with its unit, the meaning."""

    label: str
    name: str
    meaning: str


Definitions = tuple[tuple[str, tuple[Definition, ...]], ...]
"""Headings with the definitions below them."""


def definitions(titles: Sequence[str]) -> Definitions:
    """Return the definitions by heading.

    Args:
        titles: `OF_STUDIES`, `OF_PROFILES` or `OF_RUNS`.
    """
    sections = {"Scaling study": STUDY, **SECTIONS}
    return tuple(
        (title, tuple(_definition(term) for term in sections[title] if _is_shown(title, term)))
        for title in titles
    )


def _is_shown(title: str, term: Term) -> bool:
    return title not in SHOWN or term.name in SHOWN[title]


def _definition(term: Term) -> Definition:
    plain = term.unit in ("", "1") or term.name.endswith(f"_{term.unit}")
    name = term.name if plain else f"{term.name}, {term.unit}"
    label = LABELS.get(term.name) or part_name(term.name.rpartition(".")[2])
    return Definition(label, "" if name == label else name, term.meaning)
