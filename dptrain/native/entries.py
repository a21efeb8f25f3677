"""Calling compiled kernels by address, with their arguments in a record.

Numba's own call unpacks every argument in every call and allocates memory for each array. Here this
happens once, when a kernel is bound: the arguments are written into a record, an array of 64-bit
words, and the compiled kernel gets an entry that any thread can call without the interpreter:

    int entry(int64 start, int64 stop, int64 thread, int64 *record)

The result is nonzero if the kernel raised an exception. An array occupies the words data, shape …,
strides …; a number occupies one word, a tuple the words of its elements.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import _dynfunc, types
from numba.core import cgutils
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder, _LowerResult
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.lowering import Lower
from numba.core.typed_passes import BaseNativeLowering, NativeLowering
from numpy.typing import NDArray

_NOTHING = ctypes.c_char * 0
I64 = ir.IntType(64)
ENTRY = ir.FunctionType(ir.IntType(32), [I64, I64, I64, I64.as_pointer()])


def kind(value: Any) -> Any:
    """Return Numba's type of an argument: array, tuple, int64, float64, bool."""
    if isinstance(value, np.ndarray | tuple):
        return numba.typeof(value)
    if isinstance(value, bool | np.bool_):
        return types.boolean
    return types.int64 if isinstance(value, int | np.integer) else types.float64


def words(value: Any) -> int:
    """Return the number of 64-bit words of a record that an argument occupies."""
    if isinstance(value, tuple):
        return sum(map(words, value))
    return 1 + 2 * value.ndim if isinstance(value, np.ndarray) else 1


def address_of(array: Any) -> int:
    """Return the address of an array's elements, in a quarter of the time of
    ``array.ctypes.data``.
    """
    try:
        return ctypes.addressof(_NOTHING.from_buffer(array))
    except (TypeError, ValueError):  # read-only, or not contiguous
        return int(array.ctypes.data)


class Record:
    """Arguments of a kernel. The record must outlive its address; it keeps the arrays alive.

    Args:
        values: arguments of the types that the kernel was compiled for.

    Attributes:
        address: address of the first word.
        slots: for each argument a pair (words, index); ``words[index] = value`` replaces the value
            by another one of the same type.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        *starts, size = accumulate(map(words, values), initial=0)
        memory = np.zeros(max(1, size), np.int64)
        self.address = address_of(memory)
        self._arrays: dict[int, NDArray[Any]] = {}
        # Writing through memoryviews takes a third of the time of writing to an array.
        self._integers, self._floats = memory.data, memory.view(np.float64).data
        self.slots = [
            (self._words(value), start) for value, start in zip(values, starts, strict=True)
        ]
        for (words_, index), value in zip(self.slots, values, strict=True):
            words_[index] = value

    def _words(self, value: Any) -> Any:
        if isinstance(value, np.ndarray | tuple):
            return self
        return self._floats if kind(value) == types.float64 else self._integers

    def __setitem__(self, start: int, array: NDArray[Any] | tuple[Any, ...]) -> None:
        if isinstance(array, tuple):
            for value in array:
                self._words(value)[start] = value
                start += words(value)
            return
        before = self._arrays.get(start)
        self._arrays[start] = array
        self._integers[start] = address_of(array)
        if before is None or before.shape != array.shape:
            for index, word in enumerate((*array.shape, *array.strides), start + 1):
                self._integers[index] = word

    def point(self, start: int, array: NDArray[Any]) -> None:
        """Replace the memory of the array in the words from `start` on, but not its shape."""
        self._integers[start] = address_of(array)


def _load(context: Any, builder: ir.IRBuilder, kind: Any, address: ir.Value) -> ir.Value:
    """Load the argument of this type from the words at `address`, in the form that Numba's code
    expects.
    """

    def word(i: int) -> ir.Value:
        return builder.load(builder.gep(address, [I64(i)]))

    if isinstance(kind, types.Integer):
        return builder.trunc(word(0), context.get_value_type(kind))
    if kind == types.float64:
        return builder.bitcast(word(0), ir.DoubleType())
    if kind == types.boolean:
        return builder.icmp_signed("!=", word(0), I64(0))
    if isinstance(kind, types.BaseTuple):
        *starts, _ = accumulate(map(_words_of, kind), initial=0)
        addresses = (builder.gep(address, [I64(start)]) for start in starts)
        values = [_load(context, builder, *each) for each in zip(kind, addresses, strict=True)]
        return context.make_tuple(builder, kind, values)
    array, rank = context.make_array(kind)(context, builder), kind.ndim
    shape = [word(1 + i) for i in range(rank)]
    size = I64(1)
    for extent in shape:
        size = builder.mul(size, extent)
    itemsize = context.get_abi_sizeof(context.get_data_type(kind.dtype))
    # The array has no owner in the kernel, which therefore counts no references.
    array.meminfo = cgutils.get_null_value(array.meminfo.type)
    array.parent = cgutils.get_null_value(array.parent.type)
    array.nitems, array.itemsize = size, I64(itemsize)
    array.data = builder.inttoptr(word(0), array.data.type)
    array.shape = cgutils.pack_array(builder, shape)
    array.strides = cgutils.pack_array(builder, [word(1 + rank + i) for i in range(rank)])
    return array._getvalue()


def _words_of(kind: Any) -> int:
    if isinstance(kind, types.BaseTuple):
        return sum(map(_words_of, kind))
    return 1 + 2 * kind.ndim if isinstance(kind, types.Array) else 1


class _EntryLower(Lower):  # type: ignore[misc]
    """Generates the entry in place of Numba's C wrapper with all arguments."""

    def create_cfunc_wrapper(self) -> None:
        context, descriptor = self.context, self.fndesc
        module = context.create_module("entry")
        kernel_type = context.call_conv.get_function_type(descriptor.restype, descriptor.argtypes)
        kernel = ir.Function(module, kernel_type, descriptor.llvm_func_name)
        entry = ir.Function(module, ENTRY, descriptor.llvm_cfunc_wrapper_name)
        builder = ir.IRBuilder(entry.append_basic_block("entry"))
        *items, record = entry.args
        items_kind, *kinds = descriptor.argtypes
        rest = _load(context, builder, types.Tuple(kinds), record)
        args = context.make_tuple(builder, items_kind, items), *cgutils.unpack_tuple(builder, rest)
        status, _ = context.call_conv.call_function(
            builder, kernel, descriptor.restype, descriptor.argtypes, args, attrs=("noinline",)
        )
        builder.ret(builder.zext(status.is_error, ENTRY.return_type))
        self.library.add_ir_module(module)


@register_pass(mutates_CFG=True, analysis_only=False)
class _EntryLowering(BaseNativeLowering):  # type: ignore[misc]
    _name = "dptrain_entry_lowering"

    @property
    def lowering_class(self) -> type[Lower]:
        return _EntryLower


class _InlinedLibrary(JITCodeLibrary):  # type: ignore[misc]
    """Code that is linked into other libraries, and optimised and translated there only.

    To do both here too took 40% of the time of all compilations.
    """

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        """Do nothing: the module passes run on the kernels that call the function."""

    def _finalize_final_module(self) -> None:
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class _InlinedLowering(NativeLowering):  # type: ignore[misc]
    """Generates no machine code, see `_InlinedLibrary`."""

    _name = "dptrain_inlined_lowering"

    def run_pass(self, state: Any) -> bool:
        context = state.targetctx
        state.library = _InlinedLibrary(context.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        lowered = state["cr"]
        descriptor, environment = lowered.fndesc, lowered.env
        # Numba finds the code of a called function by this object, which is never called.
        function = _dynfunc.make_function(
            descriptor.lookup_module(), descriptor.qualname, "", 0, environment, (state.library,)
        )
        context.insert_user_function(function, descriptor, [state.library])
        state["cr"] = _LowerResult(descriptor, lowered.call_helper, function, environment)
        return True


class _Compiler(CompilerBase):  # type: ignore[misc]
    """Numba's compiler for functions that never call the interpreter, with another lowering."""

    lowering: type[BaseNativeLowering]

    def define_pipelines(self) -> list[PassManager]:
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.passes = [
            (self.lowering if each is NativeLowering else each, description)
            for each, description in passes.passes
        ]
        passes.finalize()
        return [passes]


class EntryCompiler(_Compiler):
    """The compiler of kernels."""

    lowering = _EntryLowering


class InlinedCompiler(_Compiler):
    """The compiler of functions that only kernels call."""

    lowering = _InlinedLowering


def entry_address(compiled: Any) -> int:
    """Return the address of the entry of a function compiled by `EntryCompiler`."""
    name = compiled.fndesc.llvm_cfunc_wrapper_name
    address: int = compiled.library.get_pointer_to_function(name)
    return address
