"""Stands in for mpirun: starts nothing, and writes a profile as a job of that many ranks would.

What it is told by the environment, by parts of folders' names: `FAKE_FAIL` fails, `FAKE_HANG`
never ends, and says so in the file `FAKE_PID`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tests.unit.scaling.synthetic import Law, make_profile


def _after(flag: str) -> str:
    return sys.argv[sys.argv.index(flag) + 1]


def main() -> None:
    """Do what the command line says."""
    place = Path(_after("--output"))
    if os.environ.get("FAKE_FAIL", "\0") in place.name:
        print("some words\ndptrain: rank 1 of 2: the data is missing\nmore words")
        sys.exit(2)
    if os.environ.get("FAKE_HANG", "\0") in place.name:
        Path(os.environ["FAKE_PID"]).write_text(str(os.getpid()))
        time.sleep(60)
    with (place.parents[1] / "order.txt").open("a") as order:
        order.write(f"{place.name}\n")
    batch = int(_after("--batch-size")) if "--batch-size" in sys.argv else 32
    threads = int(_after("--threads")) if "--threads" in sys.argv else 1
    noise = 0.01 * (time.time_ns() % 1000) / 1000
    make_profile(
        Law(), ranks=int(_after("-n")), threads=threads, batch_size=batch, noise=noise
    ).write(place / "profile.json")


if __name__ == "__main__":
    main()
