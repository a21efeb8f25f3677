"""Learning rates as pure functions of the step."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import ClassVar

from dptrain.errors import UserError, shown, suggest

CYCLE_RISE, CYCLE_FACTOR, CYCLE_END_FACTOR = 0.3, 25.0, 1e4
"""Schedule one-cycle: the share of steps in which the rate rises, the highest rate divided by the
first one, and the first one divided by the last one. PyTorch has the same defaults."""

SHORTEST_CYCLE = 4
"""Fewest steps of schedule one-cycle: with three, the rate would not rise."""


def scaled_rate(rate: float, rule: str, batch_size: int, reference_batch: int) -> float:
    """Return the learning rate for another batch size.

    Args:
        rate: α₀, the rate for `reference_batch`.
        rule: ``none``: α₀; ``linear``: α₀ · B / B₀; ``sqrt``: α₀ · √(B / B₀).
        batch_size: B, samples of a global minibatch.
        reference_batch: B₀.

    Sources: linear, Goyal et al., "Accurate, large minibatch SGD", 2017, section 2.1; square root,
    Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014, section 5.

    Example:
        >>> scaled_rate(0.1, "linear", 1024, 256), scaled_rate(0.1, "sqrt", 1024, 256)
        (0.4, 0.2)
    """
    ratio = batch_size / reference_batch
    return rate * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


@dataclass(frozen=True)
class Schedule:
    """Learning rate of every step: a ramp up, then constant or falling; or one cycle.

    With s the number of the step from 0, W the steps of warm-up, T all steps, α the base rate,
    α₀ the minimum and t = max(0, s − W):

    - ``constant``: d(t) = α
    - ``step``: d(t) = max(α₀, α · factorᶠ), f = ⌊t / every⌋, or the number of fractions in
      `step_at` up to s / T
    - ``cosine``: d(t) = α₀ + ½ (α − α₀) (1 + cos(π t / (T − W))), and α₀ from step T on
    - ``polynomial``: d(t) = α₀ + (α − α₀) (1 − t / (T − W))ᵖ, and α₀ from step T on
    - ``one-cycle``: no warm-up; half a cosine from α / 25 up to α at step 0.3 T − 1, then half a
      cosine down to α / 250,000 at step T − 1. The momentum is constant. As PyTorch's `OneCycleLR`
      with ``cycle_momentum=False``

    rate(s) = d(t) · min(1, (s + 1) / W); without warm-up, rate(s) = d(t).

    Sources: warm-up, Goyal et al., "Accurate, large minibatch SGD", 2017, section 2.2; step, He
    et al., "Deep residual learning", 2016, section 3.4; cosine, Loshchilov and Hutter, "SGDR",
    2017, equation 5, one period; polynomial, Chen et al., "DeepLab", 2018, section 4.1.1;
    one-cycle, Smith and Topin, "Super-convergence", 2018.

    Attributes:
        base: α, the rate after warm-up.
        kind: one of `KINDS`.
        warmup_steps: W, steps in which the rate rises from α / W to α.
        total_steps: T, the end of the schedule; not read by ``constant`` and `step_every`.
        step_every: steps between two falls; read by ``step`` alone.
        step_at: fractions of T after which the rate falls, rising; replaces `step_every`.
        step_factor: what the rate is multiplied with at each fall; read by ``step`` alone.
        minimum: α₀, which ``step``, ``cosine`` and ``polynomial`` do not fall below; only the ramp
            is lower.
        power: p; read by ``polynomial`` alone.

    Raises:
        UserError: a value out of range; the message names it.

    Example:
        >>> schedule = Schedule(0.1, "step", step_every=30, step_factor=0.5)
        >>> [schedule.rate(step) for step in (0, 29, 30, 60)]
        [0.1, 0.1, 0.05, 0.025]
    """

    KINDS: ClassVar[tuple[str, ...]] = ("constant", "step", "cosine", "polynomial", "one-cycle")
    WHOLE_RUN: ClassVar[tuple[str, ...]] = ("cosine", "polynomial", "one-cycle")
    """Kinds whose rate in every step depends on the number of all steps."""

    base: float
    kind: str = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    step_every: int = 0
    step_at: tuple[Fraction, ...] = ()
    step_factor: float = 0.1
    minimum: float = 0.0
    power: float = 1.0

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
        if self.kind == "step" and self.step_every < 1 and not self.step_at:
            raise UserError(
                f"the step schedule falls every {self.step_every} steps; expected at least 1"
            )
        if self.kind == "step" and not 0.0 < self.step_factor <= 1.0:
            raise UserError(
                f"the step schedule multiplies by {self.step_factor}; expected 0 < factor ≤ 1"
            )
        if self.kind in ("cosine", "polynomial") and self.total_steps <= self.warmup_steps:
            raise UserError(
                f"the {self.kind} schedule has {self.total_steps} steps and {self.warmup_steps} of "
                "warm-up; expected more steps than warm-up"
            )
        if self.kind == "polynomial" and not self.power > 0.0:
            raise UserError(f"the power of the schedule is {self.power}; expected above 0")
        if self.kind == "one-cycle" and self.warmup_steps:
            raise UserError(
                f"schedule one-cycle has a rise of its own, but warm-up is {self.warmup_steps} "
                "steps; expected 0"
            )
        if self.kind == "one-cycle" and self.total_steps < SHORTEST_CYCLE:
            raise UserError(
                f"the one-cycle schedule has {self.total_steps} steps; expected at least "
                f"{SHORTEST_CYCLE}"
            )

    def rate(self, step: int) -> float:
        """Learning rate of step number `step`, counted from 0."""
        ramp = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        return ramp * self._after_warmup(max(0, step - self.warmup_steps))

    def _after_warmup(self, t: int) -> float:
        if self.kind == "step":
            return max(self.minimum, self.base * self.step_factor ** self._falls(t))
        if self.kind in ("cosine", "polynomial"):
            progress = min(1.0, t / (self.total_steps - self.warmup_steps))
            if self.kind == "cosine":
                return _half_cosine(self.base, self.minimum, progress)
            return self.minimum + (self.base - self.minimum) * math.pow(1.0 - progress, self.power)
        if self.kind == "one-cycle":
            return self._in_cycle(t)
        return self.base

    def _in_cycle(self, step: int) -> float:
        """Return the rate of ``one-cycle``."""
        top, end = CYCLE_RISE * self.total_steps - 1, self.total_steps - 1
        low = self.base / CYCLE_FACTOR
        if step <= top:
            return _half_cosine(low, self.base, step / top)
        progress = min(1.0, (step - top) / (end - top))
        return _half_cosine(self.base, low / CYCLE_END_FACTOR, progress)

    def _falls(self, t: int) -> int:
        """Return how often the rate of ``step`` has fallen, `t` steps after warm-up."""
        if not self.step_at:
            return t // self.step_every
        step = t + self.warmup_steps
        return sum(step >= fraction * self.total_steps for fraction in self.step_at)


def _half_cosine(begin: float, end: float, progress: float) -> float:
    """Return the value of half a cosine from `begin` to `end`; `progress` is 0 to 1."""
    return end + 0.5 * (begin - end) * (1.0 + math.cos(math.pi * progress))


_FRACTION = re.compile(r"[\d.]{1,40}(?:/\d{1,40}|[eE][+-]?\d{1,2})?", re.ASCII)
"""A fraction, or a decimal number with an exponent of at most two digits."""


def parse_fractions(text: str) -> tuple[Fraction, ...]:
    """Return the fractions of `Schedule.step_at` from a text such as ``1/2,3/4`` or ``0.5,0.75``.

    Raises:
        UserError: the text is no list of rising fractions between 0 and 1.

    Example:
        >>> parse_fractions("1/2,0.75")
        (Fraction(1, 2), Fraction(3, 4))
    """
    parts = [part.strip() for part in text.split(",")]
    # A fraction holds all digits: 1e-999999999 has a billion of them.
    with suppress(ValueError, ZeroDivisionError):
        fractions = tuple(map(Fraction, parts)) if all(map(_FRACTION.fullmatch, parts)) else ()
        bounded = pairwise((Fraction(0), *fractions, Fraction(1)))
        if fractions and all(low < high for low, high in bounded):
            return fractions
    raise UserError(
        f"step_at is '{shown(text)}'; expected rising fractions between 0 and 1, such as 1/2,3/4"
    )
