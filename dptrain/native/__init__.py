"""The compiled runtime below communication: functions, their cache, threads, waiting and clocks.

Raises:
    UserError: on import, if Numba refuses the value of one of its environment variables, or one of
        them disables its compiler.
"""

from __future__ import annotations

from dptrain.errors import UserError
from dptrain.native.numba_variables import import_numba

numba = import_numba()

if numba.config.DISABLE_JIT:
    raise UserError(
        "Numba does not compile, because NUMBA_DISABLE_JIT is set (or disable_jit in the file "
        ".numba_config.yaml); unset it, or compute with --backend reference in one process"
    )
