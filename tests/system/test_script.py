"""Python scripts with a trainer, on one rank and on several."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.system.launch import ROOT, launch

FIVE_LINES = """
from sklearn.datasets import load_digits
from dptrain import Trainer

images, labels = load_digits(return_X_y=True)
images = (images * 15.9).astype("uint8").reshape(-1, 8, 8)
trainer = Trainer("model0", (images, labels), seed=1, progress=False, epochs={epochs})
trainer.fit()
print("accuracy", trainer.evaluate()["accuracy"], flush=True)
trainer.save({folder!r})
"""


def run(script: str, tmp_path: Path, ranks: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a script, on several ranks if `ranks` is not 0."""
    file = tmp_path / "script.py"
    file.write_text(script)
    # Scikit-learn needs SciPy.
    return launch(ranks=ranks, program=(str(file),), cwd=tmp_path, PYTHONPATH=str(ROOT))


@pytest.mark.more
def test_a_short_script_reaches_97_percent_on_the_digits(tmp_path: Path) -> None:
    done = run(FIVE_LINES.format(epochs=8, folder="one"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) >= 0.97


@pytest.mark.more
def test_the_same_script_on_four_ranks_computes_the_same_parameters(tmp_path: Path) -> None:
    """The bound is that of numerics.md for float32 sums in another order, after 45 steps."""
    found = []
    for name, ranks in (("one", 0), ("four", 4)):
        done = run(FIVE_LINES.format(epochs=1, folder=name), tmp_path, ranks)
        assert done.returncode == 0, done.stderr
        [file] = (tmp_path / name).glob("step-*/state.safetensors")
        found.append(load_file(file))
    one, four = found
    assert one.keys() == four.keys()
    for name, values in one.items():
        if name.startswith("parameters/"):
            error = np.abs(four[name] - values).max() / np.abs(values).max()
            assert error < 1e-3, name


@pytest.mark.more
def test_a_mistake_on_all_ranks_is_one_line(tmp_path: Path) -> None:
    script = "from dptrain import Trainer\nTrainer('model0', 'digits', batch_size=0)\n"
    done = run(script, tmp_path, ranks=2)
    assert done.returncode == 2
    message = "batch_size is 0; expected a whole number of at least 1"
    assert done.stderr.count(message) == 1, done.stderr


LATE = """
import atexit, os, pathlib, time
from dptrain import Trainer

def exit_late():
    if int(os.environ["PMI_RANK"]) == {late}:
        time.sleep(1)
    pathlib.Path("left-" + os.environ["PMI_RANK"]).touch()

atexit.register(exit_late)  # Runs after dptrain has shut MPI down.
Trainer("model0", "digits", batch_size=0)
"""


@pytest.mark.more
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_exits_late_after_a_mistake_is_not_killed(tmp_path: Path, late: int) -> None:
    done = run(LATE.format(late=late), tmp_path, ranks=2)
    assert done.returncode == 2, done.stdout
    expected = "a whole number of at least 1 and up to 2,147,483,647"
    assert done.stderr == f"dptrain: batch_size is 0; expected {expected}\n"
    assert (tmp_path / "left-0").exists()
    assert (tmp_path / "left-1").exists()


DIFFERENT = """
import os, sys
import numpy as np
from dptrain import Dense, Network, Trainer, UserError

rank = int(os.environ.get("PMI_RANK", 0))
x, y = np.random.default_rng(0).standard_normal((200, 5)), np.arange(200) % 3
network = Network((5,), [Dense(3)], name="linear")
settings = {"backend": "reference", "steps": 4, "progress": False, "timeout": 60, "threads": 1}

def attempt(action):
    try:
        action()
        print("no error", flush=True)
    except UserError as error:
        print(f"[{error}]", flush=True)

changed = x.copy()
changed[37] += rank
attempt(lambda: Trainer(network, (changed, y), **settings))
attempt(lambda: Trainer(network, (x, np.arange(200) % (3 + rank)), **settings))
attempt(lambda: Trainer("nothing" if rank else network, (x, y), **settings))
trainer = Trainer(network, (x, y), **settings)
attempt(lambda: trainer.evaluate((x[:100], y[:100]) if rank else (x, y)))
attempt(lambda: trainer.evaluate((x[:, :3], y) if rank else (x, y)))
attempt(lambda: trainer.save(os.devnull))
one, two = trainer.save("one"), (trainer.fit(), trainer.save("two"))[1]
trainer.load(two if rank else one)
assert trainer.step == 0, "all ranks load what rank 0 reads"
trainer.fit()
"""


@pytest.mark.more
def test_all_ranks_raise_the_same_error_if_the_arguments_differ(tmp_path: Path) -> None:
    done = run(DIFFERENT, tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    expected = ("differ in data content", "labels from 0 to 3", "no network 'nothing'")
    for text in (*expected, "data test_samples", "shape (3,)", "cannot write /dev/null"):
        # mpirun may join the lines of two ranks.
        assert done.stdout.count(text) == 2, (text, done.stdout)
    assert "no error" not in done.stdout


@pytest.mark.parametrize("name", ["Trainer", "load", "Network", "AfterEpoch"])
def test_star_import_has_the_public_names(name: str) -> None:
    namespace: dict[str, object] = {}
    exec("from dptrain import *", namespace)
    assert name in namespace
