"""The zoo: parameter counts of the studies, names, and recipes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from dptrain.errors import UserError
from dptrain.network import Dense, HardSwish, ReLU, get_network
from dptrain.network.zoo import NETWORKS, recipe, studies

PERCEPTRONS = [name for name in NETWORKS if name.startswith("mlp-")]


def test_parameter_counts_are_those_of_the_studies() -> None:
    assert get_network("solar").num_parameters == 4_352_641
    assert get_network("cifar").num_parameters == 1_068_298


@pytest.mark.parametrize(
    ("name", "parameters", "multiplications"),
    [
        # torchvision.models documents num_params and GFLOPS (multiplications) of these.
        ("resnet18", 11_689_512, 1.814e9),
        ("resnet34", 21_797_672, 3.664e9),
        ("resnet50", 25_557_032, 4.089e9),
        ("vgg11-bn", 132_868_840, 7.609e9),
        ("vgg16-bn", 138_365_992, 15.470e9),
        ("alexnet", 61_100_840, 0.714e9),
        ("densenet121", 7_978_856, 2.834e9),
        ("mobilenet-v2", 3_504_872, 0.301e9),
        ("mobilenet-v3-small", 2_542_856, 0.057e9),
        ("mobilenet-v3-large", 5_483_032, 0.217e9),
        ("efficientnet-b0", 5_288_548, 0.386e9),
        ("resnext50-32x4d", 25_028_904, 4.230e9),
        ("regnet-x-400mf", 5_495_976, 0.414e9),
        ("regnet-y-400mf", 4_344_144, 0.402e9),
        ("convnext-tiny", 28_589_128, 4.456e9),
        ("shufflenet-v2-x1", 2_278_604, 0.145e9),
        ("squeezenet1-1", 1_235_496, 0.349e9),
        ("mnasnet1-0", 4_383_312, 0.314e9),
        ("googlenet", 6_624_904, 1.498e9),
        # 27,161,264 with the auxiliary classifier.
        ("inception-v3", 23_834_568, 5.713e9),
        ("wide-resnet50-2", 68_883_240, 11.398e9),
        # https://github.com/chenyaofo/pytorch-cifar-models: 0.27 M and 0.86 M, 40.8 and 125.8 M.
        ("resnet20", 272_474, 40.8e6),
        ("resnet56", 855_770, 125.8e6),
        # https://github.com/kuangliu/pytorch-cifar: 11,173,962; 0.56 G by count.
        ("resnet18-cifar", 11_173_962, 0.56e9),
        # Zagoruyko and Komodakis, table 1: 36.5 M; https://github.com/xternalz/WideResNet-pytorch.
        ("wrn-28-10", 36_479_194, 5.2e9),
        # Howard et al., table 4: 4.2 M and 569 M. keras.applications counts 4,253,864 with the
        # 21,888 running means and variances.
        ("mobilenet-v1", 4_253_864 - 21_888, 569e6),
    ],
)
def test_published_networks_have_their_published_size(
    name: str, parameters: int, multiplications: float
) -> None:
    network = get_network(name)
    assert network.num_parameters == parameters
    counted = [n.flops.forward for n in network.nodes if n.layer.kind in ("conv", "dense")]
    assert sum(counted) / 2 == pytest.approx(multiplications, rel=0.01)


def test_shapes_inside_published_networks() -> None:
    shapes = {n.name: n.output_shape for n in get_network("resnet50").nodes}
    assert shapes["maxpool"] == (64, 56, 56)
    assert shapes["layer1.2.relu3"] == (256, 56, 56)
    # Stride in the 3×3 convolution ("v1.5").
    assert shapes["layer2.0.conv1"] == (128, 56, 56)
    assert shapes["layer2.0.conv2"] == (128, 28, 28)
    assert shapes["layer4.2.relu3"] == (2048, 7, 7)
    for name, last in (("vgg11-bn", (512, 7, 7)), ("alexnet", (256, 6, 6))):
        nodes = get_network(name).nodes
        assert next(n.input_shape for n in nodes if n.name == "flatten") == last


@pytest.mark.parametrize(
    ("name", "channels", "last_size", "units"),
    [
        ("model0", (3, 16, 32), 32 // 4, (100, 10)),
        ("model1", (3, 16, 32), 40 // 4, (100, 10)),
        ("model2", (3, 16, 32, 32), 40 // 8, (128, 50, 10)),
        ("study-a-smaller", (3, 16, 32), 12 // 4, (100, 10)),
        ("study-a-larger", (3, 32, 32, 32), 50 // 8, (200, 50, 10)),
    ],
)
def test_models_have_the_parameters_of_their_table(
    name: str, channels: tuple[int, ...], last_size: int, units: tuple[int, ...]
) -> None:
    pairs = pairwise(channels)
    expected = sum((9 * c + 1) * k for c, k in pairs)
    widths = (channels[-1] * last_size**2, *units)
    expected += sum((a + 1) * b for a, b in pairwise(widths))
    assert get_network(name).num_parameters == expected


@pytest.mark.parametrize("name", PERCEPTRONS)
def test_perceptrons_follow_the_formula(name: str) -> None:
    widths = [50, *map(int, name.split("-")[1:]), 1]
    assert get_network(name).num_parameters == sum((a + 1) * b for a, b in pairwise(widths))


def test_there_are_thirty_perceptrons_from_the_smallest_to_the_largest() -> None:
    assert len(set(PERCEPTRONS)) == 30
    assert {"mlp-50", "mlp-50-25-13", "mlp-25600", "mlp-25600-12800-6656"} <= set(PERCEPTRONS)


def test_cifar_does_the_multiplications_of_its_study() -> None:
    forward = sum(node.flops.forward for node in get_network("cifar").nodes if node.parameters)
    # "About 19.5 M multiply-adds an image": within 10%, as the study rounds and skips some layers.
    assert forward / 2 == pytest.approx(19.5e6, rel=0.1)


def test_small_and_large_lie_outside_the_models_of_the_study() -> None:
    sizes = [get_network(f"model{kin}").num_parameters for kin in ("-small", "0", "2", "-large")]
    assert sizes[0] < min(sizes[1:])
    assert sizes[3] > max(sizes[:3])
    large = get_network("model-large")
    assert sum(node.layer.kind == "conv" for node in large.nodes) == 3
    assert large.input_shape > get_network("model2").input_shape


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_builds_under_its_own_name_and_trains_by_its_recipe(name: str) -> None:
    built = get_network(name)
    assert built.name == name
    assert NETWORKS[name].description
    size, outputs = built.input_shape[-1], built.num_outputs
    chosen = recipe(built)
    if name in ("model0-labels", "model0-values"):
        assert chosen.data is None
    elif name in studies.NETWORKS or name in studies.PERCEPTRONS:
        assert chosen.data == {"classes": "digits", "values": "irradiance"}[built.loss.targets]
    else:
        expected = {(32, 10): "shapes", (224, 1000): None, (299, 1000): None}[size, outputs]
        assert (chosen.data, chosen.flip) == (expected, True)
    dense = [i for i, layer in enumerate(built.layers) if isinstance(layer, Dense)]
    assert all(isinstance(built.layers[i + 1], ReLU | HardSwish) for i in dense[:-1])
    # Only the network of the solar study has a ReLU after the last layer.
    assert isinstance(built.layers[-1], ReLU) == (name == "solar")


def test_any_perceptron_can_be_named() -> None:
    assert [n.output_shape for n in get_network("mlp-7-3").nodes] == [(7,), (7,), (3,), (3,), (1,)]


@pytest.mark.parametrize("name", ["modle0", "mlp-", "mlp-0", "mlp-5--5", "mlp-5-x", ""])
def test_unknown_names_are_refused_in_one_line(name: str) -> None:
    with pytest.raises(UserError, match=f"no network '{name}'; expected model0, ") as caught:
        get_network(name)
    assert "\n" not in str(caught.value)
    if name == "modle0":
        assert "did you mean 'model0'?" in str(caught.value)
