"""The settings of a training job: those of all modules, in one record.

Each module declares its settings next to the code that uses them, as a group
(`dptrain.setting_groups`). The flags of the command line, the environment variables, the keys of a
configuration file and the keyword arguments of `dptrain.Trainer` are derived from `SettingGroups`,
which combines the groups. `GivenSettings` is what a user has set, `Settings` has the recipe of the
network filled in, and `dptrain.training.spec.JobSpec` what the backend, the data and the machine
decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dptrain.backends import BACKENDS
from dptrain.bounds import MAX_SEED
from dptrain.errors import UserError, suggest
from dptrain.files import MAX_TEXT_BYTES, parse_json, read_regular
from dptrain.plan.optimizer_settings import OptimizerSettings
from dptrain.runs.names import CONFIG, SPECIFICATION
from dptrain.runs.settings import DIRECTORY_SETTINGS, DirectorySettings, OutputSettings
from dptrain.setting_groups import (
    PREFIX,
    Known,
    Setting,
    SettingGroup,
    UntilRecipe,
    UntilStart,
    first,
    no_effect,
    setting,
    settings_of,
)
from dptrain.toml import read_toml
from dptrain.training.data_settings import AugmentationSettings, DataSettings, WeightSettings
from dptrain.training.length import LengthSettings
from dptrain.training.parallelism import OFF, ParallelismSettings, RankSettings
from dptrain.training.presets import find_config
from dptrain.training.schedules import SCHEDULES, ScheduleSettings

if TYPE_CHECKING:
    from dptrain.network.network import Network
    from dptrain.network.zoo.recipes import Recipe

OTHER_VARIABLES = {
    "DPTRAIN_ALLOW_SINGLE": "1: a process that finds no other ranks trains alone, although the "
    "launcher started several",
    "DPTRAIN_CACHE_DIR": "Directory of compiled kernels; default: $XDG_CACHE_HOME/dptrain, "
    "otherwise ~/.cache/dptrain",
}
"""Environment variables with the prefix that are not settings of a job, and their meanings."""

NETWORK_SUFFIXES = (".toml", ".onnx")
"""Endings of the names of files that describe networks."""

START_SETTINGS = ("stop_after", "snapshots", "snapshot_every", "snapshot_mib")
"""Settings of a single start of a run. The file of a run does not contain them."""

DEFAULT_NETWORK = "model0"
"""Network for the default data."""

ALTERNATIVE_SETTINGS = (("epochs", "steps"), ("step_at", "step_every"))
"""Pairs of settings of which a run has one; the layer with precedence decides which."""

USED_WITH: Mapping[str, tuple[str, tuple[str, ...]]] = {
    **{name: ("schedule", (key,)) for key, kind in SCHEDULES.items() for name in kind.own_settings},
    "step_factor": ("schedule", ("step", "plateau", "exponential")),
    "power": ("schedule", ("polynomial",)),
    "randaugment_magnitude": ("randaugment", ()),
    **dict.fromkeys(("snapshot_every", "snapshot_mib"), ("snapshots", ())),
}
"""Settings that have an effect only with some values of another one; no values: all but 0."""

DEPENDENT_SETTINGS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    **USED_WITH,
    "momentum": ("optimizer", ("sgd", "lars", "rmsprop")),
    "nesterov": ("optimizer", ("sgd", "lars")),
}
"""Settings as in `USED_WITH`: if a layer with precedence sets another value of the other setting,
those of lower layers do not count."""

RANK_SETTINGS = ("threads", "workers", "share_gpus")
"""Settings that may differ between ranks, because they describe a rank and not the job."""

WORKER_SETTINGS = ("backend", "precision")
"""Settings that may also differ between ranks if shares are not equal: `Settings.balance`."""


def _path_of_weights(value: Any) -> Any:
    """Return a path, and refuse an empty one, such as that of a variable without a value."""
    if isinstance(value, str | Path) and not str(value).strip():
        raise UserError(
            "--weights is empty; expected a run directory, a folder that Trainer.save wrote, or an "
            ".onnx or .safetensors file; leave it out for random parameters"
        )
    return value


@dataclass(frozen=True)
class ModelSettings(SettingGroup[UntilRecipe, UntilStart]):
    """The network, and what computes it."""

    network: str | UntilRecipe = setting(
        "model",
        None,
        "A network that `dptrain describe` lists, which gets the channels or columns and the "
        "classes of the data, a .toml file, or an .onnx file, which also contains the initial "
        "parameters.",
        otherwise="that of --weights, if it is known; or by the data: model0 for images, "
        "classifier-64-32 for rows of numbers; model0-labels and multilabel-64-32 for several "
        "labels, model0-values and mlp-64-32 for values",
    )
    backend: str = setting(
        "model",
        "numba",
        "Implementation of the layers. `null` computes nothing; it measures "
        "the overhead of the program.",
        choices=BACKENDS,
    )
    precision: str | UntilStart = setting(
        "model",
        None,
        "Precision of the arithmetic: fp32; cuda and cudnn also tf32 and bf16; "
        "numba also fp32-direct (no Winograd convolution); reference also fp64.",
        otherwise="the first precision of the backend",
    )
    weights: str | UntilRecipe = setting(
        "model",
        None,
        "Initial parameters: a run directory, a folder that Trainer.save wrote, an .onnx file, or "
        "a safetensors file, such as the state_dict of torchvision's resnet18. Each array is "
        "loaded that has the name and the shape of a parameter. The other parameters are random, "
        "and the first lines of the run name them. --resume does not read it.",
        unset="",
        convert=_path_of_weights,
        otherwise="those of an .onnx network, else random numbers by the seed",
    )
    seed: int = setting(
        "model",
        0,
        "Seed of the initial parameters, the order of the samples, dropout and augmentation.",
        at_least=0,
        at_most=MAX_SEED,
    )
    tune: bool = setting(
        "model",
        False,
        "Measure the kernels with the lowest estimated times on the GPU, for "
        "about 5 s, and use the fastest (cuda and cudnn). Otherwise estimates decide.",
    )
    recompute: bool = setting(
        "model",
        False,
        "Compute activations again in the backward pass, if this needs less memory "
        "than to keep them. Results are the same.",
    )

    def from_recipe(self, recipe: Recipe) -> dict[str, Any]:
        network, weights = first(self.network, DEFAULT_NETWORK), self.weights
        is_file = network.endswith(NETWORK_SUFFIXES)
        if weights is None and network.endswith(".onnx"):
            weights = network
        return {
            **super().from_recipe(recipe),
            "network": str(Path(network).absolute()) if is_file else network,
            "weights": None if weights is None else str(Path(weights).absolute()),
        }


@dataclass(frozen=True)
class JobSettings(
    ModelSettings[UntilRecipe, UntilStart],
    DataSettings[UntilRecipe, UntilStart],
    AugmentationSettings[UntilRecipe, UntilStart],
    LengthSettings[UntilRecipe, UntilStart],
    OptimizerSettings[UntilRecipe, UntilStart],
    WeightSettings[UntilRecipe, UntilStart],
    ScheduleSettings[UntilRecipe, UntilStart],
    ParallelismSettings[UntilRecipe, UntilStart],
    OutputSettings[UntilRecipe, UntilStart],
):
    """The settings of a job, which decide what it computes and writes."""

    def refuse_contradictions(self) -> None:
        """Raise `UserError` if settings of one group, or of several, contradict each other."""
        super().refuse_contradictions()
        if self.shards and self.tune:
            raise UserError(
                f"--tune selects kernels by measurements, but --shards {self.shards} requires "
                "results that do not depend on the machine; remove one of the two"
            )
        if self.batch_size is not None and self.shards > self.batch_size:
            raise UserError(
                f"--shards is {self.shards}, but --batch-size is {self.batch_size}; use at most "
                "one micro-shard for each sample"
            )
        if self.balance != OFF and self.accumulate > 1:
            raise UserError(
                f"--accumulate {self.accumulate} divides equal shares into passes, but --balance "
                f"{self.balance} makes unequal ones; remove one of the two"
            )
        if self.schedule == "plateau" and not self.evaluate_every:
            raise UserError(
                "--schedule plateau needs evaluations during training, but --evaluate-every is 0; "
                "try --evaluate-every 1"
            )
        if self.schedule == "plateau" and self.best_by == "none":
            raise UserError(
                "--schedule plateau follows improvements by --best-by, but this is none; try "
                "--best-by loss"
            )

    def check_validation(self, data: str, *, has_validation: bool) -> None:
        """Raise `UserError` if a setting needs validation data, but the data `data` has none."""
        super().check_validation(data, has_validation=has_validation)
        if self.schedule == "plateau" and not has_validation:
            raise UserError(
                f"--schedule plateau needs validation data, but {data} has none; try "
                "--validation 0.1"
            )


@dataclass(frozen=True)
class SettingGroups(
    DirectorySettings[UntilRecipe, UntilStart],
    JobSettings[UntilRecipe, UntilStart],
    RankSettings[UntilRecipe, UntilStart],
):
    """Everything that a user can set for a training job.

    The field `origins` maps the names of the settings that were set to where they were set, for
    example ``--seed``, ``DPTRAIN_SEED`` or ``job.toml``.
    """

    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.refuse_contradictions()

    def load_network(self) -> Network:
        """Return the network that the setting `network` names.

        A run that is resumed has the network that it began with, whatever the zoo or the data would
        be now.
        """
        from dptrain.network.files import get_network

        name = first(self.network, DEFAULT_NETWORK)
        if self.resume is None:
            return get_network(name)
        found = _network_of_run(self.resume, name) or get_network(name)
        is_kept = Path(name).absolute().parent == Path(self.resume).absolute()
        return found.read_from(str(self.resume), "run") if is_kept else found

    def to_toml_values(self) -> dict[str, Any]:
        """Return the settings that start the same run again from a file, without locations."""
        values = {each.name: getattr(self, each.name) for each in settings()}
        unused = [name for name in USED_WITH if not _has_effect(name, values)]
        omitted = (*DIRECTORY_SETTINGS, *START_SETTINGS, *unused)
        unset = {each.name: each.unset for each in settings()}
        return {
            name: value
            for name, value in values.items()
            if value not in (None, unset[name]) and name not in omitted
        }


@dataclass(frozen=True)
class GivenSettings(SettingGroups[None, None]):
    """What a user has set. A value of None is resolved later; `Setting.default_text` states how.

    Raises:
        UserError: a value is invalid, or two settings contradict each other.

    Example:
        >>> GivenSettings(batch_size=64).batch_size
        64
    """

    def __post_init__(self) -> None:
        for declared in settings():
            value = declared.check(getattr(self, declared.name), declared.name)
            object.__setattr__(self, declared.name, value)
        self._refuse_without_effect({})
        super().__post_init__()

    def _refuse_without_effect(self, filled: Mapping[str, Any]) -> None:
        """Raise `UserError` if a setting was set that has no effect with another one.

        Args:
            filled: values that the recipe of the network fills in.
        """
        for declared in settings():
            name, value = declared.name, getattr(self, declared.name)
            if name not in USED_WITH or value in (None, declared.default, declared.unset):
                continue
            other, used_with = USED_WITH[name]
            present = first(getattr(self, other), filled.get(other))
            if present is not None and not _has_effect(name, {other: present}):
                raise UserError(no_effect(name, value, other, present, used_with))

    @property
    def network_of_weights(self) -> str | None:
        """The network of the zoo that the setting `weights` has parameters of; None if unknown."""
        from dptrain.interchange.weight_names import network_of_weights

        return None if self.weights is None else network_of_weights(self.weights)

    def with_recipe(self, network: Network | None = None) -> Settings:
        """Return the settings with what the recipe of the network fills in.

        Paths become absolute, so that the run can be resumed and evaluated from any directory.

        Args:
            network: the network; loaded from the setting `network` if it is None.

        Raises:
            UserError: there is no such network, or it has no default data.
        """
        from dptrain.data import default_network
        from dptrain.network.zoo import recipe

        if network is None and self.network is None and self.network_of_weights is not None:
            origins = {**self.origins, "network": "weights"}
            named = replace(self, network=self.network_of_weights, origins=origins)
            return named.with_recipe()
        if self.network is None and self.data is not None:
            return replace(self, network=default_network(self.data)).with_recipe(network)
        chosen = recipe(
            self.load_network() if network is None else network,
            self.optimizer,
            self.data,
            begins_with_weights=self.weights is not None,
        )
        if self.data is None and chosen.data is None:
            raise UserError(
                f"network '{self.network}' has no default data; try --data folder:DIR or npz:FILE"
            )
        filled, origins = self.from_recipe(chosen), dict(self.origins)
        self._refuse_without_effect(filled)
        for name, value in filled.items():
            if getattr(self, name) is None and value is not None and name not in DIRECTORY_SETTINGS:
                origins[name] = "network" if name == "weights" else "recipe"
        values = {each.name: getattr(self, each.name) for each in settings()} | filled
        resolved = {each.name: first(values[each.name], each.unset) for each in settings()}
        return Settings(**resolved, origins=origins)


@dataclass(frozen=True)
class Settings(SettingGroups[Known, None]):
    """The settings with the recipe of the network filled in; see `GivenSettings.with_recipe`."""


def _network_of_run(run_dir: Path, name: str) -> Network | None:
    """Return the network of a run by the same name; None if it has no specification."""
    from dptrain.network.files import network_from_dict

    with suppress(OSError, ValueError, KeyError, TypeError):  # The run directory is checked later.
        found = parse_json(read_regular(run_dir / SPECIFICATION, MAX_TEXT_BYTES))
        if found["job"]["network"] == name:
            return network_from_dict(found["network"]).read_from(str(run_dir), "run")
    return None


def _has_effect(name: str, values: Mapping[str, Any]) -> bool:
    """Return False if a setting has no effect with the value of the setting that it depends on."""
    other, used_with = DEPENDENT_SETTINGS[name]
    present = values.get(other)
    return present is None or (present in used_with if used_with else bool(present))


def _with_effect(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a run without those that have no effect, which earlier versions wrote."""
    return {k: v for k, v in values.items() if k not in USED_WITH or _has_effect(k, values)}


@cache
def settings() -> tuple[Setting, ...]:
    """Return every setting, group by group."""
    return tuple(settings_of(GivenSettings))


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

    by_name = {each.name: each for each in settings()}
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
    if file is not None and resume is None and (file.parent / SPECIFICATION).exists():
        values = _with_effect(values)
    origins = dict.fromkeys(values, source)
    if resume is not None:
        assert file is not None
        values, origins = _continued(values, file)
    for layer, origin in (
        (variables, {name: by_name[name].variable for name in variables}),
        (given, {name: by_name[name].flag for name in given}),
    ):
        put_layer(values, origins, layer, origin)
    return GivenSettings(**values, origins=origins).with_recipe()


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
    replaced += [
        name for name in DEPENDENT_SETTINGS if name not in layer and not _has_effect(name, layer)
    ]
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
        values = _with_effect(file_values)
        origins = dict.fromkeys(values, str(file))
    else:
        first, last = spans.items[0], spans.items[-1]
        values = _from_file(_resolved(dict(last.config), file.parent), str(file.parent))
        values = _with_effect(values)
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
    from dptrain.data import absolute

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
    by_variable = {each.variable: each for each in by_name.values()}
    values = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES:
            continue
        if variable not in by_variable:
            known = (*by_variable, *OTHER_VARIABLES)
            raise UserError(f"unknown environment variable {variable}{suggest(variable, known)}")
        declared = by_variable[variable]
        values[declared.name] = declared.parse(text, variable)
    return values


def _from_file(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    from dptrain.training.setting_names import unknown_setting

    by_name = {each.name: each for each in settings()}
    for key in values:
        if key not in by_name:
            raise UserError(unknown_setting(f"{source}: unknown key", key))
    return {key: by_name[key].check(value, f"{source}: {key}") for key, value in values.items()}
