"""Standard output that does not end training if the reader exits early or the disk is full."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from io import TextIOWrapper
from typing import Any, TextIO, cast


class OutputStream:
    """A text stream that discards text after the first error instead of raising it.

    ``dptrain train | head`` closes the pipe while training runs. The results are in the run
    directory, so training continues without output.

    Args:
        stream: standard output or standard error.
        warn: whether to print one line to standard error when the stream is lost.
    """

    def __init__(self, stream: TextIO, *, warn: bool) -> None:
        self._stream, self._warn = stream, warn
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        """Write text, or discard it if the stream is lost."""
        with self._discarding():
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Pass written text to the operating system."""
        with self._discarding():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _discarding(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self.error is not None:
                return
            self.error = error
            # Python flushes the stream again when it exits, so its file must accept the rest.
            with contextlib.suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._stream.fileno())
                os.close(null)
            if self._warn:
                reason = error.strerror or str(error)
                print(
                    f"dptrain: cannot write standard output: {reason}; continuing without it",
                    file=sys.stderr,
                    flush=True,
                )

    def exit_code(self, code: int) -> int:
        """Return the exit code of a command that would end with `code`.

        If the reader exited early, the code is unchanged. If the disk was full, it is 2.
        """
        self.flush()
        lost = self.error is not None and self.error.errno != errno.EPIPE
        return 2 if lost and code == 0 else code


def open_standard_streams() -> None:
    """Open the null device instead of closed standard streams.

    Otherwise the next file that the program opens becomes standard output, and receives its text.
    """
    for descriptor, mode in enumerate("rww"):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # The lowest free number, which is this one.
        name = ("stdin", "stdout", "stderr")[descriptor]
        if getattr(sys, name) is None:
            stream = open(descriptor, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


@contextlib.contextmanager
def safe_output() -> Iterator[OutputStream]:
    """Replace standard output and standard error by streams that do not raise `OSError`.

    Yields:
        The stream that replaces standard output.
    """
    with contextlib.suppress(AttributeError):  # Of tests and notebooks, other streams.
        # A locale without Unicode lacks characters of the tables, such as ×.
        cast(TextIOWrapper, sys.stdout).reconfigure(errors="replace")
    output, errors = OutputStream(sys.stdout, warn=True), OutputStream(sys.stderr, warn=False)
    previous = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = output, errors
    try:
        yield output
    finally:
        with contextlib.suppress(ValueError):
            output.flush()
            errors.flush()
        sys.stdout, sys.stderr = previous
