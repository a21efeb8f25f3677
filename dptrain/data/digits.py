"""Handwritten digits that come with dptrain.

1,797 grey pictures of 8×8 pixels with values 0 … 16, written by 43 people: the test part of
"Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak, UCI Machine Learning
Repository, 1998, https://doi.org/10.24432/C50P49, in the order in which scikit-learn's
`load_digits` gives them. Licence: Creative Commons Attribution 4.0 International (CC BY 4.0). The
values are unchanged; only the container is ours.
"""

from __future__ import annotations

from importlib.resources import files

import numpy as np

from dptrain.data.base import Dataset
from dptrain.data.images import pixels
from dptrain.data.spec import Request
from dptrain.data.stored import StoredSamples, make_dataset, split_rows
from dptrain.data.targets import labels_for

WHITE = 16
"""The highest value of a pixel."""


def open_digits(request: Request) -> Dataset:
    """The embedded digits: 1,437 for training and 360 for the test, always the same."""
    with (files("dptrain.data") / "digits.npz").open("rb") as file, np.load(file) as arrays:
        images, labels = arrays["images"][:, None], arrays["labels"]
    adapter = pixels(images.shape[1:], request.network.input_shape, dtype=images.dtype, white=WHITE)
    targets = labels_for(labels, request.network, "digits")
    train, test = (
        StoredSamples(images, targets, rows, adapter)
        for rows in split_rows(len(images), "digits", labels)
    )
    return make_dataset(
        request,
        train,
        test,
        origin="handwritten digits, UCI (Alpaydin and Kaynak, CC BY 4.0)",
        where="digits",
        classes=tuple("0123456789"),
    )
