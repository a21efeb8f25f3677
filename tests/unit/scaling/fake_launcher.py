"""Stands in for mpirun: leaves a profile that was made before, and starts only what makes none.

What it is told by the environment: `FAKE_PROFILES` is a folder with ``r2-b64.json`` and so on; by
parts of folders' names, `FAKE_FAIL` fails and `FAKE_HANG` never ends, and says so in the file
`FAKE_PID`. It imports little, so that it starts at once.
"""

import json
import os
import sys
import time


def _after(flag: str, default: str = "") -> str:
    return sys.argv[sys.argv.index(flag) + 1] if flag in sys.argv else default


def _train() -> None:
    """Leave a run that reached the accuracy after as many epochs as it has ranks, or never."""
    place, ranks = _after("--run-dir"), int(_after("-n"))
    reached = ranks < int(os.environ.get("FAKE_UNREACHED", "99"))
    epochs = ranks + int(_after("--seed", "0"))
    values = (float(epochs), 1000 * epochs, 2.0 * epochs / ranks) if reached else (None,) * 3
    record = dict(zip(("epochs", "samples", "time_s"), values))  # noqa: B905
    record["requested"] = float(_after("--until-accuracy"))
    os.makedirs(place)  # noqa: PTH103
    with open(os.path.join(place, "summary.json"), "w") as file:  # noqa: PTH118, PTH123
        json.dump({"time_to_accuracy": record, "flags": sys.argv}, file)


def main() -> None:
    """Do what the command line says."""
    if "train" in sys.argv:
        _train()
        return
    place = _after("--output")
    if not place:
        os.execv(sys.executable, sys.argv[sys.argv.index("-n") + 2 :])
    name = os.path.basename(place)  # noqa: PTH119 - pathlib takes longer to import than all else.
    if os.environ.get("FAKE_FAIL", "\0") in name:
        print("some words\ndptrain: rank 1 of 2: the data is missing\nmore words")
        sys.exit(2)
    if os.environ.get("FAKE_HANG", "\0") in name:
        with open(os.environ["FAKE_PID"], "w") as file:  # noqa: PTH123
            file.write(str(os.getpid()))
        time.sleep(60)
    profile = f"r{_after('-n')}-b{_after('--batch-size', '32')}.json"
    with open(os.path.join(os.environ["FAKE_PROFILES"], profile)) as file:  # noqa: PTH118, PTH123
        text = file.read()
    with open(os.path.join(place, "profile.json"), "w") as file:  # noqa: PTH118, PTH123
        file.write(text)
    with open(os.path.join(place, "..", "..", "order.txt"), "a") as file:  # noqa: PTH118, PTH123
        file.write(f"{name}\n")


if __name__ == "__main__":
    main()
