"""Special files are refused before they are opened; TOML files have limits."""

import errno
import os
import threading
from pathlib import Path

import pytest

from dptrain.errors import UserError
from dptrain.files import parse_json, read_regular, replacing, require_regular, writing
from dptrain.toml import read_toml


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: os.mkfifo(path), "a named pipe"),
        (lambda path: path.symlink_to("/dev/zero"), "a device"),
        (lambda path: path.mkdir(), "[Ii]s a directory"),
        (lambda path: None, "[Nn]o such file"),
    ],
)
def test_only_regular_files_are_read(tmp_path: Path, make: object, message: str) -> None:
    path = tmp_path / "file"
    make(path)  # type: ignore[operator]
    for read in (require_regular, read_regular):
        with pytest.raises(OSError, match=message):
            read(path)
    with pytest.raises(UserError, match=message) as info:
        read_toml(path)
    assert str(path) in str(info.value)


def test_a_file_larger_than_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_regular(path, 5) == b"12345"
    with pytest.raises(OSError, match="5 bytes; expected at most 4"):
        read_regular(path, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = " + "[" * 5000, "nested too deeply"),
        ("a = " + "9" * 5000, "not TOML: .*4300 digits"),
        ("a = ", "not TOML: Invalid value"),
        ("a = 1\na = 2", "not TOML: "),
    ],
)
def test_a_mistake_in_toml_is_one_short_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as info:
        read_toml(path)
    assert str(info.value).isprintable()
    assert len(str(info.value)) < 400 + len(str(path))


def test_settings_may_come_from_a_pipe_that_the_user_named() -> None:
    reading, write = os.pipe()

    def send() -> None:
        with os.fdopen(write, "w") as file:
            file.write("batch_size = 64")

    thread = threading.Thread(target=send)
    thread.start()
    assert read_toml(Path(f"/dev/fd/{reading}")) == {"batch_size": 64}
    thread.join()
    os.close(reading)


def test_deeply_nested_json_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 200_000)


def test_what_the_system_refuses_becomes_one_line(tmp_path: Path) -> None:
    message = r"cannot write .*\\n.*: No such file.*--output"
    with pytest.raises(UserError, match=message), writing(tmp_path / "a\nb", "--output"):
        (tmp_path / "missing" / "file").write_text("")


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "; free some space, or choose another --output"),
        (errno.EACCES, "; correct its permissions, or choose another --output"),
        (errno.ENOTDIR, "; choose another --output"),
    ],
)
def test_the_advice_fits_the_error(tmp_path: Path, number: int, advice: str) -> None:
    with (
        pytest.raises(UserError, match=f"cannot write .*: {os.strerror(number)}{advice}$"),
        writing(tmp_path, "--output"),
    ):
        raise OSError(number, os.strerror(number))


def test_two_writers_of_a_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path) as first:
        first.write_text("first")
        with replacing(path) as second:
            assert second != first
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_a_file_that_is_not_completed_leaves_the_old_one(
    tmp_path: Path, error: BaseException
) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def write_half() -> None:
        with replacing(path) as partial:
            partial.write_text("half")
            raise error

    with pytest.raises((UserError, KeyboardInterrupt)):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["a device", "a named pipe", "a link to a named pipe"])
def test_a_special_file_is_not_replaced(tmp_path: Path, kind: str) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    path = {"a device": Path("/dev/null"), "a named pipe": pipe}.get(kind, link)
    before = path.stat()
    with (
        pytest.raises(UserError, match="which a file would replace; choose another --output"),
        replacing(path, "--output"),
    ):
        pytest.fail("the block runs")
    assert path.stat().st_mode == before.st_mode
