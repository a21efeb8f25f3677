"""Names of settings in other libraries."""

from __future__ import annotations

from collections.abc import Mapping

from dptrain.errors import shown, suggest
from dptrain.training.settings import settings

OTHER_NAMES: Mapping[str, str] = {
    "lr": "learning_rate", "eta": "learning_rate", "learning_rate_init": "learning_rate",
    "base_lr": "learning_rate", "wd": "weight_decay", "l2": "weight_decay",
    "batch": "batch_size", "batchsize": "batch_size", "bs": "batch_size",
    "minibatch": "batch_size", "global_batch_size": "batch_size",
    "num_epochs": "epochs", "n_epochs": "epochs", "max_epochs": "epochs", "nb_epoch": "epochs",
    "max_steps": "steps", "num_steps": "steps", "max_iter": "steps", "iterations": "steps",
    "random_state": "seed", "random_seed": "seed", "manual_seed": "seed",
    "validation_split": "validation", "val_split": "validation", "val_size": "validation",
    "validation_fraction": "validation", "early_stopping": "patience",
    "n_iter_no_change": "patience", "early_stopping_patience": "patience",
    "scheduler": "schedule", "lr_scheduler": "schedule", "lr_schedule": "schedule",
    "warmup": "warmup_steps", "num_workers": "workers",
    "device": "backend", "dtype": "precision", "amp": "precision", "clip": "clip_norm",
    "max_grad_norm": "clip_norm", "gradient_clip_val": "clip_norm", "grad_clip": "clip_norm",
    "gradient_accumulation_steps": "accumulate", "accumulate_grad_batches": "accumulate",
    "accumulation_steps": "accumulate", "ema": "average_weights", "ema_decay": "average_weights",
    "class_weight": "class_weights", "sampler": "sampling", "smoothing": "label_smoothing",
    "output_dir": "run_dir", "log_dir": "run_dir",
    "default_root_dir": "run_dir", "save_dir": "run_dir", "num_threads": "threads",
    "n_jobs": "threads", "gradient_checkpointing": "recompute", "pretrained": "weights",
    "checkpoint": "weights", "optim": "optimizer", "solver": "optimizer", "model": "network",
    "monitor": "best_by", "logging_steps": "log_every", "save_steps": "checkpoint_every",
}  # fmt: skip
"""Names in other libraries, and the settings that they mean."""

ADVICE: Mapping[str, str] = {
    "sample_weight": "fit(x, y, sample_weight=w), or data={'x': x, 'y': y, 'sample_weight': w}",
    "balanced": "use sampling='balanced', or class_weights='balanced'",
    "pos_weight": "use class_weights, whose loss is the weighted mean",
    **dict.fromkeys(
        ("loss", "criterion", "loss_fn", "objective"),
        "the loss belongs to the network: Network(..., loss=SoftmaxCrossEntropy())",
    ),
    "verbose": "use progress=False for no output",
    "shuffle": "samples are always in random order, by seed",
    "x": "data=(x, y)",
    "y": "data=(x, y)",
    "x_train": "data=(x_train, y_train, x_test, y_test)",
    "validation_data": "pass data as a mapping that also has x_validation and y_validation",
    "callback": "use callbacks=[...]",
    "betas": "adam and adamw have beta1 = 0.9 and beta2 = 0.999",
    "distributed": "start the script with mpirun -n 4 python script.py",
    "num_gpus": "start the script with mpirun -n 4 python script.py",
}
"""What to do about names of other libraries that are no settings here."""


def resolved_name(name: str) -> tuple[str | None, str | None]:
    """Return the setting that a name means, or advice if it means none; else None twice."""
    known = [setting.name for setting in settings()]
    plain = name.lower().replace("-", "_")
    if plain in known:
        return plain, None
    return OTHER_NAMES.get(plain), ADVICE.get(plain)


def unknown_setting(what: str, name: str) -> str:
    """Return the message for a name that is no setting, with the setting that it may mean.

    Args:
        what: the first words, such as "Trainer has no setting".
        name: the unknown name.
    """
    named, advice = resolved_name(name)
    if named is not None:
        hint = f"; did you mean '{named}'?"
    elif advice is not None:
        hint = f"; {advice}"
    else:
        hint = suggest(name, [setting.name for setting in settings()])
    return f"{what} '{shown(name)}'{hint}"
