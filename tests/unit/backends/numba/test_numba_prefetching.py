"""Parts of maps that convolutions prefetch."""

import numpy as np
import pytest
from numba import njit

from dptrain.backends.numba.prefetching import tile_rows_part

HEIGHT, PITCH, DOWN, SIDE = 7, 10, 2, 4


@njit
def _part(maps, rows, shifts):
    _, first, stop = tile_rows_part(maps, (HEIGHT, PITCH), (DOWN, SIDE), rows, shifts)
    return first, stop


@pytest.mark.parametrize("shifts", [(0, 0), (-1, 1), (0, 2), (-2, 0)])
def test_parts_contain_what_rows_of_tiles_read(shifts):
    """Rows of tiles are those of three samples; each reads some rows above and below."""
    maps = np.zeros((3, HEIGHT, PITCH), np.float32)
    for first in range(3 * DOWN):
        for stop in range(first + 1, 3 * DOWN + 1):
            read = [
                n * HEIGHT + row
                for n, tile in (divmod(i, DOWN) for i in range(first, stop))
                for row in range(tile * SIDE + shifts[0], (tile + 1) * SIDE + shifts[1])
                if 0 <= row < HEIGHT
            ]
            begin, end = _part(maps, (first, stop), shifts)
            assert begin == min(read) * PITCH
            # At the end of a sample, nothing of the next one is read.
            assert (max(read) + 1) * PITCH == end


def test_parts_adjoin():
    """Without shifts, consecutive rows of tiles cover every row of the maps once."""
    maps = np.zeros((3, HEIGHT, PITCH), np.float32)
    ends = [_part(maps, (i, i + 1), (0, 0)) for i in range(3 * DOWN)]
    assert [stop for _, stop in ends[:-1]] == [first for first, _ in ends[1:]]
    assert ends[0][0] == 0
    assert ends[-1][1] == maps.size
