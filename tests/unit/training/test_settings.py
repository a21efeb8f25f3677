"""The configuration: order of its sources, and one line for every mistake."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import tomli_w
from hypothesis import strategies as st

from dptrain.errors import UserError
from dptrain.plan import SGD, Adam, AdamW
from dptrain.training.balance import first_shares
from dptrain.training.settings import (
    USED_WITH,
    GivenSettings,
    load_settings,
    put_layer,
    settings,
)

SAMPLES: dict[str, tuple[Any, Any]] = {
    "network": ("model1", "model2"),
    "data": ("digits", "synthetic"),
    "backend": ("numba", "reference"),
    "strategy": ("mirrored", "central"),
    "transport": ("host", "nccl"),
    "schedule": ("cosine", "constant"),
    "timeout": (20.0, 30.0),
    "optimizer": ("sgd", "adam"),
    "precision": ("fp32", "fp64"),
    "scale_rate": ("linear", "sqrt"),
    "run_dir": (Path("a"), Path("b")),
    "weights": ("/a.safetensors", "/b.safetensors"),
    "class_weights": ("balanced", "1,4"),
    "sampling": ("shuffle", "balanced"),
    "nesterov": (True, False),
    "flip": (True, False),
    "tune": (True, False),
    "recompute": (True, False),
    "batch_norm": ("rank", "global"),
    "tags": ("one,two", "three"),
    "note": ("one", "two"),
    "balance": ("3,1", "measured"),
    "best_by": ("loss", "accuracy"),
    "share_gpus": (True, False),
    "snapshots": (True, False),
    "freeze": ("conv1", "dense2,*.bias"),
    "rate_factor": ("conv1=0.5", "*=2"),
    "tensorboard": (True, False),
    "logger": ("mlflow", "wandb"),
}
"""Two right values of a setting; numbers are made up below."""

ALONE = {"steps", "resume", *USED_WITH}
"""Settings that need others; they have tests of their own."""


def samples_of(name: str, kind: type[Any]) -> tuple[Any, Any]:
    return SAMPLES.get(name, (kind(1), kind(2)) if kind is int else (0.25, 0.5))


def as_toml(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


@pytest.mark.parametrize("setting", settings(), ids=lambda setting: setting.name)
def test_flags_beat_environment_beats_file_beats_default(setting: Any, tmp_path: Path) -> None:
    if setting.name in ALONE:
        return
    first, second = samples_of(setting.name, setting.type)
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps({setting.name: as_toml(first)}))

    def value(flags: dict[str, Any], environment: dict[str, str]) -> Any:
        return getattr(load_settings(flags, environment, file), setting.name)

    flag = second if setting.type is bool else str(second)
    assert value({}, {}) == first
    assert value({}, {setting.variable: str(second)}) == second
    assert value({setting.name: flag}, {setting.variable: str(first)}) == second


def test_defaults_come_from_the_recipe_of_the_network() -> None:
    config = load_settings({}, {"HOME": "somewhere"})
    assert (config.network, config.data, config.optimizer) == ("model0", "digits", "sgd")
    assert config.epochs
    assert config.steps is None
    assert config.learning_rate
    assert config.update_rule() == SGD(momentum=0.9)
    regression = load_settings({"network": "solar"}, {})
    assert (regression.data, regression.update_rule()) == ("irradiance", Adam())
    assert regression.learning_rate == 1e-4


def test_recipes_set_batch_size_augmentation_and_fractions_of_the_run() -> None:
    found = load_settings({"network": "resnet20", "data": "synthetic"}, {})
    assert (found.batch_size, found.crop, found.flip, found.nesterov) == (128, 4, True, False)
    assert (found.schedule, found.step_at, found.step_factor) == ("step", "1/2,3/4", 0.1)
    cosine = load_settings(
        {"network": "resnet20", "data": "synthetic", "schedule": "cosine", "flip": False}, {}
    )
    assert (cosine.step_at, cosine.flip) == ("", False)
    every = load_settings(
        {"network": "resnet20", "data": "synthetic", "schedule": "step", "step_every": "7"}, {}
    )
    assert (every.step_at, every.step_every) == ("", 7)
    other = load_settings({"network": "resnet20", "data": "synthetic", "step_at": "1/3"}, {})
    assert (other.schedule, other.step_at) == ("step", "1/3")
    wide = load_settings({"network": "wrn-28-10", "data": "synthetic"}, {})
    assert (wide.update_rule(), wide.step_factor) == (SGD(momentum=0.9, nesterov=True), 0.2)
    # The factor of a whole run is none of a reduction.
    for network, schedule, factor in (
        ("mobilenet-v2", None, 0.98**300), ("mobilenet-v2", "plateau", 0.1),
        ("wrn-28-10", "plateau", 0.2), ("wrn-28-10", "exponential", 0.1),
    ):  # fmt: skip
        values = {"network": network, "data": "synthetic", "schedule": schedule}
        chosen = load_settings({key: value for key, value in values.items() if value}, {})
        assert (chosen.schedule, chosen.step_factor) == (schedule or "exponential", factor)
    adam = load_settings({"network": "wrn-28-10", "data": "synthetic", "optimizer": "adam"}, {})
    assert adam.update_rule() == Adam()
    plain = load_settings({}, {})
    assert (plain.batch_size, plain.flip, plain.step_at, plain.step_factor) == (
        32,
        False,
        "",
        0.1,
    )


def test_another_optimizer_brings_its_own_rate() -> None:
    assert load_settings({"optimizer": "adam"}, {}).learning_rate == 1e-3
    assert load_settings({"optimizer": "adam"}, {}).update_rule() == Adam()
    chosen = load_settings({"optimizer": "sgd", "network": "solar"}, {})
    assert chosen.update_rule() == SGD(momentum=0.9)
    assert load_settings({"learning_rate": "0.5", "optimizer": "adam"}, {}).learning_rate == 0.5


def test_adamw_has_the_rate_of_adam_and_a_weight_decay() -> None:
    assert load_settings({"optimizer": "adamw"}, {}).learning_rate == 1e-3
    solar = load_settings({"optimizer": "adamw", "network": "solar"}, {})
    assert (solar.learning_rate, solar.update_rule()) == (1e-4, AdamW())
    assert solar.origins["weight_decay"] == "recipe"
    other = load_settings({"optimizer": "adamw", "weight_decay": "0"}, {})
    assert other.update_rule() == AdamW(weight_decay=0.0)
    assert load_settings({"weight_decay": "1e-4"}, {}).update_rule() == SGD(
        momentum=0.9, weight_decay=1e-4
    )
    assert load_settings({}, {}).weight_decay is None


@pytest.mark.parametrize(("rule", "factor"), [("none", 1), ("linear", 4), ("sqrt", 2)])
def test_the_rate_scales_with_the_batch_size(rule: str, factor: float) -> None:
    chosen = load_settings({"scale_rate": rule, "batch_size": "128"}, {})
    assert chosen.reference_batch == 32
    assert chosen.learning_rate == 0.02
    rate, schedule = chosen.peak_rate(128), chosen.make_schedule(128, total_steps=9)
    assert rate == schedule.base == pytest.approx(0.02 * factor)
    same = load_settings({"scale_rate": rule, "batch_size": "8", "reference_batch": "8"}, {})
    assert same.peak_rate(8) == 0.02


def test_a_higher_layer_may_say_steps_where_a_lower_one_says_epochs(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("epochs = 3\n")
    config = load_settings({"steps": "50"}, {}, file)
    assert (config.epochs, config.steps) == (0, 50)
    config = load_settings({"epochs": "2"}, {"DPTRAIN_STEPS": "9"}, file)
    assert (config.epochs, config.steps) == (2, None)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"network": "cifar", "steps": "7", "crop": "4", "flip": True, "threads": "2"},
        {"network": "mlp-7", "optimizer": "sgd", "nesterov": True, "schedule": "step",
         "step_every": "10", "timeout": "20"},
        {"run_dir": "somewhere", "precision": "fp32"},
    ],
)  # fmt: skip
def test_a_resolved_configuration_starts_the_same_run_again(
    flags: dict[str, Any], tmp_path: Path
) -> None:
    config = load_settings(flags, {})
    file = tmp_path / "config.toml"
    file.write_text(tomli_w.dumps(config.to_toml_values()))
    again = load_settings({}, {}, file)
    assert again.to_toml_values() == config.to_toml_values()
    # A second run with the same settings has a directory of its own.
    assert again.run_dir is None


def test_resume_reads_the_configuration_of_its_run(tmp_path: Path) -> None:
    first = load_settings({"network": "model1", "epochs": "2"}, {})
    (tmp_path / "config.toml").write_text(tomli_w.dumps(first.to_toml_values()))
    config = load_settings({"resume": str(tmp_path), "epochs": "5"}, {})
    assert (config.network, config.epochs) == ("model1", 5)
    assert config.run_dir == config.resume == tmp_path
    assert load_settings({}, {"DPTRAIN_RESUME": str(tmp_path)}).run_dir == tmp_path


def test_missing_default_data_is_an_error(tmp_path: Path) -> None:
    network = tmp_path / "pair.toml"
    network.write_text(
        'input = [4]\nloss = "sigmoid_cross_entropy"\n[[layer]]\ntype = "dense"\nunits = 1\n'
    )
    with pytest.raises(UserError, match=r"network '.*pair.toml' has no default data; try --data"):
        load_settings({"network": str(network)}, {})
    assert load_settings({"network": str(network), "data": "npz:/a"}, {}).data == "npz:/a"


def test_paths_mean_the_same_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    for given, expected in {
        "digits": "digits",
        "irradiance?samples=600": "irradiance?samples=600",
        "npz:a,b.npz?fit=crop": f"npz:{tmp_path}/a,b.npz?fit=crop",
        "npy:x.npy,y.npy": f"npy:{tmp_path}/x.npy,{tmp_path}/y.npy",
        "mnist:~/mnist": "mnist:/home/me/mnist",
        "cifar10:/data": "cifar10:/data",
    }.items():
        assert load_settings({"network": "model0", "data": given}, {}).data == expected


def test_other_variables_of_the_project_are_left_alone() -> None:
    load_settings(
        {},
        {
            "DPTRAIN_CACHE_DIR": "x",
            "DPTRAIN_ALLOW_SINGLE": "1",
            "DPTRAINER": "x",
        },
    )


MISTAKES = [
    ({"batch_size": "0"}, "--batch-size is 0; expected a whole number of at least 1"),
    ({"batch_size": "3.5"}, "--batch-size is '3.5'; expected a whole number of at least 1"),
    ({"batch_size": "x"}, "--batch-size is 'x'; expected a whole number of at least 1"),
    ({"learning_rate": "0"}, "--learning-rate is 0.0; expected a number above 0"),
    ({"learning_rate": "nan"}, "--learning-rate is nan; expected a number above 0"),
    ({"timeout": "inf"}, "--timeout is inf; expected a number of at least 1"),
    ({"momentum": "1"}, "--momentum is 1.0; expected a number of at least 0 and below 1"),
    ({"step_factor": "2"}, "--step-factor is 2.0; expected a number above 0 and up to 1"),
    ({"optimizer": "adams"}, "--optimizer is 'adams'; expected one of sgd, adam, adamw, "
                             "rmsprop, lars, lamb; did you mean 'adam'?"),
    ({"backend": "nunba"}, "--backend is 'nunba'; expected one of numba, reference, cuda, cudnn, "
                           "null; did you mean 'numba'?"),
    ({"network": "model9"}, "no network 'model9'; expected model0,"),
    ({"epochs": "1", "steps": "1"}, "epochs is 1 and steps is 1; set only one of the two"),
    ({"schedule": "step"}, "schedule is 'step' but neither step_every nor step_at is set; try"),
    ({"step_at": "1/2"}, "--step-at is 1/2, but it has no effect with --schedule cosine"),
    ({"schedule": "step", "step_at": "1/2", "step_every": "3"}, "step_every is 3 and step_at is"),
    ({"schedule": "step", "step_at": "0.5,0.5"}, "step_at is '0.5,0.5'; expected rising fractions"),
    ({"schedule": "step", "step_at": "1/0"}, "step_at is '1/0'; expected rising fractions"),
    ({"schedule": "step", "step_at": "0.5,2"}, "step_at is '0.5,2'; expected rising fractions"),
    ({"schedule": "step", "step_at": "a"}, "step_at is 'a'; expected rising fractions"),
    ({"step_every": "5"}, "--step-every is 5, but it has no effect with --schedule cosine"),
    ({"optimizer": "adamw", "momentum": "0.5"}, "momentum belongs to optimizer sgd or "
                                                "rmsprop or lars, but optimizer is 'adamw'"),
    ({"schedule": "one-cycle", "warmup_steps": "3"}, "warmup_steps is 3, but schedule one-cycle"),
    ({"accumulate": "0"}, "--accumulate is 0; expected a whole number of at least 1"),
    ({"accumulate": "9", "batch_size": "8"}, "--accumulate is 9, but --batch-size is 8"),
    ({"average_weights": "1"}, "--average-weights is 1.0; expected a number above 0 and below 1"),
    ({"average_weights": "0"}, "--average-weights is 0.0; expected a number above 0 and below 1"),
    ({"clip_norm": "0"}, "--clip-norm is 0.0; expected a number above 0"),
    ({"weight_decay": "-1"}, "--weight-decay is -1.0; expected a number of at least 0"),
    ({"weight_decay": "1e300"}, "--weight-decay is 1e+300; expected a number of at least 0 and up"),
    ({"brightness": "1e300"}, "--brightness is 1e+300; expected a number of at least 0 and up to"),
    ({"optimizer": "adam", "momentum": "0.5"}, "momentum belongs to optimizer sgd"),
    ({"network": "solar", "nesterov": True}, "nesterov belongs to optimizer sgd"),
    ({"nesterov": True, "momentum": "0"}, "nesterov needs a momentum above 0"),
    ({"resume": "nowhere"}, "nowhere/config.toml: no such file"),
    ({"plateau_patience": "3"}, "--plateau-patience is 3, but it has no effect with --schedule "
                                "cosine; remove it, or use --schedule plateau"),
    ({"randaugment_magnitude": "3"}, "--randaugment-magnitude is 3.0, but it has no effect with "
                                     "--randaugment 0; remove it, or use --randaugment above 0"),
    ({"schedule": "plateau", "evaluate_every": "0"}, "--schedule plateau needs evaluations during "
                                                     "training, but --evaluate-every is 0"),
    ({"schedule": "plateau", "best_by": "none"}, "--schedule plateau follows improvements by"),
    ({"weights": ""}, "--weights is empty; expected a run directory"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "message"), MISTAKES)
def test_mistakes_in_flags(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_settings(flags, {})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_every_value_has_an_origin(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("batch_size = 16\nseed = 1\nepochs = 3\n")
    found = load_settings({"steps": "5"}, {"DPTRAIN_SEED": "2"}, file)
    assert found.origins["batch_size"] == str(file)
    assert found.origins["seed"] == "DPTRAIN_SEED"
    assert found.origins["steps"] == "--steps"
    assert found.origins["learning_rate"] == "recipe"
    assert "epochs" not in found.origins
    assert found.origins["flip"] == "recipe"
    assert "brightness" not in found.origins


def test_paths_in_a_file_are_relative_to_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('network = "model0"\ndata = "npz:cells.npz"\n')
    assert load_settings({}, {}, file).data == f"npz:{tmp_path / 'cells.npz'}"


def test_a_resumed_run_takes_the_threads_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("threads = 7\nseed = 3\n")
    assert load_settings({"resume": str(tmp_path)}, {}).threads is None
    assert load_settings({"resume": str(tmp_path)}, {}).seed == 3
    assert load_settings({"resume": str(tmp_path), "threads": "2"}, {}).threads == 2


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("DPTRAIN_BATCH_SIZE", "many", "DPTRAIN_BATCH_SIZE is 'many'; expected a whole number"),
        ("DPTRAIN_FLIP", "maybe", "DPTRAIN_FLIP is 'maybe'; expected true or false"),
        ("DPTRAIN_BATCHSIZE", "3", "unknown environment variable DPTRAIN_BATCHSIZE"
                                   "; did you mean 'DPTRAIN_BATCH_SIZE'?"),
        ("DPTRAIN_CACHEDIR", "3", "; did you mean 'DPTRAIN_CACHE_DIR'?"),
    ],
)  # fmt: skip
def test_mistakes_in_the_environment(variable: str, text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_settings({}, {variable: text})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batchsize = 3", "unknown key 'batchsize'; did you mean 'batch_size'?"),
        ("batch_size = '3'", "batch_size is '3'; expected a whole number of at least 1"),
        ("batch_size = true", "batch_size is True; expected a whole number"),
        ("flip = 1", "flip is 1; expected true or false"),
        ("data = 3", "data is 3; expected text"),
        ("run_dir = 3", "run_dir is 3; expected a path"),
        ("strategy = 'centre'", "strategy is 'centre'; expected one of mirrored, central"),
        ("[train]\nbatch_size = 3", "unknown key 'train'"),
        ("batch_size = ", "not TOML: "),
    ],
)
def test_mistakes_in_the_file(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        load_settings({}, {}, file)
    assert str(caught.value).startswith(f"{file}: ")
    assert message in str(caught.value)


def test_resume_has_one_directory_and_one_file(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(UserError, match="remove run_dir"):
        load_settings({"resume": str(tmp_path), "run_dir": "other"}, {})
    with pytest.raises(UserError, match="remove --config"):
        load_settings({"resume": str(tmp_path)}, {}, tmp_path / "config.toml")


def test_python_users_get_the_same_checks() -> None:
    with pytest.raises(UserError, match="batch_size is 0; expected a whole number of at least 1"):
        GivenSettings(batch_size=0)
    assert type(GivenSettings(learning_rate=1).learning_rate) is float
    assert GivenSettings(run_dir="a").run_dir == Path("a")  # type: ignore[arg-type]


def test_every_setting_has_help_and_a_right_default() -> None:
    found = settings()
    names = [item.name for item in fields(GivenSettings)]
    assert sorted([*(setting.name for setting in found), "origins"]) == sorted(names)
    assert [found[0].name, found[-1].name] == ["run_dir", "device_cache"]
    for setting in found:
        assert setting.help.endswith((".", ")"))
        assert setting.default is not None or setting.optional
        assert setting.default_text, setting.name


@pytest.mark.parametrize(
    ("balance", "counts"),
    [("3,1", (6, 2)), ("1e308,1e308", (4, 4)), ("1e308,1e-308", (8, 0)), ("1e-308,0", (8, 0))],
)
def test_fixed_shares_of_any_size_divide_a_minibatch(balance: str, counts: tuple[int, int]) -> None:
    chosen = load_settings({"balance": balance, "batch_size": 8}, {})
    assert first_shares(chosen, 2).counts == counts


@pytest.mark.parametrize("name", USED_WITH)
def test_a_setting_without_effect_is_refused(name: str) -> None:
    """It has an effect with each of the values that the message names, and with no other one."""
    other, used_with = USED_WITH[name]
    declared = {each.name: each for each in settings()}
    value = {"step_at": "1/2", "step_factor": 0.5, "power": 2.0, "randaugment_magnitude": 7.0}.get(
        name, 7
    )
    is_flag = declared[other].type is bool
    values = declared[other].limits.choices or ((False, True) if is_flag else (0, 2))
    needs = {"step_every": 5} if name == "step_factor" else {}
    for present in values:
        has_effect = present in used_with if used_with else bool(present)
        more = needs if present == "step" else {}
        given = {name: value, other: present, **more}
        if has_effect:
            assert getattr(GivenSettings(**given).with_recipe(), name) == value
            continue
        with pytest.raises(UserError, match=r"has no effect with(out)? ") as caught:
            GivenSettings(**given)
        assert str(caught.value).startswith(f"{declared[name].flag} is {value}, but it has no ")
        # A layer with precedence that selects another value drops the setting.
        values_of_file = {**more, name: value, other: used_with[0] if used_with else values[-1]}
        put_layer(values_of_file, {}, {other: present}, {})
        assert name not in values_of_file
    # A file of a run has no such settings.
    assert name not in GivenSettings(schedule="constant").with_recipe().to_toml_values()


NUMBERS: dict[type[Any], Any] = {
    int: st.sampled_from([0, 1, 2, 10]),
    float: st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    bool: st.booleans(),
    str: st.sampled_from(["", ",", " ", "a,b", "1=2", "*"]),
}


@hypothesis.given(st.data())
def test_messages_have_no_internal_names(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(settings()), min_size=1, max_size=4, unique=True))
    chosen = {}
    for each in names:
        if each.type is Path or each.name in ("network", "data", "balance", "weights"):
            continue
        choices = each.limits.choices
        chosen[each.name] = data.draw(st.sampled_from(choices) if choices else NUMBERS[each.type])
    message = ""
    try:
        GivenSettings(**chosen).with_recipe()
    except UserError as error:
        message = str(error)
    assert not re.search(r"\bNone\b|\bTrue\b|\bFalse\b|object at|<|\n", message)


@pytest.mark.parametrize("text", [",", " , ", ",,", "  "])
@pytest.mark.parametrize("name", ["freeze", "rate_factor"])
def test_lists_without_an_item_are_refused(name: str, text: str) -> None:
    with pytest.raises(UserError, match="which names no layer"):
        GivenSettings(**{name: text})


def test_patterns_may_be_lists_and_mappings() -> None:
    found = GivenSettings(freeze=["conv1", "dense*"], rate_factor={"conv2": 0.5, "*.bias": 2})
    assert (found.freeze, found.rate_factor) == ("conv1,dense*", "conv2=0.5,*.bias=2")
