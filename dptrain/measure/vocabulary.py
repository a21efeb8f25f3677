"""The words of every table, file, trace and dashboard: each name with its unit and its meaning.

`SECTIONS` is the one list; docs/measuring.md shows it, and a test holds the two, and what the
program writes, against each other.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Word:
    """One name.

    Attributes:
        name: key in JSON, column in CSV, name or category in a trace. Where one key means different
            things in different places, the place stands before it: ``memory.parameters``.
        unit: ``ms``, ``bytes``, ``1`` (a number or a share), or "" for what is no number.
        meaning: what it is, what is part of it and what is not.
    """

    name: str
    unit: str
    meaning: str


PHASES = (
    Word("load", "ms", "The minibatch is brought to where stages read it; on a GPU, what the GPU "
         "does for it."),
    Word("forward", "ms", "Outputs of the layers."),
    Word("loss", "ms", "Loss, and its gradient by the outputs."),
    Word("backward", "ms", "Gradients of layers without parameters, and of what is fused behind "
         "one with them."),
    Word("backward_weight", "ms", "Gradients by a layer's weights and biases."),
    Word("backward_input", "ms", "Gradients by a layer's input."),
    Word("update", "ms", "The update rule, over all parameters."),
)  # fmt: skip

PARTS = (
    Word("step", "ms", "From asking for a minibatch until the update is made. In a trace's "
         "args: its number, from 0."),
    Word("compute", "ms", "All stages of the plan, load and update included. Stages that run "
         "beside each other on a GPU count once."),
    Word("data_wait", "ms", "Asking for a minibatch until it is there."),
    Word("transfer", "ms", "Exposed communication without imbalance: all ranks were at it."),
    Word("imbalance", "ms", "Exposed communication in which a rank waited for the slowest one: the "
         "busy time of that rank in that step, minus its own; at most all that is exposed."),
    Word("other", "ms", "What is left of the step: Python between stages, bookkeeping, clocks."),
    Word("communication.exposed", "ms", "Transfer and imbalance: time in calls that sum gradients "
         "(on a GPU: between the last stage and the end of the sums)."),
    Word("communication.hidden", "ms", "A sum was under way while stages ran; no part of what adds "
         "up to the step."),
)  # fmt: skip

PROFILE = (
    Word("version", "1", "Of the file's form."),
    Word("job", "", "What was measured; see below."),
    Word("steps", "1", "Steps whose times count: those after the first, with a whole minibatch."),
    Word("step_ms", "ms", "Of the slowest rank in each step; of a rank, the mean of its own. In "
         "`metrics.jsonl`: of the last step, on rank 0."),
    Word("step_times_ms", "ms", "Every step of `step_ms`, in order."),
    Word("samples_per_s", "1/s", "Samples of a minibatch over the median step; in training, all "
         "samples over all steps so far."),
    Word("timing_ms", "ms", "What the clock readings of a step take, timed alone; 0 on a "
         "GPU, whose stages are timed in steps of their own."),
    Word("parts", "ms", "The mean step of all ranks taken apart: compute, data_wait, transfer, "
         "imbalance and other add up to it."),
    Word("stages", "", "Stages in the order of the plan."),
    Word("kinds", "", "Stages by kind and phase, by time."),
    Word("ranks", "", "Ranks in order; in `job`, their number."),
    Word("sums", "", "Gradient sums timed alone, by the size of a bucket."),
    Word("roofs", "", "What rank 0's processor can do; null where it was not measured."),
    Word("memory", "bytes", "By purpose, of the rank with the largest share of a minibatch."),
    Word("environment", "", "Machine, versions and command, as in `env.json`."),
)  # fmt: skip

SPREAD = (
    Word("median", "", "Of a sample; the unit is in the name before it."),
    Word("q1", "", "First quartile."),
    Word("q3", "", "Third quartile."),
    Word("mean", "", "Arithmetic mean."),
    Word("n", "1", "Number of values."),
)

STAGE = (
    Word("name", "", "Of the stage, `conv1+relu1+pool1.forward`; of a kind, "
         "`conv+relu+pool.forward`."),
    Word("group", "", "Layers that are computed together, or input, loss, update."),
    Word("kind", "", "The layers' types, as a network's file has them, joined by +."),
    Word("phase", "", "One of the phases above."),
    Word("calls", "1", "How often in a step."),
    Word("time_ms", "ms", "Mean of the ranks in each step; its spread is over steps."),
    Word("slowest_ms", "ms", "Mean over steps of the rank with the largest one."),
    Word("slowest_rank", "1", "That rank."),
    Word("share", "1", "Mean time over the mean step, or on a GPU over all stages and sums one "
         "after another, if those take longer."),
    Word("cumulative_share", "1", "Share of this and of all that take longer."),
    Word("flops", "1", "Floating-point operations a step and rank, a multiply-add being two, of "
         "the direct algorithm, whatever is used. In a trace: with the largest share of a "
         "minibatch."),
    Word("bytes_moved", "bytes", "Buffers and parameters that are read or written, each once, a "
         "step and rank."),
    Word("memory_bytes", "bytes", "Buffers whose content matters while the stage runs; of a kind, "
         "the largest of its stages."),
    Word("gflops", "10⁹/s", "flops over the mean time."),
    Word("gb_per_s", "10⁹ bytes/s", "bytes_moved over the mean time; of a roof, read and written "
         "by a copy."),
    Word("roofline_share", "1", "Least time that the roofs allow, max(flops / peak, bytes / "
         "bandwidth), over the mean time. Above 1 where an algorithm needs fewer operations than "
         "the direct one, or data come from a nearer cache than a copy's."),
    Word("note", "", "What the backend says of how it is computed."),
)  # fmt: skip

RANK = (
    Word("rank", "1", "Number of the rank."),
    Word("host", "", "Its node."),
    Word("device", "", "Its GPU, or its processor."),
    Word("samples", "1", "Mean of its share of a minibatch."),
    Word("busy_ms", "ms", "The step without exposed communication: what it takes before, and "
         "behind, the sums. A straggler's is large; whoever waits for it has a large imbalance "
         "instead."),
    Word("compute_ms", "ms", "See compute."),
    Word("data_wait_ms", "ms", "See data_wait."),
    Word("exposed_ms", "ms", "See communication.exposed."),
    Word("hidden_ms", "ms", "See communication.hidden; in `summary.json`, mean of the ranks."),
    Word("imbalance_ms", "ms", "See imbalance."),
    Word("behind_ms", "ms", "Busy time minus the median rank's of the same step."),
)  # fmt: skip

OTHERS = (
    Word("bucket_bytes", "bytes", "Of gradients that are summed at a time."),
    Word("how", "", "How the roofs were measured."),
    Word("copies", "bytes, 10⁹ bytes/s", "Bandwidth of copies by the size of source and target "
         "together; a stage is held to the smallest that has room for its bytes."),
    Word("roofs.gflops", "10⁹/s", "Of a product of large matrices, cuBLAS's or our own."),
    Word("memory.parameters", "bytes", "Parameters of one rank."),
    Word("memory.gradients", "bytes", "Gradients of one rank."),
    Word("memory.optimizer", "bytes", "The optimizer's state."),
    Word("memory.buffers", "bytes", "Activations, their gradients, and workspace of the plan."),
    Word("memory.pictures", "bytes", "Training pictures that a GPU keeps."),
    Word("memory.workspace", "bytes", "Scratch memory of cuDNN, which no plan knows."),
    Word("memory.sums", "bytes", "What sums take besides the gradients."),
    Word("memory.total", "bytes", "All of these together."),
    Word("memory.peak", "bytes", "Most memory of the host that any rank's process had at a time."),
)  # fmt: skip

TRACE = (
    Word("communication", "", "Thread of sums; category of sums, and of waiting for them."),
    Word("input", "", "Thread, and category, of waiting for data. As a group: the minibatch."),
    Word("sum", "ms", "`sum.0` and so on: a bucket's sum, from its start until it is known to be "
         "there, or from the end of the one before."),
)  # fmt: skip

JOB = (
    Word("network", "", "Name of the network."),
    Word("data", "", "What it is trained on."),
    Word("backend", "", "What computes."),
    Word("precision", "", "Arithmetic."),
    Word("strategy", "", "How ranks share an update."),
    Word("transport", "", "How gradients travel: peer, nccl or mpi (from GPU to GPU), host, or "
         "none."),
    Word("nodes", "1", "Machines."),
    Word("threads", "1", "Compute threads of a rank."),
    Word("batch_size", "1", "Samples of a minibatch, all ranks together."),
    Word("local_batch", "1", "Samples of the largest share of it."),
    Word("optimizer", "", "Update rule."),
    Word("parameters", "1", "Trainable numbers."),
    Word("seed", "1", "Of everything random."),
    Word("bucket_kib", "KiB", "Least size of a bucket; null: all gradients are one."),
    Word("buckets", "1", "Number of buckets; in `sums`, of those with this size."),
    Word("cores", "1", "That a rank may use; of the rank with the fewest."),
    Word("possible", "1", "Most weak efficiency that the cores allow where ranks share them: cores "
         "/ (ranks that share them · threads), at most 1."),
)  # fmt: skip

TRAINING = (
    Word("epoch", "1", "Passes over the data so far."),
    Word("metrics.loss", "1", "Mean over the last minibatch."),
    Word("learning_rate", "1", "Of the last update."),
    Word("train_loss", "1", "Mean over the last epoch's minibatches."),
    Word("train_accuracy", "1", "Share of correct predictions over the epoch, each made before the "
         "update by its minibatch."),
    Word("test_loss", "1", "Mean over the test data."),
    Word("test_accuracy", "1", "Share of correct predictions on the test data."),
    Word("digest", "", "SHA-256 of the agreed part of the run specification."),
    Word("first_step_s", "s", "Age of the process when its first step was done."),
    Word("stopped", "", "Whether a signal ended training early."),
    Word("scaling", "", "Efficiency against steps of rank 0 alone; the next words."),
    Word("weak", "1", "T(1) / T(p), T(1) with a rank's share of the minibatch."),
    Word("strong", "1", "T(1) / (p · T(p)), T(1) with the whole minibatch."),
    Word("weak_interval", "1", "95% interval of weak."),
    Word("strong_interval", "1", "95% interval of strong."),
    Word("steps_alone", "1", "Steps that T(1) is the median of."),
    Word("steps_together", "1", "Steps that T(p) is the median of, each the slowest rank's."),
)  # fmt: skip

SECTIONS = {
    "Phases of a stage": PHASES,
    "Parts of a step": PARTS,
    "A profile": PROFILE,
    "Of a sample": SPREAD,
    "Of a stage, or of all stages of a kind": STAGE,
    "Of a rank": RANK,
    "Of sums, roofs and memory": OTHERS,
    "Of a trace": TRACE,
    "Of a job": JOB,
    "Of training": TRAINING,
}
"""Words by what they are about."""


def find_word(*path: str) -> Word | None:
    """The word for a key, looked for with the keys that it lies below first.

    Args:
        path: keys from the outermost to the one that is asked for.
    """
    words = {word.name: word for section in SECTIONS.values() for word in section}
    for start in range(len(path)):
        if found := words.get(".".join(path[start:])):
            return found
    return None


def vocabulary_table(title: str) -> str:
    """The words of a section as docs/measuring.md shows them, in Markdown."""
    rows = ["| name | unit | meaning |", "|---|---|---|"]
    rows += [f"| `{word.name}` | {word.unit} | {word.meaning} |" for word in SECTIONS[title]]
    return "\n".join(rows)
