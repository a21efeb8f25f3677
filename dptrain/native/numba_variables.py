"""Checks of Numba's environment variables, whose wrong values end in tracebacks or in LLVM."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from types import ModuleType

from dptrain.errors import UserError, shown

_CURE = "correct or unset the environment variable, or its line in .numba_config.yaml"
_CHECK_S = 60.0
_TARGET_MACHINE = """
import sys
import llvmlite.binding as llvm
llvm.initialize_native_target()
llvm.Target.from_default_triple().create_target_machine(cpu=sys.argv[1], features=sys.argv[2])
"""


def import_numba() -> ModuleType:
    """Import Numba, which reads its variables then.

    Raises:
        UserError: the value of a variable is wrong.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Environment variable", RuntimeWarning)
            import numba
    except ValueError as error:
        raise UserError(
            f"Numba cannot be imported: {str(error).rstrip('.')}; correct or unset the environment "
            "variables whose names begin with NUMBA_"
        ) from error
    except RuntimeWarning as error:
        raise UserError(f"{_explain(str(error))}; {_CURE}") from None
    _check_processor(numba.config.CPU_NAME or "", numba.config.CPU_FEATURES or "")
    return numba  # type: ignore[no-any-return]


def _explain(warning: str) -> str:
    """Return one sentence from Numba's warning, which contains a traceback.

    Example:
        >>> _explain("Environment variable 'A' is defined but its associated value 'b' could")
        "A is 'b', which Numba cannot read"
    """
    found = re.search(r"variable '(\w+)' .* value '(.*?)' could", warning, re.DOTALL)
    if found is None:
        return shown(warning.splitlines()[0])
    return f"{found[1]} is '{shown(found[2])}', which Numba cannot read"


def _check_processor(name: str, features: str) -> None:
    """Refuse a processor that LLVM does not know.

    LLVM only prints that it ignores a name, and ends the process if features are malformed.

    Raises:
        UserError: LLVM does not know the name or the features.
    """
    if not name and not features:
        return
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TARGET_MACHINE, name, features],
            capture_output=True, text=True, timeout=_CHECK_S, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return
    if "is not a recognized processor" in done.stderr:
        raise UserError(f"NUMBA_CPU_NAME is '{shown(name)}', which LLVM does not know; {_CURE}")
    if "is not a recognized feature" in done.stderr or "Feature flags" in done.stderr:
        raise UserError(
            f"NUMBA_CPU_FEATURES is '{shown(features)}'; expected features that LLVM knows, such "
            f"as +avx2,-avx512f; {_CURE}"
        )
