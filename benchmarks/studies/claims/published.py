"""Numbers that the studies published, or that their public material contains (mark R)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

STUDIES = MappingProxyType({
    "A": "four implementations of a CNN (Granada, 2024)",
    "B": "training and inference time on heterogeneous hardware (Madrid, 2019)",
    "D": "time profile of a CNN for CIFAR-10 (Mérida, 2018)",
})  # fmt: skip
"""The studies by their letter; C are two earlier drafts of A and have no results."""

EPOCH_S = MappingProxyType({"sequential": 101.0, "8 threads": 12.76})
"""An epoch of `model0`, 1,000 images (T)."""
SPEED_UP = EPOCH_S["sequential"] / EPOCH_S["8 threads"]

MODELS: Mapping[str, tuple[int, int]] = MappingProxyType({
    "smaller": (34_998, 257_896),
    "model0": (210_998, 1_827_816),
    "model1": (326_198, 2_855_400),
    "model2": (123_824, 3_565_300),
    "larger": (260_552, 9_488_004),
})  # fmt: skip
"""Parameters and multiply-adds of a forward pass, counted from the published shapes (C)."""

LAYER_MS: Mapping[str, tuple[float, float]] = MappingProxyType({
    "conv1 forward": (0.005, 0.009),
    "conv1 backward": (0.032, 0.044),
    "pool1 forward": (0.003, 0.005),
    "pool1 backward": (0.010, 0.023),
    "conv2 forward": (0.020, 0.022),
    "conv2 backward": (0.065, 0.160),
    "pool2 forward": (0.0029, 0.0039),
    "pool2 backward": (0.014, 0.025),
    "conv3 forward": (0.023, 0.018),
    "conv3 backward": (0.047, 0.018),
    "pool3 forward": (0.032, 0.023),
    "pool3 backward": (0.0057, 0.023),
})  # fmt: skip
"""Table 5.1 of study A: milliseconds with cuDNN and with its own CUDA kernels (T)."""

LOG_SECONDS: Mapping[int, float] = MappingProxyType(
    {1: 123.0, 2: 54.79, 3: 51.9, 4: 42.31, 5: 41.0, 6: 36.0, 7: 43.0, 8: 27.16}
)
"""Training in study A's development log, by threads (R)."""

SOLAR_BATCHES = (2, 8, 32, 64, 128, 256, 512, 1024, 2048)
SOLAR_S: Mapping[str, tuple[float | None, ...]] = MappingProxyType({
    "i7-5700HQ": (5550.99, 2090.52, 1273.09, 1120.41, 1106.46, 1072.85, 1032.94, None, None),
    "2 × Xeon E5-2695 v3": (3532.89, 1071.19, 507.34, 386.72, 357.53, 344.38, 340.12, 350.84,
                            None),
    "GTX 950M": (1260.94, 380.97, 162.38, 160.21, 111.54, 102.99, 107.69, None, None),
    "GTX 980": (700.19, 192.31, 70.07, 49.11, 42.56, 36.33, 32.58, 38.35, None),
    "GTX 1080": (501.95, 130.53, 46.0, 43.06, 24.41, 31.35, 20.74, 21.94, 28.95),
})  # fmt: skip
"""Seconds of an epoch of study B's CNN by batch size (R)."""


def solar_s(device: str, batch: int) -> float:
    """Return the seconds of an epoch of study B's CNN."""
    value = SOLAR_S[device][SOLAR_BATCHES.index(batch)]
    assert value is not None, f"{device} at batch {batch} was not published"
    return value


PERCEPTRON_S: Mapping[str, tuple[float | None, float | None, float | None]] = MappingProxyType({
    "mlp-50": (34.16, 9.89, 11.62),
    "mlp-100": (34.83, 12.88, 11.14),
    "mlp-200": (38.93, 15.36, 11.18),
    "mlp-400": (41.99, 17.62, 11.18),
    "mlp-800": (49.26, 24.25, 11.28),
    "mlp-1600": (71.49, 26.5, 11.33),
    "mlp-3200": (108.73, 38.95, 11.72),
    "mlp-6400": (184.01, 64.64, 13.19),
    "mlp-12800": (342.91, 115.53, 17.35),
    "mlp-25600": (705.43, 250.8, None),
    "mlp-50-25": (44.38, 13.31, 12.99),
    "mlp-100-50": (43.24, 17.27, 12.88),
    "mlp-200-100": (49.32, 20.01, 13.14),
    "mlp-400-200": (73.47, 25.28, 13.19),
    "mlp-800-400": (142.93, 37.43, 13.11),
    "mlp-1600-800": (338.86, 66.84, 14.74),
    "mlp-3200-1600": (1145.69, 161.53, 24.82),
    "mlp-6400-3200": (4207.01, 535.26, 64.09),
    "mlp-12800-6400": (None, 2071.8, 271.2),
    "mlp-50-25-13": (57.08, 15.88, None),
    "mlp-100-50-26": (52.72, 19.88, None),
    "mlp-200-100-52": (64.02, 23.95, None),
    "mlp-400-200-104": (78.76, 29.86, None),
    "mlp-800-400-208": (147.31, 44.78, None),
    "mlp-1600-800-416": (410.94, 82.85, None),
    "mlp-3200-1600-832": (1400.35, 203.02, None),
    "mlp-6400-3200-1664": (5277.21, 662.6, None),
    "mlp-12800-6400-3328": (None, 2562.18, None),
})  # fmt: skip
"""Seconds of two epochs on i7, 2 × Xeon and GTX 1080 (R)."""

PERCEPTRON_COUNTS: Mapping[str, int] = MappingProxyType({
    "mlp-50": 2_601, "mlp-100": 5_201, "mlp-200": 10_401, "mlp-400": 20_801, "mlp-800": 41_601,
    "mlp-1600": 83_201, "mlp-3200": 166_401, "mlp-6400": 332_801, "mlp-12800": 665_601,
    "mlp-25600": 1_331_201, "mlp-50-25": 3_851, "mlp-100-50": 10_201, "mlp-200-100": 30_401,
    "mlp-400-200": 100_801, "mlp-800-400": 361_601, "mlp-1600-800": 1_363_201,
    "mlp-3200-1600": 5_286_401, "mlp-6400-3200": 20_812_801, "mlp-12800-6400": 82_585_601,
    "mlp-25600-12800": 329_011_201, "mlp-50-25-13": 4_177, "mlp-100-50-26": 11_503,
    "mlp-200-100-52": 35_605, "mlp-400-200-104": 121_609, "mlp-800-400-208": 444_817,
    "mlp-1600-800-416": 1_696_033, "mlp-3200-1600-832": 6_617_665,
    "mlp-6400-3200-1664": 26_137_729, "mlp-12800-6400-3328": 103_885_057,
    "mlp-25600-12800-6656": 414_208_513,
})  # fmt: skip
"""Parameters of study B's thirty perceptrons (T, C)."""
SOLAR_PARAMETERS = 4_352_641

WIDE_AND_DEEP: Mapping[tuple[str, str], tuple[float, float, float]] = MappingProxyType({
    ("mlp-1600", "mlp-400-200"): (0.97, 1.05, 0.86),
    ("mlp-6400", "mlp-800-400"): (1.29, 1.73, 0.98),
    ("mlp-12800", "mlp-800-400-208"): (2.33, 2.58, 1.14),
    ("mlp-12800", "mlp-1600-800"): (1.01, 1.73, 1.17),
    ("mlp-25600", "mlp-1600-800"): (2.08, 3.75, 1.75),
    ("mlp-25600", "mlp-1600-800-416"): (1.72, 3.03, 1.53),
})  # fmt: skip
"""Time of a wide network ÷ that of a deeper one of like size, on i7, 2 × Xeon, GTX 980 (C)."""

INFERENCE_S: Mapping[int, tuple[float | None, float | None, float]] = MappingProxyType({
    2: (0.0043, 0.002519, 0.000185),
    64: (0.139, 0.0816, 0.006),
    512: (1.1144, 0.6415, 0.0459),
    1024: (None, 1.284, 0.093),
})  # fmt: skip
"""Seconds of a forward pass on i7, 2 × Xeon and GTX 1080; divisions, no calls (R)."""


class Variant(NamedTuple):
    """Results of a variant of study D: times in ms for 128 images.

    Attributes:
        conv_ms, share, total_ms: time of Conv2D, its share, and the sum of all operations.
        precision: precision@1 on CIFAR-10.
        parameters, multiply_adds: counted from the published shapes.
        bytes: printed by the profiler, as text, by operation; empty where they have another base.
    """

    conv_ms: float
    share: float
    total_ms: float
    precision: float
    parameters: int
    multiply_adds: int
    maps: tuple[int, int, int, int]
    bytes: Mapping[str, str] = {}


VARIANTS: Mapping[str, Variant] = MappingProxyType({
    "base": Variant(40.34, 0.7202, 56.0, 0.86, 1_068_298, 18_470_784, (24, 12, 12, 6)),
    "stride 2": Variant(
        6.54, 0.6467, 10.1, 0.796, 281_866, 1_786_752, (12, 6, 3, 2),
        {"Conv2D": "5.01 MB", "LRN": "1.47 MB", "MaxPool": "1.31 MB", "MatMul": "300.03 KB",
         "variables": "1.13 MB", "batch": "885.25 KB"},
    ),
    "stride 3": Variant(2.61, 0.5673, 4.60, 0.747, 208_138, 817_024, (8, 4, 2, 1)),
    "stride 5": Variant(1.24, 0.4369, 2.84, 0.70, 208_138, 322_624, (5, 3, 1, 1)),
    "32 filters": Variant(
        20.97, 0.7514, 27.9, 0.837, 546_666, 5_586_816, (24, 12, 12, 6),
        {"Conv2D": "11.80 MB", "LRN": "4.72 MB", "MaxPool": "2.95 MB", "MatMul": "300.03 KB",
         "variables": "2.19 MB", "batch": "885.25 KB"},
    ),
    "larger pooling": Variant(
        32.51, 0.7482, 43.4, 0.863, 1_068_298, 16_115_584, (24, 11, 11, 6),
        {"Conv2D": "22.84 MB", "LRN": "7.93 MB", "MaxPool": "5.14 MB", "MatMul": "300.03 KB",
         "variables": "4.27 MB", "batch": "885.25 KB"},
    ),
})  # fmt: skip
"""Times and precisions (T), totals (C), counts (C), bytes (T)."""

PROFILE: Mapping[str, tuple[float, float]] = MappingProxyType({
    "Conv2D": (40.34, 0.7202), "LRN": (5.78, 0.1033), "BiasAdd": (2.67, 0.0476),
    "MaxPool": (2.38, 0.0426), "Relu": (2.22, 0.0397), "MatMul": (1.57, 0.0281),
})  # fmt: skip
"""Table 4.3 of study D: milliseconds and share of the base network, for 128 images (T)."""
TRAINING_RATIO = 16.0
"""100,000 steps: about 8 h for the base, 30 minutes with stride 5 (T)."""
PROFILER_RATIO = 5.0
