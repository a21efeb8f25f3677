"""The comparison of test accuracies over several seeds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks.accuracy import CROP, Score, _changed, agree, main

pytestmark = pytest.mark.more


def scores(*accuracies: float) -> list[Score]:
    return [Score(accuracy, 1.0) for accuracy in accuracies]


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ((0.90, 0.92, 0.91), (0.91, 0.92, 0.90), True),
        ((0.90, 0.92, 0.91), (0.93, 0.94, 0.95), False),
        ((0.95, 0.97, 0.96), (0.93, 0.91, 0.92), False),
        ((0.5, 0.9), (0.6, 0.6), True),
    ],
)
def test_means_agree_within_the_spread(
    ours: tuple[float, ...], theirs: tuple[float, ...], expected: bool
) -> None:
    assert agree({"dptrain": scores(*ours), "PyTorch": scores(*theirs)}) is expected


def test_changed_images_are_windows_of_padded_images() -> None:
    torch.manual_seed(0)
    x = torch.arange(1, 1 + 40 * 2 * 5 * 6, dtype=torch.float32).reshape(40, 2, 5, 6)
    padded = torch.nn.functional.pad(x, (CROP,) * 4)
    found, mirrored = _changed(x), 0
    for image, source in zip(found, padded, strict=True):
        windows = [
            source[:, i : i + 5, j : j + 6]
            for i in range(2 * CROP + 1)
            for j in range(2 * CROP + 1)
        ]
        if any(torch.equal(image, window) for window in windows):
            continue
        assert any(torch.equal(image.flip(2), window) for window in windows)
        mirrored += 1
    assert 0 < mirrored < 40


def test_a_short_comparison_writes_both_files(tmp_path: Path) -> None:
    arguments = "--network model-small --data digits --samples 64 --epochs 1 --seeds 2 --output"
    found = CliRunner().invoke(main, [*arguments.split(), str(tmp_path)])
    assert found.exit_code in (0, 1), found.output
    assert "PyTorch" in found.output
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".md"]


def test_bad_data_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    found = CliRunner().invoke(main, ["--data", "nothing", "--network", "model-small"])
    assert found.exit_code == 2
    assert "nothing" in found.output
