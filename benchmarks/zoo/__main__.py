r"""Which published classifiers dptrain reads, computes, trains and exports.

    python -m benchmarks zoo                          all, read
    python -m benchmarks zoo --until exported resnet18 mobilenet_v2

Each classifier of ``classifiers.csv``, of torchvision or timm with random weights, is exported to
ONNX by PyTorch and read by dptrain. A refusal names the operator and the node. The further columns:

- step: error of the gradients of a step in float32, divided by that of PyTorch in float32; both are
  distances from PyTorch in float64. Up to 30 counts as equal. It is larger if rounding moves a
  number across a kink, such as 0 of ReLU, in dptrain alone. Then PyTorch in float64 moves such
  numbers across, those that are as near to a kink as rounding in float32. The ratio without these
  follows in parentheses. If there are too many, the result is that of the same network with SiLU
  and means for functions with kinks, which has the same convolutions. Filters that the module does
  not train are not compared, and weights that it computes are compared as they are after that.
- trained: loss of a minibatch of 4 samples before and after 50 steps on it.
- exported: largest difference of ONNX Runtime, relative to the largest probability.

Two more columns are results of reading other files: ``training``, the file for training of the
older exporter, and ``dynamo``, that of the newer one, also for training.
``--exporter`` fills one of them.

The file contains the results: a row is written when its classifier is done, up to the column of
``--until``. Install the extra ``zoo``.
"""

from __future__ import annotations

import csv
import fnmatch
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.zoo.checks import (
    LARGEST_RATIO,
    export_error,
    gradient_error,
    losses_of_training,
)
from benchmarks.zoo.sources import EXPORTERS, export, make_module
from dptrain.errors import UserError
from dptrain.files import csv_of_rows, write_whole
from dptrain.interchange.onnx_import import OnnxNetwork, read_onnx

FILE = Path(__file__).with_name("classifiers.csv")
CHECKS = ("read", "step", "trained", "exported")
OTHER_FILES = ("training", "dynamo")
"""Columns of whether a file that another exporter writes is read."""

LARGEST_ERROR = 1e-3

Row = dict[str, str]


def read_rows(path: Path = FILE) -> list[Row]:
    """Return the rows of the list: library, name, size of images, results by check."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Write the list."""
    table = [list(rows[0]), *(list(row.values()) for row in rows)]
    write_whole(path, csv_of_rows(table), "--file")


def check(row: Row, until: str, exporter: str, folder: Path) -> Row:
    """Return the row of a classifier with the results of checks.

    Args:
        row: library, name and size.
        until: the last check.
        exporter: a key of `EXPORTERS`. Files of all but the first one are only read.
        folder: of exported files. A file that exists is not exported again.
    """
    is_other = exporter in OTHER_FILES
    size, suffix = int(row["size"]), f"-{exporter}" if is_other else ""
    path, module = folder / f"{row['library']}-{row['name']}{suffix}.onnx", None
    column = exporter if is_other else "read"
    result = {**row, **dict.fromkeys((column,) if is_other else CHECKS, "")}
    try:
        if until != CHECKS[0] or not path.exists():
            module = make_module(row["library"], row["name"], size)
        if not path.exists():
            export(module, path, size, exporter)
    except Exception as error:  # Exporters have many classes of errors.
        first = " ".join(str(error).split()).partition(". ")[0]
        return {**result, column: f"not exported: {first[:120]}"}
    try:
        found = read_onnx(path)
    except UserError as error:
        text = str(error).removeprefix(f"{path}: ").partition("; expected")[0]
        return {**result, column: f"refused: {text}"}
    result[column] = "yes"
    if is_other:
        return result
    for name in CHECKS[1 : CHECKS.index(until) + 1]:
        try:
            result[name] = RESULTS[name](found, module, size, folder)
        except (UserError, ValueError) as error:
            result[name] = f"fails: {error}"
    return result


def _step(found: OnnxNetwork, module: Any, size: int, folder: Path) -> str:
    from benchmarks.zoo.kinks import without_kinks

    smooth = without_kinks(module).float()  # Before the comparison, which changes the module.
    error = gradient_error(found, module, size)
    if passes("step", str(error)):
        return str(error)
    path = folder / "smooth.onnx"
    export(smooth, path, size, "torchscript")
    own = gradient_error(read_onnx(path), smooth, size)
    return f"{own} if smooth, otherwise {error}"


def _trained(found: OnnxNetwork, module: Any, size: int, folder: Path) -> str:
    before, after = losses_of_training(found, size)
    return f"{before:.3g} to {after:.3g}"


def _exported(found: OnnxNetwork, module: Any, size: int, folder: Path) -> str:
    return f"{export_error(found, size, folder):.1g}"


RESULTS: dict[str, Callable[[OnnxNetwork, Any, int, Path], str]] = {
    "step": _step,
    "trained": _trained,
    "exported": _exported,
}


def summary(rows: Sequence[Row]) -> list[str]:
    """Return how many classifiers pass each check, and what refuses others."""
    lines = []
    for library in dict.fromkeys(row["library"] for row in rows):
        own = [row for row in rows if row["library"] == library]
        counts = [f"read {sum(row['read'] == 'yes' for row in own)} of {len(own)}"]
        for name in CHECKS[1:]:
            found = [row[name] for row in own if row[name]]
            if found:
                counts.append(f"{name} {sum(passes(name, each) for each in found)} of {len(found)}")
        for name in OTHER_FILES:
            found = [row[name] for row in own if row[name]]
            if found:
                counts.append(f"{name} {found.count('yes')} of {len(found)}")
        lines.append(f"{library}: {', '.join(counts)}")
    refused = [row["read"] for row in rows if row["read"].startswith("refused")]
    operators = Counter(each.partition("(")[2].partition(")")[0] for each in refused)
    lines += [f"refused by {name or 'another reason'}: {n}" for name, n in operators.most_common()]
    return lines


def passes(name: str, text: str) -> bool:
    """Return whether the result of a check is as expected.

    Example:
        >>> passes("step", "1.2 (400 without 1 kink)"), passes("step", "45")
        (True, False)
        >>> passes("step", "1.1 if smooth, otherwise 78 (240 without 11 kinks)")
        True
        >>> passes("trained", "7 to 0.02")
        True
    """
    if not text or text.startswith("fails"):
        return False
    if name == "trained":
        before, after = map(float, text.split(" to "))
        return after < before
    limit = {"step": LARGEST_RATIO, "exported": LARGEST_ERROR}[name]
    return float(text.partition(" ")[0]) <= limit


@click.command(help=__doc__, epilog="See docs/how-to/interchange.md.")
@click.option("--until", type=click.Choice(CHECKS), default="read", show_default=True,
              help="The last check.")  # fmt: skip
@click.option("--exporter", type=click.Choice([*EXPORTERS]), default="torchscript",
              show_default=True, help="How PyTorch exports.")  # fmt: skip
@click.option("--file", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              default=FILE, help="The list.  [default: classifiers.csv of the module]")  # fmt: skip
@click.option("--folder", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="Folder that keeps exported files.  [default: none]")  # fmt: skip
@click.option("--missing", is_flag=True, help="Only those that are read and lack the last check.")
@click.argument("names", nargs=-1)
def main(
    until: str,
    exporter: str,
    file: Path,
    folder: Path | None,
    missing: bool,
    names: tuple[str, ...],
) -> None:
    """Check the classifiers whose names match NAMES, or all."""
    rows = read_rows(file)
    for index, row in enumerate(rows):
        if names and not any(fnmatch.fnmatch(row["name"], each) for each in names):
            continue
        if missing and (row["read"] != "yes" or row[until]):
            continue
        with tempfile.TemporaryDirectory() as temporary:
            rows[index] = row = check(row, until, exporter, folder or Path(temporary))
        write_rows(rows, file)
        shown = (exporter,) if exporter in OTHER_FILES else CHECKS
        results = ", ".join(f"{name} {row[name]}" for name in shown if row[name])
        click.echo(f"{row['library']} {row['name']}: {results}")
    click.echo("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
