"""Weights in safetensors files: round trips, PyTorch's names, and one line for every mistake."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from dptrain import Trainer, load
from dptrain.api import make_replica
from dptrain.backends.replica import Replica
from dptrain.cli.main import run
from dptrain.data.sources.shapes import generate
from dptrain.errors import UserError
from dptrain.interchange.weight_names import expected_shapes, network_of_weights
from dptrain.network import (
    BatchNorm2d,
    Conv2d,
    Dense,
    Flatten,
    Input,
    Network,
    ReLU,
    get_network,
)
from dptrain.network.adaptation import with_normalization
from dptrain.network.files import network_from_dict, network_to_dict
from dptrain.plan.freezing import rate_factors
from dptrain.plan.optimizers import SGD
from dptrain.training.persistence.weights import (
    check_fitting_weights,
    check_weights,
    load_weights,
    save_weights,
    size_of_weights,
)
from tests.lazy import LazyModule
from tests.tiers import tiered
from tests.unit.plan.networks import networks

torch = LazyModule("torch")
nn = LazyModule("torch.nn")


@pytest.fixture(scope="module")
def torch_model() -> nn.Module:
    """A network in evaluation mode, whose running statistics are those of some images."""
    from tests.unit.training.torch_networks import ResNet18

    torch.manual_seed(0)
    model = ResNet18()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0.0, 0.2)
        model(torch.randn(4, 3, 224, 224))
    return model.eval()


@pytest.fixture(scope="module")
def state_file(torch_model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state_dict of `torch_model`, with PyTorch's step counters."""
    path = tmp_path_factory.mktemp("weights") / "resnet18.safetensors"
    save_file({name: value.numpy() for name, value in torch_model.state_dict().items()}, path)
    return path


SMALL = get_network("model-small")


def resnet18(backend: str) -> Replica:
    precision = {"reference": "fp64"}.get(backend)
    return make_replica(
        get_network("resnet18"), backend=backend, batch_size=2, precision=precision, training=False
    )


@pytest.mark.parametrize("backend", tiered(["reference", "numba"], ["numba"]))
def test_resnet18_computes_what_pytorch_computes(
    backend: str, torch_model: nn.Module, state_file: Path
) -> None:
    replica = resnet18(backend)
    load_weights(replica, state_file)
    x = np.random.default_rng(0).standard_normal((2, 3, 224, 224), np.float32)
    with torch.no_grad():
        model = torch_model.double() if backend == "reference" else torch_model
        wide = x.astype(np.float64) if backend == "reference" else x
        expected = model(torch.from_numpy(wide)).numpy()
    torch_model.float()
    found = replica.predict(x)
    scores = np.exp(expected - expected.max(1, keepdims=True))
    np.testing.assert_allclose(found, scores / scores.sum(1, keepdims=True), rtol=1e-3, atol=1e-6)


def by_decay(model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameters as the recipe decays them: weights of convolutions and dense layers."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": decayed, "weight_decay": 1e-4}, {"params": others}]


@pytest.mark.parametrize(
    ("backend", "steps", "tolerance"),
    tiered([("reference", 3, 1e-7), ("numba", 2, 1e-4)], []),
)
def test_resnet20_trains_as_in_pytorch(
    backend: str, steps: int, tolerance: float, tmp_path: Path
) -> None:
    """Losses, parameters and running statistics are those of PyTorch.

    In float32, the gradients of both differ from those in float64 by 10% after one step, and more
    later, because rounding errors change the signs of inputs of ReLU.
    """
    from tests.unit.training.torch_networks import ResNet20

    replica = make_replica(
        get_network("resnet20"), backend=backend, batch_size=16, optimizer=SGD(momentum=0.9),
        precision={"reference": "fp64"}.get(backend),
    )  # fmt: skip
    path = tmp_path / "w.safetensors"
    save_weights(replica, path)
    model = ResNet20().double()
    loaded = {name: torch.from_numpy(values) for name, values in load_file(path).items()}
    model.load_state_dict(loaded, strict=False)
    optimizer = torch.optim.SGD(by_decay(model), 0.05, momentum=0.9)
    images, labels = generate(16 * steps, 0, 1)
    for x, y in zip(np.split(images, steps), np.split(labels, steps), strict=True):
        x = x / np.float32(127.5) - 1
        outputs = model(torch.from_numpy(x).double())
        loss = nn.functional.cross_entropy(outputs, torch.from_numpy(y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert replica.forward_backward(x, y) == pytest.approx(loss.item(), rel=tolerance)
        replica.update(learning_rate=0.05)
    state = {name: values.numpy() for name, values in model.state_dict().items()}
    for found in (replica.parameters, replica.statistics):
        difference = np.concatenate([(found[name] - state[name]).ravel() for name in found])
        expected = np.concatenate([state[name].ravel() for name in found])
        assert np.linalg.norm(difference) < 10 * tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("freeze", tiered(["conv1,bn1,layer1.*", "*.bn2,layer3.*.conv1", "fc"], []))
def test_frozen_layers_train_as_in_pytorch(freeze: str, tmp_path: Path) -> None:
    """Frozen modules have `requires_grad=False`, and frozen batch normalisations are in eval()."""
    from tests.unit.training.torch_networks import ResNet20

    network, optimizer = get_network("resnet20"), SGD(momentum=0.9, freeze=freeze)
    replica = make_replica(network, "reference", 6, precision="fp64", optimizer=optimizer)
    random = np.random.default_rng(3)
    for name, values in replica.statistics.items():
        replica.statistics[name] = random.uniform(0.5, 1.5, values.shape)
    path = tmp_path / "w.safetensors"
    save_weights(replica, path)
    model = ResNet20().double().train()
    loaded = {name: torch.from_numpy(values) for name, values in load_file(path).items()}
    model.load_state_dict(loaded, strict=False)
    factors = rate_factors(network, optimizer)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = factors[name] > 0
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and not module.weight.requires_grad:
            module.eval()
    images, labels = generate(6, 0, 1)
    x = (images / 127.5 - 1).astype(np.float64)
    loss = nn.functional.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(labels))
    loss.backward()
    assert replica.forward_backward(x, labels) == pytest.approx(loss.item(), rel=1e-9)
    gradients = {n: p.grad.numpy() for n, p in model.named_parameters() if p.requires_grad}
    assert replica.gradients.keys() == gradients.keys()
    for name, values in gradients.items():
        found = replica.gradients[name]
        np.testing.assert_allclose(found, values, rtol=0, atol=1e-7 * np.abs(values).max())
    state = model.state_dict()
    for name, values in replica.statistics.items():
        np.testing.assert_allclose(values, state[name].numpy(), rtol=1e-9)


def test_saved_weights_are_those_of_the_file(state_file: Path, tmp_path: Path) -> None:
    replica = resnet18("reference")
    load_weights(replica, state_file)
    path = tmp_path / "again.safetensors"
    save_weights(replica, path)
    before, after = load_file(state_file), load_file(path)
    counters = {name for name in before if name.endswith("num_batches_tracked")}
    assert set(after) == set(before) - counters
    for name, values in after.items():
        np.testing.assert_array_equal(values, before[name])
    assert [p.name for p in tmp_path.iterdir()] == ["again.safetensors"]
    assert path.stat().st_mode & 0o044 == 0o044


@pytest.fixture
def weights(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A file with the weights of model-small, and its arrays."""
    path = tmp_path / "w.safetensors"
    replica = make_replica(SMALL, backend="reference", batch_size=2)
    save_weights(replica, path)
    return path, load_file(path)


def test_mistakes_are_one_line(weights: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    arrays = weights[1]
    replica = make_replica(SMALL, backend="reference", batch_size=2, seed=1)
    before = replica.parameters["conv1.weight"].copy()
    bad = tmp_path / "bad.safetensors"

    def refuse(changed: dict[str, Any], message: str) -> None:
        save_file(changed, bad)
        with pytest.raises(UserError) as caught:
            load_weights(replica, bad)
        assert message in str(caught.value)
        assert str(caught.value).startswith(f"weights {bad} do not fit network model-small: ")
        assert "\n" not in str(caught.value)
        np.testing.assert_array_equal(replica.parameters["conv1.weight"], before)

    refuse({k: v for k, v in arrays.items() if k != "conv2.bias"}, "the file lacks conv2.bias")
    renamed = {f"my_{k}": v for k, v in arrays.items()}
    refuse(renamed, "the file lacks conv1.weight and 7 more; the file has my_")
    refuse({**arrays, "fc.weight": arrays["conv1.bias"]}, "the file also has fc.weight")
    wide = {**arrays, "dense2.bias": np.zeros(11, np.float32)}
    refuse(wide, "dense2.bias has shape (11,); expected (10,)")
    refuse({**arrays, "dense2.bias": np.full(10, np.nan, np.float32)}, "not finite numbers")
    whole = {**arrays, "dense2.bias": np.zeros(10, np.int64)}
    refuse(whole, "dense2.bias has type I64; expected F32, F64, F16")
    bad.write_bytes(b"PK\x03\x04 a pickle of PyTorch")
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        load_weights(replica, bad)
    with pytest.raises(UserError, match=r"absent.safetensors do not exist; expected a .safetensor"):
        load_weights(replica, tmp_path / "absent.safetensors")


def test_negative_variances_are_refused(tmp_path: Path) -> None:
    network = Network((3, 4, 4), [BatchNorm2d(), Flatten(), Dense(2)], name="normalized")
    replica, path = make_replica(network, "reference", 2), tmp_path / "w.safetensors"
    save_weights(replica, path)
    arrays = {**load_file(path), "batchnorm1.running_var": np.full(3, -1.0)}
    save_file(arrays, path)
    with pytest.raises(UserError, match=r"batchnorm1.running_var contains -1; expected variances"):
        load_weights(replica, path)


def test_a_wrong_file_is_refused_before_compilation(
    weights: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, arrays = weights
    Trainer("model-small", "digits", backend="reference", steps=1, run_dir=tmp_path / "run").fit()
    save_file({**arrays, "dense2.bias": np.zeros(11, np.float32)}, path)

    def compile_nothing(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a replica is made")

    monkeypatch.setattr("dptrain.backends.base.Backend.make_replica", compile_nothing)
    with pytest.raises(UserError, match=r"dense2.bias has shape \(11,\); expected \(10,\)"):
        load(tmp_path / "run", weights=path)
    frozen = r"dense2.bias \(shape 11 in the file, 10 here\), and --freeze would keep it at random"
    with pytest.raises(UserError, match=frozen):
        Trainer("model-small", "digits", backend="reference", weights=path, freeze="dense2")
    save_file({f"my_{name}": values for name, values in arrays.items()}, path)
    nothing = "no array has the name and the shape of a parameter, such as conv1.weight"
    with pytest.raises(UserError, match=f"{nothing}.*; the file has my_.* and 7 more"):
        Trainer("model-small", "digits", backend="reference", weights=path)


def test_training_starts_with_the_weights_and_evaluates_them(
    weights: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    path, arrays = weights
    run = tmp_path / "run"
    settings = {"epochs": 1, "crop": 0, "backend": "reference", "schedule": "constant"}
    trainer = Trainer(
        "model-small", "digits", weights=path, seed=5, run_dir=run, progress=False, **settings
    )
    np.testing.assert_array_equal(trainer.parameters["conv1.weight"], arrays["conv1.weight"])
    start = trainer.evaluate()["loss"]
    trainer.fit()
    assert trainer.evaluate()["loss"] < start
    assert load(run).evaluate()["loss"] < start
    model = load(run, weights=path)
    assert model.evaluate()["loss"] == pytest.approx(start, rel=1e-4)
    model.save_weights(tmp_path / "out.safetensors")
    saved = load_file(tmp_path / "out.safetensors")
    assert all(np.array_equal(saved[name], np.float32(arrays[name])) for name in arrays)
    path.unlink()  # A run that continues does not need the file.
    again = Trainer.resume(run, steps=90, progress=False)
    assert not np.array_equal(again.parameters["conv1.weight"], arrays["conv1.weight"])


def test_statistics_are_trained_saved_and_loaded(tmp_path: Path) -> None:
    x = Input((3, 8, 8))
    y = Flatten()(ReLU()(BatchNorm2d()(Conv2d(4, bias=False)(x, name="conv"), name="bn")))
    network = Network.from_output(Dense(10)(y), name="normalised")
    run = tmp_path / "run"
    trainer = Trainer(network, "digits", epochs=1, run_dir=run, progress=False)
    assert not trainer.statistics["bn.running_mean"].any()
    trainer.fit()
    assert trainer.statistics["bn.running_mean"].any()
    model = load(run)
    for name, values in trainer.statistics.items():
        np.testing.assert_array_equal(model.statistics[name], values)
    path = tmp_path / "normalised.safetensors"
    model.save_weights(path)
    other = Trainer(network, "digits", weights=path, seed=3, progress=False)
    np.testing.assert_array_equal(
        other.statistics["bn.running_var"], model.statistics["bn.running_var"]
    )
    assert other.evaluate()["loss"] == pytest.approx(model.evaluate()["loss"], rel=1e-5)


def test_weights_decide_on_the_size_of_a_network_of_the_zoo(tmp_path: Path) -> None:
    """Labels without names are then numbers of the outputs that the weights have."""
    path = tmp_path / "w.safetensors"
    network = get_network("model-small", input_shape=(3, 16, 16), outputs=12)
    save_weights(make_replica(network, "reference", seed=1), path)
    data = np.zeros((20, 8, 8), np.uint8), np.arange(20) % 5
    settings = {"backend": "reference", "progress": False, "steps": 1, "weights": path}
    trainer = Trainer("model-small", data, **settings)
    assert (trainer.network.input_shape, trainer.network.num_outputs) == ((3, 16, 16), 12)
    named = Trainer("model-small", data, classes=list("abcde"), **settings)
    assert (named.network.input_shape, named.network.num_outputs) == ((3, 16, 16), 5)
    loaded = trainer.parameters["conv1.weight"]
    np.testing.assert_array_equal(named.parameters["conv1.weight"], loaded)


def test_training_begins_with_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a run, a checkpoint and a file with a prefix and names of timm."""
    data = np.random.default_rng(0).integers(0, 256, (30, 3, 16, 16), np.uint8), np.arange(30) % 3
    x = Input((3, 16, 16))
    y = BatchNorm2d()(Conv2d(4, stride=4)(x, name="features.0"), name="features.1")
    y = Dense(6)(Flatten()(ReLU()(y)), name="classifier.0")

    def network(outputs: int) -> Network:
        return Network.from_output(Dense(outputs)(ReLU()(y), name="fc"), name="transfer")

    settings = {"backend": "reference", "steps": 2, "batch_size": 10, "seed": 1}
    first = Trainer(network(3), data, run_dir=tmp_path / "run", **settings, average_weights=0.5)
    first.fit()
    first.save(tmp_path / "saved")
    model = load(tmp_path / "run")
    arrays = {**model.parameters, **model.statistics}
    dense = arrays.pop("classifier.0.weight").reshape(6, 4, 4, 4)
    renamed = {**arrays, "pre_logits.fc1.weight": dense}
    renamed["pre_logits.fc1.bias"] = renamed.pop("classifier.0.bias")
    stored = {f"model.{k}": np.ascontiguousarray(v, np.float32) for k, v in renamed.items()}
    save_file(stored, tmp_path / "timm.safetensors")
    data = data[0], np.arange(30) % 5
    for source in ("run", "saved", "timm.safetensors"):
        capsys.readouterr()
        trainer = Trainer(network(5), data, weights=tmp_path / source, **settings, freeze="f*.*.*")
        trainer.fit()
        assert (
            f"weights: 6 of 8 parameters and 2 of 2 running statistics from {tmp_path / source}; "
            "initialised at random: fc.weight (shape 3×6 in the file, 5×6 here), fc.bias (shape 3 "
            "in the file, 5 here)\n"
        ) in capsys.readouterr().out
        for name in trainer.statistics:
            np.testing.assert_allclose(trainer.statistics[name], model.statistics[name], rtol=1e-6)
        frozen = "features.0.weight"
        np.testing.assert_allclose(trainer.parameters[frozen], model.parameters[frozen], rtol=1e-6)


@given(
    network=networks(),
    prefix=st.sampled_from(["", "module.", "_orig_mod.module.", "model.", "a.conv1.", "weight."]),
    change=st.sampled_from(["none", "none", "one name", "another array", "lacks one"]),
)
def test_a_prefix_of_all_names_does_not_matter(
    tmp_path_factory: pytest.TempPathFactory, network: Network, prefix: str, change: str
) -> None:
    shapes = {array.name: array.shape for array in (*network.parameters, *network.statistics)}
    assume(network.parameters)
    arrays = {f"{prefix}{name}": np.ones(shape, np.float32) for name, shape in shapes.items()}
    arrays[f"{prefix}bn9.num_batches_tracked"] = np.ones(1, np.float32)
    first = f"{prefix}{next(iter(shapes))}"
    if change == "one name":
        arrays["odd." + first] = arrays.pop(first)
    elif change == "another array":
        arrays["module.other"] = np.ones(1, np.float32)
    elif change == "lacks one":
        del arrays[first]
    path = tmp_path_factory.mktemp("weights") / "w.safetensors"
    save_file(arrays, path)
    if change == "none" or (change == "one name" and len(shapes) == 1):
        check_weights(network, path)
        return
    with pytest.raises(UserError, match=r"the file (lacks|also has)"):
        check_weights(network, path)


def test_weights_of_wrapped_models_are_read(tmp_path: Path) -> None:
    network = get_network("mlp-8", input_shape=(4,), outputs=2)
    replica = make_replica(network, "reference", batch_size=2)
    save_weights(replica, tmp_path / "own.safetensors")
    arrays = load_file(tmp_path / "own.safetensors")
    save_file(
        {f"module.{name}": values + 1 for name, values in arrays.items()},
        tmp_path / "w.safetensors",
    )
    load_weights(replica, tmp_path / "w.safetensors")
    for name, values in arrays.items():
        np.testing.assert_array_equal(replica.parameters[name], values + 1)
    found = size_of_weights(get_network("mlp-8"), tmp_path / "w.safetensors")
    assert found == ((4,), 2, False)


def test_arrays_of_other_forms_are_read_and_auxiliary_ones_ignored(tmp_path: Path) -> None:
    """A dense layer per pixel, a factor per channel, and a classifier that only training has."""
    x = Input((4, 3, 3))
    y = Conv2d(8, 1)(x, name="block.3")
    scaled = Conv2d(8, 1, groups=8, bias=False)(y, name="block.layer_scale")
    network = Network.from_output(Dense(2)(Flatten()(scaled), name="fc"))
    replica, path = make_replica(network, "reference", batch_size=1), tmp_path / "w.safetensors"
    arrays = {
        name: np.full(values.shape, i + 1.0, np.float32)
        for i, (name, values) in enumerate(replica.parameters.items())
    }
    written = {
        **arrays,
        "block.3.weight": arrays["block.3.weight"].reshape(8, 4),
        "block.layer_scale": arrays["block.layer_scale.weight"].reshape(8, 1, 1),
        "aux1.fc.weight": np.zeros((3, 3), np.float32),
    }
    del written["block.layer_scale.weight"]
    save_file({f"model.{name}": values for name, values in written.items()}, path)
    load_weights(replica, path)
    for name, values in arrays.items():
        np.testing.assert_array_equal(replica.parameters[name], values)


@pytest.mark.parametrize(("name", "normalised"), [("squeezenet1-1", True), ("googlenet", False)])
def test_published_weights_of_inception_expect_plain_pixels(
    name: str, normalised: bool, tmp_path: Path
) -> None:
    network, path = get_network(name), tmp_path / "w.safetensors"
    arrays = [*network.parameters, *network.statistics]
    save_file({each.name: np.ones(each.shape, np.float32) for each in arrays}, path)
    assert size_of_weights(network, path) == ((3, 224, 224), 1000, normalised)
    assert network_of_weights(path) == name


def test_published_weights_choose_the_network_and_its_normalisation(
    torch_model: nn.Module, state_file: Path
) -> None:
    """Probabilities are those of PyTorch for inputs that were normalised as for ImageNet."""
    x = np.random.default_rng(0).integers(0, 256, (4, 3, 224, 224), np.uint8)
    settings = {"backend": "reference", "steps": 1, "batch_size": 2}
    trainer = Trainer(data=(x, np.arange(4) % 2), weights=state_file, **settings)
    assert trainer.network.name == "resnet18"
    assert trainer.spec.job.schedule == "cosine"
    mean, deviation = (
        torch.tensor(numbers)[:, None, None]
        for numbers in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    with torch.no_grad():
        scores = torch_model((torch.from_numpy(x) / 255 - mean) / deviation)
    np.testing.assert_allclose(
        trainer.predict(x), torch.softmax(scores, 1).numpy(), rtol=1e-3, atol=1e-6
    )
    assert "layer normalization normalises inputs as for ImageNet" in trainer.job.weights
    # Other numbers than pixels are the user's own.
    floats = np.random.default_rng(0).normal(size=x.shape).astype(np.float32)
    other = Trainer(data=(floats, np.arange(4) % 2), weights=state_file, **settings)
    assert [node.name for node in other.network.nodes][:1] == ["conv1"]


@pytest.mark.filterwarnings("ignore")
def test_onnx_files_choose_the_network_and_its_normalisation(
    torch_model: nn.Module, tmp_path: Path
) -> None:
    from benchmarks.zoo.sources import export

    path = tmp_path / "weights.onnx"
    export(torch_model, path, 64, "torchscript")
    assert network_of_weights(path) == "resnet18"
    assert size_of_weights(get_network("resnet18"), path) == ((3, 224, 224), 1000, True)
    path.write_bytes(b"damaged")
    assert network_of_weights(path) is None


def test_files_of_dptrain_keep_their_normalisation(tmp_path: Path) -> None:
    network, path = get_network("mobilenet-v1", outputs=3), tmp_path / "own.safetensors"
    assert network_of_weights(path) is None
    save_weights(make_replica(network, "null", batch_size=1), path)
    assert network_of_weights(path) == "mobilenet-v1"
    assert size_of_weights(network, path) == ((3, 224, 224), 3, False)
    normalised = with_normalization(network)
    save_weights(make_replica(normalised, "null", batch_size=1), path)
    assert network_of_weights(path) == "mobilenet-v1"
    assert size_of_weights(network, path) == ((3, 224, 224), 3, True)
    arrays = load_file(path)
    own = {name: values for name, values in arrays.items() if "normalization" not in name}
    assert len(arrays) == len(own) + 4
    save_file({f"model.{name}": values for name, values in own.items()}, path)
    assert size_of_weights(network, path) == ((3, 224, 224), 3, True)
    assert size_of_weights(get_network("mlp-8"), path) is None
    check_weights(normalised, path)
    path.write_bytes(b"damaged")
    assert network_of_weights(path) is None


def test_weights_of_another_network_name_it(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_weights(make_replica(get_network("model-small"), "null", batch_size=1), path)
    with pytest.raises(UserError, match=r"they are of model-small; use --network model-small$"):
        check_fitting_weights(get_network("resnet18"), path)


@pytest.mark.parametrize("backend", ["reference", "numba", "cuda"])
def test_a_batch_normalisation_may_have_fixed_numbers(backend: str, tmp_path: Path) -> None:
    """Training is that of inputs that were normalised before, whatever the patterns match."""
    random = np.random.default_rng(0)
    x, y = random.standard_normal((24, 3, 6, 6)).astype(np.float32), np.arange(24) % 3
    mean, deviation = np.float32([0.5, -0.25, 0.0]), np.float32([2.0, 0.5, 1.0])
    layers = [Conv2d(4), ReLU(), Flatten(), Dense(3)]
    plain = Network((3, 6, 6), layers, name="plain")
    fixed = Network((3, 6, 6), [BatchNorm2d(trained=False), *layers], name="fixed")
    assert network_from_dict(network_to_dict(fixed)) == fixed
    start = {p.name: random.normal(0, 0.2, p.shape) for p in plain.parameters}
    losses = list[list[float]]()
    for network in (plain, fixed):
        rule = SGD(momentum=0.9, rate_factor="*=0.5")
        replica = make_replica(network, backend, batch_size=24, optimizer=rule)
        for name, values in start.items():
            replica.parameters[name] = values
        inputs = (x - mean[:, None, None]) / deviation[:, None, None]
        if network is fixed:
            replica.statistics["batchnorm1.running_mean"] = mean
            replica.statistics["batchnorm1.running_var"] = deviation**2 - 1e-5
            inputs = x
        losses.append([])
        for _ in range(4):
            losses[-1].append(replica.forward_backward(inputs, y))
            replica.update(learning_rate=0.2)
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-4)
    np.testing.assert_array_equal(replica.statistics["batchnorm1.running_mean"], mean)
    np.testing.assert_array_equal(replica.parameters["batchnorm1.weight"], np.ones(3))


@pytest.mark.parametrize("known", ["resnet20", "resnet56"])
def test_a_dry_run_states_the_weights_and_refuses_those_of_a_smaller_network(
    known: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All arrays of resnet20 fit resnet56, whose other layers would be random."""
    path = tmp_path / "w.safetensors"
    shapes = expected_shapes(get_network(known))
    save_file({name: np.ones(shape, np.float32) for name, shape in shapes.items()}, path)
    command = ["train", "--network", "resnet56", "--weights", str(path)]
    command += ["--data", "shapes?samples=500"]
    code = run([*command, "--backend", "null", "--dry-run"], is_rank_zero=True)
    found = capsys.readouterr()
    if known == "resnet56":
        assert code == 0
        assert f"from {path}" in " ".join(found.out.split())
        assert re.search(r"weights: (\d+) of \1 parameters and (\d+) of \2 running", found.out)
        return
    assert code == 2
    assert "they are of resnet20, and lack " in found.err
    assert found.err.rstrip().endswith("use --network resnet20")
