"""TOML networks: valid ones with a known number of parameters, and edited ones."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dptrain.network import ACTIVATIONS
from tests.fuzz.damage import damage_bytes
from tests.fuzz.outcome import ACCEPTED, COMPARED, Outcome, call, expect

Random = np.random.Generator
Shape = tuple[int, ...]

OWN = "own"
ELEMENTWISE = (*ACTIVATIONS, "dropout", OWN)
EXPRESSIONS = ("x", "x * sigmoid(x)", "where(x > 0, x, exp(x) - 1)", "min(x * x, 4) / (1 + abs(x))")
"""Expressions of the function `OWN`."""
BACKENDS = ("reference", "reference", "null", "numba", "numba")
VALUES = (
    "0", "-1", "1", "2", "3", "7", "1.5", "-0.0", "nan", "inf", "-inf", "1e999", "true", '""',
    '"x"', '"y"', '"exp(x)"', '"x ** 0.5"', '"log(x)"', '"exit()"', '"x if x else x"', '"(((x"',
    '"__import__(\\\"os\\\")"', '"exp(exp(x)) / exp(exp(x))"', '"[x for x in ()]"', "{a = 1}",
    '"same"', '"valid"', '"full"', '"conv1"', '"input"', "[]", "[1]", "[2, 2]", "[1, 2, 3]",
    "[[1]]", "{}", '{type = "normal"}', '{type = "normal", std = 0.1}', "2026-01-01", "'he'",
    "2147483647", "2147483648", "9223372036854775808", "9" * 60, "9" * 5000, "65536", "30000",
    "0x10", "1_000", '"\\u0000"', '"' + "x" * 300 + '"', "[" * 400, '"\\n"', '"a\\u001b[31m"',
)  # fmt: skip
KEYS = ("filters", "kernel", "stride", "padding", "groups", "units", "window", "rate", "inputs",
        "name", "type", "bias", "rounding", "weight_init", "weight_decay", "input", "loss",
        "layer", "layers", "function", "expression", "derivative", "parameters",
        "Type", "num_inputs", "epsilon", "radius", "a.b", '"a b"',
        "")  # fmt: skip


@dataclass
class Case:
    """A network file and what it must describe.

    Attributes:
        lines: of the file.
        shape: of the output.
        parameters: number of trainable numbers.
        shapes: shape of each layer's output by name, of layers that have a default name.
    """

    lines: list[str]
    shape: Shape
    parameters: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    layers: list[tuple[str, Shape, int]] = field(default_factory=list)


def trial(random: Random, folder: Path) -> Outcome:
    """Describe a network, and compare shapes and numbers of parameters."""
    case = make_case(random)
    content = ("\n".join(case.lines) + "\n").encode()
    is_valid = True
    if random.random() < 0.5:
        is_valid = False
        content = _edit(random, content)
    path = folder / "net.toml"
    path.write_bytes(content)
    arguments = ["describe", path, "--json", "--backend", BACKENDS[int(random.integers(5))]]
    arguments += ["--batch-size", (1, 2, 32)[int(random.integers(3))], "--threads", 2]
    for flag in ("--inference", "--recompute"):
        if random.random() < 0.2:
            arguments.append(flag)
    result = call(*arguments)
    if result.code:
        return result.refusal(is_valid=is_valid)
    if not is_valid:
        return ACCEPTED
    compare(case, json.loads(result.output))
    return COMPARED


def compare(case: Case, described: dict[str, object]) -> None:
    """Compare a description with the numbers that were counted while the file was made."""
    expect(
        described["parameters"] == case.parameters,
        f"{described['parameters']} parameters; expected {case.parameters}",
    )
    found = [
        (row["name"], tuple(row["output_shape"]), row["parameters"])  # type: ignore[index]
        for row in described["layers"]  # type: ignore[attr-defined]
    ]
    expect(found == case.layers, f"layers {found}; expected {case.layers}")


def make_case(random: Random) -> Case:
    """Return a random chain of layers with branches, and its counts."""
    maps = tuple(int(random.integers(1, 13)) for _ in range(3))
    shape: Shape = maps if random.random() < 0.85 else (int(random.integers(1, 40)),)
    outputs = int(random.integers(1, 6))
    losses = ["mean_squared_error", "sigmoid_cross_entropy"]
    if outputs > 1:
        losses.append("softmax_cross_entropy")
    case = Case([f"input = {list(shape)}"], shape)
    if random.random() < 0.5:
        case.lines.insert(0, 'name = "fuzz"')
    loss = losses[int(random.integers(len(losses)))]
    case.lines.append(
        f'loss = "{loss}"' if random.random() < 0.7 else f'loss = {{type = "{loss}"}}'
    )
    expression = EXPRESSIONS[int(random.integers(len(EXPRESSIONS)))]
    case.lines += ["[[function]]", f'name = "{OWN}"', f'expression = "{expression}"']
    for _ in range(int(random.integers(0, 7))):
        _add_random(random, case)
    if len(case.shape) == 3:
        _add(case, "flatten", {}, (math.prod(case.shape),))
    _add(case, "dense", {"units": outputs}, (outputs,), (case.shape[0] + 1) * outputs)
    return case


def _add(
    case: Case, kind: str, settings: dict[str, object], shape: Shape, parameters: int = 0,
    inputs: list[str] | None = None,
) -> str:  # fmt: skip
    """Add a layer; return its name."""
    case.counts[kind] = case.counts.get(kind, 0) + 1
    name = f"{kind}{case.counts[kind]}"
    case.lines += ["", "[[layer]]", f'type = "{kind}"']
    case.lines += [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    if inputs is not None:
        case.lines.append(f"inputs = {json.dumps(inputs)}")
    case.shape = shape
    case.parameters += parameters
    case.layers.append((name, shape, parameters))
    return name


def _add_random(random: Random, case: Case) -> None:
    shape = case.shape
    if len(shape) == 1:
        if random.random() < 0.5:
            units = int(random.integers(1, 20))
            _add(case, "dense", {"units": units}, (units,), (shape[0] + 1) * units)
        else:
            _add(case, ELEMENTWISE[int(random.integers(len(ELEMENTWISE)))], {}, shape)
        return
    choice = int(random.integers(8))
    if choice < 3:
        _add_conv(random, case)
    elif choice == 3:
        _add_pool(random, case)
    elif choice == 4:
        _add(case, ELEMENTWISE[int(random.integers(len(ELEMENTWISE)))], {}, shape)
    elif choice == 5:
        kind = ("batchnorm", "layernorm", "groupnorm", "lrn")[int(random.integers(4))]
        groups = _divisor(random, shape[0])
        settings: dict[str, object] = {"groups": groups} if kind == "groupnorm" else {}
        _add(case, kind, settings, shape, 0 if kind == "lrn" else 2 * shape[0])
    elif choice == 6:
        _add_branches(random, case)
    elif random.random() < 0.3:
        _add(case, "globalavgpool", {}, (shape[0], 1, 1))


def _add_conv(random: Random, case: Case) -> None:
    channels, *sizes = case.shape
    groups = _divisor(random, channels)
    filters = groups * int(random.integers(1, 5))
    kernel = [int(random.integers(1, 5)) for _ in range(2)]
    stride = [int(random.integers(1, 4)) for _ in range(2)]
    padding = ("same", "valid", "full", 0, 1, 2)[int(random.integers(6))]
    out = []
    for size, window, step in zip(sizes, kernel, stride, strict=True):
        if padding == "same":
            out.append(-(-size // step))
            continue
        named = {"valid": 0, "full": window - 1}
        pad = named[padding] if isinstance(padding, str) else padding
        out.append((size + 2 * pad - window) // step + 1)
    if min(out) < 1:
        return
    has_bias = bool(random.random() < 0.7)
    settings: dict[str, object] = {
        "filters": filters, "kernel": kernel[0] if kernel[0] == kernel[1] else kernel,
        "stride": stride, "padding": padding, "rounding": "floor",
    }  # fmt: skip
    if groups > 1:
        settings["groups"] = groups
    if not has_bias:
        settings["bias"] = False
    weights = filters * (channels // groups) * kernel[0] * kernel[1]
    _add(case, "conv", settings, (filters, *out), weights + filters * has_bias)


def _add_pool(random: Random, case: Case) -> None:
    channels, *sizes = case.shape
    kind = ("pool", "avgpool", "sumpool")[int(random.integers(3))]
    window, stride = int(random.integers(1, 4)), int(random.integers(1, 4))
    padding = ("same", "valid", window // 2)[int(random.integers(3))]
    if padding == "same":
        out = [-(-size // stride) for size in sizes]
    else:
        pad = padding if isinstance(padding, int) else 0
        out = [(size + 2 * pad - window) // stride + 1 for size in sizes]
    if min(out) < 1:
        return
    settings: dict[str, object] = {"window": window, "stride": stride, "padding": padding}
    _add(case, kind, settings, (channels, *out))


def _add_branches(random: Random, case: Case) -> None:
    """Add two layers that read the same tensor, and their sum or concatenation."""
    before = case.layers[-1][0] if case.layers else "input"
    shape = case.shape
    first = _add(case, "relu", {}, shape, inputs=[before])
    filters = shape[0] if random.random() < 0.5 else int(random.integers(1, 6))
    weights = filters * (shape[0] + 1)
    second = _add(
        case, "conv", {"filters": filters, "kernel": 1}, (filters, *shape[1:]), weights, [before]
    )
    joined = [first, second] if random.random() < 0.5 else [second, first]
    if filters == shape[0] and random.random() < 0.5:
        _add(case, "add", {}, shape, inputs=joined)
    else:
        _add(case, "concatenate", {}, (shape[0] + filters, *shape[1:]), inputs=joined)


def _divisor(random: Random, number: int) -> int:
    divisors = [each for each in range(1, number + 1) if number % each == 0]
    return divisors[int(random.integers(len(divisors)))] if random.random() < 0.4 else 1


def _edit(random: Random, content: bytes) -> bytes:
    """Return a file with a wrong value, a wrong key, or damaged bytes."""
    if random.random() < 0.15:
        return damage_bytes(random, content)
    lines = content.decode().splitlines()
    for _ in range(int(random.integers(1, 4))):
        at = int(random.integers(len(lines)))
        key, equals, _ = lines[at].partition(" = ")
        match int(random.integers(7)):
            case 0:
                del lines[at]
            case 1:
                lines.insert(at, lines[at])
            case 2:
                other = int(random.integers(len(lines)))
                lines[at], lines[other] = lines[other], lines[at]
            case 3:
                new = KEYS[int(random.integers(len(KEYS)))]
                lines[at] = f"{new} = {lines[at].partition(' = ')[2] or '1'}"
            case 4:
                depth = int(10 ** random.uniform(0, 4))
                lines.insert(at, ".".join(["a"] * depth) + " = 1")
            case _ if equals:
                lines[at] = f"{key} = {VALUES[int(random.integers(len(VALUES)))]}"
        lines = lines or ["a = 1"]
    return ("\n".join(lines) + "\n").encode()
