"""The settings of a training job: names, types, defaults, limits and help texts.

Settings are declared only in `Settings`. The flags of the command line, the environment variables,
the keys of a configuration file and the keyword arguments of `dptrain.Trainer` are derived from it.
A setting that is None is resolved later, from the network's recipe, the backend, the data or the
machine; `dptrain.training.spec` holds the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from dptrain.backends import BACKENDS
from dptrain.bounds import MAX_SEED, Limits, as_number, convert, expected_number
from dptrain.comm import BATCH_NORM_MODES, TRANSPORTS
from dptrain.errors import UserError, shown, suggest
from dptrain.files import MAX_TEXT_BYTES, parse_json, read_regular
from dptrain.runs.labels import parse_tags
from dptrain.runs.names import CONFIG, SPECIFICATION
from dptrain.toml import read_toml
from dptrain.training.presets import find_config

if TYPE_CHECKING:
    from dptrain.network.network import Network
    from dptrain.plan.optimizers import Optimizer

PREFIX = "DPTRAIN_"
OTHER_VARIABLES = {
    "DPTRAIN_ALLOW_SINGLE": "1: a process that finds no other ranks trains alone, although the "
    "launcher started several",
    "DPTRAIN_CACHE_DIR": "Directory of compiled kernels; default: $XDG_CACHE_HOME/dptrain, "
    "otherwise ~/.cache/dptrain",
}
"""Environment variables with the prefix that are not settings of a job, and their meanings."""

NETWORK_SUFFIXES = (".toml", ".onnx")
"""Endings of the names of files that describe networks."""

DIRECTORY_SETTINGS = ("run_dir", "resume", "tags", "note")
"""Settings about the directory of a run, not the job. The file of a run does not contain them."""

START_SETTINGS = ("stop_after",)
"""Settings of a single start of a run. The file of a run does not contain them."""

ALTERNATIVE_SETTINGS = (("epochs", "steps"), ("step_at", "step_every"))
"""Pairs of settings of which a run has one; the layer with precedence decides which."""

DEPENDENT_SETTINGS = {
    "schedule": {"step": ("step_every", "step_at")},
    "optimizer": {"sgd": ("momentum", "nesterov")},
}
"""Settings that only one value of another setting uses: if a layer with precedence sets another
value, those of lower layers do not count."""

RANK_SETTINGS = ("threads", "workers", "share_gpus")
"""Settings that may differ between ranks, because they describe a rank and not the job."""

OFF, MEASURED = "off", "measured"
"""Values of the setting `balance` that are no shares."""

WORKER_SETTINGS = ("backend", "precision")
"""Settings that may also differ between ranks if shares are not equal: `Settings.balance`."""

BEST_BY = ("accuracy", "loss", "none")
"""Values of the setting `best_by`."""

GROUPS = ("model", "data", "optimisation", "parallelism", "output", "measurement")
"""Headings under which help texts list the settings, in order."""

RECIPE = "from the network's recipe"


def _setting(group: str, default: Any, help: str, *, otherwise: str = "", **limits: Any) -> Any:
    """Declare a setting; `otherwise` states what replaces a default of None."""
    assert group in GROUPS
    metadata = {"group": group, "help": help, "otherwise": otherwise, "limits": Limits(**limits)}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """Everything that a user can set for a training job.

    A value of None is resolved later; `Setting.default_text` states how. The field `origins` maps
    the names of the settings that were set to where they were set, for example ``--seed``,
    ``DPTRAIN_SEED`` or ``job.toml``.

    Raises:
        UserError: a value is invalid, or two settings contradict each other.

    Example:
        >>> Settings(batch_size=64).batch_size
        64
    """

    network: str = _setting(
        "model",
        "model0",
        "A network that `dptrain describe` lists, which gets the channels or columns and the "
        "classes of the data, a .toml file, or an .onnx file, which also contains the initial "
        "parameters.",
    )
    backend: str = _setting(
        "model", "numba", "Implementation of the layers. `null` computes nothing; it measures "
        "the overhead of the program.", choices=BACKENDS,
    )  # fmt: skip
    precision: str | None = _setting(
        "model", None, "Precision of the arithmetic: fp32; cuda and cudnn also tf32 and bf16; "
        "numba also fp32-direct (no Winograd convolution); reference also fp64.",
        otherwise="the first precision of the backend",
    )  # fmt: skip
    weights: Path | None = _setting(
        "model", None, "Initial parameters: an .onnx file, or a safetensors file whose names and "
        "shapes are those of the network's parameters, such as the state_dict of torchvision's "
        "resnet18. A run that continues from a checkpoint does not read it.",
        otherwise="those of an .onnx network, else random numbers by the seed",
    )  # fmt: skip
    seed: int = _setting(
        "model", 0, "Seed of the initial parameters, the order of the samples, dropout and "
        "augmentation.", at_least=0, at_most=MAX_SEED,
    )  # fmt: skip
    tune: bool = _setting(
        "model", False, "Measure the kernels with the lowest estimated times on the GPU, for "
        "about 5 s, and use the fastest (cuda and cudnn). Otherwise estimates decide.",
    )  # fmt: skip
    recompute: bool = _setting(
        "model", False, "Compute activations again in the backward pass, if this needs less memory "
        "than to keep them. Results are the same.",
    )  # fmt: skip

    data: str | None = _setting(
        "data", None, "Data set: digits, shapes, irradiance, synthetic, cifar10:DIR, mnist:DIR, "
        "npz:FILE, npy:X,Y, folder:DIR, csv:FILE?target=COLUMN or maps:TABLE,POSITIONS?target=….",
        otherwise=RECIPE,
    )  # fmt: skip
    validation: float | None = _setting(
        "data", None, "Share of the training data that is set aside for evaluations during "
        "training, by class and by the seed, such as 0.2. 0 uses none.",
        otherwise="the validation split of the data, if it has one; 0.2 of the digits", at_least=0,
        below=1,
    )  # fmt: skip
    crop: int | None = _setting(
        "data", None, "Augmentation: shift each training image by up to this many pixels.",
        otherwise=RECIPE, at_least=0,
    )  # fmt: skip
    flip: bool | None = _setting(
        "data", None, "Augmentation: mirror half of the training images.", otherwise=RECIPE
    )
    brightness: float = _setting(
        "data", 0.0, "Augmentation: largest value that is added to or subtracted from the pixels "
        "of an image, which range from -1 to 1.", at_least=0, at_most=100,
    )  # fmt: skip
    contrast: float = _setting(
        "data", 0.0, "Augmentation: largest relative change of the contrast.", at_least=0,
        at_most=1,
    )  # fmt: skip
    cutout: int = _setting(
        "data", 0, "Augmentation: set a square of this side in pixels to 0, around a random pixel "
        "of each training image.", at_least=0,
    )  # fmt: skip
    mixup: float = _setting(
        "data", 0.0, "Augmentation: average each training sample with another of its minibatch, "
        "with random weights from a beta distribution with this parameter, usually 0.2.",
        at_least=0, at_most=100,
    )  # fmt: skip
    prefetch: int | None = _setting(
        "data", None, "Minibatches that a thread reads ahead; 0 reads each one when it is needed.",
        otherwise="2; 0 if the data is in memory and every core computes", at_least=0,
        at_most=256,
    )  # fmt: skip
    workers: int = _setting(
        "data", 0, "Processes of each rank that decode samples: image files, and objects with "
        "data[i] that do not fit in memory. 0 decodes in the rank itself.", at_least=0,
        at_most=1024,
    )  # fmt: skip
    device_cache: float = _setting(
        "data", 0.5, "Largest share of a GPU's free memory that the training data may take; if it "
        "needs more, each minibatch is copied from host memory. 0 always copies.", at_least=0,
        at_most=1,
    )  # fmt: skip

    batch_size: int | None = _setting(
        "optimisation", None, "Samples of a global minibatch, which all ranks share.",
        otherwise=RECIPE, at_least=1,
    )  # fmt: skip
    accumulate: int = _setting(
        "optimisation", 1, "Forward and backward passes for an update, each with this part of a "
        "minibatch, such as 4 for a quarter. Their gradients are added, so that activations need "
        "less memory.", at_least=1,
    )  # fmt: skip
    epochs: int | None = _setting(
        "optimisation", None, "Passes over the training data.", otherwise=RECIPE, at_least=1
    )
    steps: int | None = _setting(
        "optimisation", None, "Parameter updates; replaces --epochs.",
        otherwise="epochs × steps per epoch", at_least=1,
    )  # fmt: skip
    until_accuracy: float | None = _setting(
        "optimisation", None, "End training after the first evaluation with at least this accuracy "
        "on the validation data, such as 0.97; --epochs or --steps is the limit.",
        otherwise="make all steps", above=0, at_most=1,
    )  # fmt: skip
    patience: int | None = _setting(
        "optimisation", None, "End training after this many evaluations without an improvement "
        "by --best-by.", otherwise="make all steps", at_least=1,
    )  # fmt: skip
    best_by: str | None = _setting(
        "optimisation", None, "Keep the parameters of the epoch with the highest accuracy or the "
        "lowest loss on the validation data, and end training with them. none ends with the last "
        "ones.", otherwise="accuracy, or loss if the network predicts values; none without "
        "validation data", choices=BEST_BY,
    )  # fmt: skip
    optimizer: str | None = _setting(
        "optimisation", None, "Update rule.", otherwise=RECIPE, choices=("sgd", "adam", "adamw")
    )
    learning_rate: float | None = _setting(
        "optimisation", None, "Learning rate after warm-up.", otherwise=RECIPE, above=0
    )
    scale_rate: str = _setting(
        "optimisation", "none", "Multiply the learning rate by --batch-size / --reference-batch "
        "(linear) or by its square root (sqrt).", choices=("none", "linear", "sqrt"),
    )  # fmt: skip
    reference_batch: int | None = _setting(
        "optimisation", None, "Batch size for which the learning rate is meant.",
        otherwise=RECIPE, at_least=1,
    )  # fmt: skip
    weight_decay: float | None = _setting(
        "optimisation", None, "Weight decay of all weights of convolutions and dense layers. "
        "Biases and the parameters of normalisations have none. sgd and adam add it to the "
        "gradient, adamw multiplies the weights.",
        otherwise="0.01 with adamw; otherwise that of the network's layers", at_least=0,
        at_most=1e6,
    )  # fmt: skip
    momentum: float | None = _setting(
        "optimisation", None, "Momentum of sgd.", otherwise=RECIPE, at_least=0, below=1
    )
    nesterov: bool | None = _setting(
        "optimisation", None, "Use Nesterov momentum.", otherwise=RECIPE
    )
    clip_norm: float | None = _setting(
        "optimisation", None, "Largest norm of the gradient of all parameters; a larger gradient "
        "is scaled down to it.", otherwise="no limit", above=0,
    )  # fmt: skip
    average_weights: float | None = _setting(
        "optimisation", None, "Decay of a moving average of the parameters, such as 0.999, which "
        "evaluations, the best checkpoint and predictions use.", otherwise="no average", above=0,
        below=1,
    )  # fmt: skip
    label_smoothing: float = _setting(
        "optimisation", 0.0, "Share of each label that is divided among all classes, such as 0.1, "
        "in training; evaluations do not smooth.", at_least=0, below=1,
    )  # fmt: skip
    schedule: str | None = _setting(
        "optimisation", None, "Learning-rate schedule: constant; a factor of --step-factor every "
        "--step-every steps or at --step-at; half a cosine that ends at 0; polynomial, which ends "
        "at 0; or one-cycle, which rises to the learning rate in 30% of the steps.",
        otherwise=RECIPE, choices=("constant", "step", "cosine", "polynomial", "one-cycle"),
    )  # fmt: skip
    warmup_steps: int = _setting(
        "optimisation", 0, "Steps in which the learning rate rises linearly to its value.",
        at_least=0,
    )  # fmt: skip
    step_every: int | None = _setting(
        "optimisation", None, "Steps between two reductions by schedule step.",
        otherwise="none", at_least=1,
    )  # fmt: skip
    step_at: str | None = _setting(
        "optimisation", None, "Fractions of all steps after which schedule step reduces the rate, "
        "such as 1/2,3/4; replaces --step-every.", otherwise=RECIPE,
    )  # fmt: skip
    step_factor: float | None = _setting(
        "optimisation", None, "Factor of a reduction by schedule step.", otherwise=RECIPE, above=0,
        at_most=1,
    )  # fmt: skip
    power: float = _setting(
        "optimisation", 1.0, "Exponent of schedule polynomial; 1 is a straight line.", above=0
    )

    strategy: str = _setting(
        "parallelism", "mirrored", "How ranks share an update: mirrored sums the gradients on "
        "every rank (all-reduce); central sends them to rank 0, which updates the parameters and "
        "broadcasts them.", choices=("mirrored", "central"),
    )  # fmt: skip
    batch_norm: str = _setting(
        "parallelism", "global", "Whose mean and variance batch normalisation uses in training: "
        "global, those of the whole minibatch, with two small sums over the ranks for each such "
        "layer; rank, those of each rank's part, without sums; running means are then averaged "
        "over the ranks before evaluations and checkpoints.", choices=BATCH_NORM_MODES,
    )  # fmt: skip
    shards: int = _setting(
        "parallelism", 0, "Micro-shards of a minibatch, at least one for each rank. Their "
        "gradients are summed in a fixed order, so that results do not depend on the number of "
        "ranks and threads (backends numba and reference). 0 sums in the fastest order.",
        at_least=0,
    )  # fmt: skip
    balance: str = _setting(
        "parallelism", "off", "Shares of the ranks in a minibatch: off, equal ones; measured, "
        "shares that follow the measured speeds of the ranks; or fixed ones, one number for each "
        "rank, such as 3,1. With --shards, ranks have whole micro-shards, each at least one.",
    )  # fmt: skip
    threads: int | None = _setting(
        "parallelism", None, "Compute threads of a rank.",
        otherwise="the cores of the node divided by its ranks", at_least=1, at_most=1024,
    )  # fmt: skip
    transport: str = _setting(
        "parallelism", "auto", "How gradients are transferred. CPU ranks: memory that the ranks of "
        "a node share, or an all-reduce by MPI. GPU ranks: peer-to-peer memory within a node, "
        "NCCL, a CUDA-aware MPI, or host memory. auto takes the first that works.",
        choices=TRANSPORTS,
    )  # fmt: skip
    bucket_kib: int | None = _setting(
        "parallelism", None, "Size of a gradient bucket in KiB. A smaller bucket starts its "
        "all-reduce earlier; a larger one needs fewer messages.",
        otherwise="the whole gradient within a node; 256 across nodes; 1024 between GPUs without "
        "peer-to-peer memory", at_least=1,
    )  # fmt: skip
    share_gpus: bool = _setting("parallelism", False, "Allow several ranks to use one GPU.")
    timeout: float = _setting(
        "parallelism", 300.0, "Seconds that a rank waits for another one before it ends the job.",
        at_least=1, at_most=1e8,
    )  # fmt: skip

    run_dir: Path | None = _setting(
        "output", None, "Directory of the files of the run.",
        otherwise="a new directory in runs/",
    )  # fmt: skip
    resume: Path | None = _setting(
        "output", None, "Continue the run in this directory with its own settings, unless flags "
        "or variables change them. Without a directory: continue the run in --run-dir, or start "
        "it.", otherwise="start a new run",
    )  # fmt: skip
    tags: str | None = _setting(
        "output", None, "Tags of the run, separated by commas, for `dptrain runs list --tag`.",
        otherwise="none",
    )  # fmt: skip
    note: str | None = _setting("output", None, "A note about the run.", otherwise="none")
    stop_after: int | None = _setting(
        "output", None, "Stop after this step of the run with a checkpoint, as a signal does; "
        "--resume continues. The learning rate is that of the whole run.", otherwise="make all "
        "steps", at_least=1,
    )  # fmt: skip
    checkpoint_every: int | None = _setting(
        "output", None, "Steps between two checkpoints.", otherwise="one epoch", at_least=1
    )
    keep_checkpoints: int = _setting(
        "output",
        3,
        "Number of checkpoints that are kept, the newest ones; the best one is kept in addition.",
        at_least=1,
    )
    log_every: int = _setting(
        "output", 10, "Steps between two records in metrics.jsonl.", at_least=1
    )
    tensorboard: bool = _setting(
        "output", False, "Also write files for TensorBoard, to the folder tensorboard of the run."
    )

    evaluate_every: int = _setting(
        "measurement", 1, "Epochs between two evaluations on the validation data; 0 evaluates "
        "after the last step only. The test data is evaluated once, at the end.", at_least=0,
    )  # fmt: skip
    baseline_steps: int = _setting(
        "measurement", 10, "Most steps in a block of steps that rank 0 makes alone, to measure the "
        "scaling efficiency; all blocks take at most 2% of the run. 0 makes none.", at_least=0,
    )  # fmt: skip

    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for setting in settings():
            value = setting.check(getattr(self, setting.name), setting.name)
            object.__setattr__(self, setting.name, value)
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        from dptrain.training.balance import parse_balance

        if self.epochs is not None and self.steps is not None:
            raise UserError(
                f"epochs is {self.epochs} and steps is {self.steps}; set only one of the two"
            )
        self._refuse_contradicting_schedules()
        if self.optimizer not in ("sgd", None) and (self.momentum or self.nesterov):
            raise UserError(
                f"momentum and nesterov belong to optimizer sgd, but optimizer is "
                f"'{self.optimizer}'; remove them or try --optimizer sgd"
            )
        if self.batch_size is not None and self.shards > self.batch_size:
            raise UserError(
                f"--shards is {self.shards}, but --batch-size is {self.batch_size}; use at most "
                "one micro-shard for each sample"
            )
        if self.batch_size is not None and self.accumulate > self.batch_size:
            raise UserError(
                f"--accumulate is {self.accumulate}, but --batch-size is {self.batch_size}; use at "
                "most one pass for each sample"
            )
        if self.shards and self.batch_norm == "rank":
            raise UserError(
                "--batch-norm rank takes statistics that depend on the number of ranks, but "
                f"--shards {self.shards} requires results that do not; remove one of the two"
            )
        for name in ("until_accuracy", "patience"):
            value = getattr(self, name)
            if value is not None and not self.evaluate_every:
                raise UserError(
                    f"{name} is {value:g}, but evaluate_every is 0, so nothing is evaluated before "
                    "training ends; try --evaluate-every 1"
                )
        if self.patience is not None and self.best_by == "none":
            raise UserError(
                f"patience is {self.patience}, but best_by is none, so no evaluation is an "
                "improvement; try --best-by loss"
            )
        if self.nesterov and self.momentum == 0:
            raise UserError("nesterov needs a momentum above 0; try --momentum 0.9")
        if self.tags is not None:
            parse_tags([self.tags])
        parse_balance(self.balance)
        if self.balance != OFF and self.accumulate > 1:
            raise UserError(
                f"--accumulate {self.accumulate} divides equal shares into passes, but --balance "
                f"{self.balance} makes unequal ones; remove one of the two"
            )
        if self.resume is not None and self.run_dir not in (None, self.resume):
            raise UserError(
                f"run_dir is '{self.run_dir}' but resume is '{self.resume}'; a run continues in "
                "its own directory, so remove run_dir"
            )

    def _refuse_contradicting_schedules(self) -> None:
        from dptrain.training.schedules import parse_fractions

        for name in ("step_every", "step_at"):
            value = getattr(self, name)
            # The recipe selects a schedule that is not set.
            if self.schedule not in ("step", None) and value is not None:
                raise UserError(
                    f"{name} is {value} but schedule is {self.schedule}; try --schedule step"
                )
        if self.step_at is not None and self.step_every is not None:
            raise UserError(
                f"step_every is {self.step_every} and step_at is {self.step_at}; set only one of "
                "the two"
            )
        if self.step_at is not None:
            parse_fractions(self.step_at)
        if self.schedule == "one-cycle" and self.warmup_steps:
            raise UserError(
                f"warmup_steps is {self.warmup_steps}, but schedule one-cycle has a rise of its "
                "own; remove one of the two"
            )

    def with_recipe(self, network: Network | None = None) -> Settings:
        """Return a copy in which the recipe of the network has filled in what is not set.

        Paths become absolute, so that the run can be resumed and evaluated from any directory.

        Args:
            network: the network; loaded from the setting `network` if it is None.

        Raises:
            UserError: there is no such network, or it has no default data.
        """
        from dptrain.data.spec import absolute
        from dptrain.network.zoo import recipe

        chosen = recipe(self.load_network() if network is None else network, self.optimizer)
        data = chosen.data if self.data is None else self.data
        if data is None:
            raise UserError(f"network '{self.network}' has no default data; try --data npz:FILE")
        no_length = self.epochs is None and self.steps is None
        is_file, weights = self.network.endswith(NETWORK_SUFFIXES), self.weights
        if weights is None and self.network.endswith(".onnx"):
            weights = Path(self.network)
        schedule = _first(self.schedule, chosen.schedule)
        step_at = self.step_at
        if schedule == "step" and step_at is None and self.step_every is None:
            step_at = chosen.step_at
            if step_at is None:
                raise UserError(
                    "schedule is 'step' but neither step_every nor step_at is set; try "
                    "--step-at 1/2,3/4"
                )
        momentum = _first(self.momentum, chosen.momentum)
        # The share was chosen for this data; other data may have a split of its own.
        is_recipe_data = data == chosen.data
        filled = {
            "validation": _first(self.validation, chosen.validation if is_recipe_data else None),
            "network": str(Path(self.network).absolute()) if is_file else self.network,
            "data": absolute(data),
            "weights": None if weights is None else weights.absolute(),
            "optimizer": chosen.optimizer,
            "learning_rate": _first(self.learning_rate, chosen.learning_rate),
            "momentum": momentum,
            "nesterov": _first(self.nesterov, chosen.nesterov and momentum > 0),
            "reference_batch": _first(self.reference_batch, chosen.batch_size),
            "weight_decay": _first(self.weight_decay, chosen.weight_decay),
            "batch_size": _first(self.batch_size, chosen.batch_size),
            "epochs": chosen.epochs if no_length else self.epochs,
            "schedule": schedule,
            "step_at": step_at,
            "step_factor": _first(self.step_factor, chosen.step_factor),
            "crop": _first(self.crop, chosen.crop),
            "flip": _first(self.flip, chosen.flip),
            "run_dir": _first(self.resume, self.run_dir),
        }
        origins = dict(self.origins)
        for name, value in filled.items():
            if getattr(self, name) is None and value is not None and name not in DIRECTORY_SETTINGS:
                origins[name] = "network" if name == "weights" else "recipe"
        return replace(self, **filled, origins=origins)

    def load_network(self) -> Network:
        """Return the network that the setting `network` names.

        A run that is resumed has the network that it began with, whatever the zoo or the data would
        be now.
        """
        from dptrain.network.files import get_network

        if self.resume is None:
            return get_network(self.network)
        found = _network_of_run(self.resume, self.network) or get_network(self.network)
        is_kept = Path(self.network).absolute().parent == Path(self.resume).absolute()
        return found.read_from(str(self.resume), "run") if is_kept else found

    def check_until_accuracy(self, network: Network) -> None:
        """Raise `UserError` if an accuracy is requested, but the network predicts values."""
        by = "--best-by accuracy" if self.best_by == "accuracy" else None
        needs = "--until-accuracy" if self.until_accuracy is not None else by
        if needs is not None and network.loss.targets == "values":
            raise UserError(
                f"{needs} needs classes, but network '{network.name}' predicts values; "
                f"remove {needs}"
            )

    def check_validation(self, data: str, *, has_validation: bool) -> None:
        """Raise `UserError` if a setting needs validation data, but the data `data` has none."""
        needs = [name for name in ("until_accuracy", "patience") if getattr(self, name) is not None]
        if self.best_by not in (None, "none"):
            needs.append("best_by")
        if needs and not has_validation:
            raise UserError(
                f"--{needs[0].replace('_', '-')} needs validation data, but {data} has none; try "
                "--validation 0.1"
            )

    @property
    def global_batch(self) -> int:
        """Samples of a global minibatch; `with_recipe` has filled them in."""
        assert self.batch_size is not None, "call with_recipe first"
        return self.batch_size

    def update_rule(self) -> Optimizer:
        """Return the optimizer; `with_recipe` has filled in its settings."""
        from dptrain.plan.optimizers import make_optimizer

        assert self.optimizer is not None, "call with_recipe first"
        return make_optimizer(
            self.optimizer,
            momentum=self.momentum or 0.0,
            nesterov=bool(self.nesterov),
            weight_decay=self.weight_decay,
            clip_norm=self.clip_norm,
            average_decay=self.average_weights,
        )

    @property
    def peak_rate(self) -> float:
        """The learning rate after warm-up, scaled to the batch size."""
        from dptrain.training.schedules import scaled_rate

        assert self.learning_rate is not None, "call with_recipe first"
        reference = self.reference_batch or self.global_batch
        return scaled_rate(self.learning_rate, self.scale_rate, self.global_batch, reference)

    def to_toml_values(self) -> dict[str, Any]:
        """Return the settings that start the same run again from a file, without locations."""
        values = {setting.name: getattr(self, setting.name) for setting in settings()}
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in values.items()
            if value is not None and name not in (*DIRECTORY_SETTINGS, *START_SETTINGS)
        }


def _network_of_run(run_dir: Path, name: str) -> Network | None:
    """Return the network of a run by the same name; None if it has no specification."""
    from dptrain.network.files import network_from_dict

    with suppress(OSError, ValueError, KeyError, TypeError):  # The run directory is checked later.
        found = parse_json(read_regular(run_dir / SPECIFICATION, MAX_TEXT_BYTES))
        if found["job"]["network"] == name:
            return network_from_dict(found["network"]).read_from(str(run_dir), "run")
    return None


def _object_hint(value: Any) -> str:
    """Return the settings that mean an update rule, which `make_replica` takes as an object."""
    kind = getattr(value, "kind", None)
    if kind not in ("sgd", "adam", "adamw"):
        return ""
    names = ("momentum", "nesterov", "weight_decay", "clip_norm")
    given = {} if isinstance(value, type) else {name: getattr(value, name, None) for name in names}
    more = "".join(f", {name}={item!r}" for name, item in given.items() if item)
    return (
        f"; objects are for make_replica, so use optimizer='{kind}'{more}, and learning_rate for "
        "the learning rate"
    )


def _first(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


@dataclass(frozen=True)
class Setting:
    """One field of `Settings` as a flag, an environment variable and a key of a file."""

    name: str
    type: type[Any]
    optional: bool
    default: Any
    group: str
    help: str
    otherwise: str
    limits: Limits

    @property
    def flag(self) -> str:
        """The flag, for example ``--batch-size``."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """The environment variable, for example ``DPTRAIN_BATCH_SIZE``."""
        return PREFIX + self.name.upper()

    @property
    def default_text(self) -> str:
        """The default, or a phrase that states how the value is chosen."""
        if self.default is None:
            return self.otherwise
        return {True: "on", False: "off"}[self.default] if self.type is bool else str(self.default)

    @property
    def expected(self) -> str:
        """A phrase for the valid values."""
        if self.limits.choices is not None:
            return f"one of {', '.join(self.limits.choices)}"
        if self.type in (int, float):
            return expected_number(self.type, self.limits)
        return {bool: "true or false", Path: "a path"}.get(self.type, "text")

    def check(self, value: Any, source: str) -> Any:
        """Return `value` with the right type, or raise a `UserError` that names `source`."""
        if value is None and self.optional:
            return value
        value = as_number(value, self.type)
        if self.type is Path and isinstance(value, str):
            value = Path(value)
        is_right = isinstance(value, Path) if self.type is Path else type(value) is self.type
        if not (is_right and self.limits.allow(value)):
            text = f"'{shown(value)}'" if isinstance(value, str) else shown(value)
            hint = suggest(str(value), self.limits.choices or ()) or _object_hint(value)
            raise UserError(f"{source} is {text}; expected {self.expected}{hint}")
        return value

    def parse(self, text: str, source: str) -> Any:
        """Convert the text of a flag or of a variable."""
        value: Any = text
        if self.type is bool:
            texts = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
            value = texts.get(text.lower(), text)
        elif self.type in (int, float):
            if self.optional and text.lower() == "none":
                return None
            found = convert(text, self.type)
            value = text if found is None else found
        return self.check(value, source)


@cache
def settings() -> tuple[Setting, ...]:
    """Return every setting of `Settings`, in order."""
    hints = get_type_hints(Settings)
    found = []
    for item in fields(Settings):
        if "group" not in item.metadata:
            continue
        members = get_args(hints[item.name]) or (hints[item.name],)
        found.append(Setting(
            name=item.name, type=members[0], optional=type(None) in members,
            default=item.default,
            **{**item.metadata, "limits": item.metadata["limits"].of(members[0])},
        ))  # fmt: skip
    return tuple(found)


def load_settings(
    flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None = None
) -> Settings:
    """Combine the layers: defaults < file < environment < flags.

    If one layer sets `epochs` and a higher one `steps`, or vice versa, the higher one counts; the
    text ``none`` of a number removes the value of lower layers. With
    `resume`, the lowest layer has the last settings of that run, without `threads`, which belong
    to the machine on which the run was started. Values of its file that a user has edited take
    precedence over them.

    Args:
        flags: the given flags by the name of their setting; text is converted.
        environment: for example `os.environ`.
        file: a TOML file, or the name of a preset.

    Returns:
        The settings, with the recipe of the network filled in.

    Raises:
        UserError: an unknown key or variable, or an invalid value; the message names its source.
    """
    from dptrain.training.setting_names import unknown_setting

    by_name = {setting.name: setting for setting in settings()}
    for name in flags:
        if name not in by_name:
            raise UserError(unknown_setting("there is no setting", name))
    given: dict[str, Any] = {
        name: by_name[name].parse(value, by_name[name].flag) if isinstance(value, str) else value
        for name, value in flags.items()
    }
    variables = _from_environment(environment, by_name)
    resume = given.get("resume", variables.get("resume"))
    if resume is not None:
        if file is not None:
            raise UserError(
                f"--resume continues with the settings in {resume / CONFIG}, but --config "
                f"names {file}; remove --config"
            )
        file = resume / CONFIG
    source = "" if file is None else str(file)
    if file is not None:
        file = find_config(file)
    values = {} if file is None else _from_file(read_settings(file), source)
    origins = dict.fromkeys(values, source)
    if resume is not None:
        assert file is not None
        values, origins = _continued(values, file)
    for layer, origin in (
        (variables, {name: by_name[name].variable for name in variables}),
        (given, {name: by_name[name].flag for name in given}),
    ):
        put_layer(values, origins, layer, origin)
    return Settings(**values, origins=origins).with_recipe()


def put_layer(
    values: dict[str, Any],
    origins: dict[str, str],
    layer: Mapping[str, Any],
    origin: Mapping[str, str],
) -> None:
    """Add the values of a layer with precedence, and remove those that it replaces."""
    replaced = [
        other
        for pair in ALTERNATIVE_SETTINGS
        for one, other in (pair, pair[::-1])
        if layer.get(one) is not None and other not in layer
    ]
    for name, users in DEPENDENT_SETTINGS.items():
        if layer.get(name) is not None and layer[name] not in users:
            replaced += [other for group in users.values() for other in group if other not in layer]
    for name in replaced:
        values.pop(name, None)
        origins.pop(name, None)
    values.update(layer)
    origins.update(origin)


def _continued(file_values: dict[str, Any], file: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings with which a run continues, and their origins.

    They are those of its last span. The file holds the settings of the first one; what a user has
    edited in it since takes precedence.

    Args:
        file_values: values of the configuration file of the run, with absolute paths.
        file: that file.
    """
    from dptrain.runs.spans import Spans

    spans = Spans.read(file.parent)
    if not spans.items or not spans.items[-1].config:
        values, origins = dict(file_values), dict.fromkeys(file_values, str(file))
    else:
        first, last = spans.items[0], spans.items[-1]
        values = _from_file(_resolved(dict(last.config), file.parent), str(file.parent))
        origins = {k: v for k, v in last.origins.items() if k in values}
        recorded = _from_file(_resolved(dict(first.config), file.parent), str(file.parent))
        edited = {k: v for k, v in file_values.items() if recorded.get(k) != v}
        for name in recorded.keys() - file_values.keys():
            values.pop(name, None)
            origins[name] = f"removed from {file}"
        put_layer(values, origins, edited, dict.fromkeys(edited, f"{file}, edited"))
    for found in (values, origins):
        found.pop("threads", None)
    return values, origins


def read_settings(file: Path) -> dict[str, Any]:
    """Return the values of a configuration file.

    The paths of a network, of data and of weights are relative to the folder of the file.
    """
    return _resolved(read_toml(file), file.parent)


def _resolved(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return values whose relative paths are relative to `folder`."""
    from dptrain.data.spec import absolute

    network, data, weights = (values.get(key) for key in ("network", "data", "weights"))
    if isinstance(network, str) and network.endswith(NETWORK_SUFFIXES):
        values["network"] = str(folder / network)
    if isinstance(data, str):
        values["data"] = absolute(data, folder)
    if isinstance(weights, str):
        values["weights"] = str(folder / weights)
    return values


def _from_environment(
    environment: Mapping[str, str], by_name: Mapping[str, Setting]
) -> dict[str, Any]:
    by_variable = {setting.variable: setting for setting in by_name.values()}
    values = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES:
            continue
        if variable not in by_variable:
            known = (*by_variable, *OTHER_VARIABLES)
            raise UserError(f"unknown environment variable {variable}{suggest(variable, known)}")
        setting = by_variable[variable]
        values[setting.name] = setting.parse(text, variable)
    return values


def _from_file(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    from dptrain.training.setting_names import unknown_setting

    by_name = {setting.name: setting for setting in settings()}
    for key in values:
        if key not in by_name:
            raise UserError(unknown_setting(f"{source}: unknown key", key))
    return {key: by_name[key].check(value, f"{source}: {key}") for key, value in values.items()}
