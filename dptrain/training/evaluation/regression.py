"""What the results of a regression mean."""

from __future__ import annotations


def r2_remark(r2: float | None) -> str:
    """Return what a coefficient of determination below 0 means, to follow the results.

    Example:
        >>> r2_remark(-4.5), r2_remark(0.9), r2_remark(None)
        (': worse than predicting the mean of the targets', '', '')
    """
    return ": worse than predicting the mean of the targets" if r2 is not None and r2 < 0 else ""
