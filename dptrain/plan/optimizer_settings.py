"""The settings of the update rule and of the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dptrain.errors import UserError, shown
from dptrain.plan.optimizers import (
    RULES,
    Optimizer,
    make_optimizer,
    parse_rate_factors,
    split_patterns,
)
from dptrain.setting_groups import (
    Known,
    SettingGroup,
    UntilRecipe,
    UntilStart,
    as_list_text,
    first,
    setting,
)

if TYPE_CHECKING:
    from dptrain.network.zoo.recipes import Recipe


def _object_hint(value: Any) -> str:
    """Return the settings that mean an update rule, which `make_replica` takes as an object."""
    kind = getattr(value, "kind", None)
    if kind not in RULES:
        return ""
    names = ("momentum", "nesterov", "weight_decay", "clip_norm")
    given = {} if isinstance(value, type) else {name: getattr(value, name, None) for name in names}
    more = "".join(f", {name}={item!r}" for name, item in given.items() if item)
    return (
        f"; objects are for make_replica, so use optimizer='{kind}'{more}, and learning_rate for "
        "the learning rate"
    )


@dataclass(frozen=True)
class OptimizerSettings(SettingGroup[UntilRecipe, UntilStart]):
    """The update rule, and how gradients and labels are changed before it."""

    optimizer: str | UntilRecipe = setting(
        "optimisation",
        None,
        "Update rule.",
        choices=tuple(RULES),
        hint=_object_hint,
    )
    weight_decay: float | None = setting(
        "optimisation",
        None,
        "Weight decay of all weights of convolutions and dense layers. "
        "Biases and the parameters of normalisations have none. adamw multiplies the weights, the "
        "other optimizers add it to the gradient, lars and lamb with a factor.",
        otherwise="0.01 with adamw and lamb; otherwise that of the network's layers",
        at_least=0,
        at_most=1e6,
    )
    momentum: float | UntilRecipe = setting(
        "optimisation", None, "Momentum of sgd, lars and rmsprop.", at_least=0, below=1
    )
    nesterov: bool | UntilRecipe = setting("optimisation", None, "Use Nesterov momentum.")
    clip_norm: float | UntilRecipe = setting(
        "optimisation",
        None,
        "Largest norm of the gradient of all parameters; a larger gradient is scaled down to it.",
        unset=0.0,
        otherwise="no limit",
        above=0,
    )
    average_weights: float | UntilRecipe = setting(
        "optimisation",
        None,
        "Decay of a moving average of the parameters, such as 0.999, which "
        "evaluations, the best checkpoint and predictions use.",
        unset=0.0,
        otherwise="no average",
        above=0,
        below=1,
    )
    freeze: str | UntilRecipe = setting(
        "optimisation",
        None,
        "Layers or parameters that are not trained: names or patterns with * and ?, separated by "
        "commas, such as conv1,layer1.*; all-but-head freezes all but the output layer. A batch "
        "normalisation whose weight and bias are frozen uses its running statistics and does not "
        "change them.",
        unset="",
        otherwise="everything is trained",
        convert=as_list_text,
    )
    rate_factor: str | UntilRecipe = setting(
        "optimisation",
        None,
        "Factors of the learning rate of some layers or parameters, such as layer1.*=0.1,fc=10; "
        "the last pattern that matches counts.",
        unset="",
        otherwise="one learning rate",
        convert=as_list_text,
    )
    label_smoothing: float = setting(
        "optimisation",
        0.0,
        "Share of each label that is divided among all classes, such as 0.1, "
        "in training; evaluations do not smooth.",
        at_least=0,
        below=1,
    )

    def refuse_contradictions(self) -> None:
        super().refuse_contradictions()
        for name in ("momentum", "nesterov"):
            if self.optimizer is not None and getattr(self, name):
                known = [kind for kind, rule in RULES.items() if name in rule.__dataclass_fields__]
                if self.optimizer not in known:
                    raise UserError(
                        f"{name} belongs to optimizer {' or '.join(known)}, but optimizer is "
                        f"'{self.optimizer}'; remove it or try --optimizer {known[0]}"
                    )
        for name in ("freeze", "rate_factor"):
            text = first(getattr(self, name), "")
            if text and not split_patterns(text):
                example = "conv1,layer1.*" if name == "freeze" else "layer1.*=0.1,fc=10"
                raise UserError(
                    f"--{name.replace('_', '-')} is '{shown(text)}', which names no layer; "
                    f"expected patterns separated by commas, such as {example}"
                )
        parse_rate_factors(first(self.rate_factor, ""))
        if self.nesterov and self.momentum == 0:
            raise UserError("nesterov needs a momentum above 0; try --momentum 0.9")

    def from_recipe(self, recipe: Recipe) -> dict[str, Any]:
        momentum = first(self.momentum, recipe.momentum)
        return {
            **super().from_recipe(recipe),
            "optimizer": recipe.optimizer,
            "momentum": momentum,
            "nesterov": first(self.nesterov, recipe.nesterov and momentum > 0),
            "weight_decay": first(self.weight_decay, recipe.weight_decay),
        }

    def update_rule(self: OptimizerSettings[Known, UntilStart]) -> Optimizer:
        """Return the optimizer."""
        return make_optimizer(
            self.optimizer,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            clip_norm=self.clip_norm or None,
            average_decay=self.average_weights or None,
            freeze=self.freeze,
            rate_factor=self.rate_factor,
        )
