"""Run directories: nothing is overwritten, what is written comes back, mistakes are one line."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dptrain.errors import UserError
from dptrain.training.rundir import RunDirectory

NOW = datetime(2026, 11, 20, 16, 31, 52)

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


@settings(deadline=None)  # A shared disk may take its time.
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


def test_one_process_at_a_time_trains_in_a_directory(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    hold = (
        "import sys; from pathlib import Path; from dptrain.training.rundir import RunDirectory\n"
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
        tmp_path / "model0-digit-1": "no such directory; near it: .*model0-digits-1$",
        tmp_path / "other": r"it has no config\.toml; near it: ",
        tmp_path: r"it has no config\.toml; near it: .*model0-digits-1, .*solar-irradiance-1",
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


def test_a_directory_that_went_away_is_one_line(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    shutil.rmtree(run.path)
    with pytest.raises(UserError, match=r"cannot write .*No such file"):
        run.write_summary({})


def test_a_folder_without_a_run_is_not_advised_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match=r"is not empty and holds no run; choose another --run-dir"):
        RunDirectory.create(tmp_path, network="model0", data="digits", now=datetime.now())
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(UserError, match="go on with that run by --resume"):
        RunDirectory.create(tmp_path, network="model0", data="digits", now=datetime.now())
