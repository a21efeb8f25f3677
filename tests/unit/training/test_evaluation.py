"""Evaluation and prediction: the load kernel converts 8-bit pixels, and workers decode files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dptrain
from dptrain import Dense, Flatten, MeanSquaredError, Network, Trainer
from dptrain.comm.world import World
from dptrain.data.stored import CachedSamples, StoredSamples
from dptrain.training.evaluation import evaluation
from dptrain.training.evaluation.evaluation import evaluate_model, pixel_batches_of, score
from dptrain.training.evaluation.prediction import predict_to_file

SHAPE = 3, 8, 8
NETWORK = Network(SHAPE, [Flatten(), Dense(2)], name="pictures")


def arrays(size: int = 8, count: int = 50) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (count, 3, size, size), dtype=np.uint8)
    return x, np.arange(count) % 2


def converted_score(trainer: Trainer) -> Any:
    """Return the score by inputs that the host has converted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "pixel_batches_of", lambda *_: None)
        return score(trainer.job.replica, trainer.data.test, World.single())


@pytest.mark.parametrize("backend", ["numba", "cuda"])
@pytest.mark.parametrize("cache", [0.5, 0.0], ids=["cached", "streamed"])
def test_scores_from_pixels_and_from_inputs_are_equal(
    backend: str, cache: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dptrain.data.stored.HOST_SHARE", cache)
    settings: dict[str, Any] = {
        "backend": backend, "steps": 12, "batch_size": 8, "crop": 1, "contrast": 0.2,
        "device_cache": cache, "progress": False,
    }  # fmt: skip
    trainer = Trainer(NETWORK, arrays(), evaluate_every=1, **settings)
    assert isinstance(trainer.data.test, CachedSamples if cache else StoredSamples)
    trainer.fit()
    replica, test = trainer.job.replica, trainer.data.test
    assert pixel_batches_of(replica, test, np.arange(3)) is not None
    found = score(replica, test, World.single())
    assert found == converted_score(trainer)
    assert trainer.summary is not None
    assert found.loss == trainer.summary["test_loss"]
    # An evaluation between two steps changes neither of them.
    other = Trainer(NETWORK, arrays(), evaluate_every=0, **settings)
    other.fit()
    for name, values in other.parameters.items():
        np.testing.assert_array_equal(trainer.parameters[name], values)


@pytest.mark.parametrize("kind", ["images", "resized images", "vectors", "few bytes"])
@pytest.mark.parametrize("keeps", [True, False])
def test_a_device_keeps_the_images_of_the_validation_data(kind: str, keeps: bool) -> None:
    x, y = arrays(11 if kind == "resized images" else 8)
    network = NETWORK
    if kind == "vectors":
        x, network = x.reshape(len(x), 192), Network((192,), [Dense(2)], name="vectors")
    if kind == "few bytes":  # Values are checked when they are read.
        x = x // 16
    trainer = Trainer(
        network, (x, y), backend="cuda", validation=0.3, steps=4, batch_size=8, progress=False,
        device_cache=0.5 if keeps else 0.0,
    )  # fmt: skip
    trainer.fit()
    job, validation = trainer.job, trainer.data.validation
    assert validation is not None
    assert job.validation_at == (len(trainer.data.train) if keeps else None)
    for change in (1.0, 1.0, 2.0):
        name = next(iter(job.replica.parameters))
        job.replica.parameters[name] = change * job.replica.parameters[name]
        found = score(job.replica, validation, World.single(), first=job.validation_at)
        assert found == score(job.replica, validation, World.single())
    assert found.samples == len(validation)
    # The other samples are not those of the validation data.
    assert found.loss != score(job.replica, trainer.data.test, World.single()).loss


@pytest.mark.parametrize("backend", ["numba", "cuda", "reference"])
def test_a_loaded_model_evaluates_images_that_are_cropped(backend: str, tmp_path: Path) -> None:
    x, y = arrays(11)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    data = f"npz:{tmp_path / 'data.npz'}?fit=crop"
    trainer = Trainer(NETWORK, data, steps=3, backend="reference", progress=False)
    trainer.fit()
    trainer.save(tmp_path / "saved")
    found = dptrain.load(tmp_path / "saved", backend=backend).evaluate()
    expected = converted_score(trainer)
    assert found["samples"] == expected.samples
    np.testing.assert_allclose(found["loss"], expected.loss, rtol=1e-3)


def test_vectors_of_bytes_are_pixels_too() -> None:
    x, y = arrays(count=30)
    network = Network((192,), [Dense(1)], MeanSquaredError(), "vectors")
    trainer = Trainer(network, (x.reshape(30, 192), y / 1.0), steps=3, progress=False)
    trainer.fit()
    assert pixel_batches_of(trainer.job.replica, trainer.data.test, np.arange(3)) is not None
    assert score(trainer.job.replica, trainer.data.test, World.single()) == converted_score(trainer)


@pytest.mark.more
def test_workers_decode_for_evaluation_and_prediction(tmp_path: Path) -> None:
    from PIL import Image

    random = np.random.default_rng(1)
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(6):
            pixels = random.integers(0, 256, (9 + i, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{i}.png")
    data = f"folder:{tmp_path / 'images'}"
    trainer = Trainer(NETWORK, data, steps=2, batch_size=4, backend="reference", progress=False)
    trainer.fit()
    trainer.save(tmp_path / "saved")
    model, world = dptrain.load(tmp_path / "saved", backend="reference"), World.single()
    results, files = [], []
    for workers in (0, 2):
        results.append(evaluate_model(model, data, world, workers=workers)[0])
        output = tmp_path / f"{workers}.csv"
        predict_to_file(model, [tmp_path / "images"], output, world, workers=workers)
        files.append(output.read_text())
    assert results[0] == results[1]
    assert files[0] == files[1]
    assert len(files[0].splitlines()) == 13


def test_a_test_image_that_cannot_be_read_leaves_a_complete_run(tmp_path: Path) -> None:
    """One epoch reads each file once, those of the test after training."""
    from PIL import Image

    for split, count in (("train", 4), ("test", 2)):
        for kind, value in (("dark", 40), ("light", 220)):
            folder = tmp_path / "images" / split / kind
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("L", (8, 8), value).save(folder / f"{number}.png")
    broken = tmp_path / "images" / "test" / "dark" / "1.png"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:40])
    trainer = Trainer(
        "model-small", f"folder:{tmp_path}/images", backend="reference", epochs=1, batch_size=4,
        run_dir=tmp_path / "run", progress=False,
    )  # fmt: skip
    with pytest.raises(
        dptrain.UserError, match=r"1\.png cannot be read.*; training is complete: .*/run$"
    ):
        trainer.fit()
    broken.write_bytes(whole)
    assert dptrain.load(tmp_path / "run").evaluate()["samples"] == 4
