"""What public objects return is read-only, and wrong arguments are refused with right names."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import pickle
import random
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dptrain
from dptrain import (
    AfterEpoch,
    AfterStep,
    ArgumentError,
    Conv2d,
    Dense,
    Flatten,
    Network,
    ReadOnlyError,
    Trainer,
    UserError,
)
from dptrain.training.settings import settings
from tests.tiers import tiered

NETWORK = Network((1, 8, 8), [Flatten(), Dense(10), dptrain.ReLU(), Dense(10)])
TRAINING: dict[str, Any] = {
    "steps": 4, "progress": False, "backend": "reference", "baseline_steps": 0, "threads": 1,
    "schedule": "constant", "learning_rate": 0.01,
}  # fmt: skip


def tiny(**options: Any) -> Trainer:
    return Trainer(NETWORK, "digits", **{**TRAINING, **options})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    trainer = tiny(run_dir=tmp_path_factory.mktemp("public") / "run", optimizer="adam")
    trainer.fit()
    return trainer


@pytest.fixture(scope="module")
def objects(trained: Trainer) -> dict[str, Any]:
    """An object of each public class whose objects a program keeps."""
    assert trained.job.run is not None
    image = dptrain.Input((1, 8, 8))
    return {
        "Trainer": trained,
        "TrainedModel": dptrain.load(trained.job.run.path, backend="reference"),
        "Replica": dptrain.make_replica(NETWORK, "reference"),
        "Network": NETWORK,
        "Tensor": image,
        "SGD": dptrain.SGD(momentum=0.9),
        "Adam": dptrain.Adam(),
        "AdamW": dptrain.AdamW(),
        **{
            name: value()
            for name in dptrain.__all__
            if inspect.isclass(value := getattr(dptrain, name))
            and dataclasses.is_dataclass(value)
            and not inspect.isabstract(value)
            and name not in ("Network", "Tensor", "SGD", "Adam", "AdamW")
            and not any(
                f.default is f.default_factory is dataclasses.MISSING
                for f in dataclasses.fields(value)
            )
        },
        "Conv2d": Conv2d(8),
        "Dense": Dense(8),
    }


SETTABLE = {("Replica", "updates"), ("Replica", "sum_statistics")}
"""Documented as settable; further attributes of a replica belong to engines."""

ENGINES = {"context", "stages", "accumulation"}


def public_attributes(value: Any) -> list[str]:
    fields = getattr(type(value), "__dataclass_fields__", {})
    return sorted({name for name in (*vars(value), *dir(type(value)), *fields)
                   if not name.startswith("_")})  # fmt: skip


def accepts(value: Any, name: str) -> bool:
    """Return True if an attribute can be set."""
    try:
        setattr(value, name, 0.5)
    except AttributeError:
        return False
    return True


def test_no_public_attribute_can_be_set(objects: dict[str, Any]) -> None:
    tried = 0
    for kind, value in objects.items():
        for name in public_attributes(value):
            is_method = callable(getattr(type(value), name, None))
            if (kind, name) in SETTABLE or (kind == "Replica" and (name in ENGINES or is_method)):
                continue
            assert not accepts(value, name), f"{kind}.{name} was set"
            tried += 1
    assert tried > 200


def test_unknown_attributes_are_refused(objects: dict[str, Any]) -> None:
    """Names at random, and names of other libraries; those of settings name the setting."""
    draw = random.Random(4)
    letters = "abcdefghijklmnopqrstuvwxyz_"
    for _ in range(200):
        name = "z" + "".join(draw.choices(letters, k=draw.randint(1, 12)))
        for kind in ("Trainer", "TrainedModel", "Replica", "Network", "Dense"):
            with pytest.raises(AttributeError):
                setattr(objects[kind], name, 1)
            assert not hasattr(objects[kind], name)
    trainer = objects["Trainer"]
    for setting in settings():
        if setting.name == "learning_rate":
            continue
        with pytest.raises(ReadOnlyError, match=rf"Trainer\.resume\(RUN_DIR, {setting.name}=0\.5"):
            setattr(trainer, setting.name, 0.5)
        with pytest.raises(ReadOnlyError) as error:
            setattr(objects["TrainedModel"], setting.name, 0.5)
        if setting.name not in public_attributes(objects["TrainedModel"]):
            assert f"no settings; '{setting.name}' is one of Trainer" in str(error.value)
    with pytest.raises(ReadOnlyError, match=r"call trainer\.set_learning_rate\(0\.5\)"):
        trainer.lr = 0.5
    with pytest.raises(ReadOnlyError, match=r"call trainer\.stop\(\) in a callback"):
        trainer.stop_training = True
    with pytest.raises(ReadOnlyError, match=r"did you mean 'history'\?"):
        trainer.histroy = []
    with pytest.raises(ReadOnlyError):
        del trainer.job


def test_a_derived_class_has_attributes_of_its_own() -> None:
    class Mine(Trainer):
        def __init__(self) -> None:
            super().__init__(NETWORK, "digits", **TRAINING)
            self.notes: list[str] = []

    mine = Mine()
    mine.notes = ["one"]
    for name in ("history", "job", "parameters", "learning_rate", "fit"):
        with pytest.raises((ReadOnlyError, AttributeError)):
            setattr(mine, name, 1)


def arrays_of(objects: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    replica = objects["Replica"]
    mappings = {
        "trainer parameters": objects["Trainer"].parameters,
        "trainer statistics": objects["Trainer"].statistics,
        "model parameters": objects["TrainedModel"].parameters,
        "replica parameters": replica.parameters,
        "replica gradients": replica.gradients,
        **{f"state {k}": v for k, v in objects["Trainer"].job.replica.state.items()},
    }
    for what, mapping in mappings.items():
        for name in mapping:
            yield what, mapping, name


def test_every_returned_array_is_read_only_and_can_be_replaced(objects: dict[str, Any]) -> None:
    draw = np.random.default_rng(7)
    tried = 0
    for what, mapping, name in arrays_of(objects):
        before = mapping[name]
        for _ in range(20):
            part = tuple(slice(int(draw.integers(0, n)), None) for n in before.shape)
            with pytest.raises(ValueError, match="read-only"):
                mapping[name][part] = 0
            with pytest.raises(ValueError, match="read-only"):
                mapping[name].fill(3.0)
            tried += 1
        np.testing.assert_array_equal(mapping[name], before)
        changed = before.copy()
        changed += 1
        mapping[name] = changed
        np.testing.assert_array_equal(mapping[name], changed, err_msg=what)
        mapping[name] = before
    assert tried >= 200


def test_predictions_are_arrays_of_their_own(objects: dict[str, Any]) -> None:
    x = np.full((3, 8, 8), 4, np.uint8)
    for value in (objects["Trainer"], objects["TrainedModel"]):
        first = value.predict(x)
        kept = first.copy()
        first[:] = -1
        np.testing.assert_array_equal(value.predict(x), kept)


def test_a_summary_is_read_only(trained: Trainer) -> None:
    summary: Any = trained.summary
    assert json.loads(json.dumps(summary)) == copy.deepcopy(summary) == dict(summary)
    assert pickle.loads(pickle.dumps(summary)) == summary
    changes: list[Callable[[], Any]] = [
        lambda: summary.update(steps=3), lambda: summary.pop("steps"), summary.clear,
        lambda: summary.__setitem__("steps", 3), lambda: summary["spans"].append(1),
        lambda: summary["scaling"].__setitem__("weak", 1), lambda: summary.setdefault("a", 1),
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(ReadOnlyError, match=r"is read-only; change a copy"):
            change()


# Training twice.


def test_a_second_fit_says_why_it_makes_no_step() -> None:
    trainer = tiny()
    trainer.fit()
    with pytest.warns(UserWarning, match=r"fit\(\) makes no step: 4 of 4 steps are complete; "
                      r".*in Python with fit\(epochs=N\)"):  # fmt: skip
        trainer.fit()
    assert trainer.step == 4


def test_a_second_fit_says_so_on_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = tiny(progress=True)
    trainer.fit()
    capsys.readouterr()
    trainer.fit()
    assert "nothing left to do: 4 of 4 steps are complete" in capsys.readouterr().out


def test_a_second_fit_continues_after_a_stop() -> None:
    parts = tiny(steps=9)
    parts.callbacks.insert(0, AfterStep(lambda trainer, _: trainer.step == 3 and trainer.stop()))
    parts.fit()
    assert parts.progress.stopped
    assert 3 <= parts.step <= 4
    parts.fit()
    assert parts.step == 9
    whole = tiny(steps=9)
    whole.fit()
    for name, values in whole.parameters.items():
        np.testing.assert_array_equal(values, parts.parameters[name])
    with pytest.raises(UserError, match=r"stop\(\) has no effect, because fit\(\) is not running"):
        whole.stop()


@pytest.mark.parametrize("method", ["fit", "load"])
@pytest.mark.parametrize("event", [AfterStep, AfterEpoch])
def test_a_callback_cannot_train(method: str, event: Any) -> None:
    arguments = ("nowhere",) if method == "load" else ()
    trainer = tiny(
        epochs=2, steps=None, batch_size=600,
        callbacks=[event(lambda trainer, _: getattr(trainer, method)(*arguments))],
    )  # fmt: skip
    with pytest.raises(
        UserError, match=rf"Trainer\.{method}\(\) was called inside of Trainer\.fit"
    ):
        trainer.fit()
    trainer.callbacks.pop(0)
    trainer.fit()  # The trainer is not blocked.
    assert trainer.step == trainer.job.spec.steps


def test_a_callback_can_evaluate_predict_and_save(tmp_path: Path) -> None:
    found = []

    def use(trainer: Trainer, result: Any) -> None:
        found.append((trainer.evaluate()["loss"], trainer.predict(np.zeros((1, 8, 8), np.uint8))))
        trainer.save(tmp_path / "saved")

    trainer = tiny(callbacks=[AfterStep(use)])
    trainer.fit()
    assert len(found) == trainer.step == 4


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict", "save", "load"])
def test_another_thread_cannot_use_a_trainer_that_trains(method: str, tmp_path: Path) -> None:
    errors: list[Exception] = []
    arguments = {"predict": (np.zeros((1, 8, 8), np.uint8),), "save": (tmp_path / "a",),
                 "load": (tmp_path / "b",)}  # fmt: skip

    def use() -> None:
        try:
            getattr(trainer, method)(*arguments.get(method, ()))
        except UserError as error:
            errors.append(error)

    def start(trainer: Trainer, result: Any) -> None:
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()

    trainer = tiny(callbacks=[AfterStep(start)])
    trainer.fit()
    assert trainer.step == len(errors) == 4
    expected = rf"Trainer.{method}() was called while another thread runs Trainer.fit(); wait"
    assert all(expected in str(error) for error in errors)


@pytest.mark.parametrize("backend", tiered(["reference", "numba"], ["reference"]))
def test_threads_that_predict_wait_for_each_other(backend: str) -> None:
    network = NETWORK if backend == "reference" else dptrain.get_network("model0")
    replica = dptrain.make_replica(network, backend, batch_size=32)
    interval = sys.getswitchinterval()
    draw = np.random.default_rng(0)
    inputs = [draw.normal(size=(32, *network.input_shape)).astype("f") for _ in range(2)]
    expected = [replica.predict(x) for x in inputs]
    wrong = []

    def work(index: int) -> None:
        for _ in range(200):
            if not np.array_equal(replica.predict(inputs[index]), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


def test_a_closed_trainer_does_not_train_in_its_directory(tmp_path: Path) -> None:
    with tiny(run_dir=tmp_path / "run") as trainer:
        pass
    with pytest.raises(UserError, match=r"the trainer is closed.*use Trainer\.resume\(RUN_DIR\)"):
        trainer.fit()
    with tiny() as other:
        pass
    other.fit()
    assert other.step == 4


def test_parameters_of_another_run_do_not_enter_a_run_directory(
    trained: Trainer, tmp_path: Path
) -> None:
    trained.save(tmp_path / "saved")
    with (
        tiny(run_dir=tmp_path / "run", optimizer="adam") as trainer,
        pytest.raises(UserError, match=r"load\(\) would put parameters of other steps into"),
    ):
        trainer.load(tmp_path / "saved")


# Wrong arguments.


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Conv2d(8, kernel_size=3), "Conv2d has no argument 'kernel_size'; use kernel; "),
        (lambda: Dense(8, activation="relu"), "has no argument 'activation'; write the activation"),
        (lambda: Dense(), "Dense needs units; Dense has the arguments units, "),
        (lambda: Dense(8, unit=3), r"no argument 'unit'; did you mean 'units'\?"),
        (lambda: Dense(8, units=3), "Dense received units twice"),
        (
            lambda: dptrain.SGD(0.1),
            r"has no argument for 0.1; the learning rate is a setting: Trainer",
        ),
        (lambda: dptrain.Adam(lr=0.1), r"'lr'; the learning rate is a setting: Trainer"),
        (lambda: dptrain.Dropout(p=0.5), "'p'; use rate; Dropout has the arguments rate"),
        (lambda: dptrain.ReLU(3), "ReLU has no arguments"),
        (lambda: Network((4,), [Dense(2)], losses=1), r"'losses'; did you mean 'loss'\?"),
        (lambda: dptrain.MeanSquaredError(reduction="sum"), "'reduction'; leave it out"),
    ],
)
def test_wrong_arguments_of_descriptions(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as info:
        call()
    assert isinstance(info.value, TypeError | UserError)
    assert "\n" not in str(info.value)


METHODS = [
    *(getattr(Trainer, name) for name in ("fit", "evaluate", "predict", "save", "load", "resume")),
    *(getattr(dptrain.TrainedModel, name) for name in
      ("predict", "predict_classes", "evaluate", "save_weights", "export")),
]  # fmt: skip


def test_wrong_arguments_of_methods() -> None:
    """Too many, unknown, missing and repeated arguments are one line with the right names."""
    draw, tried = random.Random(8), 0
    for _ in range(300):
        method = draw.choice(METHODS)
        is_bound = hasattr(method, "__self__")
        named = inspect.signature(method).parameters
        args = [draw.choice((1, "x", None)) for _ in range(draw.randint(0, 4))]
        names = draw.sample([*named, "x", "y", "datas", "self_"], draw.randint(0, 3))
        kwargs = dict.fromkeys((name for name in names if name not in ("self", "settings")), 1)
        first = () if is_bound else (object(),)
        try:
            inspect.signature(method).bind(*first, *args, **kwargs)
        except TypeError:
            tried += 1
        else:
            continue
        with pytest.raises(ArgumentError) as error:
            method(*first, *args, **kwargs)
        assert str(error.value).startswith(method.__qualname__)
        assert "\n" not in str(error.value)
        own = [name for name in named if name not in ("self", "settings")]
        assert f"has the arguments {', '.join(own)}" in str(error.value)
    assert tried > 100
    with pytest.raises(ArgumentError, match=r"Trainer.resume received run_dir twice; .*directory$"):
        Trainer.resume("run", run_dir="other")
    with pytest.raises(ArgumentError, match=r"fit has no argument 'batch_size'; .*Trainer\(netw"):
        Trainer.fit(object(), batch_size=1)  # type: ignore[call-arg, arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.1}, r"no setting 'lr'; did you mean 'learning_rate'\?"),
        ({"class_weight": {}}, "'class_weight'; did you mean 'class_weights'"),
        ({"early_stopping": 3}, r"did you mean 'patience'\?"),
        ({"sampler": 3}, r"did you mean 'sampling'\?"),
        ({"balanced": True}, r"use sampling='balanced', or class_weights='balanced'"),
        ({"sample_weight": [1]}, r"fit\(x, y, sample_weight=w\)"),
        ({"num_epochs": 3}, r"did you mean 'epochs'\?"),
        ({"loss": "mse"}, "the loss belongs to the network"),
        ({"learning_rat": 3}, r"did you mean 'learning_rate'\?"),
        ({"origins": {}}, "no setting 'origins'"),
        ({"world": 1}, "world is 1; leave it out: the launcher decides about the ranks"),
        ({"optimizer": dptrain.SGD(momentum=0.1)}, r"use optimizer='sgd', momentum=0.1, and learn"),
        ({"optimizer": dptrain.Adam}, "use optimizer='adam', and learning_rate"),
    ],
)
def test_wrong_settings_of_a_trainer(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny(**options)


def test_resume_refuses_unknown_settings(trained: Trainer) -> None:
    assert trained.job.run is not None
    with pytest.raises(UserError, match=r"there is no setting 'lr'; did you mean 'learning_rate'"):
        Trainer.resume(trained.job.run.path, lr=3, progress=False)
    with pytest.raises(UserError, match="--data digits, but this run uses synthetic"):
        Trainer.resume(trained.job.run.path, "synthetic", progress=False)


def test_arrays_of_another_size_are_refused(objects: dict[str, Any]) -> None:
    draw = random.Random(3)
    tried = 0
    for _ in range(100):
        height, width = draw.randint(1, 40), draw.randint(1, 40)
        dtype = draw.choice(["f4", "f8", "u1"])
        x = np.zeros((2, height, width), dtype)
        for value in (objects["Trainer"], objects["TrainedModel"]):
            if (height, width) == (8, 8):
                assert value.predict(x).shape == (2, 10)
                continue
            for call in (value.predict, lambda x, v=value: v.evaluate((x, np.zeros(2, int)))):
                with pytest.raises(UserError, match=f"{height}×{width} pixels.*8×8 pixels of dig"):
                    call(x)
                tried += 1
    assert tried >= 200


def test_a_network_without_a_name_is_named_once() -> None:
    network = Network((1, 8, 8), [Flatten(), Dense(5)])
    with pytest.raises(UserError, match="but the network has 5 outputs") as info:
        Trainer(network, "digits", **TRAINING)
    assert "network network" not in str(info.value)


def test_tracebacks_show_public_names_of_errors() -> None:
    names = [name for name in dptrain.__all__ if name.endswith("Error") and "Squared" not in name]
    assert len(names) == 9
    for name in names:
        error = getattr(dptrain, name)
        assert issubclass(error, UserError | TimeoutError)
        assert error.__module__ == "dptrain"
    with pytest.raises(UserError) as info:
        tiny(seed=-1)
    assert traceback.format_exception_only(info.value)[0].startswith("dptrain.AgreedError: seed is")


def test_habits_of_other_libraries_are_advised() -> None:
    """Of arguments without a name, of losses that are no objects, and of data in minibatches."""
    with pytest.raises(ArgumentError, match=r"no argument for 0.1; the learning rate is a setting"):
        dptrain.SGD(0.1)  # type: ignore[misc]
    with pytest.raises(ArgumentError, match="weights of classes are a setting"):
        tiny().fit(class_weight={})  # type: ignore[call-arg]
    for loss in ("mean_squared_error", dptrain.MeanSquaredError):
        with pytest.raises(UserError, match=r"expected an object such as MeanSquaredError\(\)"):
            Network((2,), [Dense(1)], loss=loss)  # type: ignore[arg-type]

    class Loader:
        dataset, batch_size = (), 8

    with pytest.raises(
        UserError, match=r"the data is a Loader; pass its data set, loader\.dataset"
    ):
        Trainer(Network((2,), [Dense(2)]), Loader(), progress=False)


def test_objects_with_threads_are_not_copied() -> None:
    trainer = tiny()
    for each, advice in ((trainer, "use trainer.save"), (trainer.job.replica, "make_replica")):
        with pytest.raises(UserError, match=f"cannot be pickled or copied; .*{advice}"):
            copy.deepcopy(each)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("predict_proba", r"; predict\(x\) returns"), ("score", r"; evaluate\(\(x, y\)\) returns"),
        ("train", r"; call fit\(\)"), ("nothing_known", "$"),
    ],
)  # fmt: skip
def test_methods_of_other_libraries_are_answered(name: str, advice: str) -> None:
    trainer = tiny()
    assert not hasattr(trainer, name)
    with pytest.raises(AttributeError, match=rf"^Trainer has no attribute '{name}'{advice}"):
        getattr(trainer, name)


def test_classes_of_users_are_pickled_by_their_definition(tmp_path: Path) -> None:
    """Another process has not defined them; classes of dptrain are pickled by their name."""
    loss: Any = dptrain.loss("pickled_loss", "abs(y - z) * w", w=2.0)
    layer: Any = dptrain.activation("pickled_layer", "x * sigmoid(b * x)", b=0.5)
    objects = [loss, layer, loss(w=3.0), layer(b=0.25), Dense, dptrain.SoftmaxCrossEntropy]
    assert pickle.loads(pickle.dumps(objects)) == objects
    path = tmp_path / "objects.pickle"
    path.write_bytes(pickle.dumps(objects))
    code = (
        "import pickle, pathlib, sys; "
        "print([repr(each) for each in pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == repr([repr(each) for each in objects])
