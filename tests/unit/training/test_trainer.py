"""The trainer: fit, evaluate, predict, save, load, history, callbacks, and signals."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

import dptrain
from dptrain import AfterEpoch, AfterStep, Callback, Dense, Flatten, Network, Trainer, UserError
from dptrain.backends.cuda.replica import CudaReplica
from dptrain.backends.replica import Replica
from dptrain.cli.main import run
from dptrain.comm.signals import StopRequest
from dptrain.comm.world import World
from dptrain.measure.step_record import CHECKPOINT, EVALUATION, STEP
from dptrain.runs.spans import Span, Spans
from dptrain.training import run as run_module
from dptrain.training.averaging import averaged_parameters
from dptrain.training.baseline import RankAlone
from dptrain.training.engines import FIRST_TIMED, DeviceEngine
from dptrain.training.engines.device_steps import SHORT_SLOT, Staged
from dptrain.training.engines.device_times import DeviceTimes
from dptrain.training.run import makes_no_progress, train
from dptrain.training.settings import load_settings
from tests.tiers import tiered

TINY: dict[str, Any] = {"backend": "reference", "progress": False}


def arrays(samples: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return images (n, 8, 8) of three classes that a linear network tells apart."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, samples)
    x = rng.integers(0, 60, (samples, 8, 8)).astype(np.uint8)
    x[np.arange(samples), :, y * 3] += 150
    return x, y


def tiny(**settings: Any) -> Trainer:
    """Return a trainer of a linear network on arrays."""
    network = Network((1, 8, 8), [Flatten(), Dense(3)], name="linear")
    given = {"epochs": 3, "batch_size": 10, "learning_rate": 0.05, "crop": 0, **TINY, **settings}
    return Trainer(network, (*arrays(), *arrays(30, 1)), **given)


def test_five_lines_train_a_network_on_arrays() -> None:
    trainer = tiny()
    history = trainer.fit()
    assert [record["step"] for record in history] == [6, 12, 18]
    assert history["train_loss"][-1] < history["train_loss"][0]
    result = trainer.evaluate()
    assert trainer.summary is not None
    assert result["accuracy"] == trainer.summary["test_accuracy"] > 0.9
    assert result["samples"] == 30
    assert "linear on" in repr(trainer)
    assert "train_loss" in repr(history)


def test_objects_are_readable_in_a_notebook() -> None:
    trainer = tiny()
    assert repr(trainer.parameters).splitlines() == [
        "dense1.weight  (3, 64)  float64",
        "dense1.bias    (3,)  float64",
    ]
    assert "0x" not in repr(trainer.job.replica)
    assert "linear" in repr(trainer.job.replica)
    assert repr(trainer.data).startswith("<Dataset arrays: 60 training and 30 test samples")


def test_predictions_are_made_from_raw_samples() -> None:
    trainer = tiny()
    trainer.fit()
    x, y = arrays(30, 1)
    predictions = trainer.predict(x)
    assert predictions.shape == (30, 3)
    np.testing.assert_allclose(predictions.sum(axis=1), 1.0, rtol=1e-5)
    assert np.mean(predictions.argmax(axis=1) == y) == trainer.evaluate()["accuracy"]


def test_a_saved_trainer_continues_to_the_same_bits(tmp_path: Path) -> None:
    whole = tiny(momentum=0.9, optimizer="sgd", schedule="constant")
    whole.fit()

    half = tiny(momentum=0.9, optimizer="sgd", schedule="constant")
    stop_after = StopAfter(7)
    half.callbacks.insert(0, stop_after)
    with StopRequest() as stop:
        stop_after.request = stop
        half.fit(stop=stop)
    assert half.step < 18
    half.save(tmp_path / "half")

    resumed = tiny(momentum=0.9, optimizer="sgd", schedule="constant")
    resumed.load(tmp_path / "half")
    assert resumed.step == half.step
    resumed.fit()
    for name, values in whole.parameters.items():
        np.testing.assert_array_equal(resumed.parameters[name], values)


@pytest.mark.parametrize("passes", [2, 5])
def test_several_passes_train_as_one(passes: int) -> None:
    whole, parts = tiny(crop=1), tiny(crop=1, accumulate=passes)
    expected, found = whole.fit(), parts.fit()
    assert parts.job.plan.batch_size == 10 // passes
    assert parts.job.local_batch == whole.job.local_batch == 10
    np.testing.assert_allclose(found["train_loss"], expected["train_loss"], rtol=1e-12)
    for name, values in whole.parameters.items():
        np.testing.assert_allclose(parts.parameters[name], values, rtol=0, atol=1e-12)


def test_passes_of_micro_shards_train_to_the_same_bits() -> None:
    """With four passes, the sums of two are stored at the same time."""
    whole, parts = tiny(shards=4), tiny(shards=4, accumulate=4)
    assert whole.fit()["train_loss"] == parts.fit()["train_loss"]
    for name, values in whole.parameters.items():
        np.testing.assert_array_equal(parts.parameters[name], values)


def test_averaged_parameters_are_those_of_evaluations_and_files(tmp_path: Path) -> None:
    options: dict[str, Any] = {"momentum": 0.9, "optimizer": "sgd", "schedule": "constant"}
    plain, trainer = tiny(**options), tiny(**options, average_weights=0.9)
    assert trainer.predict(arrays(30, 1)[0]).shape == (30, 3)  # There is no average yet.
    plain.fit()
    trainer.fit()
    for name, values in plain.parameters.items():
        np.testing.assert_array_equal(trainer.parameters[name], values)
    average = {name: np.array(v) for name, v in trainer.job.replica.state["average"].items()}
    assert trainer.summary is not None
    assert plain.summary is not None
    result = trainer.evaluate()
    assert result["loss"] == trainer.summary["test_loss"] != plain.summary["test_loss"]
    trainer.save(tmp_path / "saved")
    loaded, x = dptrain.load(tmp_path / "saved"), arrays(30, 1)[0]
    for name, values in average.items():
        np.testing.assert_allclose(loaded.parameters[name], values, rtol=1e-6)  # In float32.
    np.testing.assert_allclose(loaded.predict(x), trainer.predict(x), rtol=1e-4)
    resumed = tiny(**options, average_weights=0.9)
    resumed.load(tmp_path / "saved")
    for name, values in average.items():
        np.testing.assert_array_equal(resumed.parameters[name], trainer.parameters[name])
        np.testing.assert_array_equal(resumed.job.replica.state["average"][name], values)
    with pytest.raises(UserError, match=r"it also has average of dense1.*optimizer settings"):
        tiny(**options).load(tmp_path / "saved")


def test_predictions_with_averaged_parameters_follow_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer, x, found = tiny(average_weights=0.9), arrays(30, 1)[0], list[Any]()
    trainer.callbacks.insert(0, AfterStep(lambda trainer, _: found.append(trainer.predict(x)), 6))
    made = list[Replica]()
    make_replica = trainer.job.backend.make_replica

    def make(*arguments: Any, **options: Any) -> Replica:
        made.append(make_replica(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(trainer.job.backend, "make_replica", make)
    trainer.fit()
    assert len(made) == 1
    assert len(found) == 3
    assert np.abs(found[0] - found[1]).max() > 1e-4
    np.testing.assert_array_equal(trainer.predict(x), found[-1])
    with averaged_parameters(World.single(), trainer.job.replica, "mirrored"):
        expected = trainer.job.replica.predict(trainer.data.preprocessing.apply(x))
    np.testing.assert_allclose(found[-1], expected, rtol=1e-5)


def test_an_evaluation_that_fails_restores_the_parameters() -> None:
    trainer = tiny(average_weights=0.9)
    trainer.fit()
    before = {name: np.array(values) for name, values in trainer.parameters.items()}

    def fail() -> None:
        with trainer._averaged_parameters():
            found = trainer.parameters
            assert any((found[name] != values).any() for name, values in before.items())
            raise RuntimeError("wrong")

    with pytest.raises(RuntimeError, match="wrong"):
        fail()
    for name, values in before.items():
        np.testing.assert_array_equal(trainer.parameters[name], values)


def test_a_run_on_arrays_is_resumed_with_the_arrays(tmp_path: Path) -> None:
    same: dict[str, Any] = {"momentum": 0.9, "schedule": "constant", "run_dir": tmp_path / "run"}
    trainer = tiny(**same)
    trainer.callbacks.insert(0, StopAfter(7))
    trainer.fit()
    trainer.close()
    assert trainer.step < 18
    with pytest.raises(UserError, match=r"data 'arrays' are Python objects.*Trainer\.resume"):
        Trainer.resume(tmp_path / "run", progress=False)
    resumed = Trainer.resume(
        tmp_path / "run", (*arrays(), *arrays(30, 1)), progress=False, backend="reference"
    )
    assert resumed.step == trainer.step
    resumed.fit()
    whole = tiny(momentum=0.9, schedule="constant")
    whole.fit()
    for name, values in whole.parameters.items():
        np.testing.assert_array_equal(resumed.parameters[name], values)


def test_a_run_is_not_resumed_with_another_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the network, and not its inputs or its parameters."""
    folder = str(tmp_path / "run")
    flags = ["train", "--network", "model0", "--steps", "1", "--evaluate-every", "0"]
    assert run([*flags, "--run-dir", folder], is_rank_zero=True) == 0
    capsys.readouterr()
    flags[2] = "model-small"
    assert run([*flags, "--resume", folder], is_rank_zero=True) == 2
    assert "with --network model0, but this run uses model-small; " in capsys.readouterr().err


def test_a_run_is_not_resumed_with_changed_data(tmp_path: Path) -> None:
    x, y = arrays()
    np.savez(tmp_path / "data.npz", x=x, y=y)
    network = Network((1, 8, 8), [Flatten(), Dense(3)], name="linear")
    given: dict[str, Any] = {"epochs": 2, "batch_size": 16, "crop": 0, **TINY}
    trainer = Trainer(network, f"npz:{tmp_path / 'data.npz'}", run_dir=tmp_path / "run", **given)
    trainer.callbacks.insert(0, StopAfter(2))
    trainer.fit()
    trainer.close()
    x[0, 0, 0] ^= 1
    np.savez(tmp_path / "data.npz", x=x, y=y)
    with pytest.raises(UserError, match=r"the data npz:.* has changed since .*\(content\)"):
        Trainer.resume(tmp_path / "run", progress=False)


def test_a_run_of_arrays_states_what_it_needs(tmp_path: Path) -> None:
    """Other names of the classes are the reason of a refusal, and no command opens arrays."""
    network, folder = Network((1, 8, 8), [Flatten(), Dense(3)], name="linear"), tmp_path / "run"
    given: dict[str, Any] = {"epochs": 1, "batch_size": 16, "crop": 0, **TINY}
    given |= {"schedule": "constant", "classes": ["c", "a", "b"], "run_dir": folder}
    with pytest.raises(UserError, match="the data has only the class a; "):
        Trainer(network, arrays(), **{**given, "classes": ["a"]})
    with Trainer(network, arrays(), **given) as trainer:
        trainer.fit()
    only = "# The data are Python objects, so only a Python program can repeat the run."
    assert (folder / "config.toml").read_text().splitlines()[0] == only
    for classes, found in ((None, r"'0', '1', '2'"), (["a", "b", "c"], r"'a', 'b', 'c'")):
        with pytest.raises(UserError, match=rf"are \['c', 'a', 'b'\], but those of the data arrays "
                           rf"are \[{found}\]; restore them, .* classes=\['c'"):  # fmt: skip
            Trainer.resume(folder, arrays(), classes=classes, epochs=2, progress=False)
    with Trainer.resume(
        folder, arrays(), classes=["c", "a", "b"], epochs=2, progress=False
    ) as trainer:
        trainer.fit()
    first, second, *_ = (folder / "config.toml").read_text().splitlines()
    assert first.endswith("To repeat it in Python, with its data and the settings of:")
    assert "dptrain train --config" in second


class StopAfter(Callback):
    """Request a stop after a number of steps."""

    def __init__(self, steps: int) -> None:
        self.steps, self.request = steps, StopRequest()

    def on_step(self, trainer: Trainer, result: Any) -> None:
        if trainer.step == self.steps:
            signal.raise_signal(signal.SIGTERM)


def test_a_stopped_fit_can_be_called_again() -> None:
    trainer = tiny()
    trainer.callbacks.insert(0, StopAfter(4))
    trainer.fit()
    assert trainer.progress.stopped
    assert trainer.step < 18
    trainer.fit()
    assert trainer.step == 18
    whole = tiny()
    whole.fit()
    for name, values in whole.parameters.items():
        np.testing.assert_array_equal(trainer.parameters[name], values)


def test_a_stop_request_in_the_last_step_stops_nothing(tmp_path: Path) -> None:
    """A resumed run would have no step left, and would keep results without the test data."""
    trainer = tiny(run_dir=tmp_path / "run", validation=0.2)
    last = trainer.spec.job.steps
    trainer.callbacks.insert(0, StopAfter(last - 1))
    trainer.fit()
    assert (trainer.step, trainer.progress.stopped) == (last, False)
    assert trainer.summary is not None
    assert trainer.summary["selected_step"] > 0
    assert trainer.summary["test_loss"] > 0.0


@pytest.mark.more
def test_a_stop_request_when_training_ends_early_stops_nothing() -> None:
    trainer = tiny(validation=0.2, patience=1, learning_rate=1e-20)
    steps = trainer.spec.job.epoch_steps
    trainer.callbacks.insert(0, StopAfter(2 * steps - 1))
    trainer.fit()
    assert (trainer.step, trainer.progress.stopped) == (2 * steps, False)
    assert trainer.summary is not None
    assert trainer.summary["test_loss"] > 0.0


def test_a_trained_model_is_loaded_without_its_data(tmp_path: Path) -> None:
    trainer = tiny(run_dir=tmp_path / "run")
    trainer.fit()
    trainer.close()
    x, _ = arrays(5, 2)
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-00000018"):
        model = dptrain.load(path, backend="reference")
        np.testing.assert_allclose(model.predict(x), trainer.predict(x), rtol=1e-4, atol=1e-6)
        assert model.step == 18
        assert "linear" in repr(model)
    trainer.save(tmp_path / "saved")
    assert dptrain.load(tmp_path / "saved", backend="reference").step == 18


def test_callbacks_run_after_steps_and_epochs() -> None:
    steps, epochs = list[int](), list[float]()
    callbacks = [
        AfterStep(lambda trainer, result: steps.append(result.step + 1), every=5),
        AfterEpoch(lambda trainer, record: epochs.append(record["epoch"])),
    ]
    tiny(callbacks=callbacks).fit()
    assert steps == [5, 10, 15]
    assert epochs == [1, 2, 3]


def test_the_run_directory_holds_the_specification(tmp_path: Path) -> None:
    trainer = tiny(run_dir=tmp_path / "run", seed=4)
    trainer.fit()
    found = json.loads((tmp_path / "run" / "spec.json").read_text())
    assert found["digest"] == trainer.spec.digest
    assert found["job"]["seed"] == 4
    assert found["origins"]["seed"] == "argument"
    assert found["origins"]["momentum"] == "recipe"
    # Each layer has its own weight decay.
    assert [name for name, value in found["job"].items() if value is None] == ["weight_decay"]
    assert found["preprocessing"] == trainer.data.preprocessing.to_dict()
    assert "seed = 4  # argument" in (tmp_path / "run" / "config.toml").read_text()
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "train_accuracy" in metrics


@pytest.mark.more
def test_without_a_run_directory_no_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny().fit()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epoch": 3}, "no setting 'epoch'; did you mean 'epochs'?"),
        ({"batch_size": 0}, "batch_size is 0; expected a whole number of at least 1"),
        ({"learning_rate": "fast"}, "learning_rate is 'fast'; expected a number"),
    ],
)
def test_mistakes_name_the_setting(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        tiny(**settings)
    assert message in str(caught.value)


def test_a_diverging_run_names_step_and_layer() -> None:
    trainer = tiny(
        learning_rate=1e30, weight_decay=1e6, schedule="constant", epochs=10, backend="numba"
    )
    message = r"the loss is \S+ at step \d+, first in .*`dptrain find-rate`"
    with pytest.raises(UserError, match=message):
        trainer.fit()


# Signals before the first step.


def run_with_signal(
    folder: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch, **flags: str
) -> dict[str, Any]:
    """Train, and receive a signal while the job is assembled."""
    original = run_module.Trainer.from_settings

    def from_settings(*arguments: Any, **options: Any) -> Any:
        signal.raise_signal(number)
        return original(*arguments, **options)

    monkeypatch.setattr(run_module.Trainer, "from_settings", from_settings)
    small = {"network": "mlp-50-25", "data": "irradiance?samples=64", "backend": "reference"}
    same = {**small, "baseline_steps": "0", "steps": "50", "run_dir": str(folder), **flags}
    train(load_settings(same, {}), World.single())
    return dict(json.loads((folder / "summary.json").read_text()))


@pytest.mark.more
def test_a_warning_before_training_stops_after_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    summary = run_with_signal(folder, signal.SIGUSR1, monkeypatch)
    assert (summary["stopped"], summary["steps"]) == (True, 1)
    monkeypatch.undo()
    with pytest.raises(UserError, match="SIGUSR1 stopped two starts in a row after one step each"):
        run_with_signal(folder, signal.SIGUSR1, monkeypatch, resume=str(folder))
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["stopped"], summary["steps"]) == (True, 2)
    monkeypatch.undo()
    # `scancel` and preemption end jobs early, too, but say nothing of the time limit.
    summary = run_with_signal(folder, signal.SIGTERM, monkeypatch, resume=str(folder))
    assert (summary["stopped"], summary["steps"]) == (True, 3)


@hypothesis.given(strategies.lists(strategies.integers(1, 3), min_size=1, max_size=8))
def test_two_starts_of_one_step_in_a_row_are_found(steps: list[int]) -> None:
    spans, step, before = Spans(), 0, 4
    for number in steps:
        spans = spans.followed_by(Span(step + 1, {}))
        step += number
        assert makes_no_progress(spans, step) == (before == number == 1)
        before = number


def test_ctrl_c_before_training_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_with_signal(tmp_path / "run", signal.SIGINT, monkeypatch)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("backend", ["numba", "cuda"])
def test_pixels_from_memory_and_from_files_train_the_same_parameters(
    tmp_path: Path, backend: str
) -> None:
    """Cached images, and minibatches that reach the replica as 8-bit pixels."""
    x, y = arrays(40)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    np.savez(tmp_path / "xy.npz", x=x, y=y)
    network = Network((1, 6, 6), [Flatten(), Dense(3)], name="linear")
    found = []
    for data, cache in (("npz:xy.npz", 0.5), ("npy:x.npy,y.npy", 0.5), ("npy:x.npy,y.npy", 0.0)):
        name, _, files = data.partition(":")
        paths = ",".join(str(tmp_path / file) for file in files.split(","))
        trainer = Trainer(
            network, f"{name}:{paths}?fit=crop", backend=backend, epochs=3, batch_size=10, crop=2,
            flip=True, brightness=0.2, contrast=0.3, learning_rate=0.05, threads=1,
            device_cache=cache, progress=False,
        )  # fmt: skip
        trainer.fit()
        is_cached = name == "npz" or (backend == "cuda" and cache > 0)
        assert (trainer.job.cached_samples is not None) == is_cached
        assert trainer.job.streams_pixels == (not is_cached)
        found.append(trainer.parameters["dense1.weight"])
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@pytest.mark.parametrize("mixing", [{"mixup": 0.5}, {"cutmix": 1.0}], ids=["mixup", "CutMix"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_gpu_mixes_cached_and_streamed_images_as_the_host_does(
    tmp_path: Path, mixing: dict[str, float], accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters are equal, and so are those of a run that continues within an epoch."""
    x, y = arrays(43)
    np.savez(tmp_path / "xy.npz", x=x, y=y)
    network = Network((1, 5, 5), [Flatten(), Dense(3)], name="linear")
    found = []
    for mixes, cache in ((False, 0.5), (True, 0.5), (True, 0.0)):
        monkeypatch.setattr(CudaReplica, "mixes_images", mixes)
        settings = {
            "backend": "cuda", "epochs": 3, "batch_size": 10, "crop": 1, "flip": True,
            "contrast": 0.3, "cutout": 2, "learning_rate": 0.05, "accumulate": accumulate,
            "device_cache": cache, "progress": False, **mixing,
        }  # fmt: skip
        run = tmp_path / f"{mixes}-{cache}"
        data = f"npz:{tmp_path / 'xy.npz'}?fit=crop"
        trainer = Trainer(network, data, run_dir=run, stop_after=6, **settings)
        trainer.fit()
        assert (trainer.job.cached_samples is not None) == (mixes and cache > 0)
        assert trainer.job.streams_pixels == (mixes and cache == 0)
        with Trainer.resume(run, progress=False) as continued:
            continued.fit()
            found.append(continued.parameters["dense1.weight"])
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


def test_images_of_another_size_stay_8_bit_pixels_on_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached, streamed, and resized on the host: the parameters and the scores are equal."""
    x, y = arrays(40)
    np.savez(tmp_path / "xy.npz", x=x, y=y)
    network = Network((1, 5, 9), [Flatten(), Dense(3)], name="linear")
    found = []
    for cache, resizes in ((0.5, True), (0.0, True), (0.5, False)):
        monkeypatch.setattr(CudaReplica, "resizes_images", resizes)
        trainer = Trainer(
            network, f"npz:{tmp_path / 'xy.npz'}", backend="cuda", epochs=3, batch_size=10, crop=2,
            flip=True, brightness=0.2, contrast=0.3, learning_rate=0.05, evaluate_every=1,
            device_cache=cache, progress=False, validation=0.2,
        )  # fmt: skip
        trainer.fit()
        replica = trainer.job.replica
        assert isinstance(replica, CudaReplica)
        assert trainer.job.streams_pixels == (cache == 0.0)
        assert replica.cached_images.dtype == (np.uint8 if resizes else np.float32)
        assert replica.cached_images.shape[2:] == (x.shape[1:3] if resizes else (5, 9))
        losses = [record["validation_loss"] for record in trainer.history]
        found.append((trainer.parameters["dense1.weight"], losses))
    for parameters, losses in found[1:]:
        np.testing.assert_array_equal(parameters, found[0][0])
        assert losses == found[0][1]


# Times of an emulated GPU.


def fit_on_gpu(**settings: Any) -> Trainer:
    trainer = Trainer("mlp-5", backend="cuda", batch_size=8, progress=False, **settings)
    trainer.fit()
    return trainer


@pytest.mark.parametrize("steps", [10, 40])
def test_steps_before_the_captured_ones_are_not_measured(steps: int) -> None:
    trainer = fit_on_gpu(data="irradiance?samples=640", steps=steps)
    summary = trainer.summary
    assert summary is not None
    in_flight = trainer.job.engine.max_steps_in_flight
    timed = steps > FIRST_TIMED
    expected = steps - FIRST_TIMED - 1 - in_flight if timed else steps
    assert summary["step_ms"]["n"] == expected
    assert (summary["parts"] is not None) == (len(summary["stages"]) > 0) == timed
    assert all(stage["time_ms"]["n"] == 1 for stage in summary["stages"])


@pytest.mark.parametrize("backend", ["cuda", "reference"])
def test_only_whole_minibatches_count_in_the_baseline(backend: str) -> None:
    """51 samples make six minibatches of eight and a smaller one: six of any seven steps count."""
    trainer = Trainer(
        "mlp-5", "irradiance?samples=51", backend=backend, batch_size=8, baseline_steps=7,
        progress=False,
    )  # fmt: skip
    alone = RankAlone(trainer.job, 8)
    # The first block has a longer warm-up.
    assert len(alone.time_steps(7)) == 6
    assert len(alone.time_steps(14)) == 12


@pytest.mark.parametrize(
    ("samples", "first"),
    # With 80 samples all minibatches are whole; with 85 the 11th is smaller; with 17 every third
    # is, and with 9 every other one, so that whole ones have two slots and one.
    tiered([(80, 10), (85, 11), (17, 10), (9, 10)], [(17, 10)]),
)
def test_the_first_timed_step_is_whole_and_captured(
    samples: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed, original = list[int](), DeviceTimes.record

    def record(self: DeviceTimes, step: Any) -> None:
        timed.append(step._recorder.steps)
        original(self, step)

    monkeypatch.setattr(DeviceTimes, "record", record)
    trainer = fit_on_gpu(data=f"irradiance?samples={samples}", steps=40, evaluate_every=0)
    assert timed == [first]
    assert trainer.summary is not None
    assert len(trainer.summary["stages"]) > 0
    assert all(stage["time_ms"]["n"] == 1 for stage in trainer.summary["stages"])


@pytest.mark.more
def test_the_short_minibatch_of_an_epoch_has_one_slot() -> None:
    """Its graph is valid for one slot, and every epoch would otherwise capture another one."""
    trainer = Trainer(
        "mlp-5", "irradiance?samples=41", backend="cuda", batch_size=8, progress=False, epochs=5,
        evaluate_every=0,
    )  # fmt: skip
    slots = list[tuple[int, int]]()
    engine = trainer.job.engine
    assert isinstance(engine, DeviceEngine)
    original = engine.steps.enqueue

    def enqueue(staged: Staged) -> None:
        if staged.series is None:
            slots.append((staged.batch.global_count, staged.slot))
        original(staged)

    engine.steps.enqueue = enqueue  # type: ignore[method-assign]
    trainer.fit()
    assert {slot for count, slot in slots if count < 8} == {SHORT_SLOT}
    assert len({slot for count, slot in slots if count == 8}) == 4
    on_host = Trainer(
        "mlp-5", "irradiance?samples=41", backend="reference", batch_size=8, progress=False,
        epochs=5, evaluate_every=0,
    )  # fmt: skip
    expected = [record["train_loss"] for record in on_host.fit()]
    found = [record["train_loss"] for record in trainer.history]
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_an_epoch_ends_without_a_wait_unless_the_parameters_are_read(tmp_path: Path) -> None:
    def waits(*callbacks: Callback, **settings: Any) -> bool:
        trainer = tiny(callbacks=list(callbacks), **settings)
        steps = trainer.job.spec.epoch_steps
        assert not trainer._needs_parameters(steps + 1)
        return trainer._needs_parameters(steps)

    assert not waits(evaluate_every=0)
    assert not waits(evaluate_every=1)
    assert waits(evaluate_every=1, validation=0.2)
    assert waits(AfterEpoch(lambda trainer, record: None), evaluate_every=0)
    assert waits(evaluate_every=0, run_dir=tmp_path / "run")
    assert not waits(evaluate_every=0, run_dir=tmp_path / "other", checkpoint_every=100)


def test_trainer_and_saved_model_predict_the_same_from_named_columns(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 40))
    lines = ["a,b,y", *(f"{p:.6f},{q:.6f},{20 * p:.6f}" for p, q in zip(a, b, strict=True))]
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    network = Network((2,), [Dense(1)], loss=dptrain.MeanSquaredError(), name="line")
    data = f"csv:{tmp_path / 'table.csv'}?target=y"
    trainer = Trainer(network, data, steps=20, learning_rate=0.1, **TINY)
    trainer.fit()
    trainer.save(tmp_path / "new" / "folder")
    model = dptrain.load(tmp_path / "new" / "folder", backend="reference")
    columns = {"b": b[:5], "a": a[:5]}
    np.testing.assert_array_equal(trainer.predict(columns), model.predict(columns))
    assert trainer.predict(columns).shape == (5, 1)
    with pytest.raises(UserError, match="no most probable class"):
        model.predict_classes(columns)


def test_predict_accepts_images_of_different_sizes() -> None:
    images = [np.zeros((8, 8), np.uint8), np.zeros((9, 7), np.uint8)]
    assert tiny(steps=1, epochs=None).predict(images).shape == (2, 3)


def test_binary_networks_predict_the_names_of_classes(tmp_path: Path) -> None:
    x = np.linspace(-3, 3, 40)[:, None]
    loss = dptrain.SigmoidBinaryCrossEntropy()
    network = Network((1,), [Dense(1)], loss=loss, name="logistic")
    trainer = Trainer(network, (x, x[:, 0] > 0), steps=60, learning_rate=1.0, **TINY)
    trainer.fit()
    model = dptrain.load(trainer.save(tmp_path / "saved"), backend="reference")
    assert model.predict_classes([[-3.0], [3.0]]) == ["0", "1"]


@pytest.mark.parametrize("callbacks", [print, [print], AfterStep(lambda trainer, result: None)])
def test_wrong_callbacks_are_refused_at_once(callbacks: Any) -> None:
    with pytest.raises(UserError, match="expected a list of Callback objects"):
        tiny(callbacks=callbacks)


def test_after_step_refuses_an_interval_of_zero() -> None:
    with pytest.raises(UserError, match="every is 0; expected a whole number of at least 1"):
        AfterStep(lambda trainer, result: None, every=0)


def test_tensorboard_needs_a_run_directory() -> None:
    with pytest.raises(UserError, match="set run_dir too"):
        tiny(tensorboard=True)


def test_settings_may_be_numpy_scalars() -> None:
    job = tiny(epochs=None, steps=np.int64(3), learning_rate=np.float32(0.5)).spec.job
    assert (job.steps, job.learning_rate) == (3, 0.5)
    assert type(job.steps) is int
    assert type(job.learning_rate) is float
    with pytest.raises(UserError, match=r"batch_size is 2\.0"):
        tiny(batch_size=np.float64(2.0))


def test_the_specification_is_readable() -> None:
    lines = repr(tiny().spec).splitlines()
    assert any(line.split() == ["batch_size", "10", "argument"] for line in lines)
    assert max(map(len, lines)) < 120


@pytest.mark.more
def test_history_documents_its_columns() -> None:
    from dptrain.training import history

    source = Path(history.__file__).read_text(encoding="utf-8")
    for name in tiny(epochs=1).fit().names:
        assert f"`{name}`" in source, name


def test_a_dry_run_refuses_what_a_resume_refuses(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Trainer("mlp-5", "irradiance?samples=64", run_dir=folder, epochs=1, **TINY) as trainer:
        trainer.fit()
    same = load_settings({"resume": str(folder)}, {})
    run_module.dry_run(same, World.single())
    other = load_settings({"resume": str(folder), "seed": 3}, {})
    with pytest.raises(UserError, match="was trained with --seed 0"):
        run_module.dry_run(other, World.single())


def separable(count: int = 96) -> tuple[np.ndarray, np.ndarray]:
    """Pictures whose class is their brightness."""
    y = np.arange(count) % 2
    x = np.random.default_rng(0).normal(size=(count, 1, 4, 4)).astype(np.float32)
    return x + 4 * y[:, None, None, None].astype(np.float32), y


def train_until(accuracy: float, **settings: Any) -> Trainer:
    network = Network((1, 4, 4), [Flatten(), Dense(2)], name="bright")
    given = {"validation": 0.2, "until_accuracy": accuracy, "epochs": 40, **settings}
    trainer = Trainer(
        network, separable(), batch_size=8, progress=False, backend="reference", **given
    )
    trainer.fit()
    return trainer


def test_training_ends_at_the_first_evaluation_with_the_accuracy(tmp_path: Path) -> None:
    trainer = train_until(0.9, run_dir=tmp_path / "run")
    assert trainer.summary is not None
    found = trainer.summary["time_to_accuracy"]
    assert found["reached"]
    assert found["accuracy"] >= 0.9
    assert trainer.step == found["steps"] < trainer.job.spec.steps
    assert found["epochs"] == len(trainer.history) == trainer.step / trainer.job.spec.epoch_steps
    assert found["samples"] == found["epochs"] * len(trainer.data.train)
    earlier = [record["validation_accuracy"] for record in trainer.history[:-1]]
    assert all(accuracy < 0.9 for accuracy in earlier)
    recorder = trainer.job.recorder
    column = dict(zip(recorder.names, recorder.rows().sum(axis=0) / 1e9, strict=True))
    steps_s = column[STEP]
    between_s = sum(recorder.totals_ns.values()) / 1e9 - column[EVALUATION] - column[CHECKPOINT]
    assert 0 < found["time_s"] <= steps_s
    assert between_s > 0  # The last evaluation and the checkpoint belong to no step.
    assert not trainer.summary["stopped"]
    assert (tmp_path / "run" / "checkpoints").is_dir()


def test_a_resumed_run_that_reached_the_accuracy_makes_no_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    with train_until(0.9, run_dir=folder) as first:
        reached = first.step
        with pytest.warns(UserWarning, match="fit.. makes no step: the validation accuracy"):
            first.fit()
        assert first.step == reached
    before = (folder / "summary.json").read_text()
    capsys.readouterr()
    with Trainer.resume(folder, separable()) as again:
        again.fit()
        assert again.step == reached
    assert (folder / "summary.json").read_text() == before
    assert "nothing left to do: the validation accuracy after step" in capsys.readouterr().out
    # A run that was killed before it wrote its summary.
    (folder / "summary.json").unlink()
    with Trainer.resume(folder, separable(), progress=False) as killed:
        with pytest.warns(UserWarning, match="fit.. makes no step: the validation accuracy"):
            killed.fit()
        assert killed.step == reached
        assert killed.summary is not None
        assert killed.summary["time_to_accuracy"]["steps"] == reached
    with Trainer.resume(
        folder, separable(), progress=False, until_accuracy=1.0, evaluate_every=5
    ) as higher:
        higher.fit()
        assert higher.step > reached


@pytest.mark.more
def test_an_accuracy_that_is_not_reached_makes_all_steps() -> None:
    trainer = train_until(1.0, learning_rate=1e-9)
    assert trainer.summary is not None
    assert trainer.step == trainer.job.spec.steps
    found = trainer.summary["time_to_accuracy"]
    assert found == {
        "requested": 1.0, "reached": False, "accuracy": None, "epochs": None, "steps": None,
        "samples": None, "time_s": None,
    }  # fmt: skip


def test_accuracies_need_evaluations_and_classes() -> None:
    with pytest.raises(UserError, match="try --evaluate-every 1"):
        train_until(0.9, evaluate_every=0)
    with pytest.raises(UserError, match="needs validation data, but arrays has none"):
        train_until(0.9, validation=None)
    with pytest.raises(UserError, match="predicts values"):
        Trainer("mlp-8", "irradiance?samples=200", epochs=1, progress=False, until_accuracy=0.9)


@pytest.mark.parametrize("name", ["classifier-8", "model0", "mlp-8"])
def test_a_named_network_does_not_open_the_data_of_its_recipe(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the data of the recipe was opened")

    monkeypatch.setattr("dptrain.training.job.open_data", refuse)
    rng = np.random.default_rng(0)
    shape = (1, 12, 12) if name == "model0" else (4,)
    x, y = rng.normal(size=(40, *shape)).astype(np.float32), np.arange(40) % 2
    trainer = Trainer(name, epochs=1, backend="reference", progress=False)
    assert repr(trainer) == "Trainer(without data yet)"
    trainer.fit(x, y)
    assert trainer.data.name == "arrays"
    with pytest.raises(UserError, match="would replace the data"):
        trainer.fit(x, y)


def test_a_named_network_trains_on_the_data_of_its_recipe() -> None:
    data = Trainer("mlp-8", epochs=1, backend="reference", progress=False).data
    assert data.name == "irradiance"
    for name in ("resnet18", "classifier-8", "multilabel-8"):
        with pytest.raises(UserError, match=r"no data yet; call fit\(x, y\), or pass the data"):
            Trainer(name, progress=False).fit()


def test_a_rank_alone_does_not_open_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening data needs all ranks, so that reading an attribute on one would wait for ever."""
    trainer = Trainer("mlp-8", progress=False, world=World.single())
    monkeypatch.setattr(trainer._world, "size", 2)
    with pytest.raises(UserError, match=r"has no data yet; call fit\(\), or fit\(x, y\), or pass"):
        trainer.parameters  # noqa: B018


def test_a_history_is_a_table_of_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    history = dptrain.History()
    history.append({"epoch": 1, "train_loss": 0.5})
    history.append({"epoch": 2, "validation_loss": 0.7})
    columns = {"epoch": [1, 2], "train_loss": [0.5, None], "validation_loss": [None, 0.7]}
    assert history.columns() == columns
    pandas = ModuleType("pandas")
    monkeypatch.setattr(pandas, "DataFrame", lambda columns: ("table", columns), raising=False)
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    assert history.frame() == ("table", columns)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="needs pandas, which is not installed: pip install pandas"):
        history.frame()
