"""Terms of profiles: steps, stages, ranks, efficiencies, losses and traces."""

from __future__ import annotations

from dptrain.vocabulary.terms import Term

PHASES = (
    Term(
        "load",
        "ms",
        "Copying the minibatch to the input buffer; on a GPU, only the work of the GPU.",
    ),
    Term("statistics", "ms", "Mean and variance of the minibatch, for a batch normalisation."),
    Term("forward", "ms", "Outputs of the layers."),
    Term("loss", "ms", "Loss, and its gradient with respect to the outputs."),
    Term("backward_recompute", "ms", "Outputs of layers, again, with `--recompute`."),
    Term(
        "backward",
        "ms",
        "Gradients of layers without parameters, also of those fused after a "
        "layer with parameters.",
    ),
    Term(
        "backward_statistics",
        "ms",
        "Gradients with respect to weights and biases of a batch "
        "normalisation, and the sums that the gradient of its input needs.",
    ),
    Term("backward_weight", "ms", "Gradients with respect to weights and biases."),
    Term("backward_input", "ms", "Gradients with respect to the input of a layer."),
    Term("backward_add", "ms", "Sums of the gradients of a tensor that several layers read."),
    Term("update", "ms", "The update rule, over all parameters."),
)

PARTS = (
    Term(
        "step",
        "ms",
        "Wall time from one completion of the updated parameters to the next, on "
        "the clock of each rank; mean over ranks. In the args of a trace: number of the step, "
        "from 0.",
    ),
    Term(
        "compute",
        "ms",
        "Computation: all stages of the plan, with load and update. Stages that "
        "run concurrently on a GPU count once.",
        heading="computation",
    ),
    Term(
        "transfer",
        "ms",
        "Communication: time of the sums of gradients and batch statistics for "
        "which computation waits although no rank is late in the step or without a core.",
        heading="communication",
    ),
    Term(
        "imbalance",
        "ms",
        "Waiting for the slowest rank of the step in a gradient sum: busy time "
        "of that rank in that step minus the own one, at most the exposed communication. With "
        "run delays, also waiting for a rank that has no core in the sum.",
        heading="waiting",
    ),
    Term(
        "without_core",
        "ms",
        "Without a core: run delay of the computing thread in stages and "
        "between them, in waiting for data, and in sums after all ranks arrived; with several "
        "compute threads, in and between stages their mean. The other parts do not contain it. "
        "null if it was not measured; they then contain it.",
        heading="without a core",
    ),
    Term(
        "load_imbalance",
        "1",
        "Share of waiting because the same rank is always later: (largest "
        "mean busy time of any rank − mean of all) / (mean over steps of the largest busy time − "
        "mean of all).",
        heading="load imbalance",
    ),
    Term(
        "step_parts.serialisation",
        "1",
        "The other share of waiting: a different rank is late in each step.",
    ),
    Term("data_wait", "ms", "Waiting for the minibatch.", heading="waiting for data"),
    Term(
        "checkpoint", "ms", "Writing a checkpoint on rank 0, and waiting of the other ranks for it."
    ),
    Term("evaluation", "ms", "Evaluation on the validation and test data."),
    Term(
        "other",
        "ms",
        "The rest of the step: Python between stages and between steps, metrics, "
        "progress, clock readings.",
    ),
    Term(
        "communication.exposed",
        "ms",
        "Communication and waiting: time in calls that sum "
        "gradients (on a GPU: between the last stage and the end of the sums) or batch "
        "statistics.",
        heading="communication and waiting",
    ),
    Term(
        "communication.statistics",
        "ms",
        "The part of communication.exposed in sums of batch "
        "statistics over the ranks, which are not in the times of their stages.",
    ),
    Term(
        "run_delay",
        "ms",
        "Time that the computing thread spent in a run queue because it had "
        "no core, in stages and between them. In the args of a trace: in the whole step.",
    ),
    Term("run_delay.data_wait", "ms", "The same, after the minibatch arrived."),
    Term(
        "run_delay.sum",
        "ms",
        "The same, in gradient sums before the update, and in sums of batch statistics.",
    ),
    Term(
        "run_delay.update", "ms", "The same, in calls of the gradient sum after the first update."
    ),
    Term(
        "communication.hidden",
        "ms",
        "Time in which a gradient sum was in progress while the "
        "rank computed. It is not what overlap saved, because MPI may have made no progress in "
        "that time, and no part of the step.",
        heading="sums in progress during computation",
    ),
)

PROFILE = (
    Term("version", "1", "Version of the file format."),
    Term("job", "", "Description of the job; see below."),
    Term("steps", "1", "Number of timed steps: those after the first with a whole minibatch."),
    Term(
        "step_ms",
        "ms",
        "Duration of the steps, see step. The step of a profile or a run is its "
        "`mean`, the wall time divided by the steps. Of a rank, the mean in typical steps. In "
        "`metrics.jsonl`: time of the last step on rank 0.",
        heading="step",
    ),
    Term("step_times_ms", "ms", "The values of `step_ms` in order."),
    Term(
        "samples_per_s",
        "1/s",
        "Samples of a minibatch divided by the mean step; in training, "
        "all samples divided by the time of all steps so far, with evaluation and "
        "checkpoints.",
        heading="throughput",
        shown="samples/s",
    ),
    Term(
        "timing_ms",
        "ms",
        "Time of the clock readings of a step, measured alone; 0 on a GPU, "
        "whose stages are timed in separate steps.",
    ),
    Term(
        "parts",
        "ms",
        "Parts of typical steps, means over ranks and steps; they add up to the mean typical step.",
    ),
    Term("step_parts", "ms", "Where the time of a step goes: by median, typical and all_steps."),
    Term(
        "step_parts.median",
        "ms",
        "Distribution of each part over the steps. Medians of parts do "
        "not add up to the median step.",
    ),
    Term(
        "typical",
        "ms",
        "Parts of typical steps: the half of the steps whose duration is "
        "closest to the median by rank.",
    ),
    Term("all_steps", "ms", "Parts of all steps, slow ones included: where all time goes."),
    Term("stages", "", "Stages in the order of the plan."),
    Term("kinds", "", "Stages by kind and phase, the slowest first."),
    Term("ranks", "", "Ranks in order; in `job`, their number."),
    Term("sums", "", "Gradient sums timed alone, by the size of a bucket."),
    Term("sweep", "", "All-reduces of other sizes by MPI, timed alone; their `buckets` is 0."),
    Term(
        "roofs",
        "",
        "Limits of the roofline model, the highest of all ranks; null if not "
        "measured. In `study.json`, the highest of all launches of a point, by its name.",
    ),
    Term(
        "shares_withheld",
        "",
        "Why no stage has a roofline_share although the limits were measured, else empty.",
    ),
    Term("memory", "bytes", "Bytes by purpose, of the rank with the largest share of a minibatch."),
    Term("environment", "", "Machine, versions and command, as in `env.json`."),
    Term("pop", "", "Efficiencies of the POP hierarchy; null for one rank."),
    Term(
        "batch_statistics",
        "",
        "Sums of batch statistics over the ranks, whose `time_ms` is that "
        "of all sums of a step with waiting; null if there are none.",
    ),
    Term(
        "frequencies",
        "",
        "Frequency of each rank in order, about ten times in the measured "
        "steps, with the following keys.",
    ),
    Term(
        "mhz",
        "MHz",
        "Of the core on which the computing thread runs, or of the multiprocessors of its GPU.",
    ),
    Term("throttled", "", "Why the GPU was slowed down, as far as NVML names it."),
    Term("frequencies.missing", "", "The reason if the frequency cannot be read, else empty."),
    Term("number", "1", "Number of such sums in a step.", heading="sums of a step"),
    Term(
        "largest_bytes",
        "bytes",
        "Size of the largest of them, of one rank.",
        heading="largest",
        shown="KB",
    ),
    Term(
        "alone_ms",
        "ms",
        "Time of the largest of them alone, between barriers.",
        heading="largest alone",
    ),
    Term(
        "separate_kernels",
        "",
        "True if timed steps make these sums by separate kernels; in "
        "other steps, the kernels that compute statistics add them, which takes less time.",
    ),
)

SPREAD = (
    Term("median", "", "Median; the enclosing name states the unit."),
    Term("q1", "", "First quartile."),
    Term("q3", "", "Third quartile."),
    Term("mean", "", "Arithmetic mean."),
    Term("n", "1", "Number of values."),
    Term(
        "low",
        "",
        "Lower end of the 95% interval: of a median from batches of consecutive "
        "steps, null for fewer than 100; of an efficiency, 0 if there are too few steps.",
    ),
    Term("high", "", "Upper end of the 95% interval; null or infinite if there is none."),
    Term("p95", "", "95th percentile; null for fewer than 20 values."),
    Term("p99", "", "99th percentile; null for fewer than 100 values."),
)

STAGE = (
    Term(
        "name",
        "",
        "Name of the stage, `conv1+relu1+pool1.forward`, or of a kind, `conv+relu+pool.forward`.",
    ),
    Term("group", "", "Layers that are computed together, or input, loss, update."),
    Term("kind", "", "Types of the layers as in network files, joined with +."),
    Term("phase", "", "One of the phases above."),
    Term("calls", "1", "Number of calls per step."),
    Term(
        "time_ms", "ms", "Mean over ranks in each step; distribution over steps.", heading="median"
    ),
    Term("typical_ms", "ms", "Mean over ranks and typical steps.", heading="typical"),
    Term(
        "slowest_ms", "ms", "Largest mean over typical steps of any rank.", heading="slowest rank"
    ),
    Term("slowest_rank", "1", "That rank.", heading="slowest rank", shown="number"),
    Term(
        "share",
        "1",
        "Time divided by the step, both in typical steps, or on a GPU by the sum of "
        "all stages and gradient sums without overlap, if that is longer.",
        shown="%",
    ),
    Term(
        "cumulative_share",
        "1",
        "Sum of the shares of this and of all slower ones.",
        heading="cumulative",
        shown="%",
    ),
    Term(
        "flops",
        "1",
        "Floating-point operations per step and rank of the direct algorithm, "
        "also if "
        "another one is used; a multiply-add counts as two. In a trace: for the largest share "
        "of a minibatch.",
    ),
    Term(
        "bytes_moved",
        "bytes",
        "Size of the buffers and parameters that are read or written, "
        "each "
        "counted once, per step and rank.",
        heading="data moved",
    ),
    Term(
        "memory_bytes",
        "bytes",
        "Size of the buffers that are needed while the stage runs; of a "
        "kind, the largest of its stages.",
        heading="memory",
    ),
    Term("gflops", "10⁹/s", "flops divided by typical_ms.", heading="rate", shown="GFLOP/s"),
    Term(
        "gb_per_s",
        "10⁹ bytes/s",
        "bytes_moved divided by typical_ms; in roofs, bandwidth of data larger than the caches.",
        heading="bandwidth",
        shown="GB/s",
    ),
    Term(
        "roofline_share",
        "1",
        "Least time in the roofline model, max(flops / peak, bytes / "
        "bandwidth) of least_flops and least_bytes, divided by typical_ms. It is at most 1; null "
        "if the limits are not measured or not certain.",
        heading="roofline",
        shown="% of limit",
    ),
    Term(
        "least_flops",
        "FLOP",
        "The operations that no implementation of the algorithm can omit: "
        "without products with padding, and with the products of Winograd's algorithm.",
    ),
    Term(
        "least_bytes",
        "bytes",
        "The bytes that no implementation can omit: without pixels "
        "between the windows of a convolution.",
    ),
    Term("note", "", "Algorithm of the stage, if the backend states one.", heading="algorithm"),
)

RANK = (
    Term("rank", "1", "Number of the rank."),
    Term("host", "", "Name of its node."),
    Term("device", "", "Name of its GPU or processor."),
    Term("samples", "1", "Mean size of its share of a minibatch."),
    Term(
        "busy_ms",
        "ms",
        "The step without communication and waiting, mean in typical steps. It "
        "is large for a straggler; ranks that wait for it have a large imbalance instead.",
        heading="busy",
    ),
    Term("compute_ms", "ms", "See compute.", heading="computation"),
    Term("data_wait_ms", "ms", "See data_wait.", heading="waiting for data"),
    Term("exposed_ms", "ms", "See communication.exposed.", heading="communication and waiting"),
    Term(
        "hidden_ms",
        "ms",
        "See communication.hidden; in `summary.json`, mean over ranks and steps.",
        heading="sums in progress during computation",
    ),
    Term("imbalance_ms", "ms", "See imbalance.", heading="waiting"),
    Term("delay_ms", "ms", "Busy time minus the median rank's of the same step.", heading="delay"),
    Term("transfer_ms", "ms", "See transfer.", heading="communication"),
    Term("without_core_ms", "ms", "See without_core.", heading="without a core"),
    Term(
        "involuntary_switches",
        "1",
        "How often the system took the core of a thread of the "
        "process that could compute on, per step, in all steps; null if it was not measured.",
        heading="switches",
        shown="per step",
    ),
    Term(
        "page_faults",
        "1",
        "How often a thread of the process used a page that had no memory, "
        "per step, in all steps; null as above.",
        heading="page faults",
        shown="per step",
    ),
)

OTHERS = (
    Term("bucket_bytes", "bytes", "Size of a gradient bucket.", heading="bucket"),
    Term("how", "", "How the limits of the roofline model were measured."),
    Term(
        "copies",
        "bytes, 10⁹ bytes/s",
        "Bandwidth by size of the data, the fastest of reading, copying and adding; the part of a "
        "stage's data up to each size is compared with the bandwidth of that size.",
    ),
    Term("withheld", "", "Why the limits are not certain, else empty."),
    Term(
        "roofs.gflops",
        "10⁹/s",
        "Rate of a product of large matrices, the highest of products.",
        heading="rate",
        shown="GFLOP/s",
    ),
    Term(
        "products",
        "10⁹/s",
        "Rates of this product by program: cuBLAS, or the backend and OpenBLAS.",
    ),
    Term("memory.parameters", "bytes", "Parameters of one rank."),
    Term("memory.gradients", "bytes", "Gradients of one rank."),
    Term("memory.optimizer", "bytes", "State of the optimizer."),
    Term("memory.buffers", "bytes", "Activations, their gradients and other buffers of the plan."),
    Term("memory.dataset cache", "bytes", "Training images cached on the GPU."),
    Term("memory.workspace", "bytes", "Workspace of cuDNN, which plans do not contain."),
    Term("memory.sums", "bytes", "Buffers of the sums of gradients and batch statistics."),
    Term("memory.best epoch", "bytes", "Parameters and statistics of the best epoch."),
    Term("memory.replays", "bytes", "What computes micro-shards again, with `--replay-every`."),
    Term("memory.total", "bytes", "Sum of these."),
    Term("memory.peak", "bytes", "Largest resident host memory of any rank's process."),
)

POP = (
    Term(
        "parallel",
        "1",
        "Parallel efficiency: mean busy time of all ranks divided by the wall "
        "time; load balance · serialisation · transfer.",
        heading="parallel efficiency",
        shown="%",
    ),
    Term(
        "load_balance",
        "1",
        "Mean busy time divided by the largest mean over steps of any rank. "
        "It is low if the same ranks are slower in every step.",
        heading="load balance",
        shown="%",
    ),
    Term(
        "serialisation",
        "1",
        "Largest mean over steps of any rank, divided by the mean over "
        "steps of the slowest rank's busy time. It is low if other ranks are late in each step.",
        shown="%",
    ),
    Term(
        "pop.transfer",
        "1",
        "Mean over steps of the slowest rank's busy time, divided by the "
        "wall time. It is low if communication takes long although no rank is late, or if ranks "
        "lack cores in it.",
        shown="%",
    ),
    Term(
        "pop.ranks",
        "1",
        "Share of the wall time in which each rank is busy.",
        heading="busy share",
        shown="%",
    ),
    Term(
        "layers",
        "",
        "Balance of the ranks by layers: load_balance and serialisation of the "
        "times of their stages.",
    ),
    Term("value", "", "The estimate."),
)

ENERGY = (
    Term("energy", "", "Energy of the measured steps, with the following keys."),
    Term(
        "joules_per_sample",
        "J",
        "Energy of all counters that could be read, divided by the "
        "number of samples; null if there is none.",
        heading="energy",
        shown="J/sample",
    ),
    Term("watts", "W", "Mean power of these counters."),
    Term(
        "sources",
        "",
        "These counters: processors and memory (RAPL) with all programs that use "
        "them, and GPUs (NVML).",
    ),
    Term("missing", "", "Counters that could not be read, with the reasons."),
)

PROCESSOR = (
    Term(
        "processor",
        "",
        "Hardware counters of the measured steps in user mode, means over ranks, "
        "with the following keys; null on GPUs.",
    ),
    Term(
        "instructions",
        "1",
        "Instructions per step and rank, those of waiting ranks included; "
        "null if they cannot be read.",
    ),
    Term(
        "instructions_per_cycle",
        "1",
        "Instructions divided by cycles.",
        heading="instructions per cycle",
    ),
    Term("ghz", "10⁹/s", "Cycles per second of wall time and compute thread.", heading="GHz"),
    Term("processor.missing", "", "The reason if they cannot be read, else empty."),
)

LOSSES = (
    Term(
        "rounds",
        "1",
        "Number of rounds; each contains a block of every experiment, in a random order.",
    ),
    Term("losses.steps", "1", "Timed steps of a block."),
    Term("alone", "ms", "Step of rank 0 while the other ranks are idle."),
    Term("unsummed", "ms", "Step without sums and without waiting; mean over ranks."),
    Term("one_number", "ms", "Step in which the ranks sum one number instead of the gradients."),
    Term("after", "ms", "Step with the sums after the backward pass."),
    Term("during", "ms", "Step of the job, which sums during the backward pass if the method can."),
    Term(
        "delayed_rank",
        "ms",
        "Step of the job in which the last rank receives each minibatch later by the delay.",
    ),
    Term("delayed_in_turn", "ms", "Step of the job in which another rank is delayed in each step."),
    Term("losses", "", "Differences of the experiments. With alone they add up to during."),
    Term("contention", "ms", "Mean over ranks of unsummed − alone."),
    Term("load imbalance", "ms", "Largest unsummed of any rank − mean over ranks."),
    Term("losses.serialisation", "ms", "one_number − latency − largest unsummed of any rank."),
    Term("latency", "ms", "Time of the sum of one number if all ranks start together."),
    Term(
        "statistics_sums",
        "ms",
        "one_number, with the sums of batch statistics; only if the job has such sums.",
    ),
    Term("batch statistics", "ms", "statistics_sums − one_number."),
    Term(
        "losses.sums",
        "ms",
        "after − statistics_sums, or after − one_number without sums of batch statistics.",
    ),
    Term("saved by overlap", "ms", "after − during, as a negative loss."),
    Term("computation_scaling", "1", "alone divided by the mean of unsummed.", shown="%"),
    Term(
        "computation_factors",
        "1",
        "Factors of computation_scaling: ratios of instructions, "
        "instructions per cycle and frequency; empty if counters cannot be read.",
    ),
    Term("frequency", "1", "Ratio of cycles per wall time."),
    Term("counters_missing", "", "The reason if hardware counters cannot be read, else empty."),
    Term("efficiencies", "", "Parallel efficiency and its factors."),
    Term(
        "by_experiment",
        "1",
        "From unsummed, one_number, latency and after.",
        heading="by experiment",
        shown="%",
    ),
    Term(
        "by_busy_times",
        "1",
        "Of the POP hierarchy, from the steps of after.",
        heading="by busy times",
        shown="%",
    ),
    Term("agree", "", "True if the two intervals overlap; null with too few steps for intervals."),
    Term("delays", "", "Effects of the injected delays."),
    Term("delays.delay_ms", "ms", "The injected delay.", heading="delay"),
    Term(
        "waiting_ms",
        "ms",
        "Increase of the imbalance of the other ranks per step.",
        heading="waiting",
    ),
    Term("cost_ms", "ms", "Increase of the step.", heading="longer step"),
    Term(
        "known", "", "Losses of known size that were injected after the steps; empty if none were."
    ),
    Term("known.name", "", "delay, lost core or message."),
    Term("injected_ms", "ms", "The injected loss, by round.", heading="injected"),
    Term("recovered_ms", "ms", "Increase of the step by this loss, by round.", heading="recovered"),
    Term("known.reason", "", "Why this loss was not injected, else empty."),
    Term("overlaps", "", "True if the method of summing overlaps with the backward pass."),
)

TRACE = (
    Term("communication", "", "Thread of gradient sums; category of sums and of waiting for them."),
    Term("input", "", "Thread and category of waiting for data. As a group: the minibatch."),
    Term(
        "sum",
        "ms",
        "`sum.0` and so on: sum of a bucket, from its start, or from the end of "
        "the one "
        "before, until its completion is detected.",
    ),
)
