"""Arrays in .npz and .npy files: every type, order of axes and form of targets."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dptrain.data import open_data
from dptrain.errors import UserError
from tests.fuzz.conversion import (
    Split,
    check_split,
    check_stratified,
    check_union,
    expected_inputs,
    linear_network,
    read_split,
    write_linear_network,
)
from tests.fuzz.damage import damage_file
from tests.fuzz.outcome import ACCEPTED, COMPARED, Outcome, call, expect, expect_close, refused

Arrays = dict[str, NDArray[Any]]
INTEGERS = ("int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
FLOATS = ("float16", "float32", "float64", ">f4", ">f8")
ENDINGS = ("_val", "_valid", "_validation")
WRONG_TYPES = ("complex64", "U3", "S4", "M8[s]", "O", "V4")


@dataclass
class Case:
    """A data set and what a network must receive.

    Attributes:
        arrays: contents of the files by name.
        shape: input of the network.
        targets: kind of the targets.
        outputs: number of outputs.
        options: of the spec.
        expected: inputs and targets by the ending of the arrays' names.
        is_valid: True if the data must be accepted.
        is_scaled: True if numbers look like pixels of another scale, which may be refused.
        classes: contents of classes.txt.
        kind: of the data, npz or npy.
        is_pair: True if two .npy files are named instead of their folder.
    """

    arrays: Arrays
    shape: tuple[int, ...]
    targets: str
    outputs: int
    options: str
    expected: dict[str, Split]
    is_valid: bool = True
    is_scaled: bool = False
    classes: list[str] | None = None
    kind: str = "npz"
    is_pair: bool = False
    compresses: bool = False
    damaged: list[str] = field(default_factory=list)


def trial(random: np.random.Generator, folder: Path) -> Outcome:
    """Open arrays, and compare samples, splits and the description of the data."""
    case = make_case(random)
    if random.random() < 0.45:
        spoil(random, case)
    spec, files = write(case, folder)
    if random.random() < 0.15:
        damage_file(random, files[int(random.integers(len(files)))])
        case.is_valid, case.damaged = False, ["bytes"]
    network = folder / "linear.toml"
    write_linear_network(network, case.shape, case.outputs, case.targets)
    described = call("data", "describe", spec, "--network", network, "--json")
    try:
        dataset = open_data(spec, linear_network(case.shape, case.outputs, case.targets))
        splits = [read_split(dataset, part) for part in dataset.splits]
    except UserError as error:
        expect(described.code == 2, "`data describe` accepts what cannot be read")
        return refused(str(error), is_valid=case.is_valid and not case.is_scaled)
    if described.code:
        return described.refusal(is_valid=case.is_valid and not case.is_scaled)
    if not case.is_valid:
        return ACCEPTED
    compare(case, splits)
    compare_description(case, json.loads(described.output), splits)
    checked = call("data", "check", spec, "--network", network)
    problems = has_problems(case, splits)
    if checked.code or problems:
        expect(
            bool(checked.code) == problems or case.is_scaled,
            f"`data check` ends with {checked.code}, although {problems=}: {checked.errors}",
        )
    return COMPARED


def make_case(random: np.random.Generator) -> Case:
    """Return a random data set that is valid."""
    is_split, has_validation = bool(random.random() < 0.5), bool(random.random() < 0.3)
    endings = ["_train", "_test"] if is_split else [""]
    if is_split and has_validation:
        endings.append(ENDINGS[int(random.integers(3))])
    outputs = int(random.integers(1, 5))
    targets = ("classes", "values", "binary")[int(random.choice(3, p=(0.6, 0.25, 0.15)))]
    if targets == "classes":
        outputs += 1
    axes = ("NCHW", "NHWC", "NHW", "NF")[int(random.integers(4))]
    dtype = _dtype(random)
    stored, shape, crops = _shapes(random, axes)
    form = int(random.integers(4))
    arrays: Arrays = {}
    expected: dict[str, Split] = {}
    is_scaled = False
    for ending in endings:
        count = int(random.integers(2 * outputs + 3, 24))
        x, scaled = _numbers(random, dtype, (count, *stored))
        is_scaled |= scaled
        labels, y = _targets(random, count, targets, outputs, form)
        moved = np.moveaxis(x, -1, 1) if axes == "NHWC" else x[:, None] if axes == "NHW" else x
        arrays[f"x{ending}"] = np.asfortranarray(x) if random.random() < 0.2 else x
        arrays[f"y{ending}"] = y
        expected[ending] = (expected_inputs(moved, shape, crops=crops), labels)
    options = "?fit=crop" if crops else "?fit=resize" if random.random() < 0.2 else ""
    kind = "npy" if random.random() < 0.4 else "npz"
    case = Case(arrays, shape, targets, outputs, options, expected, kind=kind, is_scaled=is_scaled)
    case.is_pair = kind == "npy" and not is_split
    case.compresses = bool(random.random() < 0.3)
    if case.kind == "npy" and is_split and targets == "classes" and random.random() < 0.5:
        case.classes = [f"class {i}" for i in range(outputs)]
        # Named classes may be expected as whole numbers (n,).
        case.is_scaled |= form > 0 or y.dtype.kind == "f"
    return case


def _dtype(random: np.random.Generator) -> np.dtype[Any]:
    choice = random.random()
    if choice < 0.4:
        return np.dtype("uint8")
    names = FLOATS if choice < 0.75 else INTEGERS if choice < 0.95 else ("bool",)
    return np.dtype(names[int(random.integers(len(names)))])


def _shapes(
    random: np.random.Generator, axes: str
) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """Return the shape of a stored sample, that of the input, and whether images are cropped."""
    if axes == "NF":
        width = int(random.integers(1, 9))
        return (width,), (width,), False
    # Sizes of 1 and 3 could be channels.
    height, width = (int(random.choice((2, 4, 5, 6, 7, 8, 9, 11))) for _ in range(2))
    channels = 1 if axes == "NHW" else int(random.choice((1, 3)))
    inner = 3 if channels == 1 and random.random() < 0.3 else channels
    inner = 1 if channels == 3 and random.random() < 0.3 else inner
    size, crops = (height, width), False
    change = random.random()
    if change < 0.2:
        size = (int(random.integers(1, height + 1)), int(random.integers(1, width + 1)))
        crops = True
    elif change < 0.5:
        size = (int(random.integers(1, 14)), int(random.integers(1, 14)))
    shape: tuple[int, ...] = (inner, *size)
    if random.random() < 0.15:
        shape, crops = (channels * height * width,), False
    stored = {"NHW": (height, width), "NHWC": (height, width, channels)}
    return stored.get(axes, (channels, height, width)), shape, crops


def _numbers(
    random: np.random.Generator, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> tuple[NDArray[Any], bool]:
    """Return inputs, and True if their scale is unusual."""
    if dtype.kind == "b":
        return random.random(shape) < 0.5, False
    if dtype == np.uint8:
        return random.integers(0, 256, shape, dtype=np.uint8), False
    if dtype.kind == "f":
        scale = float(random.choice((1.0, 1.0, 1.0, 255.0, 1000.0)))
        low = 0.0 if random.random() < 0.5 else -scale
        return random.uniform(low, scale, shape).astype(dtype), scale > 1.0
    return random.integers(0, min(np.iinfo(dtype).max, 70_000), shape).astype(dtype), True


def _targets(
    random: np.random.Generator, count: int, targets: str, outputs: int, form: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return targets as the loss reads them, and as they are stored."""
    if targets == "values":
        y = random.standard_normal((count, outputs)) * 10.0 ** float(random.integers(-3, 4))
        y = y.astype(("float32", "float64", ">f8", "float64")[form])
        return y.astype(np.float32), y[:, 0] if outputs == 1 and form == 1 else y
    if targets == "binary":
        y = random.integers(0, 2, (count, outputs))
        stored = y.astype(("bool", "uint8", "int64", "float32")[form])
        return y, stored[:, 0] if outputs == 1 and form != 2 else stored
    # Each class has a sample, so that `data check` finds none without.
    labels = random.permutation(np.arange(count) % outputs)
    dtype = ("uint8", "int64", "int32", "float32", ">i4")[int(random.integers(5))]
    if form == 1:
        return labels, labels[:, None].astype(dtype)
    if form == 2:
        return labels, np.eye(outputs)[labels].astype(dtype)
    return labels, labels.astype(dtype)


def spoil(random: np.random.Generator, case: Case) -> None:
    """Change the arrays so that the data is not valid, or so that it is unclear."""
    names = list(case.arrays)
    name = names[int(random.integers(len(names)))]
    array, is_x = case.arrays[name], name.startswith("x")
    case.is_valid = False
    choice = int(random.integers(12))
    case.damaged.append(f"{choice} {name}")
    match choice:
        case 0:
            del case.arrays[name]
        case 1:
            case.arrays[name] = array[:-1]
        case 2:
            case.arrays[name] = array[:0]
        case 3:
            case.arrays[name] = array.reshape(1, *array.shape) if is_x else array[..., None, None]
        case 4:
            case.arrays[name] = np.float64(3.0) if random.random() < 0.5 else array.ravel()
        case 5:
            wrong = WRONG_TYPES[int(random.integers(len(WRONG_TYPES)))]
            case.arrays[name] = np.zeros(array.shape, wrong)
        case 6:
            changed = array.astype(np.float64)
            values = (np.nan, np.inf, -np.inf, 1e300, -1e39)
            changed.flat[int(random.integers(changed.size))] = values[int(random.integers(5))]
            case.arrays[name] = changed
        case 7:
            case.arrays[name] = array.astype(np.int64) + (0 if is_x else case.outputs)
        case 8:
            case.arrays[name] = -array.astype(np.float64) - 1.0
        case 9:
            renamed = ("X", "data", f"{name}_", "x_train", "y_test")[int(random.integers(5))]
            case.arrays[renamed] = case.arrays.pop(name)
        case 10:
            case.arrays[name] = np.repeat(array, 2, axis=-1)
        case _:
            text = ("", "a\na", "a\x00b\nc", "only", "\udcff", "é\né")[int(random.integers(6))]
            case.classes = text.split("\n")


def write(case: Case, folder: Path) -> tuple[str, list[Path]]:
    """Write the files; return the spec and the files."""
    if case.kind == "npz":
        path = folder / "data.npz"
        save = np.savez_compressed if case.compresses else np.savez
        save(path, **case.arrays)
        return f"npz:{path}{case.options}", [path]
    inner = folder / "arrays"
    inner.mkdir()
    for name, array in case.arrays.items():
        np.save(inner / f"{name}.npy", array, allow_pickle=True)
    if case.classes is not None:
        text = "".join(f"{name}\n" for name in case.classes)
        (inner / "classes.txt").write_bytes(text.encode("utf-8", "surrogateescape"))
    files = sorted(inner.iterdir()) or [inner]
    if case.is_pair and case.arrays:
        names = ",".join(str(inner / f"{name}.npy") for name in case.arrays)
        return f"npy:{names}{case.options}", files
    return f"npy:{inner}{case.options}", files


def compare(case: Case, splits: list[Split]) -> None:
    """Compare the samples of all splits with the expected ones."""
    training = case.arrays[f"x{next(iter(case.expected))}"]
    is_in_range = training.min() >= 0 and 127 < training.max() <= 255
    if training.dtype != np.uint8 and is_in_range and training.ndim > 2:
        # Such numbers are pixels as those of 8 bits are.
        case.expected = {k: (x / 127.5 - 1.0, y) for k, (x, y) in case.expected.items()}
    sizes = [np.abs(x).max(initial=1.0) for x, _ in case.expected.values()]
    tolerance = 2e-6 * max(sizes)
    if "" not in case.expected:
        expect(len(splits) == len(case.expected), f"{len(splits)} splits are read")
        for name, found in zip(case.expected, splits, strict=True):
            check_split(found, case.expected[name], tolerance, name)
        return
    whole = case.expected[""]
    rows = check_union(splits, whole, tolerance)
    if case.targets == "classes":
        check_stratified(np.asarray(whole[1]), rows, len(splits[0][0]))


def compare_description(case: Case, described: dict[str, Any], splits: list[Split]) -> None:
    """Compare the numbers of `data describe` with those of the samples."""
    for part, (x, y) in zip(described["splits"], splits, strict=True):
        name = part["name"]
        expect(part["samples"] == len(x), f"{part['samples']} {name} samples are described")
        inputs, scale = part["inputs"], np.abs(x).max(initial=1.0)
        for key, value in (("low", x.min()), ("high", x.max()), ("mean", x.mean(dtype=float)),
                           ("deviation", x.std(dtype=float))):  # fmt: skip
            expect_close(inputs[key], value, 1e-4 * scale, f"{key} of the {name} inputs")
        if case.targets == "classes":
            names = case.classes or [str(i) for i in range(case.outputs)]
            counts = {names[i]: int((y == i).sum()) for i in range(case.outputs) if (y == i).any()}
            expect(part["classes"] == counts, f"classes {part['classes']}, not {counts}")


def has_problems(case: Case, splits: list[Split]) -> bool:
    """Return True if the data has a problem that `data check` must report."""
    train = {x.tobytes() for x in splits[0][0]}
    if any(x.tobytes() in train for x in splits[1][0]):
        return True
    if any(len(x) and x.min() == x.max() for x, _ in splits):
        return True
    if case.targets == "values" or (case.targets == "binary" and case.outputs > 1):
        return False
    classes = case.outputs if case.targets == "classes" else 2
    return len(np.unique(splits[0][1])) < classes
