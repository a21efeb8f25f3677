"""The configuration of a run, from defaults, a TOML file, the environment and flags.

`TrainConfig` is the one place that knows the settings: names, types, defaults, limits and help.
The command line's flags, the environment variables and the file's keys are derived from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
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
    "DPTRAIN_JOB",
    "DPTRAIN_VECTOR_WIDTH",
)
"""Environment variables that are no settings of a run."""

CONFIG_FILE = "config.toml"
"""Name of the resolved configuration in a run directory."""

PLACES = ("run_dir", "resume")
"""Settings that say where a run lies and not what it is; a run's own file leaves them out."""


@dataclass(frozen=True)
class Limits:
    """What a value must satisfy besides its type; None where there is no limit."""

    choices: tuple[str, ...] | None = None
    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    at_most: float | None = None

    def allow(self, value: Any) -> bool:
        """Whether `value`, of the right type, is within the limits."""
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
        words = {
            "of at least": self.at_least,
            "above": self.above,
            "below": self.below,
            "up to": self.at_most,
        }
        return " and ".join(f"{word} {limit}" for word, limit in words.items() if limit is not None)


def _setting(default: Any, help: str, **limits: Any) -> Any:
    return field(default=default, metadata={"help": help, "limits": Limits(**limits)})


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides what a training run does. None means: chosen to suit the rest."""

    network: str = _setting("model0", "A name that `dptrain describe` lists, or a .toml file.")
    data: str | None = _setting(None, "digits, irradiance, synthetic, cifar10:DIR, mnist:DIR, "
                                "npz:FILE, folder:DIR or csv:FILE; what suits the network where "
                                "left out.")  # fmt: skip
    backend: str = _setting("numba", "What computes.", choices=BACKENDS)
    strategy: str = _setting("mirrored", "How ranks share an update: gradients summed everywhere, "
                             "or sent to rank 0, which updates and sends parameters back.",
                             choices=("mirrored", "central"))  # fmt: skip
    transport: str = _setting("auto", "How gradients travel between GPUs: by kernels that write "
                              "into each other's memory, within a node; by NCCL, by an MPI that "
                              "takes addresses of GPU memory, or through the host; the first of "
                              "these that works where left out.",
                              choices=TRANSPORTS)  # fmt: skip
    batch_size: int = _setting(32, "Samples in a minibatch, over all ranks.", at_least=1)
    epochs: int | None = _setting(None, "Passes over the data; what suits the network where "
                                  "neither this nor --steps is given.", at_least=1)  # fmt: skip
    steps: int | None = _setting(None, "Updates, instead of --epochs.", at_least=1)
    learning_rate: float | None = _setting(None, "Learning rate; what suits the network where "
                                           "left out.", above=0)  # fmt: skip
    schedule: str | None = _setting(None, "How the learning rate changes: not at all, times "
                                    "--step-factor every --step-every steps, or along a half "
                                    "cosine to 0; what suits the network where left out.",
                                    choices=("constant", "step", "cosine"))  # fmt: skip
    warmup_steps: int = _setting(0, "Steps in which the learning rate rises linearly to its value.",
                                 at_least=0)  # fmt: skip
    step_every: int | None = _setting(None, "Steps between two drops of schedule step.", at_least=1)
    step_factor: float = _setting(0.1, "Factor of a drop of schedule step.", above=0, at_most=1)
    optimizer: str | None = _setting(None, "Update rule; what suits the network where left out.",
                                     choices=("sgd", "adam"))  # fmt: skip
    momentum: float | None = _setting(None, "Momentum of sgd; what suits the network where left "
                                      "out.", at_least=0, below=1)  # fmt: skip
    nesterov: bool = _setting(False, "Nesterov's momentum.")
    seed: int = _setting(0, "Of parameters, order of samples, dropout and augmentation.",
                         at_least=0)  # fmt: skip
    threads: int | None = _setting(None, "Threads of a rank; cores of the node divided by its "
                                   "ranks where left out.", at_least=1,
                                   at_most=1024)  # fmt: skip
    share_gpus: bool = _setting(False, "Ranks of a node may use the same GPU; else each needs its "
                                "own.")  # fmt: skip
    precision: str | None = _setting(None, "Arithmetic, a word of the backend's such as fp32.")
    crop: int | None = _setting(None, "Augmentation: move each image at random, by up to this "
                                "many pixels; what suits the network where left out.",
                                at_least=0)  # fmt: skip
    flip: bool = _setting(False, "Augmentation: mirror half of the images.")
    brightness: float = _setting(0.0, "Augmentation: largest amount added to or taken from "
                                 "pixels, which go from -1 to 1.", at_least=0)  # fmt: skip
    contrast: float = _setting(0.0, "Augmentation: largest relative change of contrast.",
                               at_least=0, at_most=1)  # fmt: skip
    run_dir: Path | None = _setting(None, "Directory of the run's files; a new one under runs/ "
                                    "where left out.")  # fmt: skip
    resume: Path | None = _setting(None, "Continue the run in this directory, with its own "
                                   "configuration below environment and flags. Without one: "
                                   "continue the run in --run-dir, or begin it.")  # fmt: skip
    checkpoint_every: int | None = _setting(None, "Steps between checkpoints; an epoch where left "
                                            "out.", at_least=1)  # fmt: skip
    keep_checkpoints: int = _setting(3, "Checkpoints kept, the latest.", at_least=1)
    evaluate_every: int = _setting(1, "Epochs between evaluations on the test data; 0: at the end "
                                   "alone.", at_least=0)  # fmt: skip
    log_every: int = _setting(10, "Steps between lines of metrics and progress.", at_least=1)
    tensorboard: bool = _setting(False, "Write files for TensorBoard too, to a folder tensorboard "
                                 "beside the others.")  # fmt: skip
    baseline_steps: int = _setting(10, "Steps that rank 0 runs alone before training, to measure "
                                   "scaling efficiency against; 0: none.", at_least=0)  # fmt: skip
    bucket_kib: int | None = _setting(None, "KiB of gradients whose sum over the ranks starts "
                                      "together; where left out 256, all of them if the ranks "
                                      "share one node, 1024 between GPUs that do not write into "
                                      "each other's memory.", at_least=1)  # fmt: skip
    prefetch: int | None = _setting(None, "Minibatches read ahead by a thread, 0: none; where left "
                                    "out 2, or 0 if the data is in memory and every core "
                                    "computes.", at_least=0)  # fmt: skip
    timeout: float = _setting(300.0, "Seconds a rank waits for the others before it takes the job "
                              "for hanging and ends it.", at_least=1)  # fmt: skip

    def __post_init__(self) -> None:
        for setting in settings():
            value = setting.check(getattr(self, setting.name), setting.name)
            object.__setattr__(self, setting.name, value)
        if self.epochs is not None and self.steps is not None:
            raise UserError(
                f"epochs is {self.epochs} and steps is {self.steps}; expected one of the two"
            )
        if self.schedule == "step" and self.step_every is None:
            raise UserError("schedule is 'step' without step_every; try --step-every 1000")
        if self.schedule != "step" and self.step_every is not None:
            raise UserError(
                f"step_every is {self.step_every} but schedule is "
                f"{self.schedule or 'left out'}; try --schedule step"
            )
        if self.optimizer == "adam" and (self.momentum or self.nesterov):
            raise UserError(
                "momentum and nesterov belong to optimizer sgd, but optimizer is 'adam'; "
                "leave them out or try --optimizer sgd"
            )
        if self.nesterov and self.momentum == 0:
            raise UserError("nesterov needs a momentum above 0; try --momentum 0.9")
        if self.resume is not None and self.run_dir not in (None, self.resume):
            raise UserError(
                f"run_dir is '{self.run_dir}' but resume is '{self.resume}'; a run continues in "
                "its own directory, so leave run_dir out"
            )

    def resolved(self) -> TrainConfig:
        """Fill in what the network's recipe decides; what is already there stays.

        Paths become absolute, so that the run can be resumed and evaluated from anywhere.

        Raises:
            UserError: there is no such network, or nothing to train it on by default.
        """
        from dptrain.data.spec import absolute
        from dptrain.network.zoo import recipe

        chosen = recipe(self.load_network(), self.optimizer)
        data = chosen.data if self.data is None else self.data
        if data is None:
            raise UserError(
                f"there is no default data for network '{self.network}'; try --data npz:FILE"
            )
        unlimited = self.epochs is None and self.steps is None
        is_file = self.network.endswith(".toml")
        return replace(
            self,
            network=str(Path(self.network).absolute()) if is_file else self.network,
            data=absolute(data),
            optimizer=chosen.optimizer,
            learning_rate=(
                chosen.learning_rate if self.learning_rate is None else self.learning_rate
            ),
            momentum=chosen.momentum if self.momentum is None else self.momentum,
            epochs=chosen.epochs if unlimited else self.epochs,
            schedule=chosen.schedule if self.schedule is None else self.schedule,
            crop=chosen.crop if self.crop is None else self.crop,
            run_dir=self.run_dir if self.resume is None else self.resume,
        )

    def load_network(self) -> Network:
        """The network that `network` names."""
        from dptrain.network.files import get_network

        return get_network(self.network)

    def update_rule(self) -> Optimizer:
        """The optimizer of a resolved configuration."""
        from dptrain.plan.optimizers import SGD, Adam

        assert self.optimizer is not None, "only a resolved configuration has an update rule"
        return Adam() if self.optimizer == "adam" else SGD(self.momentum or 0.0, self.nesterov)

    def to_toml_values(self) -> dict[str, Any]:
        """Settings that start the same run again from a file; None and places are left out."""
        values = {setting.name: getattr(self, setting.name) for setting in settings()}
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in values.items()
            if value is not None and name not in PLACES
        }

    @classmethod
    def from_values(cls, values: Mapping[str, Any], source: str) -> TrainConfig:
        """Make a configuration from a file's values; errors call the file `source`."""
        return cls(**_from_file(values, source))


@dataclass(frozen=True)
class Setting:
    """One field of `TrainConfig` as flag, variable and key."""

    name: str
    type: type[Any]
    optional: bool
    default: Any
    help: str
    limits: Limits

    @property
    def flag(self) -> str:
        """``--batch-size``."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """``DPTRAIN_BATCH_SIZE``."""
        return PREFIX + self.name.upper()

    @property
    def expected(self) -> str:
        """Words for the values that are right."""
        if self.limits.choices is not None:
            return f"one of {', '.join(self.limits.choices)}"
        words = {int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}
        return f"{words.get(self.type, 'text')} {self.limits}".rstrip()

    def check(self, value: Any, source: str) -> Any:
        """Return `value` with the right type, or raise a `UserError` that calls it `source`."""
        if value is None and self.optional:
            return value
        if self.type is float and type(value) is int:
            value = float(value)
        if self.type is Path and isinstance(value, str):
            value = Path(value)
        is_right = isinstance(value, Path) if self.type is Path else type(value) is self.type
        if not (is_right and self.limits.allow(value)):
            shown = f"'{value}'" if isinstance(value, str) else str(value)
            hint = suggest(str(value), self.limits.choices or ())
            raise UserError(f"{source} is {shown}; expected {self.expected}{hint}")
        return value

    def parse(self, text: str, source: str) -> Any:
        """Convert a flag's or a variable's text."""
        value: Any = text
        if self.type is bool:
            words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
            value = words.get(text.lower(), text)
        elif self.type in (int, float):
            with suppress(ValueError):
                value = self.type(text)
        return self.check(value, source)


def settings() -> tuple[Setting, ...]:
    """Every field of `TrainConfig`, in order."""
    hints = get_type_hints(TrainConfig)
    found = []
    for item in fields(TrainConfig):
        members = get_args(hints[item.name]) or (hints[item.name],)
        found.append(Setting(
            item.name, members[0], type(None) in members, item.default,
            item.metadata["help"], item.metadata["limits"],
        ))  # fmt: skip
    return tuple(found)


def load_config(
    flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None = None
) -> TrainConfig:
    """Put the layers together: defaults < file < environment < flags.

    Where one layer sets `epochs` and a higher one `steps` (or the other way round), the higher
    one holds. With `resume` the file is the one of that run.

    Args:
        flags: given on the command line, by field name; texts are converted.
        environment: as `os.environ`.
        file: TOML file.

    Returns:
        The resolved configuration.

    Raises:
        UserError: an unknown key or variable, or a wrong value; the message names its source.
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
                f"--resume continues with {resume / CONFIG_FILE}, but --config says {file}; "
                "leave --config out"
            )
        file = resume / CONFIG_FILE
    values = {} if file is None else _from_file(read_settings(file), str(file))
    for layer in (variables, given):
        for one, other in (("epochs", "steps"), ("steps", "epochs")):
            if one in layer and other not in layer:
                values.pop(other, None)
        values.update(layer)
    return TrainConfig(**values).resolved()


def read_settings(file: Path) -> dict[str, Any]:
    """Values of a configuration file; a network's path is relative to the folder of that file."""
    values = read_toml(file)
    network = values.get("network")
    if isinstance(network, str) and network.endswith(".toml"):
        values["network"] = str(file.parent / network)
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
