"""Files that MPI leaves in /dev/shm are removed, and no file that a process uses."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import pytest

from dptrain.comm.launching.ancestry import is_listening, is_open_socket, observe
from dptrain.comm.watchdog import mpi_files

pytestmark = pytest.mark.skipif(
    not mpi_files.sees_all_processes(), reason="in a container, no file is removed"
)


def test_only_recent_files_of_mpi_that_no_process_uses_are_removed(tmp_path: Path) -> None:
    since = time.time() - 1
    for name in ("mpich_shm_1_0", "sm_segment.a.0.1.0", "vader_segment.a", "mpich_shar_tmpXY"):
        (tmp_path / name).write_bytes(b"left")
    other = tmp_path / "psm2_shm"
    other.write_bytes(b"of another library")
    held, mapped = tmp_path / "mpich_shm_2_0", tmp_path / "mpich_shm_3_0"
    held.write_bytes(b"open")
    mapped.write_bytes(bytes(mmap.PAGESIZE))
    with held.open("rb"):
        with mapped.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        mpi_files.remove_unused(time.time() + 60, str(tmp_path))
        assert len(list(tmp_path.iterdir())) == 7
        mpi_files.remove_unused(since, str(tmp_path))
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            held.name,
            mapped.name,
            other.name,
        ]
        assert mpi_files.mapped_files(str(tmp_path)) == [str(mapped)]
        memory.close()
    mpi_files.remove_unused(since, str(tmp_path))
    assert list(tmp_path.iterdir()) == [other]


def test_nothing_is_removed_in_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_files, "sees_all_processes", lambda: False)
    (tmp_path / "mpich_shm_1_0").touch()
    mpi_files.remove_unused(0.0, str(tmp_path))
    assert list(tmp_path.iterdir())


def test_sockets_are_told_from_files_and_from_closed_ones() -> None:
    import socket

    one, other = socket.socketpair()
    assert is_open_socket(one.fileno())
    other.send(b"waiting data is not read")
    assert is_open_socket(one.fileno())
    assert one.recv(100) == b"waiting data is not read"
    other.close()
    assert not is_open_socket(one.fileno())
    number = one.fileno()
    one.close()
    assert not is_open_socket(number)
    read, write = os.pipe()
    assert not is_open_socket(read)
    os.close(read)
    os.close(write)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert is_listening(port)
    assert is_listening(port) is False


def test_ancestors_are_launchers_by_the_name_of_their_program() -> None:
    name = Path("/proc/self/exe").readlink().name
    facts = observe(
        {name}
    )  # At least pytest-xdist or the shell may be others; the parent is known.
    assert facts.sees_all
    assert facts.mpi_parent == ""
    parent = Path(f"/proc/{os.getppid()}/comm").read_text().strip()
    assert parent in observe({parent}).launchers[0]
    assert observe(()).launchers == ()
