"""The cache of compiled kernels on disk.

A file is written under a temporary name and then renamed, so that several processes can compile the
same kernel at the same time. It ends with a checksum, by which a damaged file is recognised.
Processes that want to compile a kernel only once claim its file first.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

DIGEST_BYTES = hashlib.sha256().digest_size


def writable_folder(name: str) -> Path | None:
    """Return the folder of this name for compiled kernels; None if none is writable.

    It is in ``$DPTRAIN_CACHE_DIR``, else ``$XDG_CACHE_HOME/dptrain``, else ``~/.cache/dptrain``:
    the first that is writable.
    """
    for base in _candidates():
        folder = base / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError:
            continue
        return folder
    return None


def _candidates() -> Iterator[Path]:
    if chosen := os.environ.get("DPTRAIN_CACHE_DIR"):
        yield Path(chosen)
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        yield Path(chosen) / "dptrain"
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.expanduser raises without a home
    if home.is_absolute():
        yield home / ".cache" / "dptrain"


def sealed(data: bytes) -> bytes:
    """Return data followed by its checksum."""
    return data + hashlib.sha256(data).digest()


def unsealed(data: bytes) -> bytes | None:
    """Return data without its checksum; None if it is damaged."""
    body, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    return body if hashlib.sha256(body).digest() == digest else None


def load(path: Path) -> bytes | None:
    """Return the contents of a file that `store` wrote; None if it is missing or damaged."""
    try:
        return unsealed(path.read_bytes())
    except OSError:
        return None


def store(path: Path, data: bytes) -> None:
    """Write data and its checksum; see `write_atomically`."""
    write_atomically(path, sealed(data))


@contextlib.contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Claim the right to write a file, until the block ends or the process dies.

    Yields:
        False if another process has claimed the file. Without file locks, every process succeeds.
    """
    lock, is_free = Path(f"{path}.lock"), True
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(lock.open("ab"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A process that has opened the file before may then claim a lock that no other sees.
            # It finds what was written.
            stack.callback(lock.unlink, missing_ok=True)
        except BlockingIOError:
            is_free = False
        except OSError:
            pass
        yield is_free


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file completely or not at all; errors such as a full disk are ignored."""
    with contextlib.suppress(OSError):
        descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            Path(partial).replace(path)
        except OSError:
            Path(partial).unlink(missing_ok=True)
            raise
