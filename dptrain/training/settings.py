"""The settings of a training job: names, types, defaults, limits and help texts.

Settings are declared only in `Settings`. The flags of the command line, the environment variables,
the keys of a configuration file and the keyword arguments of `dptrain.Trainer` are derived from it.
A setting that is None is resolved later, from the network's recipe, the backend, the data or the
machine; `dptrain.training.spec` holds the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from dptrain.backends import BACKENDS
from dptrain.comm import TRANSPORTS
from dptrain.errors import UserError, suggest
from dptrain.toml import read_toml

if TYPE_CHECKING:
    from dptrain.network.network import Network
    from dptrain.plan.optimizers import Optimizer

PREFIX = "DPTRAIN_"
OTHER_VARIABLES = (
    "DPTRAIN_ALLOW_SINGLE",
    "DPTRAIN_CACHE_DIR",
)
"""Environment variables with the prefix that are not settings of a job."""

CONFIG_FILE = "config.toml"
"""Name of the file in a run directory that holds the settings of the run."""

LOCATIONS = ("run_dir", "resume")
"""Settings that name where a run is stored. The file of a run does not contain them."""

RANK_SETTINGS = ("threads", "workers", "share_gpus", "timeout")
"""Settings that may differ between ranks, because they describe a rank and not the job."""

GROUPS = ("model", "data", "optimisation", "parallelism", "output", "measurement")
"""Headings under which help texts list the settings, in order."""

RECIPE = "from the network's recipe"


@dataclass(frozen=True)
class Limits:
    """Conditions on a value in addition to its type. None means that there is no such limit."""

    choices: tuple[str, ...] | None = None
    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    at_most: float | None = None

    def allow(self, value: Any) -> bool:
        """Return True if `value`, which has the right type, is within the limits."""
        if isinstance(value, float) and not math.isfinite(value):
            return False
        return (
            (self.choices is None or value in self.choices)
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and (self.at_most is None or value <= self.at_most)
        )

    def __str__(self) -> str:
        phrases = {
            "of at least": self.at_least,
            "above": self.above,
            "below": self.below,
            "up to": self.at_most,
        }
        return " and ".join(
            f"{phrase} {limit}" for phrase, limit in phrases.items() if limit is not None
        )


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
        "model", "model0", "A network that `dptrain describe` lists, or a .toml file."
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
    seed: int = _setting(
        "model", 0, "Seed of the initial parameters, the order of the samples, dropout and "
        "augmentation.", at_least=0,
    )  # fmt: skip
    tune: bool = _setting(
        "model", False, "Measure the kernels with the lowest estimated times on the GPU, for "
        "about 5 s, and use the fastest (cuda and cudnn). Otherwise estimates decide.",
    )  # fmt: skip

    data: str | None = _setting(
        "data", None, "Data set: digits, irradiance, synthetic, cifar10:DIR, mnist:DIR, npz:FILE, "
        "npy:X,Y, folder:DIR or csv:FILE?target=COLUMN.", otherwise=RECIPE,
    )  # fmt: skip
    crop: int | None = _setting(
        "data", None, "Augmentation: shift each training image by up to this many pixels.",
        otherwise=RECIPE, at_least=0,
    )  # fmt: skip
    flip: bool = _setting("data", False, "Augmentation: mirror half of the training images.")
    brightness: float = _setting(
        "data", 0.0, "Augmentation: largest value that is added to or subtracted from the pixels "
        "of an image, which range from -1 to 1.", at_least=0,
    )  # fmt: skip
    contrast: float = _setting(
        "data", 0.0, "Augmentation: largest relative change of the contrast.", at_least=0,
        at_most=1,
    )  # fmt: skip
    prefetch: int | None = _setting(
        "data", None, "Minibatches that a thread reads ahead; 0 reads each one when it is needed.",
        otherwise="2; 0 if the data is in memory and every core computes", at_least=0,
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

    batch_size: int = _setting(
        "optimisation", 32, "Samples of a global minibatch, which all ranks share.", at_least=1
    )
    epochs: int | None = _setting(
        "optimisation", None, "Passes over the training data.", otherwise=RECIPE, at_least=1
    )
    steps: int | None = _setting(
        "optimisation", None, "Parameter updates; replaces --epochs.",
        otherwise="epochs × steps per epoch", at_least=1,
    )  # fmt: skip
    until_accuracy: float | None = _setting(
        "optimisation", None, "End training after the first evaluation with at least this accuracy "
        "on the test data, such as 0.97; --epochs or --steps is the limit.",
        otherwise="make all steps", above=0, at_most=1,
    )  # fmt: skip
    optimizer: str | None = _setting(
        "optimisation", None, "Update rule.", otherwise=RECIPE, choices=("sgd", "adam")
    )
    learning_rate: float | None = _setting(
        "optimisation", None, "Learning rate after warm-up.", otherwise=RECIPE, above=0
    )
    momentum: float | None = _setting(
        "optimisation", None, "Momentum of sgd.", otherwise=RECIPE, at_least=0, below=1
    )
    nesterov: bool = _setting("optimisation", False, "Use Nesterov momentum.")
    schedule: str | None = _setting(
        "optimisation", None, "Learning-rate schedule: constant; a factor of --step-factor every "
        "--step-every steps; or half a cosine that ends at 0.", otherwise=RECIPE,
        choices=("constant", "step", "cosine"),
    )  # fmt: skip
    warmup_steps: int = _setting(
        "optimisation", 0, "Steps in which the learning rate rises linearly to its value.",
        at_least=0,
    )  # fmt: skip
    step_every: int | None = _setting(
        "optimisation", None, "Steps between two reductions by schedule step.",
        otherwise="none; schedule step requires it", at_least=1,
    )  # fmt: skip
    step_factor: float = _setting(
        "optimisation", 0.1, "Factor of a reduction by schedule step.", above=0, at_most=1
    )

    strategy: str = _setting(
        "parallelism", "mirrored", "How ranks share an update: mirrored sums the gradients on "
        "every rank (all-reduce); central sends them to rank 0, which updates the parameters and "
        "broadcasts them.", choices=("mirrored", "central"),
    )  # fmt: skip
    shards: int = _setting(
        "parallelism", 0, "Micro-shards of a minibatch, at least one for each rank. Their "
        "gradients are summed in a fixed order, so that results do not depend on the number of "
        "ranks and threads (backends numba and reference). 0 sums in the fastest order.",
        at_least=0,
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
    checkpoint_every: int | None = _setting(
        "output", None, "Steps between two checkpoints.", otherwise="one epoch", at_least=1
    )
    keep_checkpoints: int = _setting(
        "output", 3, "Number of checkpoints that are kept, the newest ones.", at_least=1
    )
    log_every: int = _setting(
        "output", 10, "Steps between two records in metrics.jsonl.", at_least=1
    )
    tensorboard: bool = _setting(
        "output", False, "Also write files for TensorBoard, to the folder tensorboard of the run."
    )

    evaluate_every: int = _setting(
        "measurement", 1, "Epochs between two evaluations on the test data; 0 evaluates at the "
        "end only.", at_least=0,
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
        if self.epochs is not None and self.steps is not None:
            raise UserError(
                f"epochs is {self.epochs} and steps is {self.steps}; set only one of the two"
            )
        if self.schedule == "step" and self.step_every is None:
            raise UserError("schedule is 'step' but step_every is not set; try --step-every 1000")
        if self.schedule != "step" and self.step_every is not None:
            raise UserError(
                f"step_every is {self.step_every} but schedule is "
                f"{self.schedule or 'not set'}; try --schedule step"
            )
        if self.optimizer == "adam" and (self.momentum or self.nesterov):
            raise UserError(
                "momentum and nesterov belong to optimizer sgd, but optimizer is 'adam'; "
                "remove them or try --optimizer sgd"
            )
        if self.shards > self.batch_size:
            raise UserError(
                f"--shards is {self.shards}, but --batch-size is {self.batch_size}; use at most "
                "one micro-shard for each sample"
            )
        if self.until_accuracy is not None and not self.evaluate_every:
            raise UserError(
                f"until_accuracy is {self.until_accuracy:g}, but evaluate_every is 0, so nothing "
                "is evaluated before training ends; try --evaluate-every 1"
            )
        if self.nesterov and self.momentum == 0:
            raise UserError("nesterov needs a momentum above 0; try --momentum 0.9")
        if self.resume is not None and self.run_dir not in (None, self.resume):
            raise UserError(
                f"run_dir is '{self.run_dir}' but resume is '{self.resume}'; a run continues in "
                "its own directory, so remove run_dir"
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
        is_file = self.network.endswith(".toml")
        filled = {
            "network": str(Path(self.network).absolute()) if is_file else self.network,
            "data": absolute(data),
            "optimizer": chosen.optimizer,
            "learning_rate": _first(self.learning_rate, chosen.learning_rate),
            "momentum": _first(self.momentum, chosen.momentum),
            "epochs": chosen.epochs if no_length else self.epochs,
            "schedule": _first(self.schedule, chosen.schedule),
            "crop": _first(self.crop, chosen.crop),
            "run_dir": _first(self.resume, self.run_dir),
        }
        origins = dict(self.origins)
        for name, value in filled.items():
            if getattr(self, name) is None and value is not None and name not in LOCATIONS:
                origins[name] = "recipe"
        return replace(self, **filled, origins=origins)

    def load_network(self) -> Network:
        """Return the network that the setting `network` names."""
        from dptrain.network.files import get_network

        return get_network(self.network)

    def check_until_accuracy(self, network: Network) -> None:
        """Raise `UserError` if an accuracy is requested, but the network predicts values."""
        if self.until_accuracy is not None and network.loss.targets == "values":
            raise UserError(
                f"--until-accuracy needs classes, but network '{network.name}' predicts values; "
                "remove --until-accuracy"
            )

    def update_rule(self) -> Optimizer:
        """Return the optimizer; `with_recipe` has filled in its settings."""
        from dptrain.plan.optimizers import SGD, Adam

        assert self.optimizer is not None, "call with_recipe first"
        return Adam() if self.optimizer == "adam" else SGD(self.momentum or 0.0, self.nesterov)

    def to_toml_values(self) -> dict[str, Any]:
        """Return the settings that start the same run again from a file, without locations."""
        values = {setting.name: getattr(self, setting.name) for setting in settings()}
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in values.items()
            if value is not None and name not in LOCATIONS
        }

    @classmethod
    def from_values(cls, values: Mapping[str, Any], source: str) -> Settings:
        """Return the settings with the values of a file; errors name the file as `source`."""
        checked = _from_file(values, source)
        return cls(**checked, origins=dict.fromkeys(checked, source))


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
        kinds = {int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}
        return f"{kinds.get(self.type, 'text')} {self.limits}".rstrip()

    def check(self, value: Any, source: str) -> Any:
        """Return `value` with the right type, or raise a `UserError` that names `source`."""
        if value is None and self.optional:
            return value
        if type(value) not in (bool, int, float) and isinstance(value, Real):  # A NumPy scalar.
            value = int(value) if isinstance(value, Integral) else float(value)
        if self.type is float and type(value) is int:
            value = float(value)
        if self.type is Path and isinstance(value, str):
            value = Path(value)
        is_right = isinstance(value, Path) if self.type is Path else type(value) is self.type
        if not (is_right and self.limits.allow(value)):
            text = f"'{value}'" if isinstance(value, str) else str(value)
            hint = suggest(str(value), self.limits.choices or ())
            raise UserError(f"{source} is {text}; expected {self.expected}{hint}")
        return value

    def parse(self, text: str, source: str) -> Any:
        """Convert the text of a flag or of a variable."""
        value: Any = text
        if self.type is bool:
            texts = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
            value = texts.get(text.lower(), text)
        elif self.type in (int, float):
            with suppress(ValueError):
                value = self.type(text)
        return self.check(value, source)


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
            default=item.default, **item.metadata,
        ))  # fmt: skip
    return tuple(found)


def load_settings(
    flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None = None
) -> Settings:
    """Combine the layers: defaults < file < environment < flags.

    If one layer sets `epochs` and a higher one `steps`, or vice versa, the higher one counts. With
    `resume`, the file is the one of that run; its `threads` is ignored, because it belongs to the
    machine on which the run was started.

    Args:
        flags: the given flags by the name of their setting; text is converted.
        environment: for example `os.environ`.
        file: a TOML file.

    Returns:
        The settings, with the recipe of the network filled in.

    Raises:
        UserError: an unknown key or variable, or an invalid value; the message names its source.
    """
    by_name = {setting.name: setting for setting in settings()}
    given: dict[str, Any] = {
        name: by_name[name].parse(value, by_name[name].flag) if isinstance(value, str) else value
        for name, value in flags.items()
    }
    variables = _from_environment(environment, by_name)
    resume = given.get("resume", variables.get("resume"))
    if resume is not None:
        if file is not None:
            raise UserError(
                f"--resume continues with the settings in {resume / CONFIG_FILE}, but --config "
                f"names {file}; remove --config"
            )
        file = resume / CONFIG_FILE
    values = {} if file is None else _from_file(read_settings(file), str(file))
    if resume is not None:
        values.pop("threads", None)
    origins = dict.fromkeys(values, str(file))
    for layer, origin in (
        (variables, {name: by_name[name].variable for name in variables}),
        (given, {name: by_name[name].flag for name in given}),
    ):
        for one, other in (("epochs", "steps"), ("steps", "epochs")):
            if one in layer and other not in layer:
                values.pop(other, None)
                origins.pop(other, None)
        values.update(layer)
        origins.update(origin)
    return Settings(**values, origins=origins).with_recipe()


def read_settings(file: Path) -> dict[str, Any]:
    """Return the values of a configuration file.

    The paths of a network and of data are relative to the folder of the file.
    """
    from dptrain.data.spec import absolute

    values = read_toml(file)
    network, data = values.get("network"), values.get("data")
    if isinstance(network, str) and network.endswith(".toml"):
        values["network"] = str(file.parent / network)
    if isinstance(data, str):
        values["data"] = absolute(data, file.parent)
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
    by_name = {setting.name: setting for setting in settings()}
    for key in values:
        if key not in by_name:
            raise UserError(f"{source}: unknown key '{key}'{suggest(key, by_name)}")
    return {key: by_name[key].check(value, f"{source}: {key}") for key, value in values.items()}
