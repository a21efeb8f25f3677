"""Checkpoints come back bit for bit, damage is noticed, and a resumed run is the same run."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

import dptrain.api
from dptrain.backends.replica import Replica
from dptrain.errors import UserError
from dptrain.network import (
    BatchNorm2d,
    Conv2d,
    Dense,
    Flatten,
    Layer,
    LayerNorm,
    MaxPool2d,
    Network,
    NodeSpec,
    ReLU,
)
from dptrain.plan.optimizers import SGD, Adam, AdamW, Optimizer
from dptrain.training.persistence.checkpoints import (
    Checkpoint,
    CheckpointFacts,
    CheckpointStore,
    replica_arrays,
    restore_replica,
)
from tests.unit.examples import fewer

ARRAYS = {"parameters/w": np.arange(6, dtype=np.float32).reshape(2, 3)}


def filled(folder: Path, steps: tuple[int, ...] = (10, 20, 30)) -> CheckpointStore:
    store = CheckpointStore(folder)
    for step in steps:
        store.save(step, {"w": np.full(5, step, np.float32)}, {"step": step})
    return store


def assert_same_bits(found: dict[str, NDArray[Any]], expected: dict[str, NDArray[Any]]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as info:
        call()
    assert "\n" not in str(info.value)
    return str(info.value)


# Round trips.


@fewer()
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        hnp.arrays(
            st.sampled_from(["float32", "float64", "int64", "uint8", "bool"]),
            hnp.array_shapes(min_dims=0, min_side=0, max_side=4),
            elements={"allow_nan": False, "allow_infinity": False},
        ),
        max_size=4,
    )
)
def test_arrays_come_back(
    tmp_path_factory: pytest.TempPathFactory, arrays: dict[str, NDArray[Any]]
) -> None:
    store = CheckpointStore(tmp_path_factory.mktemp("checkpoints"))
    store.save(1, arrays, {})
    assert_same_bits(store.load().arrays, arrays)


@pytest.mark.parametrize("bits", ["uint32", "uint64"])
def test_every_finite_bit_pattern_comes_back(tmp_path: Path, bits: str) -> None:
    width = np.dtype(bits).itemsize
    generator = np.random.default_rng(0)
    patterns = generator.integers(0, 2 ** (8 * width) - 1, 4096, bits, endpoint=True)
    numbers = patterns.view(f"f{width}")
    minus_zero = np.array([-0.0], f"f{width}")
    arrays = {
        "any": numbers[np.isfinite(numbers)],
        "minus zero": minus_zero,
        "none": np.zeros((0, 3), f"f{width}"),
        "scalar": np.array(3.0, f"f{width}"),
    }
    store = CheckpointStore(tmp_path)
    store.save(1, arrays, {})
    assert_same_bits(store.load().arrays, arrays)


def test_the_order_in_memory_does_not_matter(tmp_path: Path) -> None:
    base = np.arange(24.0).reshape(2, 3, 4)
    views = {
        "fortran": np.asfortranarray(base),
        "stride": base[:, ::2],
        "axes": base.transpose(2, 0, 1),
    }
    store = CheckpointStore(tmp_path)
    store.save(1, views, {})
    for name, array in store.load().arrays.items():
        np.testing.assert_array_equal(array, views[name])


def test_facts_come_back(tmp_path: Path) -> None:
    facts = {"updates": 7, "rate": 0.1, "loss": float("inf"), "name": "é'\"", "list": [1, None]}
    store = CheckpointStore(tmp_path)
    store.save(7, ARRAYS, facts)
    assert store.load().facts == facts


def test_a_folder_holds_what_it_says(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).save(450, ARRAYS, {"updates": 450})
    assert path == tmp_path / "step-00000450"
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "state.safetensors"]
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["arrays"] == {"parameters/w": {"dtype": "float32", "shape": [2, 3]}}
    assert (manifest["format"], manifest["step"]) == (1, 450)
    assert {p.stat().st_mode for p in path.iterdir()} == {(path / "manifest.json").stat().st_mode}


# Which are kept, which is loaded.


@fewer()
@given(st.lists(st.integers(0, 12), min_size=1, max_size=8), st.integers(1, 4))
def test_the_last_saved_is_the_newest_and_the_last_few_stay(
    tmp_path_factory: pytest.TempPathFactory, saves: list[int], keep: int
) -> None:
    store = CheckpointStore(tmp_path_factory.mktemp("checkpoints"), keep=keep)
    expected: list[int] = []
    for number, step in enumerate(saves):
        store.save(step, {"w": np.array(number)}, {})
        expected = [*(s for s in expected if s < step), step][-keep:]
        assert store.steps() == expected
        assert (store.load().step, int(store.load().arrays["w"])) == (step, number)
    assert len(list(store.folder.iterdir())) == len(expected)


def test_a_given_step_is_loaded(tmp_path: Path) -> None:
    assert filled(tmp_path).load(20).facts == {"step": 20}
    message = error_of(lambda: CheckpointStore(tmp_path).load(25))
    assert "no checkpoint of step 25" in message
    assert message.endswith("expected one of 10, 20, 30")


def test_an_empty_store_says_so(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "none")
    assert store.steps() == []
    assert "no checkpoint in" in error_of(store.load)


def test_what_else_lies_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-best").mkdir()
    assert filled(tmp_path, (1, 2, 3, 4)).steps() == [2, 3, 4]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "step-best").is_dir()


# Damage.

FILES = ["state.safetensors", "manifest.json"]


def truncate(path: Path, position: float) -> None:
    path.write_bytes(path.read_bytes()[: int(position * path.stat().st_size)])


def delete(path: Path, position: float) -> None:
    path.unlink()


def swap(path: Path, position: float) -> None:
    other = path.parent.with_name("step-00000020") / path.name
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


@fewer()
@given(
    st.sampled_from([truncate, delete]),
    st.sampled_from(FILES),
    st.floats(0, 0.99),  # What follows may be the line break at the end, which nobody misses.
)
def test_a_damaged_newest_gives_way_to_the_one_before(
    tmp_path_factory: pytest.TempPathFactory,
    damage: Callable[[Path, float], None],
    file: str,
    position: float,
) -> None:
    store = filled(tmp_path_factory.mktemp("checkpoints"))
    damage(store.folder / "step-00000030" / file, position)
    checkpoint = store.load()
    assert checkpoint.step == 20
    assert checkpoint.facts == {"step": 20}
    assert checkpoint.arrays["w"].tolist() == [20.0] * 5
    assert len(checkpoint.notes) == 1
    assert file in checkpoint.notes[0]
    assert "step-00000030" in checkpoint.notes[0]
    message = error_of(lambda: store.load(30))
    assert file in message
    assert "step-00000030" in message


@pytest.mark.parametrize("file", FILES)
def test_every_flipped_byte_is_noticed(tmp_path: Path, file: str) -> None:
    path = filled(tmp_path, (30,)).folder / "step-00000030" / file
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x01]) + whole[position + 1 :])
        assert file in error_of(CheckpointStore(tmp_path).load)


@pytest.mark.parametrize("file", FILES)
def test_files_swapped_between_checkpoints_are_noticed(tmp_path: Path, file: str) -> None:
    store = filled(tmp_path)
    swap(tmp_path / "step-00000030" / file, 0.0)
    checkpoint = store.load()
    assert (checkpoint.step, len(checkpoint.notes)) == (10, 2)


def test_folders_swapped_between_checkpoints_are_noticed(tmp_path: Path) -> None:
    store = filled(tmp_path)
    (tmp_path / "step-00000030").rename(tmp_path / "x")
    (tmp_path / "step-00000020").rename(tmp_path / "step-00000030")
    (tmp_path / "x").rename(tmp_path / "step-00000020")
    assert store.load().step == 10
    assert "belongs to step 20" in error_of(lambda: store.load(30))


def test_nothing_whole_is_an_error_that_names_the_newest(tmp_path: Path) -> None:
    store = filled(tmp_path)
    for folder in tmp_path.iterdir():
        (folder / "manifest.json").unlink()
    assert "step-00000030 is damaged: manifest.json cannot be read" in error_of(store.load)


def test_a_format_of_the_future_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("dptrain.training.persistence.checkpoints.FORMAT", 2)
        filled(tmp_path, (1,))
    assert "format 2; this version reads 1" in error_of(CheckpointStore(tmp_path).load)


def test_going_on_after_damage_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(10, ARRAYS, {})
    shutil.copytree(tmp_path / "step-00000010", tmp_path / "step-00000030")
    assert store.load().step == 10
    store.save(20, ARRAYS, {})
    assert store.steps() == [20]
    assert store.load().notes == ()


# Damage with valid checksums: what a faulty tool writes, not a faulty disk.


def forge(folder: Path, **changes: Any) -> None:
    """Change the manifest of a checkpoint and make its checksum valid again."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    del content["sha256"]
    for key, value in changes.items():
        if value is None:
            content.pop(key)
        else:
            content[key] = value
    text = json.dumps(content)
    content["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "changes",
    [
        {"files": None},
        {"files": {}},
        {"files": {"state.safetensors": {}}},
        {"files": {"state.safetensors": {"bytes": "x", "sha256": []}}},
        {"files": []},
        {"arrays": {}},
        {"arrays": None},
        {"arrays": {"w": {"dtype": "float32", "shape": [4]}}},
        {"facts": None},
        {"facts": 3},
        {"step": None},
        {"step": "x"},
        {"step": {"a": [1]}},
        {"format": None},
        {"format": "1\n\n"},
    ],
)
def test_a_manifest_with_a_valid_checksum_and_wrong_content_is_damage(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    store = filled(tmp_path)
    forge(tmp_path / "step-00000030", **changes)
    checkpoint = store.load()
    assert checkpoint.step == 20
    assert checkpoint.warning is not None
    assert "step-00000030 is damaged: manifest.json" in checkpoint.warning or (
        "state.safetensors" in checkpoint.warning
    )
    assert checkpoint.warning.endswith("using the checkpoint of step 20")
    assert checkpoint.warning.isprintable()
    error_of(lambda: store.load(30))


def deep(path: Path) -> None:
    path.write_text("[" * 200_000)


def no_object(path: Path) -> None:
    path.write_text("[]")


def many_digits(path: Path) -> None:
    path.write_text('{"step": ' + "9" * 5000 + "}")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [deep, no_object, many_digits, pipe, device, directory])
@pytest.mark.parametrize("file", FILES)
def test_special_and_senseless_files_are_damage(
    tmp_path: Path, damage: Callable[[Path], None], file: str
) -> None:
    store = filled(tmp_path)
    damage(tmp_path / "step-00000030" / file)
    assert store.load().step == 20
    assert file in error_of(lambda: store.load(30))
    store.save(40, ARRAYS, {})
    assert store.load().step == 40


@pytest.mark.parametrize("names", [("step-00000030",), (".step-00000030.partial",)])
def test_plain_files_in_place_of_checkpoint_folders_are_replaced(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    store = filled(tmp_path, (10, 20))
    for name in names:
        (tmp_path / name).write_text("")
    assert store.load().step == 20
    store.save(30, ARRAYS, {})
    assert store.load().step == 30
    assert store.steps() == [10, 20, 30]


def test_links_in_place_of_checkpoint_folders_are_replaced(tmp_path: Path) -> None:
    store = filled(tmp_path / "checkpoints", (10, 20))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").touch()
    (store.folder / "step-00000030").symlink_to(tmp_path / "elsewhere")
    (store.folder / "step-00000040").symlink_to(tmp_path / "nowhere")
    assert store.load().step == 20
    store.save(30, ARRAYS, {})
    assert store.steps() == [10, 20, 30]
    assert (tmp_path / "elsewhere" / "precious").exists()


# Facts.

FACTS: dict[str, Any] = {
    "updates": 7,
    "network": "model0",
    "batch_size": 32,
    "seed": 0,
    "data": "digits",
    "ranks": 2,
    "total_steps": 90,
    "schedule": "cosine",
    "spec": {"crop": 4},
    "preprocessing": {"classes": ["a", "b"]},
}


def with_facts(folder: Path, facts: dict[str, Any]) -> Checkpoint:
    store = CheckpointStore(folder)
    store.save(7, ARRAYS, facts)
    return store.load()


def test_typed_facts_come_back_and_unknown_ones_are_ignored(tmp_path: Path) -> None:
    facts = with_facts(tmp_path, {**FACTS, "new": 1}).run_facts
    assert facts == CheckpointFacts(**FACTS)
    assert facts.to_mapping() == {**FACTS, "shares": {}, "set_rate": 0.0}


@pytest.mark.parametrize("name", FACTS)
def test_a_missing_fact_is_named(tmp_path: Path, name: str) -> None:
    checkpoint = with_facts(tmp_path, {key: FACTS[key] for key in FACTS if key != name})
    assert f"step-00000007 does not store '{name}'" in error_of(lambda: checkpoint.run_facts)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("updates", float("nan")),
        ("updates", 1e30),
        ("updates", 10**30),
        ("updates", -1),
        ("updates", True),
        ("updates", "7"),
        ("ranks", None),
        ("set_rate", float("inf")),
        ("schedule", ["cosine"]),
        ("network", 3),
        ("spec", []),
        ("preprocessing", "x" * 100_000 + "\n"),
    ],
)
def test_a_fact_of_a_wrong_type_is_named(tmp_path: Path, name: str, value: Any) -> None:
    checkpoint = with_facts(tmp_path, {**FACTS, name: value})
    message = error_of(lambda: checkpoint.run_facts)
    assert f"step-00000007: {name} is " in message
    assert len(message) < 400


def test_updates_of_a_wrong_type_do_not_reach_the_replica(tmp_path: Path) -> None:
    for number, updates in enumerate((float("nan"), 1e30, "x")):
        store = CheckpointStore(tmp_path / str(number))
        store.save(1, replica_arrays(replica_of()), {"updates": updates})
        message = error_of(lambda store=store: restore_replica(replica_of(), store.load()))  # type: ignore[misc]
        assert "the number of updates is" in message


SETTINGS: dict[str, Any] = {name: FACTS[name] for name in ("batch_size", "seed", "data")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 64}, "--batch-size 32, but this run uses 64; resume with --batch-size 32"),
        ({"seed": 1}, "--seed 0, but this run uses 1"),
        ({"data": "a\nb"}, r"--data digits, but this run uses a\nb"),
    ],
)
def test_resuming_another_run_is_refused(change: dict[str, Any], message: str) -> None:
    facts = CheckpointFacts(**FACTS)
    facts.check_same_run("c", **SETTINGS)
    assert message in error_of(lambda: facts.check_same_run("c", **{**SETTINGS, **change}))


# Values that are not finite.


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("parameters/conv1.weight", "of conv1.weight are not finite"),
        ("momentum/conv1.weight", "of momentum of conv1.weight are not finite"),
        ("statistics/bn1.running_var", "of bn1.running_var are not finite"),
    ],
)
def test_values_that_are_not_finite_are_not_saved(
    tmp_path: Path, name: str, shown: str, value: float
) -> None:
    store = filled(tmp_path)
    arrays = {"parameters/a": np.ones(3, np.float32), name: np.ones((2, 2), np.float32)}
    arrays[name][1, 0] = value
    message = error_of(lambda: store.save(40, arrays, {}))
    assert "after step 40 1 of 4 values" in message
    assert shown in message
    assert "the newest checkpoint is that of step 30" in message
    assert store.steps() == [10, 20, 30]
    assert store.load().step == 30


# What the disk refuses.


@pytest.mark.parametrize("function", ["os.fsync", "pathlib.Path.replace", "pathlib.Path.mkdir"])
def test_a_full_disk_is_one_line_and_the_old_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    store = filled(tmp_path)
    called: list[object] = []

    def refuse(*arguments: object, **_: object) -> None:
        called.append(arguments)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(function, refuse)
        message = error_of(lambda: store.save(40, ARRAYS, {}))
    assert called
    assert "step-00000040: No space left on device" in message
    assert store.load().step == 30
    store.save(40, ARRAYS, {})
    assert store.load().step == 40
    assert not list(tmp_path.glob(".*"))


def test_a_disk_that_fills_while_arrays_are_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import SafetensorError

    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    store = filled(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("dptrain.training.persistence.checkpoints.save_file", full)
        assert "No space left on device" in error_of(lambda: store.save(40, ARRAYS, {}))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        f"step-000000{step}" for step in (10, 20, 30)
    ]


def test_a_file_in_the_way_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("mine")
    store = CheckpointStore(tmp_path / "checkpoints")
    assert "cannot write" in error_of(lambda: store.save(1, ARRAYS, {}))


def test_all_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, events = filled(tmp_path / "checkpoints", (1,)), []
    fsync, replace = os.fsync, Path.replace

    def watch_fsync(descriptor: int) -> None:
        events.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        fsync(descriptor)

    def watch_replace(path: Path, target: Path) -> Path:
        events.append(("rename", target.name))
        return replace(path, target)

    monkeypatch.setattr("os.fsync", watch_fsync)
    monkeypatch.setattr(Path, "replace", watch_replace)
    store.save(2, ARRAYS, {})
    rename = events.index(("rename", "step-00000002"))
    for name in ("state.safetensors", "manifest.json", ".step-00000002.partial"):
        assert ("sync", name) in events[:rename]
    assert ("sync", tmp_path.name) in events[:rename]
    assert ("sync", "checkpoints") in events[rename:]


# Replicas.

NETWORK = Network((2, 6, 6), [Conv2d(3), ReLU(), MaxPool2d(2), Flatten(), Dense(5)])


def normalized(layer: Layer) -> Network:
    """A network with a normalisation that is called norm."""
    layers = Conv2d(3), layer, ReLU(), Flatten(), Dense(5)
    names = (None, "norm", None, None, None)
    return Network.from_nodes((2, 6, 6), list(map(NodeSpec, layers, names)))


NORMALIZED, WITHOUT_STATISTICS = normalized(BatchNorm2d()), normalized(LayerNorm())
MOMENTUM, ADAM = SGD(momentum=0.9, nesterov=True), Adam()


def replica_of(
    optimizer: Optimizer = MOMENTUM,
    *,
    network: Network = NETWORK,
    seed: int = 0,
    **options: Any,
) -> Replica:
    return dptrain.api.make_replica(
        network, "reference", batch_size=4, seed=seed, optimizer=optimizer, **options
    )


def train(replica: Replica, steps: range) -> None:
    for step in steps:
        generator = np.random.default_rng(step)
        x, y = generator.standard_normal((4, 2, 6, 6)), generator.integers(0, 5, 4)
        replica.forward_backward(x, y, step=step)
        replica.update(0.05)


def saved(folder: Path, replica: Replica) -> Checkpoint:
    store = CheckpointStore(folder)
    store.save(replica.updates, replica_arrays(replica), {"updates": replica.updates})
    return store.load()


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("optimizer", [SGD(), SGD(momentum=0.9), MOMENTUM, ADAM, AdamW()], ids=str)
@pytest.mark.parametrize("network", [NETWORK, NORMALIZED], ids=["plain", "normalized"])
def test_a_resumed_run_ends_where_the_straight_one_does(
    tmp_path: Path, network: Network, optimizer: Optimizer, precision: str
) -> None:
    straight = replica_of(optimizer, network=network, precision=precision)
    train(straight, range(10))
    first = replica_of(optimizer, network=network, precision=precision)
    train(first, range(6))
    second = replica_of(optimizer, network=network, precision=precision, seed=99)
    restore_replica(second, saved(tmp_path, first))
    train(second, range(6, 10))
    assert second.updates == straight.updates == 10
    assert second.flat_parameters.tobytes() == straight.flat_parameters.tobytes()
    assert_same_bits(replica_arrays(second), replica_arrays(straight))


def test_arrays_are_copies_in_canonical_layout() -> None:
    replica = replica_of(ADAM)
    arrays = replica_arrays(replica)
    assert arrays["parameters/conv1.weight"].shape == (3, 2, 3, 3)
    assert {name.partition("/")[0] for name in arrays} == {
        "parameters",
        "first_moment",
        "second_moment",
    }
    before = {name: array.copy() for name, array in arrays.items()}
    train(replica, range(1))
    assert_same_bits(arrays, before)


def test_inference_takes_no_state_from_any_optimizer_and_precision(tmp_path: Path) -> None:
    trained = replica_of(ADAM, network=NORMALIZED)
    train(trained, range(3))
    replica = replica_of(SGD(), network=NORMALIZED, precision="fp32", training=False, seed=5)
    restore_replica(replica, saved(tmp_path, trained), parameters_only=True)
    assert replica.updates == 0
    for name in trained.parameters:
        expected = trained.parameters[name].astype(np.float32)
        np.testing.assert_array_equal(replica.parameters[name], expected)
    for name in trained.statistics:
        expected = trained.statistics[name].astype(np.float32)
        np.testing.assert_array_equal(replica.statistics[name], expected)


WIDER = Network((2, 6, 6), [Conv2d(4), ReLU(), MaxPool2d(2), Flatten(), Dense(5)])
DEEPER = Network((2, 6, 6), [Conv2d(3), ReLU(), MaxPool2d(2), Flatten(), Dense(5), Dense(5)])


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ({}, {"network": WIDER}, r"conv1\.weight has shape \(3, 2, 3, 3\) in .* \(4, 2, 3, 3\) in"),
        ({}, {"network": DEEPER}, r"it lacks parameter dense2\.weight; use the --network"),
        ({"network": DEEPER}, {}, r"it also has parameter dense2\.weight; use the --network"),
        ({}, {"precision": "fp32"}, r"conv1\.weight is float64 in .* float32 in.*--precision"),
        ({"optimizer": SGD()}, {}, r"it lacks momentum of conv1\.weight; use the optimizer"),
        ({}, {"optimizer": SGD()}, r"it also has momentum of conv1\.weight; use the optimizer"),
        ({"network": WITHOUT_STATISTICS}, {"network": NORMALIZED},
         r"it lacks the statistic norm\.running_mean; use the --network"),
        ({"network": NORMALIZED}, {"network": WITHOUT_STATISTICS},
         r"it also has the statistic norm\.running_mean; use the --network"),
        ({}, {"optimizer": ADAM}, r"it lacks first_moment of conv1\.weight; use the optimizer"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_and_changes_nothing(
    tmp_path: Path, source: dict[str, Any], target: dict[str, Any], message: str
) -> None:
    checkpoint = saved(tmp_path, replica_of(**source))
    replica = replica_of(**target, seed=3)
    before = replica_arrays(replica)
    with pytest.raises(UserError, match=message) as info:
        restore_replica(replica, checkpoint)
    assert "\n" not in str(info.value)
    assert_same_bits(replica_arrays(replica), before)


def test_facts_without_updates_do_not_fit(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, replica_arrays(replica_of()), {})
    assert "the number of updates is None" in error_of(
        lambda: restore_replica(replica_of(), store.load())
    )
