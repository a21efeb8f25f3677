"""Labels, classes and their names: the only place where a label becomes a class, or a class a name.

A label is an integer in the data; a class is an output of the network, with a name. The labels of a
data set have names (folders, ``classes.txt``, the option ``classes``) or they are integers without
names (arrays, IDX files, columns of tables). Names are matched with the names of the model's
classes. Integers without names are matched by their value, which is possible only if the names of
all classes are integers: label 2 is the class "2", wherever it stands in the order of the outputs.
Any other integer has no class, and the error says how the user states one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.data.preprocessing.names import same_form
from dptrain.errors import UserError, shown, suggest
from dptrain.files import MAX_TEXT_BYTES, read_regular
from dptrain.network.losses import TargetKind
from dptrain.network.outputs import NO_CLASS, predicted_classes

BINARY = ("0", "1")
"""Names of the classes of one sigmoid output that was trained on targets without names."""
MOST_NAMES = 20
"""Number of classes that a message lists."""
_INTEGER = re.compile(r"-?[0-9]{1,18}")

Names = Mapping[int, str]
"""Names of labels."""
Example = Callable[[Names], str]
"""Returns how a user states the names of labels."""


@dataclass(frozen=True)
class Labels:
    """The labels of a data set.

    Attributes:
        values: int64 (n,), one for each sample.
        names: of the labels; None if they have none.
        count: number of labels that the data distinguishes by its form, such as columns of one-hot
            rows; None if it does not state one.
    """

    values: NDArray[np.int64]
    names: Names | None = None
    count: int | None = None

    @property
    def outputs(self) -> int:
        """Number of classes: of names, of columns, or of different integers."""
        if self.names is not None:
            return len(self.names)
        return self.count or len(np.unique(self.values))


def labels_in(y: NDArray[Any], where: str, names: Names | None = None) -> Labels:
    """Return the labels that an array of targets contains.

    Args:
        y: (n,) or (n, 1) whole numbers, or (n, K) one-hot rows.
        where: name of the data, for messages.
        names: of the labels; None if they have none.

    Raises:
        UserError: the targets are no labels.
    """
    check_numbers(y, where)
    if y.ndim == 2 and y.shape[1] > 1:
        if not (((y == 0) | (y == 1)).all() and (y.sum(axis=1) == 1).all()):
            raise UserError(
                f"{where}: targets have {y.shape[1]} columns but are not one-hot; expected one 1 "
                "and otherwise 0 in each row, or a vector of class labels"
            )
        return Labels(y.argmax(axis=1).astype(np.int64), names, y.shape[1])
    if y.shape[1:] not in ((), (1,)):
        raise UserError(
            f"{where}: targets have shape {y.shape}; expected one class label per sample, "
            f"({len(y)},)"
        )
    if (y != np.floor(y)).any():
        raise UserError(
            f"{where}: targets are not whole numbers, but the network distinguishes classes; to "
            "predict values, use a network that ends in mean_squared_error, such as mlp-64-32"
        )
    if y.size and (y.min() < -(2**62) or y.max() > 2**62):
        raise UserError(f"{where}: labels from {y.min()} to {y.max()}; expected smaller numbers")
    return Labels(y.reshape(-1).astype(np.int64), names)


def are_texts(y: NDArray[Any]) -> bool:
    """Return True if targets are text, the names of classes."""
    return y.dtype.kind in "US" or (y.dtype.kind == "O" and all(isinstance(v, str) for v in y.flat))


def coded_labels(
    targets: Sequence[NDArray[Any]], names: Sequence[str] | None, where: str
) -> tuple[list[NDArray[Any]], Names | None]:
    """Return targets of text as integers, with their names; other targets as they are.

    Args:
        targets: of all splits, each (n,) or (n, 1) if it is text.
        names: of all classes; None for the labels that occur, sorted.
        where: name of the data, for messages.

    Returns:
        The targets, and the names of the integers; None if the targets are no text.

    Raises:
        UserError: some targets are text and others are not, or a label is not among `names`.

    Example:
        >>> coded_labels([np.array(["dog", "cat"]), np.array(["dog"])], None, "f.npz")
        ([array([1, 0]), array([1])], {0: 'cat', 1: 'dog'})
    """
    if not any(map(are_texts, targets)):
        return list(targets), None
    for y in targets:
        if not are_texts(y) or y.shape[1:] not in ((), (1,)):
            raise UserError(
                f"{where}: targets of type {y.dtype} and shape {y.shape}, but others are text; "
                "expected one name of a class per sample"
            )
    texts = [list(map(_as_text, y.reshape(-1).tolist())) for y in targets]
    found = sorted({text for each in texts for text in each})
    known = names_from(found if names is None else list(names), f"the labels of {where}")
    codes = {name: label for label, name in known.items()}
    for text in found:
        if text not in codes:
            raise UserError(
                f"{where}: label '{shown(text)}' is no class; expected {listed(list(codes))}"
                + suggest(text, codes)
            )
    return [np.array([codes[text] for text in each], np.int64) for each in texts], known


def _as_text(label: str | bytes) -> str:
    return same_form(label.decode("utf-8", "replace") if isinstance(label, bytes) else label)


def check_numbers(y: NDArray[Any], where: str) -> None:
    """Raise `UserError` unless targets are finite numbers."""
    if y.dtype.kind not in "biuf":
        raise UserError(f"{where}: targets are of type {y.dtype}; expected numbers")
    if not np.isfinite(y).all():
        row = int(np.argwhere(~np.isfinite(y))[0][0])
        raise UserError(f"{where}: the target of sample {row} is not a finite number")


@dataclass(frozen=True)
class Classes:
    """The classes of a model, in the order of its outputs.

    Attributes:
        names: of the classes.

    Example:
        >>> Classes(("0", "1", "10", "2")).indices(Labels(np.array([2, 10])), "f.npz")
        array([3, 2])
        >>> Classes(("cat", "dog")).indices(Labels(np.array([7]), {5: "cat", 7: "dog"}), "f.npz")
        array([1])
    """

    names: tuple[str, ...]

    @classmethod
    def of(cls, targets: TargetKind, outputs: int, names: Sequence[str] | None) -> Classes | None:
        """Return the classes of a network.

        Args:
            targets: what its loss compares with.
            outputs: number of its outputs.
            names: as `Preprocessing.classes` stores them; None if labels are integers.

        Returns:
            None if the network predicts values, or several labels for each sample.
        """
        if targets == "classes":
            known = tuple(names or ())
            return cls((*known, *map(str, range(len(known), outputs))))
        if targets == "binary" and outputs == 1:
            return cls(tuple(names or BINARY))
        return None

    def name(self, index: int) -> str:
        """Return the name of a class."""
        return self.names[index]

    def predicted(self, probabilities: NDArray[Any]) -> list[str]:
        """Return the name of the most probable class of each row (n, F), "" for a row with NaN.

        One column has the probabilities of the second class.
        """
        indices = predicted_classes(probabilities)
        return ["" if index == NO_CLASS else self.name(index) for index in indices.tolist()]

    def find(self, name: str) -> int | None:
        """Return the class with a name, or with the same integer as its name; None if none has."""
        index = self._by_name.get(same_form(name))
        if index is None and self._by_value is not None and _INTEGER.fullmatch(name):
            index = self._by_value.get(int(name))
        return index

    def indices(
        self, labels: Labels, where: str, example: Example | None = None
    ) -> NDArray[np.int64]:
        """Return the class of each sample.

        Args:
            labels: of the samples.
            where: name of the data, for messages.
            example: how the user states the names of the labels.

        Raises:
            UserError: a label has no class, or the data has other classes than the model.
        """
        table, (found, positions) = self._table(labels, where, example), _unique(labels.values)
        for label in found.tolist():
            if label not in table:
                raise UserError(f"{where}: label {label} is no class; expected {_some(table)}")
        classes = np.array([table[label] for label in found.tolist()], np.int64)
        result: NDArray[np.int64] = classes[positions]
        return result

    def names_of(self, labels: Labels, where: str, example: Example | None = None) -> list[str]:
        """Return the name of the class of each sample, "" for labels that have no class.

        Raises:
            UserError: no label has a class; arguments are those of `indices`.
        """
        table = self._table(labels, where, example)
        return [
            self.names[table[label]] if label in table else "" for label in labels.values.tolist()
        ]

    def _table(self, labels: Labels, where: str, example: Example | None) -> Mapping[int, int]:
        """Return the class of each label that has one."""
        if labels.names is not None:
            return self._of_names(labels.names, where)
        if self._by_value is None:
            stated = names_for(labels, self.names)
            first = ", that of label 0 first" if list(stated)[:1] == [0] else ""
            raise UserError(
                f"{where}: the labels are integers, but the classes of the network are "
                f"{listed(self.names)}; state the name of each label{first}"
                + (f": {example(stated)}" if example is not None else "")
            )
        if labels.count is not None and set(self._by_value) != set(range(labels.count)):
            raise UserError(
                f"{where}: targets have {labels.count} columns, the labels 0 to "
                f"{labels.count - 1}, but the classes of the network are {listed(self.names)}"
            )
        return self._by_value

    def _of_names(self, names: Names, where: str) -> Mapping[int, int]:
        """Return the class of each label with a name."""
        found = {label: self.find(name) for label, name in names.items()}
        table = {label: index for label, index in found.items() if index is not None}
        matched = set(table.values())
        missing = [name for index, name in enumerate(self.names) if index not in matched]
        unknown = [name for label, name in names.items() if label not in table]
        if missing or unknown or len(table) > len(self.names):
            raise UserError(
                f"{where} has the classes {listed(tuple(names.values()))}; the network was "
                f"trained on {listed(self.names)}"
                + (f"; missing: {listed(missing)}" if missing else "")
                + (f"; unknown: {listed(unknown)}" if unknown else "")
            )
        return table

    @cached_property
    def _by_value(self) -> dict[int, int] | None:
        """The position of each name by its value; None unless all are different integers."""
        if not all(_INTEGER.fullmatch(name) for name in self.names):
            return None
        found = {int(name): index for index, name in enumerate(self.names)}
        return found if len(found) == len(self.names) else None

    @cached_property
    def _by_name(self) -> dict[str, int]:
        return {same_form(name): index for index, name in enumerate(self.names)}


def names_for(labels: Labels, names: Sequence[str]) -> Names:
    """Return an example of how labels get some names, each of them one.

    Example:
        >>> names_for(Labels(np.array([1, -1, 1])), ("no", "yes"))
        {-1: 'no', 1: 'yes'}
        >>> names_for(Labels(np.array([1, 1])), ("no", "yes"))
        {0: 'no', 1: 'yes'}
    """
    found, count = np.unique(labels.values).tolist(), len(names)
    if not found or (found[0] >= 0 and found[-1] < count):
        return dict(enumerate(names))
    own = found[:count]
    own += range(own[-1] + 1, own[-1] + 1 + count - len(own))
    return dict(zip(own, names, strict=True))


def names_from(given: Any, where: str) -> Names:
    """Return the names of labels that a user states.

    Args:
        given: names in the order of the labels 0, 1, …, or a mapping from label to name.
        where: name of the argument, for messages.

    Raises:
        UserError: the names are no text, or two are equal.

    Example:
        >>> names_from(["cat", "dog"], "classes")
        {0: 'cat', 1: 'dog'}
    """
    if isinstance(given, Mapping):
        pairs = list(given.items())
    elif isinstance(given, Sequence | np.ndarray) and not isinstance(given, str):
        pairs = list(enumerate(given))
    else:
        pairs = []
    fine = all(
        isinstance(label, int | np.integer) and isinstance(name, str) for label, name in pairs
    )
    if not pairs or not fine:
        raise UserError(
            f"{where} is {shown(repr(given))}; expected the names of the labels 0, 1, … in this "
            'order, such as ["cat", "dog"], or a mapping such as {1: "cat", 2: "dog"}'
        )
    names = {int(label): same_form(name) for label, name in sorted(pairs)}
    for name, count in Counter(names.values()).items():
        if not name.strip() or count > 1:
            raise UserError(
                f"{where} has the name '{shown(name)}' {count} times; expected a different name "
                "for each label"
            )
    return names


def read_names(path: Path) -> list[str]:
    """Return the names in a file, one on each line; raise `UserError` if it cannot be read."""
    try:
        text = read_regular(path, MAX_TEXT_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} cannot be read ({error}); expected the name of a class on each line, in UTF-8"
        ) from None
    names = same_form(text).splitlines()
    for first, name in enumerate(names, 1):
        if name in names[first:]:
            raise UserError(
                f"{path} has the class '{shown(name)}' in lines {first} and "
                f"{names.index(name, first) + 1}; expected different names"
            )
    return names


def _unique(values: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the different values, and the position of each value among them."""
    found, positions = np.unique(values, return_inverse=True)
    return found, positions.reshape(-1)


def _some(table: Mapping[int, int]) -> str:
    """Return the labels of a table for a message."""
    known = sorted(table)
    if known == list(range(known[0], known[-1] + 1)) and len(known) > 2:
        return f"{known[0]} to {known[-1]}"
    return listed([str(label) for label in known])


def listed(names: Sequence[str]) -> str:
    """Return names for a message, at most `MOST_NAMES`; those with a comma are quoted.

    Example:
        >>> listed(["cat", "cow, brown"])
        "cat, 'cow, brown'"
    """
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    some = (shown(name, 40) for name in names[:MOST_NAMES])
    return ", ".join(f"'{name}'" if "," in name else name for name in some) + more
