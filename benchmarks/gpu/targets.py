"""Performance targets on an H200."""

from __future__ import annotations

from benchmarks.targets import Target

STEP_US = {
    (network, 32): Target(us, at_most=True)
    for network, us in
    {"model0": 45.0, "model1": 55.0, "model2": 70.0, "cifar": 150.0, "solar": 130.0}.items()
}  # fmt: skip
"""Time of a training step in µs, by network and batch size."""

SMALL_BATCH = 32
FASTER_SMALL, FASTER = Target(3.0), Target(2.0)
"""Speedup over the fastest mode of PyTorch."""

WIDE_CHANNELS = 64
WIDE_CONVOLUTION = Target(0.6)
"""Share of the GEMM rate for convolutions with at least `WIDE_CHANNELS` filters."""
WIDE_BATCH = 2048

INFERENCE = {batch_size: Target(2.0) for batch_size in (1, 32, 1024)}
"""Throughput of inference divided by that of the best peer, by batch size."""

DATA_SHARE, DATA_FASTER = Target(0.95), Target(4.0)
STREAM_SHARE = Target(0.9)
"""Speed of training on augmented images as a share of that of the bare step, and speedup over
PyTorch with images and augmentation on the GPU."""

FP32_ERROR = Target(1.0, at_most=True)
"""Error of a layer in fp32 divided by that of PyTorch."""

OWN_KERNEL = Target(1.0, at_most=True)
"""Time of a layer by `cuda` over its time by `cudnn`."""

WEAK = {32: Target(0.80), 1024: Target(0.97)}
"""Weak-scaling efficiency by samples per GPU."""

RANK_STEP_US = {("model0", 32, 8): Target(75.0, at_most=True)}
"""Time of a step in µs by network, samples per GPU and number of GPUs."""
RANK_FASTER = Target(3.0)
"""Speedup over the faster of PyTorch's programs, in the same cases."""

FP32_SMALL, FP32 = Target(2.0), Target(2.5)
"""The same in fp32."""

SHAPES = {
    **dict.fromkeys(("vgg", "input113"), Target(2.5)),
    **dict.fromkeys(("strided", "odd", "lenet5"), Target(2.0)),
    "perceptron": Target(1.3),
    **dict.fromkeys(("resnet20", "resnet18-cifar"), Target(1.5)),
    "resnet50": Target(1.0),
}
"""The same in tf32 and bf16 for networks outside the benchmark set."""
RESIDUAL = ("resnet20", "resnet18-cifar", "resnet50")
SHAPES_FP32 = {"vgg": Target(1.7), **{name: SHAPES[name] for name in RESIDUAL}}


def faster(network: str, batch_size: int, precision: str) -> Target | None:
    """Return the target of the speedup over PyTorch, if there is one."""
    if network in SHAPES:
        return (SHAPES_FP32 if precision == "fp32" else SHAPES).get(network)
    if precision == "fp32":
        return FP32_SMALL if batch_size <= SMALL_BATCH else FP32
    return FASTER_SMALL if batch_size <= SMALL_BATCH else FASTER
