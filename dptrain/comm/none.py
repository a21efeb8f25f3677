"""One rank: its own gradients are the sum."""

from __future__ import annotations

from typing import ClassVar

from dptrain.comm.base import GradientSum


class NoSum(GradientSum):
    """Nothing to sum."""

    name: ClassVar[str] = "none"
    transport: ClassVar[str] = "none"
    enqueues: ClassVar[bool] = True
    alone: ClassVar[bool] = True

    def _first_under_way(self) -> int | None:
        return None

    def _do_start(self, bucket: int) -> None:
        pass

    def _do_poll(self) -> None:
        pass

    def _do_finish(self) -> None:
        pass
