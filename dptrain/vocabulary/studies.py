"""Terms of scaling studies."""

from __future__ import annotations

from dptrain.vocabulary.terms import Term

STUDY = (
    Term("point", "", "Weak or strong scaling with one number of ranks and threads: `weak-r4-t1`."),
    Term(
        "launch",
        "",
        "One start of the job at a point, with all its steps. All intervals are "
        "over launches, not over steps.",
    ),
    Term("compute threads", "1", "Ranks × threads per rank."),
    Term(
        "weak scaling",
        "",
        "The global minibatch grows with the number of ranks, so that the work of a "
        "rank is constant.",
    ),
    Term(
        "strong scaling",
        "",
        "The global minibatch is constant, so that the work of a rank shrinks.",
    ),
    Term(
        "points.step_ms",
        "ms",
        "Wall time of the steps of a launch divided by their number; mean over launches.",
        heading="step",
    ),
    Term(
        "median_step_ms",
        "ms",
        "Median step of a launch. Slow steps hardly change it.",
        heading="median step",
    ),
    Term(
        "interval",
        "",
        "95% confidence interval over launches, which are compared within rounds "
        "for speed-up and efficiency: Student's t for the logarithm of a ratio, with the "
        "standard error of the jackknife. It includes interruptions that are too rare to be seen "
        "in the steps. Below three launches there is no efficiency. If launches fall into two "
        "groups, it is their range.",
    ),
    Term(
        "speed_up",
        "1",
        "Throughput in samples/s over that of the smallest point.",
        heading="speed-up",
    ),
    Term(
        "efficiency",
        "1",
        "Parallel efficiency: speed-up over the ratio p of compute threads. "
        "Weak: E = T(1) / T(p); strong: E = T(1) / (p T(p)). 1 is ideal.",
        shown="%",
    ),
    Term(
        "points.possible",
        "1",
        "Core limit: the upper bound of the efficiency if ranks share cores, "
        "cores over compute threads, at most 1.",
        heading="core limit",
        shown="% efficiency",
    ),
    Term(
        "karp_flatt",
        "1",
        "Serial fraction that explains the speed-up S by Amdahl's law: "
        "(1/S − 1/p) / (1 − 1/p), where p counts cores. If it grows with p, the cause is "
        "overhead, not serial work.",
        heading="serial fraction",
    ),
    Term(
        "ideal",
        "ms",
        "The step of the smallest point; for strong scaling divided by the ratio "
        "of compute threads.",
    ),
    Term(
        "pop.computation_scaling",
        "1",
        "Busy time at the smallest point over busy time, for the same "
        "work. It is lost to contention for cores, caches and memory, and to small batches.",
        shown="%",
    ),
    Term(
        "study.cost",
        "ms",
        "Step time × ratio of compute threads, which is constant for ideal strong scaling.",
    ),
    Term("points.loss", "ms", "Step time beyond the ideal step, by part."),
    Term(
        "shared_ms",
        "ms",
        "Shared cores: part of the loss of compute that is due to ranks sharing cores.",
        heading="shared cores",
    ),
    Term(
        "contention_ms",
        "ms",
        "Part of the loss of compute that is due to other competition of "
        "ranks, such as for memory and caches.",
    ),
    Term(
        "small_batch_ms",
        "ms",
        "Smaller batch: part of the loss of compute that is due to the smaller batch of a rank.",
        heading="smaller batch",
    ),
    Term(
        "forecast",
        "",
        "Efficiencies at more ranks by an ensemble of models, with intervals; "
        "wide if the upper limit is more than 1.3 times the lower one, unknown if it is more "
        "than twice the lower one.",
    ),
    Term(
        "outlier",
        "",
        "A launch whose distance from the median of its point is more than 3 "
        "scaled median absolute deviations. It is not removed.",
    ),
    Term("order", "1", "Index of a launch among all launches of the study, in time."),
    Term("points.time_to_accuracy.reached", "1", "Number of launches that reached the accuracy."),
    Term("trainings", "1", "Number of launches that trained until the accuracy."),
    Term("step_ms.n", "1", "Number of launches of a point.", heading="launches"),
)

AUDIT = (
    Term(
        "spread", "1", "Standard deviation of the logarithm of a step that is not slow.", shown="%"
    ),
    Term("correlation", "1", "Correlation of these logarithms of neighbouring steps."),
    Term(
        "burst_share",
        "1",
        "Share of the steps of a rank that are in bursts.",
        heading="bursts",
        shown="%",
    ),
    Term("burst_steps", "1", "Mean length of a burst in steps.", heading="length", shown="steps"),
    Term(
        "burst_factor",
        "1",
        "How many times as long as others the steps of a burst are.",
        heading="factor",
    ),
    Term(
        "tail",
        "1",
        "Index of the Pareto distribution of the lateness of a rank, if a few slow "
        "steps determine the mean.",
        heading="tail index",
    ),
    Term(
        "launch_spread",
        "1",
        "Standard deviation of the logarithm of the mean step of a launch.",
        heading="launches",
        shown="%",
    ),
    Term(
        "slow_share", "1", "Share of launches that are slower.", heading="slow launches", shown="%"
    ),
    Term(
        "coverage.covered",
        "1",
        "Number of the intervals of simulated studies that contain the "
        "truth; as a share, of those that were given.",
    ),
    Term(
        "coverage.given",
        "1",
        "Number of simulated studies that have the interval.",
        shown="studies",
    ),
    Term(
        "coverage.replications",
        "1",
        "Number of simulated studies.",
        heading="simulated",
        shown="studies",
    ),
    Term(
        "width",
        "1",
        "Median of (high − low) / value of the intervals.",
        heading="relative width",
        shown="%",
    ),
)
