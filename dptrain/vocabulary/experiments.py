"""Terms of sweeps, studies of variants, and benchmarks."""

from __future__ import annotations

from dptrain.vocabulary.terms import Term

EXPERIMENTS = (
    Term(
        "sweep.score",
        "1",
        "Mean over seeds of the accuracy or the loss on the validation data, "
        "or on the test data if there are no others.",
        heading="score",
    ),
    Term("runs", "1", "Number of runs of a point that ended."),
    Term("failed", "1", "Number of runs that failed, such as those that diverged."),
    Term("sweep.step_ms", "ms", "Median over the runs of their mean step.", heading="step"),
    Term("training_s", "s", "Time of training: steps × time of a step.", heading="training"),
    Term("accuracy", "1", "Share of correct predictions on the test data.", shown="%"),
    Term("variants.step_ms", "ms", "Median step of a variant.", heading="step"),
    Term(
        "conv_forward_ms",
        "ms",
        "Median time of the stages with a convolution in a forward pass.",
        heading="convolutions, forward",
    ),
    Term(
        "conv_forward_share",
        "1",
        "Their share of a forward pass.",
        heading="share of forward",
        shown="%",
    ),
    Term("many_steps_s", "s", "Time of 100 000 steps.", heading="100 000 steps"),
)

BENCH = (
    Term(
        "bench.samples",
        "1",
        "Batch size of a case; of a search, the largest that fits.",
        heading="batch",
    ),
    Term("median_ms", "ms", "Median time of the runs of a case.", heading="median"),
    Term("bench.n", "1", "Number of timed runs.", heading="runs"),
    Term(
        "bench.outliers",
        "1",
        "Number of runs that are further from the median than others, see `outliers`.",
    ),
    Term(
        "bench.samples_per_s",
        "1/s",
        "Samples divided by the median time.",
        heading="throughput",
        shown="samples/s",
    ),
    Term(
        "bench.gflops",
        "10⁹/s",
        "Operations of the plan divided by the median time.",
        heading="operations",
        shown="GFLOP/s",
    ),
    Term("allocated_bytes", "bytes", "Memory that the replica allocated.", heading="memory"),
    Term("needed_bytes", "bytes", "Memory that the plan needs.", heading="memory"),
    Term("available_bytes", "bytes", "Memory that was free or allowed.", heading="limit"),
    Term("next_bytes", "bytes", "Memory that the next larger batch needs.", heading="next batch"),
)
