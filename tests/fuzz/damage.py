"""Damage to files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

INTERESTING = (0, 1, 0x7F, 0x80, 0xFF, 0x0A, 0x22, 0x2D)
"""Bytes at the edges of formats: zero, signs, line ends, quotes."""


def damage_bytes(random: np.random.Generator, content: bytes) -> bytes:
    """Return bytes with one to four random changes."""
    for _ in range(int(random.integers(1, 5))):
        content = _change(random, content)
    return content


def damage_file(random: np.random.Generator, path: Path) -> None:
    """Change some bytes of a file, or its length."""
    path.write_bytes(damage_bytes(random, path.read_bytes()))


def _change(random: np.random.Generator, content: bytes) -> bytes:
    if not content:
        return random.bytes(int(random.integers(1, 16)))
    # Headers and directories are at the ends of files, where damage matters most.
    size = len(content)
    reach = min(size, 64) if random.random() < 0.5 else size
    at = int(random.integers(reach))
    if random.random() < 0.3:
        at = size - 1 - at
    length = int(random.integers(1, 1 + min(32, size - at)))
    match int(random.integers(7)):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + content[at + length :]
        case 2:
            return content[:at] + random.bytes(length) + content[at:]
        case 3:
            return content[:at] + content[at : at + length] * 2 + content[at + length :]
        case 4:
            return content[:at] + bytes(length) + content[at + length :]
        case 5:
            flipped = content[at] ^ (1 << int(random.integers(8)))
            return content[:at] + bytes([flipped]) + content[at + 1 :]
        case _:
            chosen = INTERESTING[int(random.integers(len(INTERESTING)))]
            return content[:at] + bytes([chosen]) + content[at + 1 :]
