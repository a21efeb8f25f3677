"""A process that is killed while it saves leaves a whole checkpoint, and never one too old.

Run as a script, this file is that process: it forks children that save and die, and looks at what
each leaves. (A script of its own, because forking a test runner with its threads is not safe.)
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dptrain.training.persistence.checkpoints import CheckpointStore
from tests.tiers import tiered

REPEATS = 2
"""Saves of each step, so that whole checkpoints are replaced too and not only added."""


@pytest.mark.more
@pytest.mark.parametrize("attack", tiered(["random", "everywhere"], ["everywhere"]))
def test_a_killed_process_leaves_a_whole_checkpoint(tmp_path: Path, attack: str) -> None:
    # One thread, so that forking is safe.
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": root}
    command = [sys.executable, __file__, attack, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    print(done.stdout)


def save(folder: Path, number: int) -> None:
    """Save number `number` of a run; its contents follow from the number."""
    array = np.full(20_000, number, np.float32)
    CheckpointStore(folder, keep=2).save(number // REPEATS, {"w": array}, {"number": number})


def load(folder: Path) -> int:
    """Number of the save that a restart would go on from, checked through and through."""
    checkpoint = CheckpointStore(folder).load()
    number: int = checkpoint.facts["number"]
    assert checkpoint.notes == (), checkpoint.notes
    assert checkpoint.step == number // REPEATS
    assert (checkpoint.arrays["w"] == number).all()
    return number


def in_child(work: Callable[[], None]) -> int:
    """Process number of a child that does `work`."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


def kill_at_random_moments(folder: Path, kills: int = 80) -> None:
    """SIGKILL a child that saves as fast as it can, again and again over one folder."""
    generator, last, total = random.Random(0), 0, 0
    save(folder, last)
    for _ in range(kills):
        reading, writing = os.pipe()

        def work(first: int = last + 1, writing: int = writing) -> None:
            for number in range(first, first + 100_000):
                save(folder, number)
                os.write(writing, number.to_bytes(8, "big"))

        child = in_child(work)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            acknowledged = pipe.read(8)
            time.sleep(generator.uniform(0.0, 0.02))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            acknowledged += pipe.read()
        total += len(acknowledged) // 8
        last = int.from_bytes(acknowledged[-8:], "big")
        found = load(folder)
        assert last <= found <= last + 1, (last, found)
        last = found
    print(f"{kills} kills, {total} saves acknowledged")


SITUATIONS = {
    "a new step": ([0, 1, 2, 3], 4, False),
    "a step that is there": ([0, 1, 2, 3, 4], 5, False),
    "a step before those that are there": ([10, 12], 4, False),
    "a new step after a crash": ([0, 1, 2, 3], 4, True),
}
"""Earlier saves, the one that is cut short, and whether the save before it was cut short too, when
it had set the old checkpoint of its step aside."""


def kill_before_every_operation(folder: Path) -> None:
    """Die before the first, second, … use of the file system in a save, until one gets through."""
    for situation, (earlier, number, crashed) in SITUATIONS.items():
        template, work = folder / f"{situation} before", folder / f"{situation} after"
        for one in earlier:
            save(template, one)
        if crashed:
            step = f"step-{earlier[-1] // REPEATS:08d}"
            (template / step).rename(template / f".{step}.aside")
        outcomes: list[tuple[bool, int]] = []
        while not outcomes or outcomes[-1][0]:
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(template, work)
            outcomes.append(die_at(work, number, len(outcomes) + 1))
        found = [number for _, number in outcomes]
        first_new = found.index(number)
        assert first_new > 8
        assert found == [earlier[-1]] * first_new + [number] * (len(found) - first_new)
        print(f"{situation}: {len(found)} moments, the new one from number {first_new + 1} on")


def die_at(folder: Path, number: int, moment: int) -> tuple[bool, int]:
    """Save in a child that dies at its `moment`-th audited event; whether it did, what it left."""

    def work() -> None:
        left = moment

        def count(event: str, arguments: object) -> None:
            nonlocal left
            left -= event.startswith(("open", "os.", "shutil."))
            if left == 0:
                os._exit(9)

        sys.addaudithook(count)
        save(folder, number)

    _, status = os.waitpid(in_child(work), 0)
    found = load(folder)
    # Whatever was left lying about, the next save cleans it up.
    save(folder, number + REPEATS)
    assert load(folder) == number + REPEATS
    assert not list(folder.glob(".*"))
    assert len(list(folder.iterdir())) <= 2
    return status != 0, found


if __name__ == "__main__":
    attack = {"random": kill_at_random_moments, "everywhere": kill_before_every_operation}
    attack[sys.argv[1]](Path(sys.argv[2]))
