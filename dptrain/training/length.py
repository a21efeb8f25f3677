"""The settings of the minibatch and of the length of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dptrain.errors import UserError
from dptrain.setting_groups import Known, SettingGroup, UntilRecipe, UntilStart, first, setting

if TYPE_CHECKING:
    from dptrain.network.network import Network
    from dptrain.network.zoo.recipes import Recipe

BEST_BY = ("accuracy", "loss", "none")
"""Values of the setting `best_by`."""


@dataclass(frozen=True)
class LengthSettings(SettingGroup[UntilRecipe, UntilStart]):
    """The minibatch, when training ends, and which parameters it ends with."""

    batch_size: int | UntilRecipe = setting(
        "optimisation",
        None,
        "Samples of a global minibatch, which all ranks share.",
        at_least=1,
    )
    accumulate: int = setting(
        "optimisation",
        1,
        "Forward and backward passes for an update, each with this part of a "
        "minibatch, such as 4 for a quarter. Their gradients are added, so that activations need "
        "less memory.",
        at_least=1,
    )
    epochs: int | UntilRecipe = setting(
        "optimisation",
        None,
        "Passes over the training data.",
        unset=0,
        at_least=1,
    )
    steps: int | UntilStart = setting(
        "optimisation",
        None,
        "Parameter updates; replaces --epochs.",
        otherwise="epochs × steps per epoch; from the recipe of a perceptron",
        at_least=1,
    )
    until_accuracy: float | UntilRecipe = setting(
        "optimisation",
        None,
        "End training after the first evaluation with at least this accuracy "
        "on the validation data, such as 0.97; --epochs or --steps is the limit.",
        unset=0.0,
        otherwise="make all steps",
        above=0,
        at_most=1,
    )
    patience: int | UntilRecipe = setting(
        "optimisation",
        None,
        "End training after this many evaluations without an improvement by --best-by.",
        unset=0,
        otherwise="make all steps",
        at_least=1,
    )
    best_by: str | UntilStart = setting(
        "optimisation",
        None,
        "Keep the parameters of the epoch with the highest accuracy or the "
        "lowest loss on the validation data, and end training with them. none ends with the last "
        "ones.",
        otherwise="accuracy, or loss if the network predicts values or several labels; none "
        "without validation data",
        choices=BEST_BY,
    )
    evaluate_every: int = setting(
        "measurement",
        1,
        "Epochs between two evaluations on the validation data; 0 evaluates "
        "after the last step only. The test data is evaluated once, at the end.",
        at_least=0,
    )

    def refuse_contradictions(self) -> None:
        super().refuse_contradictions()
        if self.epochs and self.steps:
            raise UserError(
                f"epochs is {self.epochs} and steps is {self.steps}; set only one of the two"
            )
        if self.batch_size is not None and self.accumulate > self.batch_size:
            raise UserError(
                f"--accumulate is {self.accumulate}, but --batch-size is {self.batch_size}; use at "
                "most one pass for each sample"
            )
        for name in ("until_accuracy", "patience"):
            value = getattr(self, name)
            if value and not self.evaluate_every:
                raise UserError(
                    f"{name} is {value:g}, but evaluate_every is 0, so nothing is evaluated before "
                    "training ends; try --evaluate-every 1"
                )
        if self.patience and self.best_by == "none":
            raise UserError(
                f"patience is {self.patience}, but best_by is none, so no evaluation is an "
                "improvement; try --best-by loss"
            )

    def from_recipe(self, recipe: Recipe) -> dict[str, Any]:
        no_length = self.epochs is None and self.steps is None
        return {
            **super().from_recipe(recipe),
            "batch_size": first(self.batch_size, recipe.batch_size),
            "epochs": recipe.epochs if no_length and recipe.steps is None else self.epochs,
            "steps": recipe.steps if no_length else self.steps,
        }

    def total_steps(self: LengthSettings[Known, UntilStart], epoch_steps: int) -> int:
        """Return the updates of the whole run, if an epoch has so many."""
        if self.steps is not None:
            return self.steps
        return self.epochs * epoch_steps

    def best_epoch_by(self, network: Network, *, has_validation: bool) -> str:
        """Return by what the best epoch is chosen, one of `BEST_BY`."""
        if not has_validation:
            return "none"
        # The accuracy of several labels counts samples with all labels right, often none.
        by_loss = network.loss.targets == "values" or (
            network.loss.targets == "binary" and network.num_outputs > 1
        )
        return first(self.best_by, "loss" if by_loss else "accuracy")

    def check_until_accuracy(self, network: Network) -> None:
        """Raise `UserError` if an accuracy is requested, but the network predicts values."""
        by = "--best-by accuracy" if self.best_by == "accuracy" else None
        needs = "--until-accuracy" if self.until_accuracy else by
        if needs is not None and network.loss.targets == "values":
            raise UserError(
                f"{needs} needs classes, but network '{network.name}' predicts values; "
                f"remove {needs}"
            )

    def check_validation(self, data: str, *, has_validation: bool) -> None:
        """Raise `UserError` if a setting needs validation data, but the data `data` has none."""
        needs = [name for name in ("until_accuracy", "patience") if getattr(self, name)]
        if self.best_by not in (None, "none"):
            needs.append("best_by")
        if needs and not has_validation:
            raise UserError(
                f"--{needs[0].replace('_', '-')} needs validation data, but {data} has none; try "
                "--validation 0.1"
            )
