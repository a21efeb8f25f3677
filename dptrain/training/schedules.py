"""Learning rates as pure functions of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from dptrain.errors import UserError, suggest


@dataclass(frozen=True)
class Schedule:
    """Learning rate of every step: a ramp up, then constant, falling by steps, or half a cosine.

    With s the number of the step from 0, W the steps of warm-up, T all steps, α the base rate,
    α₀ the minimum and t = max(0, s − W):

    - ``constant``: d(t) = α
    - ``step``: d(t) = max(α₀, α · factorᶠ), f = ⌊t / every⌋
    - ``cosine``: d(t) = α₀ + ½ (α − α₀) (1 + cos(π t / (T − W))), and α₀ from step T on

    rate(s) = d(t) · min(1, (s + 1) / W); without warm-up, rate(s) = d(t).

    Sources: warm-up, Goyal et al., "Accurate, large minibatch SGD", 2017, section 2.2; step, He
    et al., "Deep residual learning", 2016, section 3.4; cosine, Loshchilov and Hutter, "SGDR",
    2017, equation 5, one period.

    Attributes:
        base: α, the rate after warm-up.
        kind: ``constant``, ``step`` or ``cosine``.
        warmup_steps: W, steps in which the rate rises from α / W to α.
        total_steps: T, the end of the cosine; only ``cosine`` reads it.
        step_every: steps between two falls; read by ``step`` alone.
        step_factor: what the rate is multiplied with at each fall; read by ``step`` alone.
        minimum: α₀, which ``step`` and ``cosine`` do not fall below; only the ramp is lower.

    Raises:
        UserError: a value out of range; the message names it.

    Example:
        >>> schedule = Schedule(0.1, "step", step_every=30, step_factor=0.5)
        >>> [schedule.rate(step) for step in (0, 29, 30, 60)]
        [0.1, 0.1, 0.05, 0.025]
    """

    KINDS: ClassVar[tuple[str, ...]] = ("constant", "step", "cosine")

    base: float
    kind: str = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    step_every: int = 0
    step_factor: float = 0.1
    minimum: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in self.KINDS:
            raise UserError(
                f"no schedule '{self.kind}'; there are {', '.join(self.KINDS)}"
                f"{suggest(self.kind, self.KINDS)}"
            )
        if not (self.base > 0.0 and math.isfinite(self.base)):
            raise UserError(f"learning rate is {self.base}; expected a finite number above 0")
        if self.warmup_steps < 0:
            raise UserError(f"warm-up is {self.warmup_steps} steps; expected at least 0")
        if not 0.0 <= self.minimum <= self.base:
            raise UserError(
                f"minimum learning rate is {self.minimum}; expected 0 to the base rate {self.base}"
            )
        self._check_kind()

    def _check_kind(self) -> None:
        if self.kind == "step" and self.step_every < 1:
            raise UserError(
                f"the step schedule falls every {self.step_every} steps; expected at least 1"
            )
        if self.kind == "step" and not 0.0 < self.step_factor <= 1.0:
            raise UserError(
                f"the step schedule multiplies by {self.step_factor}; expected 0 < factor ≤ 1"
            )
        if self.kind == "cosine" and self.total_steps <= self.warmup_steps:
            raise UserError(
                f"the cosine schedule has {self.total_steps} steps and {self.warmup_steps} of "
                "warm-up; expected more steps than warm-up"
            )

    def rate(self, step: int) -> float:
        """Learning rate of step number `step`, counted from 0."""
        ramp = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        return ramp * self._after_warmup(max(0, step - self.warmup_steps))

    def _after_warmup(self, t: int) -> float:
        if self.kind == "step":
            return max(self.minimum, self.base * self.step_factor ** (t // self.step_every))
        if self.kind == "cosine":
            progress = min(1.0, t / (self.total_steps - self.warmup_steps))
            half_height = 0.5 * (self.base - self.minimum)
            return self.minimum + half_height * (1.0 + math.cos(math.pi * progress))
        return self.base
