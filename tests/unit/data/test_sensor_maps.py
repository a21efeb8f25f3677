"""Maps that are interpolated from the columns of a table."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

import dptrain
from dptrain import Trainer
from dptrain.data import Preprocessing, open_data
from dptrain.data.inputs import open_inputs
from dptrain.data.preprocessing.sensor_maps import interpolate, interpolation_weights
from dptrain.errors import UserError
from dptrain.network import Conv2d, Dense, Flatten, MeanSquaredError, Network
from tests.lazy import LazyModule

onnxruntime = LazyModule("onnxruntime")

POSITIONS = {"a": (0.0, 0.0), "b": (4.0, 0.0), "c": (4.0, 2.0), "y": (1.0, 1.0)}
ROWS = 40


@pytest.fixture
def files(tmp_path):
    """A specification of a table with positions, and the table's numbers."""
    numbers = np.random.default_rng(0).normal(3.0, 2.0, (ROWS, 4))
    lines = [f"12:{i}," + ",".join(map(repr, row)) for i, row in enumerate(numbers.tolist())]
    (tmp_path / "t.csv").write_text("time,a,b,c,y\n" + "\n".join(lines) + "\n")
    write_positions(tmp_path / "p.csv", POSITIONS)
    return f"maps:{tmp_path / 't.csv'},{tmp_path / 'p.csv'}?target=y", numbers


def write_positions(path, positions, header="sensor,x,y"):
    lines = [f"{name},{x},{y}" for name, (x, y) in positions.items()]
    path.write_text("\n".join([header, *lines, ""]), encoding="latin-1")


def test_pixels_on_sensors_have_their_values_and_others_are_between():
    flat = [number for position in POSITIONS.values() for number in position]
    weights = interpolation_weights(flat, 5, 9)
    np.testing.assert_allclose(weights.sum(axis=0), 1.0, rtol=1e-6)
    assert (weights >= 0).all()
    # Rows are y = 2, 1.5, …, 0, columns x = 0, 0.5, …, 4.
    for sensor, (row, column) in enumerate([(4, 0), (4, 8), (0, 8), (2, 2)]):
        assert weights[sensor, row, column] == 1.0
    squares = [(x - 2.0) ** 2 + (y - 1.0) ** 2 for x, y in POSITIONS.values()]
    expected = np.reciprocal(squares) / np.reciprocal(squares).sum()
    np.testing.assert_allclose(weights[:, 2, 4], expected, rtol=1e-6)


def test_sensors_in_a_line_fill_the_map():
    weights = interpolation_weights([0.0, 5.0, 3.0, 5.0], 3, 4)
    np.testing.assert_array_equal(weights[0, :, 0], 1.0)
    assert np.isfinite(weights).all()


def test_a_map_depends_on_its_row_only(net, read, files):
    spec, numbers = files
    data = open_data(f"{spec}&horizon=1", net((1, 6, 7), 1, "values"))
    x, y = read(data)
    np.testing.assert_allclose(y[:, 0], numbers[1:32, 3], rtol=1e-5)
    one = read(data, indices=[5])[0]
    np.testing.assert_array_equal(one[0], x[5])
    assert data.notes == ("columns without a position are left out: time",)
    preprocessing = data.preprocessing
    assert preprocessing.columns == ("a", "b", "c", "y")
    standard = (numbers[:31] - preprocessing.mean) / preprocessing.deviation
    weights = interpolation_weights(preprocessing.positions, 6, 7)
    expected = interpolate(standard.astype(np.float32), weights)
    np.testing.assert_array_equal(x[:, 0], expected)


def test_all_numeric_columns_may_be_sensors(net, files):
    spec, _ = files
    data = open_data(f"{spec}&horizon=1&columns=*", net((1, 6, 7), 1, "values"))
    assert data.preprocessing.columns == ("a", "b", "c", "y")
    assert data.notes == ("columns without numbers are left out: time ('12:0' in line 2)",)


def test_rows_of_a_sample_are_channels(net, read, files):
    spec, _ = files
    one = open_data(f"{spec}&horizon=1", net((1, 6, 7), 1, "values"))
    three = open_data(f"{spec}&horizon=1&window=3", net((3, 6, 7), 1, "values"))
    x, maps = read(three)[0], read(one)[0]
    for channel in range(3):
        np.testing.assert_array_equal(x[:, channel], maps[channel : channel + len(x), 0])


def test_the_target_is_no_input_of_its_own_row(net, files):
    assert open_data(files[0], net((1, 6, 7), 1, "values")).preprocessing.columns == ("a", "b", "c")


@pytest.mark.parametrize("tail", ["horizon=1", "horizon=1&window=3"])
def test_a_model_contains_the_positions(read, files, tmp_path, tail):
    spec, numbers = files
    shape = (3 if "window" in tail else 1, 6, 7)
    network = Network(shape, [Conv2d(2), Flatten(), Dense(1)], MeanSquaredError(), name="small")
    folder = tmp_path / "run"
    with Trainer(network, f"{spec}&{tail}", steps=2, run_dir=folder, threads=1, progress=False,
                 backend="reference") as trainer:  # fmt: skip
        trainer.fit()
    model = dptrain.load(folder, backend="reference", threads=1)
    saved = model.preprocessing
    assert Preprocessing.from_dict(saved.to_dict()) == saved
    depth = saved.rows.depth
    expected = model.predict(numbers)
    assert expected.shape == (ROWS - depth, 1)
    # The table alone, with other columns and another order, and without positions.
    (tmp_path / "o.csv").write_text(
        "y,c,b,a\n" + "\n".join(",".join(map(repr, row[::-1])) for row in numbers.tolist()) + "\n"
    )
    inputs = open_inputs(tmp_path / "o.csv", saved).samples
    x = np.zeros((len(inputs), *shape), np.float32)
    inputs.read(np.arange(len(x)), x, np.zeros(0))
    np.testing.assert_array_equal(saved.apply(numbers), x)
    assert model.evaluate(f"csv:{tmp_path / 'o.csv'}")["samples"] == ROWS - depth - 1
    raw = saved.rows.samples_of(numbers)
    model.export(tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: raw})
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    model.export(tmp_path / "m.py")
    source = importlib.util.spec_from_file_location("exported_maps", tmp_path / "m.py")
    module = importlib.util.module_from_spec(source)
    source.loader.exec_module(module)
    np.testing.assert_allclose(module.load().predict(raw).numpy(), expected, rtol=1e-5, atol=1e-6)


def test_degrees_have_the_same_length_in_both_directions(net, files, tmp_path):
    degrees = {name: (x / 10 - 158.0, y / 10 + 60.0) for name, (x, y) in POSITIONS.items()}
    write_positions(tmp_path / "p.csv", degrees, "station,Longitude,Latitude")
    data = open_data(f"{files[0]}&horizon=1", net((1, 6, 7), 1, "values"))
    x, y = np.reshape(data.preprocessing.positions, (4, 2)).T
    # Half of an equator's length at a latitude of 60°.
    np.testing.assert_allclose((x[1] - x[0]) / (y[2] - y[1]), 1.0, rtol=0.01)


@pytest.mark.parametrize(
    ("positions", "header", "tail", "words"),
    [
        (POSITIONS, "sensor,u,v", "", ["sensor, u, v", "x or longitude or lon"]),
        (POSITIONS, "what,x,y", "", ["what, x, y", "sensor or name"]),
        ({**POSITIONS, "a": ("west", 0)}, "sensor,x,y", "", ["sensor 'a'", "'west'"]),
        ({**POSITIONS, "a": (1e200, 0)}, "sensor,x,y", "", ["sensor 'a'", "-1e+100 to 1e+100"]),
        ({**POSITIONS, "a": (0, 91)}, "sensor,lon,lat", "", ["sensor 'a'", "'91'", "-90 to 90"]),
        ({**POSITIONS, "é": (0, 1)}, "sensor,x,y", "", ["cannot be read as csv", "UTF-8"]),
        ({**POSITIONS, "d": (4.0, 2.0)}, "sensor,x,y", "", ["'c' and 'd'", "same position"]),
        ({**POSITIONS, "d": (9.0, 9.0)}, "sensor,x,y", "", ["no column 'd'", "time, a, b, …"]),
        ({"a": (0, 0)}, "sensor,x,y", "", ["1 sensors", "at least 2"]),
        ({"a": (0, 0), "b": (1, 1)}, "sensor,x,y", "&columns=a,c", ["no position of sensor 'c'"]),
        (POSITIONS, "sensor,x,y", "&window=2", ["maps with 2 channels", "(1, 6, 7)", "(2, H, W)"]),
    ],
)
def test_mistakes(net, files, tmp_path, positions, header, tail, words):
    write_positions(tmp_path / "p.csv", positions, header)
    with pytest.raises(UserError) as error:
        open_data(f"{files[0]}&horizon=1{tail}", net((1, 6, 7), 1, "values"))
    assert all(word in str(error.value) for word in words), error.value


def test_other_positions_than_those_of_the_model(net, files, tmp_path):
    spec, network = f"{files[0]}&horizon=1", net((1, 6, 7), 1, "values")
    saved = open_data(spec, network).preprocessing
    assert open_data(spec, network, preprocessing=saved).preprocessing == saved
    write_positions(tmp_path / "p.csv", {**POSITIONS, "a": (0.5, 0.0)})
    with pytest.raises(UserError, match=r"other positions than the model .* use csv:"):
        open_data(spec, network, preprocessing=saved)
    with pytest.raises(UserError, match=r"names 1 files; expected maps:TABLE.csv,POSITIONS.csv"):
        open_data("maps:t.csv?target=y", network)
