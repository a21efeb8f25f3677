"""The command line that benchmarks of single kernels share."""

from __future__ import annotations

from collections.abc import Sequence

import click
import pytest
from click.testing import CliRunner

from benchmarks.gpu_kernels.gpu_cases import Case, takes_cases


@click.command()
@click.option("--limit", default=3)
@takes_cases(("model0", "vgg"), batches=(32, 64), precisions=("tf32",), choices=("tf32", "bf16"))
def command(cases: Sequence[Case], limit: int) -> None:
    """Print the cases."""
    for network, batch_size, precision in cases:
        click.echo(f"{network.name} {batch_size} {precision} {limit}")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "model0 32 tf32 3, model0 64 tf32 3, vgg 32 tf32 3, vgg 64 tf32 3"),
        ("perceptron --batch 7 --batch 9", "perceptron 7 tf32 3, perceptron 9 tf32 3"),
        ("cifar --limit 5 --batch 1 --precision bf16", "cifar 1 bf16 5"),
    ],
)
def test_every_combination_is_a_case(arguments: str, expected: str) -> None:
    result = CliRunner().invoke(command, arguments.split())
    assert result.output.splitlines() == expected.split(", ")


@pytest.mark.parametrize("arguments", ["--batch 0", "--precision fp32"])
def test_other_values_are_refused(arguments: str) -> None:
    assert CliRunner().invoke(command, arguments.split()).exit_code == 2
