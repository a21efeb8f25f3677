"""Terms of jobs and of training runs."""

from __future__ import annotations

from dptrain.vocabulary.terms import Term

JOB = (
    Term("task", "", "training or inference."),
    Term("network", "", "Name of the network."),
    Term("data", "", "Data specification."),
    Term("backend", "", "Name of the backend."),
    Term("precision", "", "Name of the precision."),
    Term("strategy", "", "Method of summing gradients and updating."),
    Term(
        "transport",
        "",
        "How gradients are sent: shared (memory of a node), mpi, peer or nccl "
        "(from GPU to GPU), host, or none.",
    ),
    Term("nodes", "1", "Number of nodes."),
    Term("threads", "1", "Number of compute threads of a rank."),
    Term(
        "batch_size",
        "1",
        "Number of samples of a global minibatch.",
        heading="batch",
        shown="samples",
    ),
    Term("local_batch", "1", "Number of samples of the largest share of a rank."),
    Term("optimizer", "", "Update rule."),
    Term("parameters", "1", "Number of trainable numbers."),
    Term("seed", "1", "Seed of all random numbers."),
    Term("prefetch", "1", "Number of minibatches that a thread reads ahead."),
    Term("bucket_kib", "KiB", "Least size of a bucket; null for one bucket."),
    Term("buckets", "1", "Number of buckets; in `sums`, of buckets of this size."),
    Term("cores", "1", "Number of cores that a rank may use; the smallest of all ranks."),
    Term("node_cores", "1", "Number of cores of the smallest node that ranks could use."),
    Term("node_gpus", "1", "Number of GPUs of the smallest node; 0 if ranks compute on cores."),
    Term(
        "possible",
        "1",
        "Upper limit of the weak efficiency if ranks share cores: cores / (ranks "
        "that share them · threads), at most 1.",
        heading="core limit",
        shown="% efficiency",
    ),
)

TRAINING = (
    Term("epoch", "1", "Number of passes over the data so far."),
    Term("metrics.loss", "1", "Mean loss over the last minibatch."),
    Term("learning_rate", "1", "Learning rate of the last update.", heading="learning rate"),
    Term(
        "train_loss",
        "1",
        "Mean loss over the minibatches of the last epoch; if it was "
        "interrupted, over those since the run was resumed.",
        heading="training loss",
    ),
    Term(
        "train_accuracy",
        "1",
        "Share of correct predictions over the same minibatches, each "
        "before the update with its minibatch.",
        heading="training accuracy",
        shown="%",
    ),
    Term(
        "validation_loss",
        "1",
        "Mean loss over the validation data; null without an evaluation. "
        "In `summary.json`, of the parameters that training ended with.",
        heading="validation loss",
    ),
    Term(
        "validation_accuracy",
        "1",
        "Share of correct predictions on the validation data, likewise.",
        heading="validation accuracy",
        shown="%",
    ),
    Term("data_description", "", "Origin, sizes and conversion of the data, in a line."),
    Term(
        "selected_by",
        "",
        "The setting `best_by`: by what the parameters were chosen; none keeps the last ones.",
    ),
    Term("selected_step", "1", "Number of updates that made these parameters."),
    Term(
        "spans",
        "",
        "Steps that were made with equal settings, in order, with the following "
        "keys; one, unless the run was resumed with other settings. Empty without a run "
        "directory.",
    ),
    Term("spans.first_step", "1", "Number of the first of these steps, from 1."),
    Term("spans.last_step", "1", "Number of the last one."),
    Term("spans.ranks", "1", "Number of ranks that made them."),
    Term("spans.changed", "", "Settings that differ from those of the steps before, by name."),
    Term(
        "selected_span",
        "1",
        "Index in spans, from 0, of the steps that ended with the kept parameters.",
    ),
    Term(
        "timed_steps",
        "1",
        "First and last step of the last start of the run, whose times "
        "`summary.json` contains; null if it made none.",
    ),
    Term("out_of_patience", "", "True if training ended because of `--patience`."),
    Term(
        "test_loss",
        "1",
        "Mean loss over the test data at the end of training; null if a signal stopped it.",
    ),
    Term(
        "test_accuracy",
        "1",
        "Share of correct predictions on the test data, likewise.",
        heading="test accuracy",
        shown="%",
    ),
    Term(
        "test_top5_accuracy",
        "1",
        "Share of test samples whose class is among the five most "
        "probable ones; for more than ten classes.",
    ),
    Term(
        "test_auc",
        "1",
        "Area under the ROC curve on the test data; with several classes the "
        "mean over the classes, each against all others. For up to 100 classes.",
    ),
    Term(
        "test_mean_f1",
        "1",
        "Mean over the classes, or labels, of F1, the harmonic mean of "
        "precision and recall, on the test data.",
    ),
    Term(
        "test_label_accuracy",
        "1",
        "Mean over the labels of the share of test samples for which "
        "the label is predicted correctly, if a sample may have several labels.",
    ),
    Term("test_mae", "", "Mean absolute error on the test data, in the unit of the data."),
    Term("test_rmse", "", "Root mean square error on the test data, in the unit of the data."),
    Term(
        "test_r2",
        "1",
        "Coefficient of determination on the test data: 1 − sum of squared errors "
        "/ sum of squared deviations from the mean; none if all targets are equal.",
    ),
    Term(
        "time_to_accuracy",
        "",
        "When the validation accuracy first reached `--until-accuracy`, "
        "with the following keys; null without it.",
    ),
    Term("time_to_accuracy.requested", "1", "The accuracy of `--until-accuracy`."),
    Term(
        "time_to_accuracy.reached",
        "",
        "False if no evaluation reached it; the following keys are then null.",
    ),
    Term("time_to_accuracy.accuracy", "1", "Validation accuracy of that evaluation."),
    Term("time_to_accuracy.epochs", "1", "Passes over the training data until then."),
    Term("time_to_accuracy.steps", "1", "Parameter updates until then."),
    Term("time_to_accuracy.samples", "1", "Training samples until then."),
    Term(
        "time_to_accuracy.time_s",
        "s",
        "Time of these steps, without start-up, evaluations and "
        "checkpoints; null if the run was resumed.",
        heading="time",
    ),
    Term("digest", "", "SHA-256 of the agreed part of the run specification."),
    Term("first_step_s", "s", "Age of the process at the end of its first step."),
    Term("stopped", "", "True if a signal ended training early."),
    Term(
        "limit",
        "",
        "The part that takes most of the time of all steps, with checkpoints and "
        "evaluations, with the following keys; null if fewer than 10 steps were timed by stage.",
    ),
    Term("limit.part", "", "The name of the part, see step_parts.all_steps."),
    Term("limit.share", "1", "Its share of all steps."),
    Term("limit.text", "", "The line that the run prints, with the settings that reduce the part."),
    Term(
        "input_times",
        "",
        "What input takes in a step, means over the ranks, with the "
        "following keys, without the first step after a start; null if fewer than 10 others are "
        "left to count.",
    ),
    Term(
        "input_times.part",
        "",
        "The part of input that takes longest: reading, assembling or copying.",
    ),
    Term(
        "input_times.share",
        "1",
        "Share of a step, without checkpoints and evaluations, in which "
        "nothing but input happens: waiting and copying. Copies to a GPU during earlier steps "
        "count if they take more than 90% of a step.",
    ),
    Term("input_times.wait_ms", "ms", "Waiting for the minibatch."),
    Term(
        "input_times.reading_ms",
        "ms",
        "Reading a minibatch from memory or files, with decoding; it may overlap with the step.",
    ),
    Term(
        "input_times.assembling_ms",
        "ms",
        "Drawing random numbers and changing images on the host; it may overlap with the step.",
    ),
    Term(
        "input_times.copying_ms",
        "ms",
        "Copying the minibatch to the network's input (stage "
        "load, and on a GPU the transfer before it); 0 if no step was timed by stage.",
    ),
    Term("scaling", "", "Efficiency relative to steps of rank 0 alone, with the following keys."),
    Term("weak", "1", "T(1) / T(p), T(1) with a rank's share of the minibatch."),
    Term("strong", "1", "T(1) / (p · T(p)), T(1) with the whole minibatch."),
    Term(
        "weak_interval",
        "1",
        "95% interval of weak; it includes interruptions that are too rare to be seen.",
    ),
    Term("strong_interval", "1", "95% interval of strong."),
    Term(
        "blocks",
        "1",
        "Number of blocks of steps of rank 0 alone. E is the ratio of the wall "
        "times per step of these blocks and of the steps before each. Below three blocks there "
        "is none.",
    ),
    Term("steps_alone", "1", "Number of steps of all blocks for T(1), weak scaling."),
    Term("steps_together", "1", "Number of steps of the job that they are compared with."),
    Term("cost", "1", "Share of the run that the blocks took."),
    Term(
        "scaling.why",
        "",
        "Why there are no such steps; null if there are, or if none were requested.",
    ),
    Term("scaling.note", "", "Remark if a few slow steps determine the efficiency; else null."),
    Term(
        "evaluation_s", "s", "Time of all evaluations on rank 0, with the one after the last step."
    ),
    Term(
        "checkpoint_s", "s", "Time of all checkpoints on rank 0, with the one after the last step."
    ),
    Term(
        "other_cores",
        "1",
        "Mean number of cores that other programs used on the node of rank 0 "
        "during training or the measured steps; null if the system does not report it.",
        heading="cores of other programs",
    ),
    Term("metrics.step", "1", "Number of updates so far."),
)

QUALITY = (
    Term("class.samples", "1", "Number of test samples of a class or label."),
    Term(
        "class.precision",
        "1",
        "Share of the predictions of a class or label that are correct.",
        shown="%",
    ),
    Term(
        "class.recall",
        "1",
        "Share of the samples of a class or label that are recognised.",
        shown="%",
    ),
    Term(
        "class.f1",
        "1",
        "Harmonic mean of precision and recall: 2 TP / (2 TP + FP + FN).",
        heading="F1",
        shown="%",
    ),
)
