"""The pages about networks: the examples run, and the table is the zoo's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dptrain.network import Network, get_network, read_network
from dptrain.network.zoo import NETWORKS, studies

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = (DOCS / "how-to" / "networks.md").read_text(encoding="utf-8")
ZOO = (DOCS / "reference" / "networks.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_examples_make_networks() -> None:
    for example in blocks("python")[:2]:
        values: dict[str, Any] = {}
        exec(re.sub(r"^Trainer\(.*", "", example, flags=re.MULTILINE), values)
        assert isinstance(values["network"], Network)
    assert values["network"].nodes[2].name == "block0.conv1"


def test_the_example_of_two_classes_learns(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = (block for block in blocks("python") if "SigmoidBinaryCrossEntropy" in block)
    exec(example, {})
    assert float(capsys.readouterr().out.split()[0]) > 0.97


def test_the_file_is_a_network(tmp_path: Path) -> None:
    example, own, loss = blocks("toml")
    (tmp_path / "loss.toml").write_text(
        loss.replace("[loss_function]", "input = [3]\n[loss_function]")
        + '[[layer]]\ntype = "dense"\nunits = 1\n'
    )
    assert read_network(tmp_path / "loss.toml").loss.kind == "quantile"
    (tmp_path / "own.toml").write_text(own)
    assert read_network(tmp_path / "own.toml").layers[1].kind == "swish"
    (tmp_path / "page.toml").write_text(example)
    network = read_network(tmp_path / "page.toml")
    assert {node.name: node.inputs for node in network.nodes}["add1"] == ("block.bn", "relu1")


@pytest.mark.parametrize("name", sorted(NETWORKS.keys() - studies.NETWORKS.keys()))
def test_the_table_has_the_numbers_of_the_zoo(name: str) -> None:
    if name in studies.PERCEPTRONS:
        return
    network = get_network(name)
    size = "×".join(map(str, network.input_shape))
    assert f"| `{name}` | {size} | {network.num_parameters:,} | " in ZOO
