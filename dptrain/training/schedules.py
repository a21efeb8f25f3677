"""Learning rates as functions of the step.

A schedule is a function and a row in `SCHEDULES`, at the end of this file. The choices of
``--schedule``, its help text and the documentation follow from the table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dptrain.errors import UserError, shown, suggest
from dptrain.setting_groups import (
    Known,
    SettingGroup,
    UntilRecipe,
    UntilStart,
    first,
    no_effect,
    setting,
)

if TYPE_CHECKING:
    from dptrain.network.zoo.recipes import Recipe

CYCLE_RISE, CYCLE_FACTOR, CYCLE_END_FACTOR = 0.3, 25.0, 1e4
"""Schedule one-cycle: the share of steps in which the rate rises, the highest rate divided by the
first one, and the first one divided by the last one. PyTorch has the same defaults."""

SHORTEST_CYCLE = 4
"""Fewest steps of schedule one-cycle: with three, the rate would not rise."""


SCALE_RULES: dict[str, Callable[[float], float]] = {
    "none": lambda ratio: 1.0,
    "linear": lambda ratio: ratio,
    "sqrt": math.sqrt,
}
"""Factors of the learning rate by their rule, functions of B / B₀; see `scaled_rate`."""


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
    return rate * SCALE_RULES[rule](batch_size / reference_batch)


@dataclass(frozen=True)
class Schedule:
    """Learning rate of every step: a ramp up, then constant or falling; or one cycle.

    With s the number of the step from 0, W the steps of warm-up, d(t) the function of the kind and
    t = max(0, s − W):

    rate(s) = d(t) · min(1, (s + 1) / W); without warm-up, rate(s) = d(t).

    A kind that depends on the number of all steps begins anew after `start` steps: s and T are
    counted from there.

    Source of the warm-up: Goyal et al., "Accurate, large minibatch SGD", 2017, section 2.2.

    Attributes:
        base: α, the rate after warm-up.
        kind: a key of `SCHEDULES`, whose functions have the equations.
        warmup_steps: W, steps in which the rate rises from α / W to α.
        total_steps: the end of the schedule, T if `start` is 0.
        start: steps of a run before its length was changed, see `Kind.uses_total`.
        step_every: steps between two falls; read by ``step`` alone.
        step_at: fractions of T after which the rate falls, rising; replaces `step_every`.
        step_factor: what the rate is multiplied with at each fall by ``step`` and ``plateau``, and
            in the whole run by ``exponential``.
        minimum: α₀, which ``step``, ``plateau``, ``cosine``, ``polynomial`` and ``exponential`` do
            not fall below; only the ramp is lower.
        power: p; read by ``polynomial`` alone.
        reductions: falls so far; read by ``plateau`` alone.
        function: f, from progress to a factor of α; read by ``function`` alone.
        fixed: the rate of every step, which a callback has set; None follows the schedule.

    Raises:
        UserError: a value out of range; the message names it.

    Example:
        >>> schedule = Schedule(0.1, "step", step_every=30, step_factor=0.5)
        >>> [schedule.rate(step) for step in (0, 29, 30, 60)]
        [0.1, 0.1, 0.05, 0.025]
    """

    base: float
    kind: str = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    step_every: int = 0
    step_at: tuple[Fraction, ...] = ()
    step_factor: float = 0.1
    minimum: float = 0.0
    power: float = 1.0
    start: int = 0
    reductions: int = 0
    function: Callable[[float], float] | None = None
    fixed: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise UserError(
                f"no schedule '{self.kind}'; there are {', '.join(SCHEDULES)}"
                f"{suggest(self.kind, SCHEDULES)}"
            )
        if not (self.base > 0.0 and math.isfinite(self.base)):
            raise UserError(f"learning rate is {self.base}; expected a finite number above 0")
        if self.warmup_steps < 0:
            raise UserError(f"warm-up is {self.warmup_steps} steps; expected at least 0")
        if not 0.0 <= self.minimum <= self.base:
            raise UserError(
                f"minimum learning rate is {self.minimum}; expected 0 to the base rate {self.base}"
            )
        if self.warmup_steps and not SCHEDULES[self.kind].warms_up:
            raise UserError(
                f"schedule {self.kind} has a rise of its own, but warm-up is {self.warmup_steps} "
                "steps; expected 0"
            )
        check = SCHEDULES[self.kind].check
        if check is not None:
            check(self)

    def rate(self, step: int) -> float:
        """Learning rate of step number `step`, counted from 0."""
        if self.fixed is not None:
            return self.fixed
        step -= self.begin
        ramp = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        return ramp * SCHEDULES[self.kind].rate(self, max(0, step - self.warmup_steps))

    def sample(self) -> list[float]:
        """Return 11 values of `function`, by which ranks compare it; none without a function."""
        if self.function is None:
            return []
        return [float(self.function(tenth / 10)) for tenth in range(11)]

    @property
    def begin(self) -> int:
        """Number of steps of the run before the schedule begins."""
        return self.start if SCHEDULES[self.kind].uses_total or self.step_at else 0

    @property
    def length(self) -> int:
        """T, the number of steps from the begin of the schedule to its end."""
        return self.total_steps - self.begin


@dataclass(frozen=True)
class Kind:
    """A kind of schedule.

    Attributes:
        rate: returns d(t), see `Schedule`.
        summary: what the rate does, in a few words for help texts and the documentation.
        check: raises `UserError` if values of the schedule do not fit; None checks nothing more.
        own_settings: settings that no other kind allows; their default is None.
        uses_total: True if the rate in every step depends on the number of all steps.
        warms_up: False if the schedule has a rise of its own.
    """

    rate: Callable[[Schedule, int], float]
    summary: str
    check: Callable[[Schedule], None] | None = None
    own_settings: tuple[str, ...] = ()
    uses_total: bool = False
    warms_up: bool = True


def _constant(schedule: Schedule, t: int) -> float:
    """d(t) = α."""
    return schedule.base


def _step(schedule: Schedule, t: int) -> float:
    """d(t) = max(α₀, α · factorᶠ), f = ⌊t / every⌋, or the fractions in `step_at` up to s / T.

    Source: He et al., "Deep residual learning", 2016, section 3.4.
    """
    if schedule.step_at:
        step = t + schedule.warmup_steps
        falls = sum(step >= fraction * schedule.length for fraction in schedule.step_at)
    else:
        falls = t // schedule.step_every
    return max(schedule.minimum, schedule.base * schedule.step_factor**falls)


def _check_step(schedule: Schedule) -> None:
    if schedule.step_every < 1 and not schedule.step_at:
        raise UserError(
            f"the step schedule falls every {schedule.step_every} steps; expected at least 1"
        )
    _check_factor(schedule)


def _check_factor(schedule: Schedule) -> None:
    if not 0.0 < schedule.step_factor <= 1.0:
        raise UserError(
            f"the {schedule.kind} schedule multiplies by {schedule.step_factor}; "
            "expected 0 < factor ≤ 1"
        )


def _plateau(schedule: Schedule, t: int) -> float:
    """d(t) = max(α₀, α · factorʳ), after r reductions, see `dptrain.training.selection`.

    PyTorch's `ReduceLROnPlateau` with ``patience`` one less and ``threshold=0`` has these rates.
    """
    return max(schedule.minimum, schedule.base * schedule.step_factor**schedule.reductions)


def _cosine(schedule: Schedule, t: int) -> float:
    """d(t) = α₀ + ½ (α − α₀) (1 + cos(π t / (T − W))), and α₀ from step T on.

    Source: Loshchilov and Hutter, "SGDR", 2017, equation 5, one period.
    """
    return _half_cosine(schedule.base, schedule.minimum, _progress(schedule, t))


def _polynomial(schedule: Schedule, t: int) -> float:
    """d(t) = α₀ + (α − α₀) (1 − t / (T − W))ᵖ, and α₀ from step T on.

    Source: Chen et al., "DeepLab", 2018, section 4.1.1.
    """
    low, left = schedule.minimum, 1.0 - _progress(schedule, t)
    return low + (schedule.base - low) * math.pow(left, schedule.power)


def _exponential(schedule: Schedule, t: int) -> float:
    """d(t) = max(α₀, α · factor^(t / (T − W))), the same factor in every step.

    Source: Tan and Le, "EfficientNet", 2019, section 5.2, with the factor of a whole run.
    """
    factor = math.pow(schedule.step_factor, _progress(schedule, t))
    return max(schedule.minimum, schedule.base * factor)


def _check_exponential(schedule: Schedule) -> None:
    _check_length(schedule)
    _check_factor(schedule)


def _progress(schedule: Schedule, t: int) -> float:
    """Return t / (T − W), at most 1."""
    return min(1.0, t / (schedule.length - schedule.warmup_steps))


def _check_length(schedule: Schedule) -> None:
    if schedule.length <= schedule.warmup_steps:
        raise UserError(
            f"the {schedule.kind} schedule has {schedule.length} steps and "
            f"{schedule.warmup_steps} of warm-up; expected more steps than warm-up"
        )


def _check_polynomial(schedule: Schedule) -> None:
    _check_length(schedule)
    if not schedule.power > 0.0:
        raise UserError(f"the power of the schedule is {schedule.power}; expected above 0")


def _one_cycle(schedule: Schedule, t: int) -> float:
    """Half a cosine from α / 25 up to α at step 0.3 T − 1, then half a cosine down to α / 250,000.

    It ends at step T − 1. The momentum is constant, as in PyTorch's `OneCycleLR` with
    ``cycle_momentum=False``. Source: Smith and Topin, "Super-convergence", 2018.
    """
    top, end = CYCLE_RISE * schedule.length - 1, schedule.length - 1
    low = schedule.base / CYCLE_FACTOR
    if t <= top:
        return _half_cosine(low, schedule.base, t / top)
    progress = min(1.0, (t - top) / (end - top))
    return _half_cosine(schedule.base, low / CYCLE_END_FACTOR, progress)


def _check_one_cycle(schedule: Schedule) -> None:
    if schedule.length < SHORTEST_CYCLE:
        raise UserError(
            f"the one-cycle schedule has {schedule.length} steps; expected at least "
            f"{SHORTEST_CYCLE}"
        )


def _function(schedule: Schedule, t: int) -> float:
    """d(t) = α · f(t / (T − W)), for a function f of the user."""
    return _rate_of_function(schedule, _progress(schedule, t))


def _rate_of_function(schedule: Schedule, progress: float) -> float:
    assert schedule.function is not None
    factor = schedule.function(progress)
    try:
        rate = schedule.base * float(factor)
    except (TypeError, ValueError):
        rate = math.nan
    if not 0.0 <= rate < math.inf:
        raise UserError(
            f"the schedule function returned {shown(repr(factor))} for progress {progress:g}; "
            "expected a factor of the learning rate, a finite number of at least 0"
        )
    return rate


def _check_function(schedule: Schedule) -> None:
    if schedule.function is None:
        raise UserError(
            "schedule 'function' needs a function in Python: Trainer(..., schedule=f) or "
            "Trainer.resume(RUN_DIR, schedule=f), where f(progress) is a factor of the learning "
            "rate and progress is 0 at first and 1 at the end"
        )
    _check_length(schedule)
    for tenth in range(11):
        _rate_of_function(schedule, tenth / 10)


def _half_cosine(begin: float, end: float, progress: float) -> float:
    """Return the value of half a cosine from `begin` to `end`; `progress` is 0 to 1."""
    return end + 0.5 * (begin - end) * (1.0 + math.cos(math.pi * progress))


SCHEDULES = {
    "constant": Kind(_constant, "the same in every step"),
    "step": Kind(
        _step,
        "multiplied by --step-factor every --step-every steps, or at --step-at 1/2,3/4 of the run",
        _check_step,
        own_settings=("step_every", "step_at"),
    ),
    "plateau": Kind(
        _plateau,
        "multiplied by --step-factor after --plateau-patience evaluations without an improvement",
        _check_factor,
        own_settings=("plateau_patience",),
    ),
    "cosine": Kind(_cosine, "half a cosine that ends at 0", _check_length, uses_total=True),
    "polynomial": Kind(
        _polynomial,
        "falls to 0 as (1 − progress)^p; --power is p, 1 is a straight line",
        _check_polynomial,
        uses_total=True,
    ),
    "exponential": Kind(
        _exponential,
        "multiplied by the same number in every step, and in all steps by --step-factor",
        _check_exponential,
        uses_total=True,
    ),
    "one-cycle": Kind(
        _one_cycle,
        "rises from a 25th to --learning-rate in 30% of the steps, and falls to a 250,000th",
        _check_one_cycle,
        uses_total=True,
        warms_up=False,
    ),
    "function": Kind(
        _function,
        "a function of the progress, only in Python",
        _check_function,
        uses_total=True,
    ),
}
"""Every kind of schedule by its name."""

OWN_SETTINGS = tuple(name for kind in SCHEDULES.values() for name in kind.own_settings)
"""Settings that only one kind allows."""


@dataclass(frozen=True)
class ScheduleSettings(SettingGroup[UntilRecipe, UntilStart]):
    """The learning rate and its schedule."""

    learning_rate: float | UntilRecipe = setting(
        "optimisation", None, "Learning rate after warm-up.", above=0
    )
    scale_rate: str = setting(
        "optimisation",
        "none",
        "Multiply the learning rate by --batch-size / --reference-batch (linear) or by its square "
        "root (sqrt).",
        choices=tuple(SCALE_RULES),
    )
    reference_batch: int | UntilRecipe = setting(
        "optimisation",
        None,
        "Batch size for which the learning rate is meant.",
        at_least=1,
    )
    schedule: str | UntilRecipe = setting(
        "optimisation",
        None,
        "Learning-rate schedule. "
        + "; ".join(f"{name}: {kind.summary}" for name, kind in SCHEDULES.items())
        + ".",
        choices=tuple(SCHEDULES),
    )
    warmup_steps: int = setting(
        "optimisation",
        0,
        "Steps in which the learning rate rises linearly to its value.",
        at_least=0,
    )
    step_every: int | UntilRecipe = setting(
        "optimisation",
        None,
        "Steps between two reductions by schedule step.",
        otherwise="none",
        unset=0,
        at_least=1,
    )
    step_at: str | UntilRecipe = setting(
        "optimisation",
        None,
        "Fractions of all steps after which schedule step reduces the rate, such as 1/2,3/4; "
        "replaces --step-every.",
        unset="",
    )
    plateau_patience: int | UntilRecipe = setting(
        "optimisation",
        None,
        "Evaluations without an improvement by --best-by after which schedule plateau reduces the "
        "rate.",
        otherwise="10 for schedule plateau",
        unset=0,
        at_least=1,
    )
    step_factor: float | UntilRecipe = setting(
        "optimisation",
        None,
        "Factor of a reduction by schedule step or plateau, of all steps by exponential.",
        above=0,
        at_most=1,
    )
    power: float = setting(
        "optimisation", 1.0, "Exponent of schedule polynomial; 1 is a straight line.", above=0
    )

    def refuse_contradictions(self) -> None:
        super().refuse_contradictions()
        for kind, row in SCHEDULES.items():
            for name in row.own_settings:
                value = getattr(self, name)
                # The recipe selects a schedule that is not set.
                if self.schedule not in (kind, None) and value:
                    raise UserError(no_effect(name, value, "schedule", self.schedule, (kind,)))
        if self.step_at and self.step_every:
            raise UserError(
                f"step_every is {self.step_every} and step_at is {self.step_at}; set only one of "
                "the two"
            )
        if self.step_at is not None:
            parse_fractions(self.step_at)
        warms_up = self.schedule is None or SCHEDULES[self.schedule].warms_up
        if self.warmup_steps and not warms_up:
            raise UserError(
                f"warmup_steps is {self.warmup_steps}, but schedule {self.schedule} has a rise "
                "of its own; remove one of the two"
            )

    def from_recipe(self, recipe: Recipe) -> dict[str, Any]:
        filled = super().from_recipe(recipe)
        schedule = first(self.schedule, recipe.schedule)
        step_at: str | None = self.step_at
        if schedule == "step" and step_at is None and self.step_every is None:
            step_at = recipe.step_at
            if step_at is None:
                raise UserError(
                    "schedule is 'step' but neither step_every nor step_at is set; try "
                    "--step-at 1/2,3/4"
                )
        # The factor of a whole run is none of a reduction.
        is_meant = "exponential" not in (schedule, recipe.schedule) or schedule == recipe.schedule
        factor = recipe.step_factor if is_meant else Schedule.step_factor
        return {
            **filled,
            "learning_rate": first(self.learning_rate, recipe.learning_rate),
            "reference_batch": first(self.reference_batch, recipe.batch_size),
            "schedule": schedule,
            "step_at": step_at,
            "plateau_patience": (
                first(self.plateau_patience, 10) if schedule == "plateau" else self.plateau_patience
            ),
            "step_factor": first(self.step_factor, factor),
        }

    def peak_rate(self: ScheduleSettings[Known, UntilStart], batch_size: int) -> float:
        """Return the learning rate after warm-up, scaled to the batch size."""
        return scaled_rate(self.learning_rate, self.scale_rate, batch_size, self.reference_batch)

    def make_schedule(
        self: ScheduleSettings[Known, UntilStart],
        batch_size: int,
        total_steps: int,
        function: Callable[[float], float] | None = None,
    ) -> Schedule:
        """Return the schedule of a run.

        Args:
            batch_size: samples of a global minibatch.
            total_steps: updates of the whole run.
            function: as in `Schedule`.
        """
        return Schedule(
            kind=self.schedule,
            base=self.peak_rate(batch_size),
            warmup_steps=self.warmup_steps,
            total_steps=total_steps,
            step_every=self.step_every,
            step_at=parse_fractions(self.step_at),
            step_factor=self.step_factor,
            power=self.power,
            function=function,
        )


_FRACTION = re.compile(r"[\d.]{1,40}(?:/\d{1,40}|[eE][+-]?\d{1,2})?", re.ASCII)
"""A fraction, or a decimal number with an exponent of at most two digits."""


def parse_fractions(text: str) -> tuple[Fraction, ...]:
    """Return the fractions of `Schedule.step_at` from a text such as ``1/2,3/4`` or ``0.5,0.75``.

    An empty text has none.

    Raises:
        UserError: the text is no list of rising fractions between 0 and 1.

    Example:
        >>> parse_fractions("1/2,0.75")
        (Fraction(1, 2), Fraction(3, 4))
    """
    if not text:
        return ()
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
