"""Run directories: nothing is overwritten, what is written comes back, mistakes are one line."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dptrain.comm.abort import exit_code
from dptrain.errors import UserError
from dptrain.training.persistence.rundir import RunDirectory, RunDirectoryLostError

NOW = datetime(2026, 11, 20, 16, 31, 52)
ARRAYS = {"w": np.ones(5, np.float32)}

keys = st.text(max_size=8)
scalars = st.text() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
tables = st.dictionaries(
    keys,
    scalars | st.lists(scalars, max_size=3) | st.dictionaries(keys, scalars, max_size=3),
    max_size=6,
)


def make(path: Path) -> RunDirectory:
    run = RunDirectory.create(path, network="model0", data="digits", now=NOW)
    run.write_config({"network": "model0"})
    return run


def one_line(message: str) -> str:
    assert "\n" not in message
    return message


@given(tables)
def test_configuration_comes_back(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, object]
) -> None:
    run = RunDirectory(tmp_path_factory.mktemp("run"))
    run.write_config(values)
    assert repr(sorted(run.read_config().items())) == repr(sorted(values.items()))


def test_none_is_left_out_and_paths_are_strings(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.write_config({"a": None, "data": {"path": Path("x/ü 'q' \"d\""), "b": None}, "c": ("é", 1)})
    assert run.read_config() == {"data": {"path": "x/ü 'q' \"d\""}, "c": ["é", 1]}
    first = (tmp_path / "config.toml").read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("#")
    assert "dptrain train --config config.toml" in first


def test_a_damaged_configuration_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("network = \n")
    with pytest.raises(UserError, match=r"config\.toml: not TOML") as info:
        RunDirectory.open(tmp_path).read_config()
    one_line(str(info.value))


def test_names_carry_network_data_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = [
        RunDirectory.create(None, network=network, data=data, now=NOW).path.as_posix()
        for network, data in [("model0", "digits")] * 3 + [("nets/my net.toml", "npz:/a/b.npz")]
    ]
    stem = "runs/model0-digits-20261120-163152"
    assert names == [stem, f"{stem}-2", f"{stem}-3", "runs/my-net-npz-20261120-163152"]
    assert all(Path(name).is_dir() for name in names)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    full = tmp_path / "full"
    make(full)
    note = tmp_path / "note"
    note.write_text("mine")
    for path, advice in ((full, "--resume.*another --run-dir"), (note, "another --run-dir")):
        with pytest.raises(UserError, match=advice) as info:
            RunDirectory.create(path, network="model0", data="digits", now=NOW)
        one_line(str(info.value))
    assert note.read_text() == "mine"


def test_an_empty_or_new_directory_is_taken(tmp_path: Path) -> None:
    for name in ("empty", "killed"):
        (tmp_path / name).mkdir()
    for name in (".lock", ".config.toml.partial", ".nfs0001"):  # What a start leaves at the most.
        (tmp_path / "killed" / name).touch()
    for path in (tmp_path / "empty", tmp_path / "killed", tmp_path / "deep" / "new"):
        assert RunDirectory.create(path, network="a", data="b", now=NOW).path == path
        assert path.is_dir()


@pytest.mark.more
def test_one_process_at_a_time_trains_in_a_directory(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    hold = (
        "import sys; from pathlib import Path\n"
        "from dptrain.training.persistence.rundir import RunDirectory\n"
        "run = RunDirectory(Path(sys.argv[1])); run.hold()\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", hold, str(run.path)]

    def try_in_another() -> str:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        return done.stdout + done.stderr

    refused = try_in_another().strip().splitlines()[-1]
    assert f"process {os.getpid()} on " in refused
    assert f"is training in run directory {run.path}; wait until" in refused
    run.release()
    assert try_in_another() == "held\n"
    # A process that was killed holds nothing any more.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=f"process {other.pid} on "):
            run.hold()
        other.kill()
    run.hold()


def test_a_disk_without_locks_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    make(tmp_path / "run").release()


def test_what_the_system_refuses_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 300)
    with pytest.raises(UserError, match="File name too long"):
        RunDirectory.create(path, network="model0", data="digits", now=datetime(2026, 1, 2))
    with pytest.raises(UserError, match="File name too long"):
        RunDirectory.open(path)
    with pytest.raises(UserError, match="File name too long"):
        RunDirectory(path).checkpoints.load()


def test_a_run_is_opened_again(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    run.metrics.append({"step": 1, "loss": 0.5})
    run.write_environment({"host": "h"})
    run.write_summary({"test_accuracy": 0.98, "worst_loss": float("inf")})
    again = RunDirectory.open(run.path)
    assert again.read_config() == {"network": "model0"}
    assert again.metrics.read() == [{"step": 1, "loss": 0.5}]
    assert again.read_summary() == {"test_accuracy": 0.98, "worst_loss": float("inf")}
    assert again.checkpoints.steps() == []


def test_a_run_that_has_not_ended_has_no_summary(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"summary\.json.*when it ends"):
        make(tmp_path / "run").read_summary()


def test_what_is_no_run_is_explained(tmp_path: Path) -> None:
    make(tmp_path / "model0-digits-1")
    make(tmp_path / "solar-irradiance-1")
    (tmp_path / "other").mkdir()
    cases = {
        tmp_path / "model0-digit-1": "no such directory; runs nearby: .*model0-digits-1$",
        tmp_path / "other": r"it has no config\.toml; runs nearby: ",
        tmp_path: r"it has no config\.toml; runs nearby: .*model0-digits-1, .*solar-irradiance-1",
        tmp_path / "model0-digits-1" / "checkpoints": "did you mean .*model0-digits-1",
        tmp_path / "model0-digits-1/checkpoints/step-00000450": "did you mean .*model0-digits-1",
        tmp_path / "a" / "b": "no such directory$",
    }
    for path, message in cases.items():
        with pytest.raises(UserError, match=message) as info:
            RunDirectory.open(path)
        one_line(str(info.value))


def test_a_file_is_old_or_new_but_never_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(tmp_path / "run")
    run.write_summary({"steps": 1})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for function in ("pathlib.Path.replace", "os.fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(function, full)
            with pytest.raises(UserError, match=r"cannot write .*No space left.*--run-dir") as info:
                run.write_summary({"steps": 2})
        one_line(str(info.value))
        assert run.read_summary() == {"steps": 1}
        assert not list(run.path.glob(".*.partial"))


WRITES: dict[str, Callable[[RunDirectory], object]] = {
    "metrics": lambda run: run.metrics.append({"step": 2}),
    "checkpoint": lambda run: run.save_checkpoint(2, ARRAYS, {}),
    "summary": lambda run: run.write_summary({"steps": 2}),
    "configuration": lambda run: run.write_config({"network": "model0"}),
    "environment": lambda run: run.write_environment({}),
    "truncation": lambda run: run.metrics.truncate_after(0),
    "removal": lambda run: run.remove_summary(),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("how", ["moved", "deleted", "replaced"])
def test_a_directory_that_is_lost_during_training_ends_the_run(
    tmp_path: Path, write: str, how: str
) -> None:
    run = make(tmp_path / "run")
    run.metrics.append({"step": 1})
    run.save_checkpoint(1, ARRAYS, {})
    moved = tmp_path / "moved"
    run.path.rename(moved)
    before = files_below(moved)
    if how == "deleted":
        shutil.rmtree(moved)
    elif how == "replaced":
        run.path.mkdir()
    with pytest.raises(RunDirectoryLostError, match="during training") as info:
        WRITES[write](run)
    one_line(str(info.value))
    assert exit_code(info.value) == 1
    if how == "deleted":
        assert "was deleted or moved" in str(info.value)
        assert not moved.exists()
    else:
        assert f"was moved to {moved} during" in str(info.value)
        assert f"dptrain train --resume {moved}" in str(info.value)
        assert files_below(moved) == before
    assert files_below(run.path) == {}


def test_a_directory_that_is_moved_within_a_write_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(tmp_path / "run")

    def move(*_: object) -> None:
        monkeypatch.undo()
        run.path.rename(tmp_path / "moved")
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr("dptrain.training.persistence.checkpoints.sync", move)
    with pytest.raises(RunDirectoryLostError, match="was moved to"):
        run.save_checkpoint(1, ARRAYS, {})
    assert not run.path.exists()


def files_below(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def test_a_run_that_was_moved_after_training_is_used_at_its_new_path(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    run.save_checkpoint(1, ARRAYS, {})
    run.release()
    run.path.rename(tmp_path / "moved")
    again = RunDirectory.open(tmp_path / "moved")
    again.hold()
    assert again.has_checkpoint()
    again.save_checkpoint(2, ARRAYS, {})
    again.metrics.append({"step": 2})
    assert again.checkpoints.load().step == 2
    assert not run.path.exists()


# Checkpoints that have disappeared.


def delete_checkpoints(run: RunDirectory) -> None:
    shutil.rmtree(run.checkpoints.folder)


def empty_checkpoints(run: RunDirectory) -> None:
    delete_checkpoints(run)
    run.checkpoints.folder.mkdir()


def link_checkpoints_to_a_missing_disk(run: RunDirectory) -> None:
    delete_checkpoints(run)
    run.checkpoints.folder.symlink_to(run.path / "unmounted" / "disk")


def replace_checkpoints_by_a_file(run: RunDirectory) -> None:
    delete_checkpoints(run)
    run.checkpoints.folder.write_text("")


@pytest.mark.parametrize(
    ("lose", "message"),
    [
        (delete_checkpoints, r"saved a checkpoint of step 7, but .*checkpoints is missing"),
        (empty_checkpoints, r"saved a checkpoint of step 7, but .*checkpoints is empty"),
        (link_checkpoints_to_a_missing_disk, r"cannot read .*checkpoints: No such file"),
        (replace_checkpoints_by_a_file, r"cannot read .*checkpoints: Not a directory"),
    ],
)
@pytest.mark.parametrize("ended", [False, True])
def test_a_run_whose_checkpoints_vanished_is_not_begun_again(
    tmp_path: Path, lose: Callable[[RunDirectory], None], message: str, ended: bool
) -> None:
    run = make(tmp_path / "run")
    run.save_checkpoint(7, ARRAYS, {})
    if ended:
        run.write_summary({"steps": 7})
    run.release()
    lose(run)
    with pytest.raises(UserError, match=message) as info:
        RunDirectory.open(run.path).has_checkpoint()
    one_line(str(info.value))
    if "cannot read" not in message:
        assert f"dptrain train --config {run.path}/config.toml" in str(info.value)


def test_a_run_killed_before_its_first_checkpoint_has_not_begun(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    assert not run.has_checkpoint()
    run.checkpoints.folder.mkdir()
    (run.checkpoints.folder / ".step-00000001.partial").mkdir()
    assert not run.has_checkpoint()


def test_a_resumed_run_has_no_summary_of_an_earlier_step(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    run.write_summary({"steps": 7})
    run.remove_summary()
    run.remove_summary()
    with pytest.raises(UserError, match="when it ends"):
        run.read_summary()


# Damaged and special files.


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1]", "expected a JSON object, found \\[1\\]"),
        (b"[" * 200_000, "is not JSON"),
        (b'{"steps": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b"\xff", "is not JSON"),
        (None, "it is a named pipe; expected a regular file"),
        ("/dev/zero", "it is a device; expected a regular file"),
    ],
)
def test_a_damaged_summary_is_one_line(
    tmp_path: Path, content: bytes | str | None, message: str
) -> None:
    run = make(tmp_path / "run")
    spoil(run.path / "summary.json", content)
    with pytest.raises(UserError, match=message) as info:
        run.read_summary()
    one_line(str(info.value))
    assert len(str(info.value)) < 400
    assert run.summary_of(3) is None


def spoil(path: Path, content: bytes | str | None) -> None:
    """Put bytes, a link to a device, or (for None) a named pipe at `path`."""
    path.unlink(missing_ok=True)
    if content is None:
        os.mkfifo(path)
    elif isinstance(content, str):
        path.symlink_to(content)
    else:
        path.write_bytes(content)


@pytest.mark.parametrize("content", [None, "/dev/zero"])
@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", ".last_checkpoint"])
def test_special_files_are_refused_before_they_are_opened(
    tmp_path: Path, name: str, content: str | None
) -> None:
    run = make(tmp_path / "run")
    spoil(run.path / name, content)
    reads = {"config.toml": run.read_config, "metrics.jsonl": run.metrics.read}
    with pytest.raises(UserError, match="expected a regular file") as info:
        reads.get(name, run.has_checkpoint)()
    one_line(str(info.value))


# A full disk. Files of a process cannot grow beyond RLIMIT_FSIZE, which needs no other disk.

FULL_DISK = """
import resource, sys
from pathlib import Path
import numpy as np
from dptrain.errors import UserError
from dptrain.network.layers import Dense
from dptrain.network.network import Network
from dptrain.training.persistence.rundir import RunDirectory

run = RunDirectory.open(Path(sys.argv[1]))
network = Network((4,), [Dense(3)] * 20)
resource.setrlimit(resource.RLIMIT_FSIZE, (150, 150))
writes = {
    "checkpoint": lambda: run.save_checkpoint(2, {"w": np.zeros(1000)}, {}),
    "network": lambda: run.keep_network(network),
    "summary": lambda: run.write_summary({"text": "x" * 1000}),
    "metrics": lambda: run.metrics.append({"text": "x" * 1000}),
}
for name, write in writes.items():
    try:
        write()
    except UserError as error:
        print(name, error)
"""


def test_a_full_disk_is_one_line_and_old_files_stay(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    run.save_checkpoint(1, ARRAYS, {})
    run.write_summary({"steps": 1})
    run.metrics.append({"step": 1})
    run.release()
    run.metrics.close()
    before = files_below(run.path)
    command = [sys.executable, "-c", FULL_DISK, str(run.path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr == ""
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert set(lines) == {"checkpoint", "network", "summary", "metrics"}
    for line in lines.values():
        assert "cannot write" in line
        assert "File too large" in line
    assert RunDirectory.open(run.path).checkpoints.load().step == 1
    assert run.metrics.read() == [{"step": 1}]
    after = files_below(run.path)
    assert {name: after[name] for name in before if name != "metrics.jsonl"} == {
        name: content for name, content in before.items() if name != "metrics.jsonl"
    }
    assert set(after) == set(before)


def test_a_folder_without_a_run_is_not_advised_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="does not contain a run; choose another --run-dir"):
        RunDirectory.create(tmp_path, network="model0", data="digits", now=datetime.now())
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(UserError, match="resume that run with --resume"):
        RunDirectory.create(tmp_path, network="model0", data="digits", now=datetime.now())
