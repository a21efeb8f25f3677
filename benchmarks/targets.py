"""Performance targets, and how close a measurement is to them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A target: at least `value`, or at most."""

    value: float
    at_most: bool = False

    def share(self, figure: float) -> float:
        """Return 1 or more if the target is reached, otherwise the reached share."""
        return self.value / figure if self.at_most else figure / self.value

    def verdict(self, figure: float) -> str:
        """Return ``reached``, or for example ``0.87 of target``."""
        share = self.share(figure)
        # 0.999 is not reached and must not be shown as 1.00.
        return "reached" if share >= 1.0 else f"{min(share, 0.99):.2f} of target"


TRAINING = Target(3.0)
TRAINING_DENSE = Target(1.3)
"""Perceptrons, whose time is almost only BLAS matrix products."""
INFERENCE = Target(2.0)
OTHER_INFERENCE, MEMORY_BOUND = Target(1.3), Target(1.0)
"""Compared with ONNX Runtime and OpenVINO; the second for inference that is bound by reading the
weights."""
OUTSIDE = Target(2.0)
"""Training of networks outside the benchmark set, compared with any peer."""
STAGES = {
    "convolution": Target(0.8),
    "first convolution": Target(0.6),
    "memory": Target(0.7),
}
"""Targets as shares of the sgemm peak and of the copy bandwidth."""
WEAK, STRONG = Target(0.95), Target(0.90)
THREADS = Target(1.05, at_most=True)
"""Step time of 2 threads divided by that of 2 ranks."""
MEMORY = Target(1.0, at_most=True)
"""Peak memory divided by PyTorch's."""
ALLOCATED = Target(1024.0, at_most=True)
"""Bytes allocated in a step: numbers and tuples of the interpreter, but no array."""
COLD_S, WARM_S = Target(15.0, at_most=True), Target(1.0, at_most=True)
