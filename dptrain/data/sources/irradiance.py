r"""A simulation of cloud shadow moving over a field of irradiance sensors.

49 sensors stand in a 7×7 grid, 40 m apart, and one more 40 m downwind of the grid's edge. Once a
second each measures the irradiance; 1 is a clear sky. Clouds are a random field
that the wind moves over the sensors while it changes slowly:

g(p, t) = √(2/M) Σₘ cos(kₘ · (p − ∫v dt) + ωₘ t + φₘ),   irradiance = 1 − ¾ σ(4 g) + noise,

with wavelengths of 400 to 4,000 m and a wind of about 10 m/s whose direction and speed vary. Except
for changes of the wind and noise, the irradiance that the last sensor will measure some seconds
ahead is present over the grid now. "The present value" (persistence) is a sensible prediction, and
a network that finds the right sensors makes a better one.

A network with 50 inputs receives one row of this table. A network with 2-D inputs receives the last
50 rows as an image of 50×50, with time on the vertical axis and sensors on the horizontal one. The
setting follows the study in which 50 sensor values or 50×50 maps predict one value some seconds
ahead; the simulation is our own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dptrain.data.adaptation import adapt_request
from dptrain.data.assembly import RawSplit, make_dataset
from dptrain.data.base import Dataset
from dptrain.data.preprocessing.preprocessing import Preprocessing
from dptrain.data.spec import Request
from dptrain.data.stored import StoredInputs
from dptrain.errors import UserError
from dptrain.memory import require_memory

WINDOW = 50
GRID, SPACING_M = 7, 40.0
NUM_WAVES, SHORTEST_M, LONGEST_M = 64, 400.0, 4000.0
WIND_M_PER_S = 10.0
NOISE = 0.01
_STREAM = 0x697272
# Rough mean and deviation of the irradiance: inputs of about zero mean and unit deviation.
_MEAN, _DEVIATION = 0.625, 0.25


BYTES_PER_SECOND = 8 * (4 * NUM_WAVES + 3 * (GRID * GRID + 1))
"""Memory for the tables of the simulation, of waves and of sensors, in float64."""


def positions() -> NDArray[np.float64]:
    """Return the sensors, (50, 2) in metres: along the wind and across it; the last is separate."""
    axis = (np.arange(GRID) - GRID // 2) * SPACING_M
    grid = np.stack(np.meshgrid(axis, axis, indexing="xy"), axis=-1).reshape(-1, 2)
    return np.concatenate([grid, [[axis[-1] + SPACING_M, 0.0]]])


def simulate(seconds: int, seed: int) -> NDArray[np.float32]:
    """Return the irradiance, float32 (seconds, 50), one row per second; 1 is a clear sky."""
    key = np.array([seed % 2**64, _STREAM], dtype=np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key))
    time = np.arange(seconds, dtype=np.float64)
    speed = WIND_M_PER_S * (1.0 + 0.2 * _slow(time, generator))
    direction = 0.2 * _slow(time, generator)
    wind = speed[:, None] * np.stack([np.cos(direction), np.sin(direction)], axis=1)
    travelled = np.cumsum(wind, axis=0)

    wavelength = np.exp(generator.uniform(np.log(SHORTEST_M), np.log(LONGEST_M), NUM_WAVES))
    length = 2.0 * np.pi / wavelength
    angle = generator.uniform(0.0, 2.0 * np.pi, NUM_WAVES)
    k = length[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    omega = 0.01 * generator.standard_normal(NUM_WAVES)
    phase = generator.uniform(0.0, 2.0 * np.pi, NUM_WAVES)
    # With the addition theorem for cos(a + b), a table takes two matrix products and few cosines.
    position = positions() @ k.T
    phase_at = time[:, None] * omega - travelled @ k.T + phase
    clouds = np.cos(phase_at) @ np.cos(position).T - np.sin(phase_at) @ np.sin(position).T
    clouds *= np.sqrt(2.0 / NUM_WAVES)
    clear = 1.0 - 0.75 / (1.0 + np.exp(-4.0 * clouds))
    measured = clear + NOISE * generator.standard_normal(clear.shape)
    return np.asarray(np.maximum(measured, 0.0), dtype=np.float32)


def _slow(time: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.float64]:
    """Return a smooth random function with unit deviation and periods of some minutes."""
    periods = generator.uniform(200.0, 1000.0, 4)
    phases = generator.uniform(0.0, 2.0 * np.pi, 4)
    waves = np.cos(2.0 * np.pi * time[:, None] / periods + phases)
    return np.asarray(waves.sum(axis=1) / np.sqrt(2.0))


def open_irradiance(request: Request) -> Dataset:
    """Open rows or maps, with the value of the last sensor ``horizon`` seconds ahead as target.

    The test split follows the training split in time and has no second in common with it.
    """
    count = request.number("samples", 8192)
    horizon = request.number("horizon", 10)
    network = request.network
    is_one = network.family is not None or network.num_outputs == 1
    if network.loss.targets != "values" or not is_one:
        raise UserError(
            f"irradiance predicts one value, but {network.label} ends in "
            f"{network.num_outputs} × {network.loss.kind}; expected one output and "
            "mean_squared_error, as solar has"
        )
    num_test = max(1, count // 4)
    # A training sample's last second is the one of its target; the first test window follows it.
    first_test = count + WINDOW - 1 + horizon
    seed = request.number("seed", request.seed, minimum=0)
    seconds = first_test + num_test + WINDOW - 1 + horizon
    require_memory(seconds * BYTES_PER_SECOND, f"irradiance: samples={count:,}")
    table = simulate(seconds, seed)
    usable = len(table) - horizon
    ahead = table[horizon + WINDOW - 1 :, -1]
    inputs: StoredInputs
    if len(network.input_shape) == 1:
        inputs = table[WINDOW - 1 : usable]
        what = "rows"
    else:
        windows = np.lib.stride_tricks.sliding_window_view(table[:usable], WINDOW, axis=0)
        inputs = windows.transpose(0, 2, 1)[:, None]
        what = "maps of the last 50 s"
    shape = tuple(inputs.shape[1:])
    request = adapt_request(request, shape, [ahead], "irradiance")
    network = request.network
    preprocessing = request.preprocessing or Preprocessing(
        kind="image" if len(shape) == 3 else "vector",
        input_shape=network.input_shape,
        stored_shape=shape,
        stored_dtype="float32",
        scale=1.0 / _DEVIATION,
        offset=-_MEAN / _DEVIATION,
        horizon=horizon,
        source=request.text,
    )
    train, test = (
        RawSplit(inputs, ahead, np.arange(start, start + n))
        for start, n in ((0, count), (first_test, num_test))
    )
    origin = f"simulated cloud shadow over 50 sensors, {what}, the last sensor {horizon} s ahead"
    return make_dataset(
        request,
        train,
        test,
        preprocessing=preprocessing,
        origin=origin,
        where="irradiance",
        has_split=True,
        lazy=True,
        gap=WINDOW - 1 + horizon,
    )
