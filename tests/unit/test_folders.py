"""No folder has more files than a reader can keep in mind."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

MOST_FILES = 25

COLLECTIONS = {
    "benchmarks/results": "dated results, which are opened from the pages that refer to them",
    "docs/images": "figures, which are seen on the pages that contain them",
}
"""Folders with any number of files, and the reason."""


def test_no_folder_has_more_than_25_files() -> None:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("the tree is no checkout of git")
    paths = [path for path in done.stdout.split("\0") if path and (ROOT / path).exists()]
    counts = Counter(str(Path(path).parent) for path in paths)
    counts = Counter({folder: n for folder, n in counts.items() if folder not in COLLECTIONS})
    assert [each for each in counts.most_common() if each[1] > MOST_FILES] == []
