"""Presets: every one is valid, and `--config` finds it by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from dptrain.errors import UserError
from dptrain.training.presets import find_config, presets
from dptrain.training.settings import load_settings


@pytest.mark.parametrize("preset", presets(), ids=lambda preset: preset.name)
def test_a_preset_is_a_configuration(preset: object) -> None:
    name = preset.name  # type: ignore[attr-defined]
    chosen = load_settings({}, {}, Path(name))
    assert chosen.load_network().name == chosen.network
    assert chosen.origins["batch_size"] == name
    # Flags replace its settings.
    assert load_settings({"batch_size": "7"}, {}, Path(name)).batch_size == 7


def test_published_settings() -> None:
    """Settings that the studies publish."""
    chosen = load_settings({}, {}, Path("cnn-study-model2"))
    assert (chosen.learning_rate, chosen.batch_size, chosen.momentum) == (0.00001, 32, 0.0)
    chosen = load_settings({}, {}, Path("irradiance-study-perceptron"))
    assert (chosen.optimizer, chosen.batch_size, chosen.epochs) == ("adam", 1000, 2)
    chosen = load_settings({}, {}, Path("cifar-study"))
    assert (chosen.learning_rate, chosen.batch_size, chosen.steps) == (0.1, 128, 100_000)
    assert (chosen.average_weights, chosen.data, chosen.crop) == (0.9999, "shapes?fit=crop", 4)


def test_a_file_precedes_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cifar-study").write_text("batch_size = 3\n")
    assert find_config(Path("cifar-study")) == Path("cifar-study")


def test_an_unknown_preset_is_an_error() -> None:
    with pytest.raises(UserError, match=r"no such file or preset.*did you mean 'cifar-study'"):
        load_settings({}, {}, Path("cifar-studi"))
    with pytest.raises(UserError, match=r"nothing.toml: no such file"):
        load_settings({}, {}, Path("nothing.toml"))
