"""NVRTC, NVIDIA's run-time compiler for CUDA C++. It needs neither a GPU nor a driver.

Source: NVRTC documentation, https://docs.nvidia.com/cuda/nvrtc.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import hashlib
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dptrain.backends.cuda.device.device import Macro
from dptrain.backends.cuda.device.sources import KERNELS, include_folders, source_path
from dptrain.cache import claim, load, store, writable_folder
from dptrain.errors import UserError

MAJORS = (13, 12)
"""Major CUDA versions that are searched, the newest first."""

_WHEEL_FOLDERS = {13: "cu13", 12: "cuda_nvrtc"}
"""Folders of NVIDIA's wheels in the package ``nvidia``, by major version."""

_ARCHITECTURE_SUFFIX = {90: "a"}
"""Architecture-specific targets: the compiler accepts ``wgmma`` only for ``sm_90a``, which all GPUs
of compute capability 9.0 are."""

_INCLUDE = re.compile(rb'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)

_OPTIONS = ("--std=c++17", "--generate-line-info")

SERIALIZED = "wgmma.mma_async instructions are serialized"
"""Compiler message: it moved instructions between ``wgmma`` products, so each product waits for the
previous one. Which kernels are affected depends on the compiler version."""

SCHEDULING_BARRIER = "SCHEDULING_BARRIER"
"""Macro of sources that can prevent this with a scheduling barrier, at some cost."""


class CompileError(Exception):
    """Compilation failed; the message contains file and line."""


class Compiler:
    """The loaded NVRTC library.

    Args:
        library: file or name of the shared library.

    Attributes:
        library: as given.
        version: (major, minor) of CUDA.
        architectures: supported GPU architectures, such as 90 for ``sm_90``.
        log: compiler messages of the last compilation that has ended.
    """

    def __init__(self, library: str) -> None:
        self.library, self.log = library, ""
        # NVRTC of some wheels loads its builtins by name, which the linker does not find.
        folder = Path(library).parent
        for builtins in folder.glob("libnvrtc-builtins.so.*") if folder.is_absolute() else ():
            ctypes.CDLL(str(builtins))
        self._functions = ctypes.CDLL(library)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = major.value, minor.value
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        architectures = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", architectures)
        self.architectures = tuple(architectures)

    def compile(
        self,
        path: Path,
        architecture: int,
        defines: Mapping[str, Macro] | None = None,
        options: Sequence[str] = (),
    ) -> bytes:
        """Compile a source to machine code (cubin).

        If the compiler serializes ``wgmma`` and a scheduling barrier prevents that, the source is
        compiled with the barrier.

        Args:
            path: of the source. Headers are searched in its folder and in those of the backends.
            architecture: such as 90 for ``sm_90``.
            defines: macros.
            options: further options of NVRTC.

        Raises:
            CompileError: the source has errors.
        """
        data, log = self._compile(path, architecture, defines or {}, options)
        if SERIALIZED in log and SCHEDULING_BARRIER in path.read_text(encoding="utf-8"):
            with_barrier = {**(defines or {}), SCHEDULING_BARRIER: 1}
            other_data, other_log = self._compile(path, architecture, with_barrier, options)
            if SERIALIZED not in other_log:
                data, log = other_data, other_log
        self.log = log
        return data

    def _compile(
        self, path: Path, architecture: int, defines: Mapping[str, Macro], options: Sequence[str]
    ) -> tuple[bytes, str]:
        """Return the machine code and the compiler messages."""
        options = [
            *_OPTIONS,
            *options,
            f"--gpu-architecture=sm_{architecture}{_ARCHITECTURE_SUFFIX.get(architecture, '')}",
            *(f"--include-path={each}" for each in (path.parent, *include_folders(KERNELS))),
            *(f"-D{name}={value}" for name, value in sorted(defines.items())),
        ]
        program, text = ctypes.c_void_p(), path.read_text(encoding="utf-8")
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            text.encode(),
            path.name.encode(),
            0,
            None,
            None,
        )
        try:
            return self._finish(program, options)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _finish(self, program: ctypes.c_void_p, options: Sequence[str]) -> tuple[bytes, str]:
        texts = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = self._functions.nvrtcCompileProgram(program, len(options), texts)
        log = self._output(program, "ProgramLog").rstrip(b"\0").decode().strip()
        if status != 0:
            raise CompileError(log)
        return self._output(program, "CUBIN"), log

    def _output(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        data = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, data)
        return data.raw

    def _call(self, name: str, *args: object) -> None:
        status = getattr(self._functions, name)(*args)
        if status != 0:
            explain = self._functions.nvrtcGetErrorString
            explain.restype = ctypes.c_char_p
            raise RuntimeError(f"{name}: {explain(status).decode()}")


def find_compiler(majors: Sequence[int] = MAJORS) -> Compiler:
    """Load the first NVRTC found: in NVIDIA's wheels, CUDA_PATH, then by name.

    Args:
        majors: acceptable major versions of CUDA, the best first.

    Raises:
        UserError: NVRTC was not found.
    """
    for major in majors:
        for library in _candidates(major):
            try:
                return Compiler(library)
            except (OSError, RuntimeError):
                continue
    extras = " or ".join(f"'.[cuda{major}]'" for major in majors)
    raise UserError(
        "libnvrtc, NVIDIA's run-time compiler, was not found in Python packages, CUDA_PATH or the "
        f"library path; pip install {extras}, or set CUDA_PATH to the folder of a CUDA toolkit"
    )


def _candidates(major: int) -> Iterator[str]:
    name = f"libnvrtc.so.{major}"
    spec = importlib.util.find_spec("nvidia")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        path = Path(folder, _WHEEL_FOLDERS[major], "lib", name)
        if path.is_file():
            yield str(path)
    if toolkit := os.environ.get("CUDA_PATH"):
        yield str(Path(toolkit, "lib64", name))
    yield name
    yield f"/usr/local/cuda-{major}/lib64/{name}"
    yield f"/usr/local/cuda/lib64/{name}"


def compile_cached(
    compiler: Compiler, file: str, architecture: int, defines: Mapping[str, Macro]
) -> bytes | None:
    """Return the machine code of a kernel source, from the cache if it was compiled before.

    Returns:
        None if another process is compiling the source into the cache.
    """
    folder = writable_folder("cuda-kernels")
    if folder is None:
        return compiler.compile(source_path(file, KERNELS), architecture, defines)
    path = (
        folder / f"{Path(file).stem}-{source_digest(compiler, file, architecture, defines)}.cubin"
    )
    data = load(path)
    if data is not None:
        return data
    with claim(path) as is_claimed:
        # Another process may have compiled it meanwhile.
        if is_claimed and (data := load(path)) is None:
            data = compiler.compile(source_path(file, KERNELS), architecture, defines)
            store(path, data)
    return data


def source_digest(
    compiler: Compiler, file: str, architecture: int, defines: Mapping[str, Macro]
) -> str:
    """Return a digest of everything that the machine code of a kernel source depends on."""
    digest = hashlib.sha256()
    for name, text in sorted(_sources(file).items()):
        digest.update(name.encode() + b"\0" + text + b"\0")
    facts = compiler.version, architecture, sorted(defines.items()), _OPTIONS, _ARCHITECTURE_SUFFIX
    digest.update(repr(facts).encode())
    return digest.hexdigest()[:16]


def _sources(file: str) -> dict[str, bytes]:
    """Return the texts of a source and of the project's headers that it includes, by name."""
    texts: dict[str, bytes] = {}
    names = [file]
    while names:
        name = names.pop()
        if name not in texts:
            texts[name], included = _read(source_path(name, KERNELS))
            names += included
    return texts


@functools.cache
def _read(path: Path) -> tuple[bytes, tuple[str, ...]]:
    """Return the text of a source or header and the headers that it includes."""
    text = path.read_bytes()
    return text, tuple(found.decode() for found in _INCLUDE.findall(text))
