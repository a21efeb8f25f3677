"""The settings of the data, of weights of its classes, and of the augmentation of images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from dptrain.bounds import (
    MAX_BRIGHTNESS,
    MAX_MAGNITUDE,
    MAX_MIXUP,
    MAX_OPERATIONS,
    MAX_ZOOM,
)
from dptrain.setting_groups import Known, SettingGroup, UntilRecipe, UntilStart, first, setting

if TYPE_CHECKING:
    from dptrain.data.loading.augmentation import Augmentation
    from dptrain.network.layers import Shape
    from dptrain.network.zoo.recipes import Recipe


SHUFFLE, BALANCED = "shuffle", "balanced"
"""Values of the setting `sampling`."""


@dataclass(frozen=True)
class DataSettings(SettingGroup[UntilRecipe, UntilStart]):
    """The data, and how minibatches are read."""

    data: str | UntilRecipe = setting(
        "data",
        None,
        "Data set: digits, shapes, irradiance, synthetic, cifar10:DIR, mnist:DIR, "
        "npz:FILE, npy:X,Y, folder:DIR, csv:FILE?target=COLUMN or maps:TABLE,POSITIONS?target=….",
    )
    validation: float | UntilStart = setting(
        "data",
        None,
        "Share of the training data that is set aside for evaluations during "
        "training, by class and by the seed, such as 0.2. 0 uses none.",
        otherwise="the validation split of the data, if it has one; 0.2 of the digits",
        at_least=0,
        below=1,
    )
    prefetch: int | UntilStart = setting(
        "data",
        None,
        "Minibatches that a thread reads ahead; 0 reads each one when it is needed.",
        otherwise="2; 0 if the data is in memory and every core computes",
        at_least=0,
        at_most=256,
    )

    def from_recipe(self, recipe: Recipe) -> dict[str, Any]:
        from dptrain.data import absolute

        filled, data = super().from_recipe(recipe), first(self.data, recipe.data)
        if data is None:
            return filled
        # The share was chosen for this data; other data may have a split of its own.
        share = recipe.validation if data == recipe.data else None
        validation = first(self.validation, share)
        return {**filled, "data": absolute(data), "validation": validation}


def as_text(weights: Any) -> Any:
    """Return weights in a list, an array or a mapping as a text; another value as it is.

    Example:
        >>> as_text([1, 4]), as_text({"cat": 0.5})
        ('1,4', 'cat=0.5')
    """
    from dptrain.data.spec import escape

    if isinstance(weights, Mapping):
        names = {escape(str(name)): weight for name, weight in weights.items()}
        return ",".join(f"{name}={weight}" for name, weight in names.items())
    if not isinstance(weights, str) and hasattr(weights, "__len__"):
        return ",".join(map(str, weights))
    return weights


@dataclass(frozen=True)
class WeightSettings(SettingGroup[UntilRecipe, UntilStart]):
    """How often samples are drawn, and their weights in the loss."""

    sampling: str = setting(
        "optimisation",
        SHUFFLE,
        "Samples of an epoch: shuffle has each training sample once; balanced draws as many "
        "samples, equally many of each class, so that those of small classes occur several times.",
        choices=(SHUFFLE, BALANCED),
    )

    class_weights: str | UntilRecipe = setting(
        "optimisation",
        None,
        "Weights of the classes in the training loss: balanced, in inverse proportion to their "
        "numbers of training samples; a number for each class, such as 1,4; or names, such as "
        "cat=4, where other classes have the weight 1.",
        unset="",
        otherwise="equal weights",
        convert=as_text,
    )


@dataclass(frozen=True)
class AugmentationSettings(SettingGroup[UntilRecipe, UntilStart]):
    """Random changes of training images."""

    crop: int | UntilRecipe = setting(
        "data",
        None,
        "Augmentation: shift each training image by up to this many pixels, and fill the border "
        "with 0, which is a medium grey.",
        at_least=0,
    )
    flip: bool | UntilRecipe = setting(
        "data", None, "Augmentation: mirror half of the training images."
    )
    brightness: float = setting(
        "data",
        0.0,
        "Augmentation: largest value that is added to or subtracted from the pixels "
        "of an image, which range from -1 to 1.",
        at_least=0,
        at_most=MAX_BRIGHTNESS,
    )
    contrast: float = setting(
        "data",
        0.0,
        "Augmentation: largest relative change of the contrast.",
        at_least=0,
        at_most=1,
    )
    cutout: int = setting(
        "data",
        0,
        "Augmentation: set a square of this side in pixels to 0, around a random pixel "
        "of each training image.",
        at_least=0,
    )
    mixup: float = setting(
        "data",
        0.0,
        "Augmentation: average each training sample with another of its minibatch, "
        "with random weights from a beta distribution with this parameter, usually 0.2.",
        at_least=0,
        at_most=MAX_MIXUP,
    )

    resized_crop: float = setting(
        "data",
        0.0,
        "Augmentation: resize a random part of each training image, with at least this share of "
        "its area, usually 0.08, and an aspect ratio from 3/4 to 4/3. It replaces --crop.",
        at_least=0,
        at_most=1,
    )
    rotate: float = setting(
        "data",
        0.0,
        "Augmentation: turn each training image by up to this many degrees in both directions.",
        at_least=0,
        at_most=180,
    )
    zoom: float = setting(
        "data",
        0.0,
        "Augmentation: enlarge each training image by a factor from 1 - X to 1 + X.",
        at_least=0,
        at_most=MAX_ZOOM,
    )
    saturation: float = setting(
        "data",
        0.0,
        "Augmentation: largest relative change of the saturation of colours.",
        at_least=0,
        at_most=1,
    )
    hue: float = setting(
        "data",
        0.0,
        "Augmentation: largest change of the hue of colours, as a part of the colour circle.",
        at_least=0,
        at_most=0.5,
    )
    erase: float = setting(
        "data",
        0.0,
        "Augmentation: probability with which a random box of a training image, with 2% to 33% of "
        "its area, is set to 0.",
        at_least=0,
        at_most=1,
    )
    cutmix: float = setting(
        "data",
        0.0,
        "Augmentation: replace a random box of each training image by that of another image of its "
        "minibatch, with a share of the area from a beta distribution with this parameter, "
        "usually 1.",
        at_least=0,
        at_most=MAX_MIXUP,
    )
    randaugment: int = setting(
        "data",
        0,
        "Augmentation: apply this many random operations (RandAugment) to each training image, "
        "usually 2.",
        at_least=0,
        at_most=MAX_OPERATIONS,
    )
    randaugment_magnitude: float = setting(
        "data",
        9.0,
        "Magnitude of the operations of --randaugment.",
        at_least=0,
        at_most=MAX_MAGNITUDE,
    )

    def from_recipe(self, recipe: Recipe) -> dict[str, Any]:
        return {
            **super().from_recipe(recipe),
            "crop": first(self.crop, 0 if self.resized_crop else recipe.crop),
            "flip": first(self.flip, recipe.flip),
        }

    def make_augmentation(
        self: AugmentationSettings[Known, UntilStart], input_shape: Shape
    ) -> Augmentation | None:
        """Return the augmentation of the training images; None if nothing is changed.

        Raises:
            UserError: images of this shape cannot be changed so.
        """
        from dptrain.data.loading.augmentation import Augmentation

        names = [field.name for field in fields(Augmentation)]
        found = Augmentation(**{name: getattr(self, name) for name in names})
        if not found.used:
            return None
        found.check(input_shape)
        return found
