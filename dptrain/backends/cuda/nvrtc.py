"""NVIDIA's run-time compiler, from CUDA C++ to machine code; it needs no GPU and no driver.

Source: NVRTC documentation, https://docs.nvidia.com/cuda/nvrtc.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dptrain.backends.cache import load, store, writable_folder
from dptrain.backends.cuda.device import KERNELS
from dptrain.errors import UserError

MAJORS = (13, 12)
"""Of the CUDA versions that are looked for, the newest first."""

_WHEELS = {13: "cu13", 12: "cuda_nvrtc"}
"""Folder of NVIDIA's wheels in the package ``nvidia``."""

_OWN = {90: "a"}
"""What a GPU of this architecture can do besides: 9.0 has instructions, ``wgmma`` among them, that
compilers take for ``sm_90a`` alone, which all GPUs of 9.0 are."""

_OPTIONS = ("--std=c++17", "--generate-line-info")

SERIALIZED = "wgmma.mma_async instructions are serialized"
"""Said where the compiler moved what goes into products of ``wgmma`` among them, so that each waits
for the one before; which kernels it does that to changes from version to version."""

SETTLE = "SCHEDULING_BARRIER"
"""Macro of sources that can keep the compiler from that, at some cost."""


class CompileError(Exception):
    """What the compiler says, with file and line."""


class Compiler:
    """NVRTC, loaded.

    Args:
        library: file or name of the shared library.

    Attributes:
        library: as given.
        version: (major, minor) of CUDA.
        architectures: what it compiles for, such as 90 for ``sm_90``.
        remarks: what it said of the last source that it compiled.
    """

    def __init__(self, library: str) -> None:
        self.library, self.remarks = library, ""
        # Some wheels' compiler looks for its second half by name, where nobody finds it.
        folder = Path(library).parent
        for half in folder.glob("libnvrtc-builtins.so.*") if folder.is_absolute() else ():
            ctypes.CDLL(str(half))
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
        self, path: Path, architecture: int, defines: Mapping[str, int] | None = None
    ) -> bytes:
        """Machine code (cubin) of a source; with `SETTLE` where that keeps it from `SERIALIZED`.

        Args:
            path: of the source, which includes files of its own folder.
            architecture: such as 90 for ``sm_90``.
            defines: macros.

        Raises:
            CompileError: it is wrong.
        """
        data = self._compile(path, architecture, defines or {})
        if SERIALIZED in self.remarks and SETTLE in path.read_text(encoding="utf-8"):
            settled = self._compile(path, architecture, {**(defines or {}), SETTLE: 1})
            data = data if SERIALIZED in self.remarks else settled
        return data

    def _compile(self, path: Path, architecture: int, defines: Mapping[str, int]) -> bytes:
        options = [
            *_OPTIONS,
            f"--gpu-architecture=sm_{architecture}{_OWN.get(architecture, '')}",
            f"--include-path={path.parent}",
            *(f"-D{name}={value}" for name, value in sorted(defines.items())),
        ]
        program, text = ctypes.c_void_p(), path.read_text(encoding="utf-8")
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program), text.encode(), path.name.encode(), 0, None, None,
        )  # fmt: skip
        try:
            return self._finish(program, options)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _finish(self, program: ctypes.c_void_p, options: Sequence[str]) -> bytes:
        texts = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = self._functions.nvrtcCompileProgram(program, len(options), texts)
        self.remarks = self._output(program, "ProgramLog").rstrip(b"\0").decode().strip()
        if status != 0:
            raise CompileError(self.remarks)
        return self._output(program, "CUBIN")

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
    """The first NVRTC that loads: of NVIDIA's wheels, else one that the system finds by name.

    Args:
        majors: of the versions of CUDA that will do, the best first.

    Raises:
        UserError: there is none.
    """
    for major in majors:
        for library in _candidates(major):
            try:
                return Compiler(library)
            except (OSError, RuntimeError):
                continue
    wanted = " or ".join(f"'dptrain[cuda{major}]'" for major in majors)
    raise UserError(
        f"dptrain finds no libnvrtc, NVIDIA's run-time compiler; pip install {wanted} brings "
        "it, or set CUDA_PATH to the folder of a CUDA toolkit"
    )


def _candidates(major: int) -> Iterator[str]:
    name = f"libnvrtc.so.{major}"
    spec = importlib.util.find_spec("nvidia")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        path = Path(folder, _WHEELS[major], "lib", name)
        if path.is_file():
            yield str(path)
    if toolkit := os.environ.get("CUDA_PATH"):
        yield str(Path(toolkit, "lib64", name))
    yield name
    yield f"/usr/local/cuda-{major}/lib64/{name}"
    yield f"/usr/local/cuda/lib64/{name}"


def compile_cached(
    compiler: Compiler, file: str, architecture: int, defines: Mapping[str, int]
) -> bytes:
    """Machine code of a kernel's source, from disk where it was compiled before."""
    folder = writable_folder("cuda-kernels")
    if folder is None:
        return compiler.compile(KERNELS / file, architecture, defines)
    path = folder / f"{Path(file).stem}-{_digest(compiler, file, architecture, defines)}.cubin"
    data = load(path)
    if data is None:
        data = compiler.compile(KERNELS / file, architecture, defines)
        store(path, data)
    return data


def _digest(compiler: Compiler, file: str, architecture: int, defines: Mapping[str, int]) -> str:
    """Of all that machine code depends on."""
    digest = hashlib.sha256()
    for path in (KERNELS / file, *sorted(KERNELS.glob("*.cuh"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    facts = compiler.version, architecture, sorted(defines.items()), _OPTIONS, _OWN
    digest.update(repr(facts).encode())
    return digest.hexdigest()[:16]
