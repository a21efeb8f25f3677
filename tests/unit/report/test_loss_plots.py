"""The plot of losses by experiment."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from dptrain.report.profiles.loss_plots import losses_plot
from tests.unit.measure.test_losses import known, record

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_plot_has_a_bar_for_each_loss_that_is_measured(overlaps: bool) -> None:
    found = replace(record(known(noise=0.01)), overlaps=overlaps)
    drawn = losses_plot(found)
    texts = [t.text for t in ElementTree.fromstring(drawn.svg).iter(f"{SVG}text")]
    assert {"rank 0 alone", "contention", "load imbalance", "job"} <= {*texts}
    assert ("saved by overlap" in texts) == overlaps
    assert "ms, and 95% intervals as lines" in texts
