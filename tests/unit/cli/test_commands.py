"""The commands: what they call, what they print, what they import, how they fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

import dptrain
import dptrain.training
from dptrain.__main__ import main
from dptrain.cli.main import cli, run
from dptrain.errors import UserError
from dptrain.training.settings import Settings, load_settings, settings

HEAVY = (
    "numpy",
    "numba",
    "matplotlib",
    "mpi4py",
    "rich",
    "PIL",
    "safetensors",
    "llvmlite",
    "tomli_w",
)


def modules_after(code: str) -> set[str]:
    program = f"{code}\nimport sys; print(*sys.modules)"
    root = Path(dptrain.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "code",
    [
        "import dptrain",
        "import dptrain.cli.main",
        "from dptrain.cli.main import run; run(['--help'], is_rank_zero=True)",
        "from dptrain.cli.main import run; run(['train', '--help'], is_rank_zero=True)",
        "from dptrain.cli.main import run; run(['train', '--wrong'], is_rank_zero=True)",
    ],
)
def test_help_waits_for_no_heavy_module(code: str) -> None:
    loaded = modules_after(code)
    assert not [name for name in HEAVY if name in loaded]
    # Time on a busy machine says little; what is loaded decides it. 0.2 s were 170 modules.
    assert len(loaded) < 300


def test_interrupt_before_the_commands_are_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dptrain.cli.output.open_standard_streams", interrupt)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "dptrain: interrupted\n"


@pytest.mark.parametrize(
    "program",
    [
        "from dptrain.backends import load_backend; load_backend('numba')",
        pytest.param("import dptrain.native.draws", marks=pytest.mark.more),
    ],
)
def test_numba_refuses_an_environment_variable(program: str) -> None:
    environment = {**os.environ, "NUMBA_NUM_THREADS": "-1"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert "UserError: Numba cannot be imported: " in done.stderr.splitlines()[-1]
    assert "NUMBA_" in done.stderr.splitlines()[-1]


def test_help_of_train_lists_every_setting() -> None:
    text = CliRunner().invoke(cli, ["train", "--help"], terminal_width=100).output
    for setting in settings():
        assert f"  {setting.flag} " in text
        assert setting.help.split()[0] in text
        if setting.limits.choices:
            assert "|".join(setting.limits.choices) in text


@pytest.mark.parametrize("command", [[], *([name] for name in cli.commands)], ids=str)
def test_every_help_has_examples(command: list[str]) -> None:
    result = CliRunner().invoke(cli, [*command, "--help"])
    assert result.exit_code == 0
    assert "Examples:\n" in result.output
    assert CliRunner().invoke(cli, [*command, "-h"]).output == result.output


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([], is_rank_zero=True) == 0
    assert "Commands:" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"], is_rank_zero=True) == 0
    assert capsys.readouterr().out == f"dptrain {dptrain.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "No such command 'trian'"),
        (["train", "--batchsize", "3"], "No such option '--batchsize'"),
        (["train", "--batch-size"], "Option '--batch-size' requires an argument"),
        (["train", "now"], "Got unexpected extra argument (now); see dptrain train --help"),
        (["describe", "model0", "--batch-size", "many"], "'many'; expected a whole number"),
        (["describe", "model0", "--batch-size", "0"], "batch size is 0; expected at least 1"),
        (["describe", "model9"], "no network 'model9'"),
        (["describe", "absent.toml"], "absent.toml: no such file"),
        (["describe", "model0", "--backend", "cuda9"], "no backend 'cuda9'"),
        (["describe", "model0", "--precision", "fp8"], "has no precision 'fp8'"),
        (["train", "--batch-size", "0"], "--batch-size is 0; expected a whole number"),
        (["train", "--config", "absent.toml"], "absent.toml: no such file"),
        (["predict", "somewhere"], "predict has no INPUT; expected"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments, is_rank_zero=True) == 2
    out, err = capfd.readouterr()
    assert err.startswith("dptrain: ")
    assert message in err
    assert err.count("\n") == 1
    assert not out


def test_ranks_that_do_not_speak_are_silent(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--wrong"], is_rank_zero=False) == 2
    assert run(["describe", "model9"], is_rank_zero=False) == 2
    assert capfd.readouterr() == ("", "")


def test_an_interruption_is_no_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(click.Group, "invoke", interrupt)
    assert run(["describe"], is_rank_zero=True) == 130
    # Click ends the line that holds the terminal's ^C.
    assert capsys.readouterr().err == "\ndptrain: interrupted\n"


# What the commands call. MPI itself stays out of it: these tests run in one process.


class FakeWorld:
    """A world of one."""

    is_rank_zero = True
    timeouts: tuple[float, ...] = ()

    @classmethod
    def of_launch(cls, *, timeout: float = 300.0, command: str = "") -> FakeWorld:
        cls.timeouts = (*cls.timeouts, timeout)
        return cls()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Calls of the training functions, which do nothing but note them."""
    noted: list[tuple[Any, ...]] = []

    def note(name: str, answer: Any) -> None:
        def function(*arguments: Any, **options: Any) -> Any:
            values = [value for value in arguments if not isinstance(value, FakeWorld)]
            noted.append((name, *values, options))
            return answer

        monkeypatch.setattr(f"dptrain.training.{name}", function)

    model = SimpleNamespace(warning=None, step=40)
    note("run.train", False)
    note("evaluation.model.load_on_all_ranks", model)
    found = {"samples": 360, "loss": 0.123456789, "accuracy": 0.975}
    note("evaluation.evaluation.evaluate_model", (found, None))
    note("evaluation.prediction.predict_to_file", 7)
    monkeypatch.setattr("dptrain.comm.world.World", FakeWorld)
    for name in [s.variable for s in settings()]:
        monkeypatch.delenv(name, raising=False)
    return noted


def test_train_hands_over_the_configuration(
    calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DPTRAIN_SEED", "5")
    file = tmp_path / "run.toml"
    file.write_text("steps = 3\nseed = 1\n")
    arguments = ["train", "--config", str(file), "--network", "solar", "--flip", "--timeout", "9"]
    assert run(arguments, is_rank_zero=True) == 0
    [(name, config, options)] = calls
    assert (name, options) == ("run.train", {"verbose": False})
    assert isinstance(config, Settings)
    flags = {"network": "solar", "flip": True, "timeout": "9"}
    assert config == load_settings(flags, {"DPTRAIN_SEED": "5"}, file)
    assert FakeWorld.timeouts[-1] == 9.0


def test_evaluate_prints_names_and_values(
    calls: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["evaluate", "here", "--checkpoint", "40", "--data", "digits", "--workers", "3"]
    assert run(arguments, is_rank_zero=True) == 0
    [load, evaluate] = calls
    assert load == ("evaluation.model.load_on_all_ranks", Path("here"), 40, {"weights": None})
    assert evaluate[0] == "evaluation.evaluation.evaluate_model"
    assert evaluate[2:] == ("digits", {"workers": 3})
    assert capsys.readouterr().out.splitlines() == [
        "samples   360",
        "loss      0.123457",
        "accuracy  0.975",
    ]
    assert run(["evaluate", "here", "--json"], is_rank_zero=True) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == 0.975


def test_predict_reports_the_file_and_the_step(
    calls: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["predict", "here", "-i", "x.npy", "-o", "y.csv"], is_rank_zero=True) == 0
    [load, predict] = calls
    assert load == ("evaluation.model.load_on_all_ranks", Path("here"), None, {"weights": None})
    expected = {"workers": 0, "classes": None}
    assert predict[2:] == ([Path("x.npy")], Path("y.csv"), expected)
    assert capsys.readouterr().out == "7 predictions by the model of step 40 in y.csv\n"


def test_a_mistake_found_while_training_is_said_like_any_other(
    calls: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise UserError("no")

    monkeypatch.setattr("dptrain.training.run.train", refuse)
    assert run(["train"], is_rank_zero=True) == 2
    assert capfd.readouterr().err == "dptrain: no\n"


def test_study_alone_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["study"], is_rank_zero=True) == 0
    assert "variants" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--batch-sizes", "2,x"], "--batch-sizes is '2,x'; expected whole numbers"),
        (["bench", "--threads", "none"], "--threads is 'none'; expected whole numbers"),
        (["bench", "--within", "soon"], "--within is 'soon'; expected a time such as 1s"),
        (["bench", "--memory", "much"], "--memory is 'much'; expected a size such as 2GB"),
        (["bench", "--epochs", "0"], "'0'; expected a whole number of at least 1"),
        (["bench", "model9"], "no network 'model9'"),
        (["bench", "--precisions", "fp8"], "no precision 'fp8' with numba"),
        (
            ["study", "variants", "--stride", "0"],
            "stride has the value '0'; expected whole numbers",
        ),
        (["study", "variants", "--run-dir", "x"], "No such option '--run-dir'"),
    ],
)
def test_a_mistake_in_an_experiment_is_one_line_and_leaves_nothing_behind(
    arguments: list[str],
    message: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(arguments, is_rank_zero=True) == 2
    out, err = capfd.readouterr()
    assert message in err
    assert err.count("\n") == 1
    assert not out
    assert not list(tmp_path.iterdir())


def test_bench_refuses_a_launcher_s_ranks(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PALS_LOCAL_SIZE", "3")  # Its programs are unknown.
    assert run(["bench"], is_rank_zero=True) == 2
    assert "the launcher started 3 ranks" in capfd.readouterr().err
