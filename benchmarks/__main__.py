"""The one command of all benchmarks: ``python -m benchmarks SUBJECT [options]``."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from difflib import get_close_matches

SUBJECTS = {
    "cpu": ("node", "steps, inference, ranks and sums on the cores of this machine, with peers"),
    "gpu": ("gpu", "steps, inference, images and ranks on the GPUs of this machine, with peers"),
    "table": ("table", "networks, devices and precisions of stored results, with the best peer"),
    "performance": ("performance", "write the page on performance from stored results"),
    "accuracy": ("accuracy", "test accuracy next to published ones and PyTorch's"),
    "small-tables": ("small_tables", "perceptrons on small tables next to scikit-learn"),
    "agreement": ("agreement", "whether two scaling studies measure the same efficiencies"),
    "choices": ("step.choices", "whether the selected kernels are the fastest"),
    "gains": ("step.gains", "what an algorithm gains for a step"),
    "micro-shards": ("step.shards", "what micro-shards cost for a step of one rank"),
    "chunks": ("step.chunks", "where the threads of a step spend their time"),
    "first-step": ("step.first_step", "time to the first step, with and without a cache"),
    "checks": ("step.check_cost", "what the checks for silent corruption cost"),
    "timing-cost": ("step.timing_cost", "what the clock readings of training cost"),
    "unequal": ("step.unequal", "unequal workers that train together"),
    "ladder-cpu": ("ladder.cpu", "simple convolutions on one core"),
    "ladder-gpu": ("ladder.gpu", "convolution kernels from a naive product to those of training"),
    "forecast": ("forecast.coverage", "how often forecasts contain the simulated truth"),
    "studies": ("studies", "results of published studies"),
    "zoo": ("zoo", "which published classifiers are read, trained and exported"),
    "zoo-steps": ("zoo.steps", "steps of published classifiers next to PyTorch"),
}
"""Module and description of each subject."""


def main(arguments: Sequence[str]) -> None:
    """Run the module of a subject as a program.

    Exit status: that of the program; 2 for an unknown subject or a package that is not installed.
    """
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print("Usage: python -m benchmarks SUBJECT [--help] [options]\n\nSubjects:")
        print("\n".join(f"  {each:<13} {text}" for each, (_, text) in SUBJECTS.items()))
        return
    if name not in SUBJECTS:
        near = get_close_matches(name, SUBJECTS, 1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        print(f"benchmarks: subject is '{name}'; expected one of {', '.join(SUBJECTS)}{hint}",
              file=sys.stderr)  # fmt: skip
        sys.exit(2)
    sys.argv = [name, *arguments[1:]]
    try:
        runpy.run_module(f"benchmarks.{SUBJECTS[name][0]}", run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("", "benchmarks", "dptrain"):
            raise
        extra = "zoo" if name.startswith("zoo") else "bench"
        print(f"benchmarks: {name} needs the package '{error.name}', which is not installed; "
              f"install it with pip install '.[{extra}]'", file=sys.stderr)  # fmt: skip
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
