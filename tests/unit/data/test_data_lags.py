"""Tables whose samples contain earlier rows: ``lags`` and ``window``."""

from __future__ import annotations

import numpy as np
import pytest

from dptrain.data import Preprocessing, open_data
from dptrain.data.inputs import open_inputs
from dptrain.errors import UserError

ROWS, COLUMNS = 60, 3


@pytest.fixture
def table(tmp_path):
    """A table whose numbers name their rows, and its numbers."""
    numbers = np.arange(ROWS)[:, None] + np.array([0.0, 0.25, 0.5])
    lines = [",".join(map(str, [*row, 100 * index])) for index, row in enumerate(numbers.tolist())]
    (tmp_path / "t.csv").write_text("a,b,c,y\n" + "\n".join(lines) + "\n")
    return f"csv:{tmp_path / 't.csv'}?target=y", numbers


def rows_of(data, x):
    """Return the rows of the inputs, (n, L, F), which their numbers name."""
    preprocessing = data.preprocessing
    table = x.reshape(len(x), -1, COLUMNS) * preprocessing.deviation + preprocessing.mean
    return np.round(table - np.array([0.0, 0.25, 0.5])).astype(int)


def test_samples_have_the_chosen_rows_and_no_row_is_in_both_splits(net, read, table):
    spec, _ = table
    horizon, lags = 3, (5, 1, 0)
    data = open_data(f"{spec}&horizon={horizon}&lags=0,5,1", net((9,), 1, "values"))
    used = {}
    for split in ("train", "test"):
        x, y = read(data, split)
        found = rows_of(data, x)
        last = found[:, -1, 0]
        for column in range(COLUMNS):
            np.testing.assert_array_equal(found[..., column], last[:, None] - np.array(lags))
        np.testing.assert_allclose(y[:, 0], 100 * (last + horizon), rtol=1e-6)
        np.testing.assert_array_equal(np.diff(last), 1)
        used[split] = {*found.ravel().tolist(), *(last + horizon).tolist()}
    assert not used["train"] & used["test"]
    assert used["train"] | used["test"] == set(range(ROWS))


def test_a_window_is_lags_from_zero_on(net, read, table):
    network = net((12,), 1, "values")
    window, lags = (open_data(f"{table[0]}&{option}", network)
                    for option in ("window=4", "lags=0,1,2,3"))  # fmt: skip
    np.testing.assert_array_equal(read(window)[0], read(lags)[0])
    assert window.preprocessing == lags.preprocessing


def test_the_input_of_the_network_decides_about_the_arrangement(net, read, table):
    flat, map_, channels = (read(open_data(f"{table[0]}&window=4", net(shape, 1, "values")))[0]
                            for shape in ((12,), (1, 4, 3), (3, 1, 4)))  # fmt: skip
    np.testing.assert_array_equal(map_[:, 0], flat.reshape(-1, 4, 3))
    np.testing.assert_array_equal(channels[:, :, 0], flat.reshape(-1, 4, 3).transpose(0, 2, 1))


@pytest.mark.parametrize("shape", [(12,), (1, 4, 3), (3, 1, 4)])
def test_a_model_applies_its_lags(net, read, table, tmp_path, shape):
    spec, numbers = table
    network = net(shape, 1, "values")
    data = open_data(f"{spec}&horizon=2&window=4", network)
    saved = Preprocessing.from_dict(data.preprocessing.to_dict())
    assert saved == data.preprocessing
    whole = open_data(spec.partition("?")[0], network, preprocessing=saved, split=False)
    expected, targets = read(whole)
    assert len(expected) == ROWS - 3 - 2
    np.testing.assert_array_equal(saved.apply(numbers)[:-2], expected)
    np.testing.assert_array_equal(
        saved.apply(dict(zip("abc", numbers.T, strict=True)))[:-2], expected
    )
    samples = np.stack([numbers[i : i + 4] for i in range(ROWS - 3)])
    np.testing.assert_array_equal(saved.apply(samples)[:-2], expected)
    inputs = open_inputs(tmp_path / "t.csv", saved)
    assert inputs.names == tuple(map(str, range(3, ROWS)))
    assert inputs.targets[:-2] == [(str(round(value)),) for value in targets[:, 0].tolist()]
    x = np.zeros((len(inputs.samples), *shape), np.float32)
    inputs.samples.read(np.arange(len(x)), x, np.zeros(0))
    np.testing.assert_array_equal(x[:-2], expected)
    np.save(tmp_path / "x.npy", samples)
    stored = open_inputs(tmp_path / "x.npy", saved)
    stored.samples.read(np.arange(len(x)), x, np.zeros(0))
    np.testing.assert_array_equal(x[:-2], expected)


def test_the_past_of_the_target_may_predict_it(net, read, table):
    spec = f"{table[0]}&columns=y&lags=1,2"
    data = open_data(spec, net((2,), 1, "values"))
    x, y = read(data)
    rows = x * data.preprocessing.deviation[0] + data.preprocessing.mean[0]
    np.testing.assert_allclose(rows, y - [200.0, 100.0], atol=1e-2)


def test_models_without_lags_are_read(net, table):
    saved = open_data(table[0], net((3,), 1, "values")).preprocessing
    values = saved.to_dict()
    del values["lags"]
    assert Preprocessing.from_dict(values) == saved


@pytest.mark.parametrize(
    ("tail", "words"),
    [
        ("lags=0,1,1", ["'0,1,1'", "different whole numbers"]),
        ("lags=-1,0", ["'-1,0'", "different whole numbers"]),
        ("lags=0,,1", ["'0,,1'"]),
        ("lags=99999999", ["'99999999'", "1,000,000"]),
        ("window=0", ["window is '0'", "at least 1"]),
        ("window=2&lags=0", ["lags and window", "one of them"]),
        ("window=4&columns=y", ["own input", "lags without 0"]),
        ("window=4", ["4 rows × 3 columns", "(5,)", "(12,), (1, 4, 3) or (3, 1, 4)"]),
        ("window=13&columns=a", ["13 rows × 1 columns"]),
    ],
)
def test_mistakes(net, table, tail, words):
    with pytest.raises(UserError) as error:
        open_data(f"{table[0]}&{tail}", net((5,), 1, "values"))
    assert all(word in str(error.value) for word in words), error.value


def test_mistakes_of_the_length_and_of_other_lags(net, table):
    spec, _ = table
    network = net((26,), 1, "values")
    with pytest.raises(UserError, match=r"60 rows, too few .* lags of up to 12 rows; .* least 65"):
        open_data(f"{spec}&window=13&columns=a,b", network)
    network = net((24,), 1, "values")
    data = open_data(f"{spec}&window=12&columns=a,b", network)
    with pytest.raises(UserError, match=r"lags are 0,1, but .* trained with 0,1,2,3"):
        open_data(f"{spec}&lags=0,1", network, preprocessing=data.preprocessing)
    with pytest.raises(UserError, match="the input has 11 rows; expected at least 12"):
        data.preprocessing.apply(np.zeros((11, 2)))
