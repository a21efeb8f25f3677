"""Update rules as descriptions: hyperparameters and the state arrays that a backend stores.

Notation, as in PyTorch's documentation, for every element: w parameter, λ its weight decay, g its
gradient plus λ·w (without λ·w for `AdamW`), α learning rate, t number of updates including this
one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, TypedDict

from dptrain.arguments import ADVICE, NamedArguments
from dptrain.bounds import convert
from dptrain.errors import UserError, shown

if TYPE_CHECKING:
    from dptrain.network.layers import Parameter


AVERAGE = "average"
"""Name of the state array with the moving average of the parameters."""


def split_patterns(text: str) -> tuple[str, ...]:
    """Return the patterns of a list that commas separate.

    Example:
        >>> split_patterns("conv1, layer1.*")
        ('conv1', 'layer1.*')
    """
    return tuple(part.strip() for part in text.split(",") if part.strip())


def parse_rate_factors(text: str) -> tuple[tuple[str, float], ...]:
    """Return the patterns of ``PATTERN=FACTOR,…`` with their factors.

    Raises:
        UserError: a part has another form, or a factor that is no number above 0.

    Example:
        >>> parse_rate_factors("layer4.*=0.1,fc=10")
        (('layer4.*', 0.1), ('fc', 10.0))
    """
    found = []
    for part in split_patterns(text):
        pattern, _, number = part.rpartition("=")
        factor = convert(number, float)
        if not pattern or not isinstance(factor, float) or not 0.0 < factor < 1e6:
            raise UserError(
                f"--rate-factor has '{shown(part)}'; expected PATTERN=FACTOR with a factor above "
                "0, such as layer4.*=0.1; --freeze PATTERN does not train parameters"
            )
        found.append((pattern.strip(), factor))
    return tuple(found)


@dataclass(frozen=True)
class UpdateRule(metaclass=NamedArguments):
    """What all update rules have in common.

    Attributes:
        weight_decay: λ of all parameters with two or more dimensions, which are the weights of
            convolutions and of dense layers. Biases and the parameters of normalisations have one
            dimension, and are not decayed. None: each parameter has the λ of its layer.
        clip_norm: c; before each update, the gradient of all parameters is multiplied by
            min(1, c / (‖gradient‖ + 10⁻⁶)), as by PyTorch's `clip_grad_norm_`. None: it is not.
        average_decay: d; after update t, the moving average of the parameters becomes
            average + (1 − min(d, (t − 1) / (t + 9))) · (w − average). None: there is no average.
        freeze: patterns of the layers or parameters that are not trained, such as
            ``"conv1,layer1.*"`` or ``"all-but-head"``, see `dptrain.plan.freezing`.
        rate_factor: patterns with the factors by which α is multiplied, ``"layer4.*=0.1"``.
    """

    unnamed_argument: ClassVar[str] = ADVICE["lr"]

    weight_decay: float | None = field(default=None, kw_only=True)
    clip_norm: float | None = field(default=None, kw_only=True)
    average_decay: float | None = field(default=None, kw_only=True)
    freeze: str = field(default="", kw_only=True)
    rate_factor: str = field(default="", kw_only=True)

    scales_layers: ClassVar[bool] = False
    """True if norms of each layer scale its gradient before the update."""

    def __post_init__(self) -> None:
        if self.average_decay is not None and not 0.0 < self.average_decay < 1.0:
            raise UserError(
                f"the decay of the average is {self.average_decay}; expected above 0 and below 1"
            )
        if self.clip_norm is not None and not self.clip_norm > 0.0:
            raise UserError(f"clip norm is {self.clip_norm}; expected above 0")
        if self.weight_decay is not None and not self.weight_decay >= 0.0:
            raise UserError(f"weight decay is {self.weight_decay}; expected at least 0")

    @property
    def average_state(self) -> tuple[str, ...]:
        """`AVERAGE` if there is a moving average; part of `state`."""
        return () if self.average_decay is None else (AVERAGE,)

    def average_weight(self, number: int) -> float:
        """Return the weight of the parameters after update `number`, from 1, in their average.

        The first parameters have weight 1, so that the average does not contain the initial ones.
        """
        assert self.average_decay is not None
        return 1.0 - min(self.average_decay, (number - 1) / (number + 9))

    def decay_of(self, parameter: Parameter) -> float:
        """Return λ of a parameter."""
        if self.weight_decay is None:
            return parameter.weight_decay
        return self.weight_decay if len(parameter.shape) > 1 else 0.0


@dataclass(frozen=True)
class SGD(UpdateRule):
    """Stochastic gradient descent.

    v ← μ v + g;  w ← w − α v, or w ← w − α (g + μ v) with Nesterov momentum. With μ = 0 there is no
    state.

    Attributes:
        momentum: μ, at least 0 and less than 1. Like all arguments of update rules, it is named:
            ``SGD(momentum=0.9)``; the learning rate is an argument of each update.
        nesterov: True for Nesterov momentum; it requires a momentum above 0.
    """

    kind: ClassVar[str] = "sgd"

    momentum: float = field(default=0.0, kw_only=True)
    nesterov: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.momentum < 1.0:
            raise UserError(f"momentum is {self.momentum}; expected 0 ≤ momentum < 1")
        if self.nesterov and self.momentum == 0.0:
            raise UserError("nesterov needs a momentum above 0, for example --momentum 0.9")

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the flat state arrays."""
        return (*(("momentum",) if self.momentum else ()), *self.average_state)


@dataclass(frozen=True)
class Adam(UpdateRule):
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

    beta1: float = field(default=0.9, kw_only=True)
    beta2: float = field(default=0.999, kw_only=True)
    epsilon: float = field(default=1e-8, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0.0 <= value < 1.0:
                raise UserError(f"{self.kind} {name} is {value}; expected 0 ≤ {name} < 1")

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the flat state arrays."""
        return ("first_moment", "second_moment", *self.average_state)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay.

    w ← w − α λ w − α · (m / (1 − β₁ᵗ)) / (sqrt(v / (1 − β₂ᵗ)) + ε), with m and v of the gradient
    without λ·w.

    Source: Loshchilov and Hutter, "Decoupled weight decay regularization", 2019, algorithm 2, with
    λ multiplied by α as in PyTorch.

    Attributes:
        weight_decay: λ, see `UpdateRule`.
    """

    kind: ClassVar[str] = "adamw"

    weight_decay: float | None = field(default=0.01, kw_only=True)


@dataclass(frozen=True)
class RMSProp(UpdateRule):
    """Gradient descent with steps relative to the root of the mean square of gradients.

    v ← ρ v + (1 − ρ) g²;  d = g / (sqrt(v) + ε);  w ← w − α d, or with momentum
    b ← μ b + d;  w ← w − α b. As `torch.optim.RMSprop`, where ρ is ``alpha``.

    Source: Tieleman and Hinton, "Lecture 6.5, RMSprop", COURSERA: Neural networks for machine
    learning, 2012.

    Attributes:
        decay: ρ, decay of the mean of squared gradients.
        epsilon: ε, added to the denominator.
        momentum: μ, at least 0 and less than 1.
    """

    kind: ClassVar[str] = "rmsprop"

    decay: float = field(default=0.99, kw_only=True)
    epsilon: float = field(default=1e-8, kw_only=True)
    momentum: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("decay", self.decay), ("momentum", self.momentum)):
            if not 0.0 <= value < 1.0:
                raise UserError(f"{self.kind} {name} is {value}; expected 0 ≤ {name} < 1")

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the flat state arrays."""
        momentum = ("momentum",) if self.momentum else ()
        return ("second_moment", *momentum, *self.average_state)


@dataclass(frozen=True)
class LARS(SGD):
    """Stochastic gradient descent with a learning rate for each layer.

    r = η ‖w‖ / (‖g‖ + λ ‖w‖);  v ← μ v + r (g + λ w);  w ← w − α v, with g without λ·w. The norms
    are those of the layer's weight and of its gradient; r is 1 if one of them is 0. The bias of a
    layer has the r of its weight, parameters of normalisations have 1.

    Source: You, Gitman and Ginsburg, "Large batch training of convolutional networks", 2017,
    algorithm 1, with α outside of v, as in `SGD`.

    Attributes:
        trust: η.
    """

    kind: ClassVar[str] = "lars"
    scales_layers: ClassVar[bool] = True

    momentum: float = field(default=0.9, kw_only=True)
    trust: float = field(default=0.001, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.trust > 0.0:
            raise UserError(f"{self.kind} trust is {self.trust}; expected above 0")

    def ratio(self, weight: float, gradient: float, decay: float) -> float:
        """Return r for the norms of a weight and of its gradient."""
        sum_of_norms = gradient + decay * weight
        return self.trust * weight / sum_of_norms if weight and sum_of_norms else 1.0


@dataclass(frozen=True)
class LAMB(AdamW):
    """Adam with a learning rate for each layer.

    u = (m / (1 − β₁ᵗ)) / (sqrt(v / (1 − β₂ᵗ)) + ε) + λ w, with m and v of `AdamW`;
    r = ‖w‖ / ‖u‖;  w ← w − α r u. The norms are those of the layer's weight; r is 1 if one of them
    is 0. The bias of a layer has the r of its weight, parameters of normalisations have 1.

    Source: You et al., "Large batch optimization for deep learning: training BERT in 76 minutes",
    2020, algorithm 2, with φ(x) = x.
    """

    kind: ClassVar[str] = "lamb"
    scales_layers: ClassVar[bool] = True

    epsilon: float = field(default=1e-6, kw_only=True)

    def ratio(self, weight: float, direction: float, decay: float) -> float:
        """Return r for the norms of a weight and of u."""
        return weight / direction if weight and direction else 1.0


Optimizer = SGD | Adam | RMSProp

RULES: dict[str, type[Optimizer]] = {
    rule.kind: rule for rule in (SGD, Adam, AdamW, RMSProp, LARS, LAMB)
}
"""Update rules by their names."""


def applied_rule(rule: Optimizer) -> Optimizer:
    """Return the rule of the update itself, after norms of layers scaled the gradient."""
    if isinstance(rule, LARS):
        return SGD(momentum=rule.momentum, nesterov=rule.nesterov, weight_decay=0.0)
    return SGD(weight_decay=0.0) if isinstance(rule, LAMB) else rule


class _Common(TypedDict):
    """The arguments of all update rules."""

    weight_decay: float | None
    clip_norm: float | None
    average_decay: float | None
    freeze: str
    rate_factor: str


def make_optimizer(
    kind: str,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float | None = None,
    clip_norm: float | None = None,
    average_decay: float | None = None,
    freeze: str = "",
    rate_factor: str = "",
) -> Optimizer:
    """Return the update rule with a name.

    Args:
        kind: a key of `RULES`.
        momentum: of the rules that have one; the others ignore it.
        nesterov: of `SGD` and `LARS`; the others ignore it.
        weight_decay, clip_norm, average_decay, freeze, rate_factor: see `UpdateRule`.
    """
    common = _Common(
        weight_decay=weight_decay, clip_norm=clip_norm, average_decay=average_decay,
        freeze=freeze, rate_factor=rate_factor,
    )  # fmt: skip
    if kind in (SGD.kind, LARS.kind):
        rule = SGD if kind == SGD.kind else LARS
        return rule(momentum=momentum, nesterov=nesterov, **common)
    if kind == RMSProp.kind:
        return RMSProp(momentum=momentum, **common)
    return RULES[kind](**common)
