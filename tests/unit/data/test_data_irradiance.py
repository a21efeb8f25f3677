"""The simulated sensor field: worth learning from, and fair."""

import numpy as np
import pytest

from dptrain.api import make_replica
from dptrain.data import Loader, Sampler, open_data
from dptrain.data.sources.irradiance import simulate
from dptrain.network import Dense, MeanSquaredError, Network, ReLU
from dptrain.plan import Adam


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


def test_the_test_begins_in_the_second_after_the_last_training_target(net, read):
    data = open_data("irradiance?samples=80&horizon=4", net((1, 50, 50), 1, "values"))
    table = simulate(300, 0)
    first = read(data, "test", [0])[0][0, 0, 0] * 0.25 + 0.625
    row = int(np.argmin(abs(table - first).max(axis=1)))
    np.testing.assert_allclose(first, table[row], atol=1e-6)
    assert read(data)[1][-1, 0] == table[row - 1, -1]


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


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("horizon", [1, 5, 10])
def test_least_squares_beats_persistence_and_that_beats_the_mean(net, read, seed, horizon):
    spec = f"irradiance?samples=8000&horizon={horizon}"
    data = open_data(spec, net((50,), 1, "values"), seed=seed)
    (x, y), (later, ahead) = read(data), read(data, "test")
    x, later = (np.column_stack([a, np.ones(len(a))]).astype(np.float64) for a in (x, later))
    weights = np.linalg.lstsq(x, y[:, 0], rcond=None)[0]
    error = np.mean((later @ weights - ahead[:, 0]) ** 2)
    now = later[:, 49] * 0.25 + 0.625
    persistence = np.mean((now - ahead[:, 0]) ** 2)
    assert error < 0.5 * persistence
    assert persistence < 0.8 * ahead.var()


def test_a_perceptron_trained_on_it_beats_persistence(read):
    # 800 steps of Adam: still getting better (0.45 of persistence, 0.27 after 2,000).
    layers = [Dense(50), ReLU(), Dense(1)]
    network = Network((50,), layers, loss=MeanSquaredError(), name="mlp-50")
    data = open_data("irradiance", network)
    replica = make_replica(network, backend="reference", batch_size=100, optimizer=Adam())
    sampler = Sampler(len(data.train), batch_size=100, seed=0)
    with Loader(data.train, sampler, range(800), (50,), (1,)) as batches:
        for batch in batches:
            replica.forward_backward(batch.x, batch.y)
            replica.update(0.003)
    x, y = read(data, "test")
    persistence = np.mean((x[:, -1] * 0.25 + 0.625 - y[:, 0]) ** 2)
    assert np.mean((replica.forward(x) - y) ** 2) < 0.7 * persistence
