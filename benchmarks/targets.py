"""What is to be reached, and how far a figure is from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A number to reach: at least `value`, or at most."""

    value: float
    at_most: bool = False

    def share(self, figure: float) -> float:
        """1 or more where reached; else how much of the target it is."""
        return self.value / figure if self.at_most else figure / self.value

    def verdict(self, figure: float) -> str:
        """``reached``, or ``0.87 of target``."""
        share = self.share(figure)
        # 0.999 is not reached, and must not read 1.00.
        return "reached" if share >= 1.0 else f"{min(share, 0.99):.2f} of target"


TRAINING = Target(3.0)
TRAINING_DENSE = Target(1.3)
"""Perceptrons, where matrix products of a BLAS are nearly all there is."""
INFERENCE = Target(2.0)
STAGES = {
    "convolution": Target(0.8),
    "first convolution": Target(0.6),
    "memory": Target(0.7),
}
"""Shares of the sgemm peak, and of the copy bandwidth."""
WEAK, STRONG = Target(0.95), Target(0.90)
THREADS = Target(1.05, at_most=True)
"""Step time of 2 threads over that of 2 ranks."""
MEMORY = Target(1.0, at_most=True)
"""Of PyTorch's peak."""
ALLOCATED = Target(1024.0, at_most=True)
"""Bytes in a step: the interpreter's own numbers and tuples, but no array."""
COLD_S, WARM_S = Target(15.0, at_most=True), Target(1.0, at_most=True)
