"""`dptrain export`."""

from __future__ import annotations

from pathlib import Path

import click

from dptrain.cli.common import CHECKPOINT, EXISTING, WEIGHTS, examples, guarded
from dptrain.cli.options import GroupedCommand


@click.command(
    cls=GroupedCommand,
    short_help="Write a trained network to a file for other programs.",
    epilog=examples(
        "dptrain export RUN_DIR --output model.onnx         # the whole model, with preprocessing",
        "dptrain export RUN_DIR --output model.py           # a PyTorch module and its parameters",
        "dptrain export RUN_DIR --output model.safetensors  # parameters with PyTorch's names",
    ),
)
@click.argument("run_dir", type=EXISTING)
@click.option("-o", "--output", type=EXISTING, required=True, metavar="FILE", help="File to write.")
@click.option("--replace", is_flag=True, help="Overwrite existing files.")
@CHECKPOINT
@WEIGHTS
def export(
    run_dir: Path, output: Path, replace: bool, checkpoint: int | None, weights: Path | None
) -> int:
    """Write a trained network to a file for other programs.

    The suffix of the file selects the format. An ONNX file computes from raw samples what
    dptrain predict writes, and so does a PyTorch module (.py), whose parameters are in a
    .safetensors file next to it. A safetensors file has parameters and running statistics with
    PyTorch's names and shapes.
    """

    def action() -> int:
        from dptrain.comm.collective import call_on_rank_zero
        from dptrain.comm.world import World

        world = World.of_launch(command="export")
        call_on_rank_zero(world, lambda: _export(run_dir, output, replace, checkpoint, weights))
        return 0

    return guarded(action)


def _export(
    run_dir: Path, output: Path, replace: bool, checkpoint: int | None, weights: Path | None
) -> None:
    """Write the files and print their names; called on rank 0."""
    from dptrain.cli.train import print_warning
    from dptrain.training.evaluation.model import load

    # The reference backend compiles nothing.
    model = load(run_dir, checkpoint=checkpoint, weights=weights, backend="reference")
    files = model.export(output, replace=replace)
    print_warning(model.warning)
    listed = " and ".join(map(str, files))
    click.echo(f"{model.network.name}, model of step {model.step}, in {listed}")
