"""Update rules as descriptions: hyperparameters and the state arrays that a backend stores.

Notation, as in PyTorch's documentation, for every element: w parameter, g its gradient plus λ·w
(weight decay), α learning rate, t number of updates including this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dptrain.errors import UserError


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent.

    v ← μ v + g;  w ← w − α v, or w ← w − α (g + μ v) with Nesterov momentum. With μ = 0 there is no
    state.

    Attributes:
        momentum: μ, at least 0 and less than 1.
        nesterov: True for Nesterov momentum; it requires a momentum above 0.
    """

    kind: ClassVar[str] = "sgd"

    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise UserError(f"momentum is {self.momentum}; expected 0 ≤ momentum < 1")
        if self.nesterov and self.momentum == 0.0:
            raise UserError("nesterov needs a momentum above 0, for example --momentum 0.9")

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the flat state arrays."""
        return ("momentum",) if self.momentum else ()


@dataclass(frozen=True)
class Adam:
    """Adam with bias correction.

    m ← β₁ m + (1 − β₁) g;  v ← β₂ v + (1 − β₂) g²;
    w ← w − α · (m / (1 − β₁ᵗ)) / (sqrt(v / (1 − β₂ᵗ)) + ε)

    Source: Kingma and Ba, "Adam: a method for stochastic optimization", 2015, algorithm 1.

    Attributes:
        beta1: β₁, decay of the mean of gradients.
        beta2: β₂, decay of the mean of squared gradients.
        epsilon: ε, added to the denominator.
    """

    kind: ClassVar[str] = "adam"

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        for name, value in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0.0 <= value < 1.0:
                raise UserError(f"adam {name} is {value}; expected 0 ≤ {name} < 1")

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the flat state arrays."""
        return ("first_moment", "second_moment")


Optimizer = SGD | Adam
