"""The simulated sensor field: worth learning from, and fair."""

import numpy as np
import pytest

from dptrain.data import open_data
from dptrain.data.irradiance import simulate


def test_a_row_is_fifty_sensors_and_a_map_the_last_fifty_rows(net, read):
    rows = open_data("irradiance?samples=40&horizon=3", net((50,), 1, "values"))
    maps = open_data("irradiance?samples=40&horizon=3", net((1, 50, 50), 1, "values"))
    for split in ("train", "test"):
        (x, y), (windows, same) = read(rows, split), read(maps, split)
        np.testing.assert_array_equal(windows[:, 0, -1], x)
        np.testing.assert_array_equal(y, same)
        # Time runs downwards: the next sample's map has moved up by one row.
        np.testing.assert_array_equal(windows[1:, 0, :-1], windows[:-1, 0, 1:])


def test_the_target_is_the_last_sensor_some_seconds_ahead(net, read):
    data = open_data("irradiance?samples=40&horizon=4", net((50,), 1, "values"))
    x, y = read(data)
    now = x[:, -1] * 0.25 + 0.625
    np.testing.assert_allclose(y[:-4, 0], now[4:], atol=1e-6)


def test_test_seconds_are_never_seen_in_training(net, read):
    data = open_data("irradiance?samples=80&horizon=4", net((1, 50, 50), 1, "values"))
    seen = {row.tobytes() for window in read(data)[0][:, 0] for row in window}
    tested = {row.tobytes() for window in read(data, "test")[0][:, 0] for row in window}
    assert not seen & tested
    assert read(data)[1].max() not in read(data, "test")[1]


def test_values_are_those_of_a_sky(net, read):
    table = simulate(5000, 0)
    assert table.shape == (5000, 50)
    assert table.min() >= 0.0
    assert table.max() < 1.1
    # Clear and overcast both happen.
    assert np.quantile(table, 0.1) < 0.4
    assert np.quantile(table, 0.9) > 0.9
    x, _ = read(open_data("irradiance", net((50,), 1, "values")))
    assert abs(x.mean()) < 0.5
    assert 0.5 < x.std() < 2.0


def test_the_seed_decides(net, read):
    np.testing.assert_array_equal(simulate(50, 3), simulate(50, 3))
    assert (simulate(50, 3) != simulate(50, 4)).any()
    network = net((50,), 1, "values")
    by_run = read(open_data("irradiance?samples=9", network, seed=3))
    by_spec = read(open_data("irradiance?samples=9&seed=3", network, seed=5))
    np.testing.assert_array_equal(by_run[0], by_spec[0])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("horizon", [5, 10, 20])
def test_least_squares_beats_persistence_and_that_beats_the_mean(net, read, seed, horizon):
    spec = f"irradiance?samples=4000&horizon={horizon}"
    data = open_data(spec, net((50,), 1, "values"), seed=seed)
    (x, y), (later, ahead) = read(data), read(data, "test")
    bias = lambda a: np.column_stack([a, np.ones(len(a))])  # noqa: E731
    weights = np.linalg.lstsq(bias(x.astype(np.float64)), y[:, 0], rcond=None)[0]
    error = np.mean((bias(later) @ weights - ahead[:, 0]) ** 2)
    persistence = np.mean((later[:, -1] * 0.25 + 0.625 - ahead[:, 0]) ** 2)
    assert error < 0.5 * persistence
    assert persistence < 2.0 * ahead.var()
