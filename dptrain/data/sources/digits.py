"""Handwritten digits that come with dptrain.

1,797 grey images of 8×8 pixels with values 0 … 16, written by 43 people: the test part of
"Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak, UCI Machine Learning
Repository, 1998, https://doi.org/10.24432/C50P49, in the order in which scikit-learn's
`load_digits` returns them. Licence: Creative Commons Attribution 4.0 International (CC BY 4.0). The
values are unchanged; only the file format differs.
"""

from __future__ import annotations

from importlib.resources import files

import numpy as np

from dptrain.data.adaptation import adapt_request
from dptrain.data.assembly import (
    RawSplit,
    fixed_split,
    make_dataset,
    preprocessing_for,
)
from dptrain.data.base import Dataset
from dptrain.data.spec import Request

WHITE = 16
"""Largest value of a pixel."""


def open_digits(request: Request) -> Dataset:
    """Open the digits: 1,437 samples for training and 360 for the test, always the same."""
    with (files("dptrain.data.sources") / "digits.npz").open("rb") as file, np.load(file) as arrays:
        images, labels = arrays["images"][:, None], arrays["labels"]
    train, test = (
        RawSplit(images, labels, rows) for rows in fixed_split(len(images), "digits", labels)
    )
    # The digits are repeated to the channels of any network: figures of different networks remain
    # comparable.
    channels = request.network.input_shape[0]
    sample = (channels, *images.shape[2:])
    request = adapt_request(request, sample, [labels], "digits", are_labels=True)
    return make_dataset(
        request,
        train,
        test,
        preprocessing=preprocessing_for(request, images.shape[1:], images.dtype, white=WHITE),
        origin="handwritten digits, UCI (Alpaydin and Kaynak, CC BY 4.0)",
        where="digits",
        has_split=True,
        white=WHITE,
    )
