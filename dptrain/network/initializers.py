"""Distributions of initial parameters, as descriptions; `initial` draws from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dptrain.arguments import NamedArguments
from dptrain.errors import UserError


@dataclass(frozen=True)
class He(metaclass=NamedArguments):
    """Normal(0, sqrt(2 / fan_in)).

    Source: He et al., "Delving deep into rectifiers", 2015, equation 10.
    """

    def deviation(self, fan_in: int) -> float:
        """Standard deviation for a unit with `fan_in` inputs."""
        return math.sqrt(2.0 / fan_in)


@dataclass(frozen=True)
class Normal(metaclass=NamedArguments):
    """Normal(0, std) with a given standard deviation."""

    std: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.std < math.inf:
            raise UserError(
                f"standard deviation is {self.std}; expected a finite number, 0 or more"
            )

    def deviation(self, fan_in: int) -> float:
        """Standard deviation, whatever the fan-in."""
        return self.std


@dataclass(frozen=True)
class Uniform(metaclass=NamedArguments):
    """Uniform(−b, b) with b = scale / sqrt(fan_in).

    The scale 1 is PyTorch's default for convolutions and dense layers, sqrt(6) is the uniform form
    of `He`.

    Source: LeCun et al., "Efficient backprop", 1998, section 4.6.

    Example:
        >>> round(Uniform(1.0).deviation(12), 4)  # b = 0.2887
        0.1667
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.scale < math.inf:
            raise UserError(f"uniform scale is {self.scale}; expected a finite number, 0 or more")

    def deviation(self, fan_in: int) -> float:
        """Standard deviation for a unit with `fan_in` inputs."""
        return self.scale / math.sqrt(3.0 * fan_in)


@dataclass(frozen=True)
class Constant(metaclass=NamedArguments):
    """Every element equals `value`."""

    value: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise UserError(f"constant is {self.value}; expected a finite number")


Initializer = He | Normal | Uniform | Constant
