"""Checkpoints: a folder with arrays and a manifest with checksums, written atomically.

    checkpoints/
      step-00000450/
        state.safetensors    every array, in canonical layout
        manifest.json        format, step, facts; dtype and shape of every array; size and SHA-256
                             of state.safetensors; SHA-256 of the manifest itself

`CheckpointStore.save` fills a folder under a hidden name, waits until it is on the disk, and
renames it. After a crash at any moment `CheckpointStore.load` finds the old newest checkpoint or
the new one. The next `save` removes hidden folders that a crash left. No file is pickled.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dptrain.backends.named_arrays import NamedArrays
from dptrain.backends.replica import Replica
from dptrain.errors import UserError, shown
from dptrain.files import (
    MAX_TEXT_BYTES,
    dump_json,
    parse_json,
    read_regular,
    require_regular,
    sync,
    writing,
)
from dptrain.interchange.safetensors_files import system_error
from dptrain.training.averaging import averaged_arrays

FORMAT = 1
"""Version of the layout of a checkpoint folder."""

ARRAYS, MANIFEST = "state.safetensors", "manifest.json"

STATISTICS = "statistics"
"""Kind of the arrays of running statistics, such as ``statistics/bn1.running_mean``."""

Arrays = Mapping[str, NDArray[Any]]


class DamageError(Exception):
    """Why a checkpoint cannot be used; the message begins with the name of the file."""


@dataclass(frozen=True)
class CheckpointFacts:
    """What a training run stores in a checkpoint in addition to its arrays.

    Attributes:
        updates: number of parameter updates, which Adam's bias correction uses.
        network: name of the network.
        batch_size: samples in a global minibatch.
        seed: seed of the run.
        data: data specification.
        ranks: number of ranks that wrote the checkpoint; a resumed run may have another number.
        total_steps: number of steps of the whole run.
        schedule: kind of learning rate schedule.
        spec: the agreed job specification.
        preprocessing: the preprocessing of the inputs.
        shares: of the ranks, see `dptrain.training.balance.Shares`; empty if they are equal.
        set_rate: learning rate that a callback has set; 0 if the schedule decides.
    """

    updates: int
    network: str
    batch_size: int
    seed: int
    data: str
    ranks: int
    total_steps: int
    schedule: str
    spec: Mapping[str, Any]
    preprocessing: Mapping[str, Any]
    shares: Mapping[str, Any] = field(default_factory=dict)
    set_rate: float = 0.0

    def to_mapping(self) -> dict[str, Any]:
        """Return the facts for `CheckpointStore.save`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_mapping(cls, facts: Mapping[str, Any], source: Path | str) -> CheckpointFacts:
        """Check the types of stored facts; unknown keys are ignored.

        Args:
            facts: as stored in the manifest.
            source: the checkpoint, for the error message.

        Raises:
            UserError: a fact is missing or has the wrong type; the message names it.
        """
        # Earlier versions stored no shares, and no rate of a callback.
        facts, hints = {"shares": {}, "set_rate": 0.0, **facts}, get_type_hints(cls)
        for name, expected in hints.items():
            if name not in facts:
                raise UserError(
                    f"checkpoint {source} does not store '{name}'; "
                    "it was written by another version of dptrain"
                )
            value = facts[name]
            description, is_right = _FACT_TYPES.get(expected, ("a table", _is_mapping))
            if not is_right(value):
                raise UserError(
                    f"checkpoint {source}: {name} is {shown(repr(value))}; expected {description}"
                )
        return cls(**{name: facts[name] for name in hints})

    def check_same_run(
        self,
        source: Path | str,
        *,
        batch_size: int,
        seed: int,
        data: str,
    ) -> None:
        """Refuse to resume with settings that would change the meaning of the step number.

        The minibatch of a step follows from the batch size, the seed and the data.

        Args:
            source: the checkpoint, for the error message.
            batch_size, seed, data: of the resumed run.

        Raises:
            UserError: one of them differs; the message names the setting and both values.
        """
        for name, now in (("batch_size", batch_size), ("seed", seed), ("data", data)):
            then = getattr(self, name)
            if then != now:
                raise other_setting(source, name, then, now)


def other_setting(source: Path | str, name: str, then: Any, now: Any) -> UserError:
    """Return the refusal to resume with another value of a setting.

    Args:
        source: the checkpoint.
        name: of the setting.
        then, now: its values in the checkpoint and in the resumed run.
    """
    flag = "--" + name.replace("_", "-")
    is_unset = then in (None, "") or (type(then) in (int, float) and not then)
    again = f"without {flag}" if is_unset else f"with {flag} {shown(then)}"
    return UserError(
        f"checkpoint {source} was trained with {flag} {_value(then)}, but this run uses "
        f"{_value(now)}; resume {again}, or start a new run"
    )


def _value(value: Any) -> str:
    return "none" if value in (None, "") else shown(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_rate(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


_FACT_TYPES: Mapping[Any, tuple[str, Callable[[Any], bool]]] = {
    int: ("a whole number of at least 0", _is_count),
    float: ("a finite number of at least 0", _is_rate),
    str: ("text", _is_text),
}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory; its checksums are verified.

    Attributes:
        step: number of training steps made.
        arrays: arrays by name, such as ``parameters/conv1.weight``; see `replica_arrays`.
        facts: the facts that `CheckpointStore.save` received.
        path: its folder.
        notes: one line for each newer checkpoint that was skipped because it is damaged.
    """

    step: int
    arrays: dict[str, NDArray[Any]]
    facts: dict[str, Any]
    path: Path
    notes: tuple[str, ...] = ()

    @property
    def run_facts(self) -> CheckpointFacts:
        """The facts of a training run, with their types checked.

        Raises:
            UserError: see `CheckpointFacts.from_mapping`.
        """
        return CheckpointFacts.from_mapping(self.facts, self.path)

    @property
    def warning(self) -> str | None:
        """One line that names the damaged checkpoints and the step that is used instead."""
        if not self.notes:
            return None
        return f"{'; '.join(self.notes)}; using the checkpoint of step {self.step}"


class CheckpointStore:
    """The checkpoints of one run. Only one process may save at a time.

    Args:
        folder: folder of the checkpoints; the first `save` creates it.
        keep: number of checkpoints that `save` keeps, including the new one.
        before_save: called before anything is written; it may refuse with an exception.
    """

    def __init__(
        self, folder: Path, keep: int = 3, before_save: Callable[[], None] | None = None
    ) -> None:
        if keep < 1:
            raise UserError(f"the number of checkpoints to keep is {keep}; expected at least 1")
        self.folder, self.keep, self._before_save = folder, keep, before_save

    def save(self, step: int, arrays: Arrays, facts: Mapping[str, Any]) -> Path:
        """Write a checkpoint; after the return it survives a crash and a power failure.

        Older checkpoints are deleted only afterwards. Checkpoints of later steps are deleted too:
        saving at `step` means that the run went back, because of damage or on request.

        Args:
            step: number of training steps made.
            arrays: arrays of any name, shape and dtype (float, int or bool).
            facts: values that `dptrain.files.dump_json` accepts.

        Returns:
            The folder of the checkpoint.

        Raises:
            UserError: an array holds a value that is not finite, or the checkpoint cannot be
                written; earlier checkpoints are unchanged.
        """
        self._check_finite(step, arrays)
        return self._add(step, lambda partial: _fill(partial, step, arrays, facts))

    def link(self, source: Path, step: int) -> Path:
        """Add the checkpoint of `step` of another store; its files are linked, not copied.

        Like `save`, it deletes older and later checkpoints, and survives a crash at any moment.

        Args:
            source: folder of the checkpoint, on the same disk.
            step: its step.

        Raises:
            UserError: the links cannot be made.
        """

        def fill(partial: Path) -> None:
            for name in (ARRAYS, MANIFEST):
                _link(source / name, partial / name)
            sync(partial)

        return self._add(step, fill)

    def _add(self, step: int, fill: Callable[[Path], None]) -> Path:
        """Fill a hidden folder, and rename it to that of a checkpoint, whose path is returned."""
        path = self.folder / f"step-{step:08d}"
        with writing(path, check=self._before_save):
            self.folder.mkdir(exist_ok=True)
            sync(self.folder.parent)
            self._clean()
            partial = path.with_name(f".{path.name}.partial")
            try:
                partial.mkdir()
                fill(partial)
            except OSError:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            self._put(partial, path)
            self._prune(step)
        return path

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, complete or damaged, in rising order.

        Raises:
            UserError: the folder cannot be read.
        """
        return sorted(self._look())

    def load(self, step: int | None = None) -> Checkpoint:
        """Read the checkpoint of `step`, or the newest undamaged one.

        Raises:
            UserError: there is none, or that of `step` is damaged; the message names the file
                and the damage.
        """
        found = self._look()
        if not found:
            raise UserError(
                f"there is no checkpoint in {self.folder}; train a new run, or begin one that "
                "ended before its first checkpoint again with --resume"
            )
        if step is not None and step not in found:
            steps = ", ".join(map(str, sorted(found)))
            raise UserError(
                f"there is no checkpoint of step {step} in {self.folder}; expected one of {steps}"
            )
        notes: list[str] = []
        for number in sorted(found, reverse=True) if step is None else (step,):
            try:
                arrays, facts = _read(found[number], number)
                return Checkpoint(number, arrays, facts, found[number], tuple(notes))
            except DamageError as damage:
                notes.append(f"checkpoint {found[number]} is damaged: {damage}")
        others = "start a new run" if step is None else "choose another step"
        raise UserError(f"{notes[0]}; {others}")

    def _check_finite(self, step: int, arrays: Arrays) -> None:
        """Refuse to save an array with NaN or infinity, which no run can continue from."""
        for name, array in arrays.items():
            if not np.issubdtype(array.dtype, np.floating):
                continue
            finite = np.isfinite(array)
            if finite.all():
                continue
            kind, _, parameter = name.rpartition("/")
            is_state = kind not in ("", "parameters", STATISTICS)
            what = f"{kind} of {parameter}" if is_state else parameter
            kept = self.steps()
            good = f"; the newest checkpoint is that of step {kept[-1]}" if kept else ""
            raise UserError(
                f"after step {step} {np.count_nonzero(~finite):,} of {array.size:,} values of "
                f"{what} are not finite, so no checkpoint was saved{good}; "
                "try a lower learning rate"
            )

    def _look(self) -> dict[int, Path]:
        try:
            return self._found()
        except OSError as error:
            raise UserError(f"cannot read {self.folder}: {error.strerror}") from error

    def _found(self) -> dict[int, Path]:
        """Return the folder of every checkpoint by step.

        A folder that `_put` set aside counts as long as no other has taken its name.
        """
        if not self.folder.exists() and not self.folder.is_symlink():
            return {}
        found: dict[int, Path] = {}
        for path in self.folder.iterdir():
            match = re.fullmatch(r"(\.?)step-(\d+)(\.aside)?", path.name)
            if match and bool(match[1]) == bool(match[3]):
                step = int(match[2])
                found[step] = found.get(step, path) if match[1] else path
        return found

    def _put(self, partial: Path, path: Path) -> None:
        """Rename a filled folder to its final name, after setting aside one of the same step."""
        aside = path.with_name(f".{path.name}.aside")
        if path.exists():
            path.replace(aside)
        partial.replace(path)
        sync(self.folder)
        if aside.exists():
            _discard(aside)

    def _prune(self, step: int) -> None:
        """Delete all but the `keep` newest checkpoints up to `step`, the oldest first.

        In this order `load` never finds an older checkpoint while later ones are deleted.
        """
        found = self._found()
        kept = sorted(number for number in found if number <= step)[-self.keep :]
        for number in sorted(found.keys() - set(kept)):
            _discard(found[number])

    def _clean(self) -> None:
        """Finish a `save` that a crash interrupted."""
        for path in self.folder.glob(".step-*.partial"):
            _remove(path)
        for path in self.folder.glob(".step-*.aside"):
            final = path.with_name(path.name[1:].removesuffix(".aside"))
            if final.exists():
                _discard(path)
            else:
                path.replace(final)


def _link(source: Path, target: Path) -> None:
    """Make a hard link to a file that never changes, or a copy if the disk has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
        sync(target)


def _discard(path: Path) -> None:
    """Rename and delete a folder, so that a partly deleted one is never read as a checkpoint."""
    name = path.name.removeprefix(".").removesuffix(".aside")
    doomed = path.with_name(f".{name}.partial")
    path.replace(doomed)
    _remove(doomed)


def _remove(path: Path) -> None:
    """Delete a folder, or a file or link that is in the place of one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _fill(folder: Path, step: int, arrays: Arrays, facts: Mapping[str, Any]) -> None:
    """Write both files of a checkpoint and wait until they are on the disk."""
    # safetensors writes memory in storage order. `ascontiguousarray` would change the shape ()
    # to (1,).
    ordered = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    state, manifest = folder / ARRAYS, folder / MANIFEST
    try:
        save_file(ordered, state)
    except SafetensorError as error:
        raise system_error(error) from error
    content = {
        "format": FORMAT,
        "step": step,
        "facts": dict(facts),
        "arrays": _description(ordered),
        "files": {ARRAYS: {"bytes": state.stat().st_size, "sha256": _file_sha256(state)}},
    }
    content["sha256"] = _content_sha256(content)
    manifest.write_text(dump_json(content, indent=2) + "\n", encoding="utf-8")
    # safetensors creates files that only their owner can read.
    shutil.copymode(manifest, state)
    for path in (state, manifest, folder):
        sync(path)


def _read(folder: Path, step: int) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Return the arrays and facts of the checkpoint in `folder`, or raise `DamageError`."""
    content = _read_manifest(folder / MANIFEST)
    if content["step"] != step:
        raise DamageError(f"{MANIFEST} belongs to step {shown(content['step'])}")
    state, expected = folder / ARRAYS, content["files"][ARRAYS]
    try:
        size = require_regular(state)
        if size != expected["bytes"]:
            raise DamageError(f"{ARRAYS} has {size} bytes; expected {shown(expected['bytes'])}")
        if _file_sha256(state) != expected["sha256"]:
            raise DamageError(f"{ARRAYS} differs from its checksum")
        arrays = load_file(state)
    except (OSError, SafetensorError) as error:
        raise DamageError(f"{ARRAYS} cannot be read ({_reason(error)})") from error
    if _description(arrays) != content["arrays"]:
        raise DamageError(f"{MANIFEST} describes other arrays than {ARRAYS} holds")
    return {name: arrays[name] for name in content["arrays"]}, content["facts"]


def _read_manifest(path: Path) -> dict[str, Any]:
    """Return a manifest whose checksum, format and structure are right."""
    try:
        content = parse_json(read_regular(path, MAX_TEXT_BYTES))
        if not isinstance(content, dict) or content.pop("sha256", None) != _content_sha256(content):
            raise DamageError(f"{path.name} differs from its checksum")
    except OSError as error:
        raise DamageError(f"{path.name} cannot be read ({_reason(error)})") from error
    except (ValueError, RecursionError) as error:
        raise DamageError(f"{path.name} is not JSON") from error
    if content.get("format") != FORMAT:
        found = shown(content.get("format"))
        raise DamageError(f"{path.name} has format {found}; this version reads {FORMAT}")
    files = content.get("files")
    is_complete = (
        "step" in content
        and all(isinstance(content.get(key), dict) for key in ("facts", "arrays"))
        and isinstance(files, dict)
        and isinstance(files.get(ARRAYS), dict)
        and files[ARRAYS].keys() >= {"bytes", "sha256"}
    )
    if not is_complete:
        raise DamageError(f"{path.name} lacks a description of {ARRAYS}")
    return content


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or shown(error)


def _description(arrays: Arrays) -> dict[str, Any]:
    return {
        name: {"dtype": array.dtype.name, "shape": list(array.shape)}
        for name, array in arrays.items()
    }


def _content_sha256(content: Mapping[str, Any]) -> str:
    """Return the checksum of a manifest's values, independent of white space."""
    return hashlib.sha256(dump_json(content).encode()).hexdigest()


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def replica_arrays(replica: Replica) -> dict[str, NDArray[Any]]:
    """Return a copy of the parameters, running statistics and optimizer state of a replica.

    Returns:
        Arrays such as ``parameters/conv1.weight``, ``statistics/bn1.running_mean`` and, for each
        array of the optimizer's state, ``momentum/conv1.weight``, in canonical shape, (K, C, R, S),
        (out, in) or (out,), and in the dtype of the replica. They do not depend on the backend.
    """
    return {
        f"{kind}/{name}": array
        for kind, arrays in named_arrays(replica).items()
        for name, array in arrays.copies().items()
    }


def fits_replica(replica: Replica, checkpoint: Checkpoint) -> bool:
    """Return whether `restore_replica` accepts the arrays of a checkpoint."""
    return _mismatch(replica, checkpoint.arrays, parameters_only=False) is None


def restore_replica(
    replica: Replica, checkpoint: Checkpoint, *, parameters_only: bool = False
) -> None:
    """Set the replica to the state in a checkpoint, bit for bit.

    ``replica.updates`` is set from the fact ``updates``.

    Args:
        replica: a replica of the same network; backend and batch size may differ.
        checkpoint: the state to restore.
        parameters_only: leave the optimizer state unchanged and convert between precisions, for
            evaluation and prediction. The parameters are their moving average, if there is one.

    Raises:
        UserError: the checkpoint has another network, precision or optimizer; the message names
            the first array that differs, and the replica is unchanged.
    """
    arrays = checkpoint.arrays
    if parameters_only:
        kinds = ("parameters/", f"{STATISTICS}/")
        if checkpoint.facts.get("updates"):
            arrays = averaged_arrays(arrays)
        arrays = {k: v for k, v in arrays.items() if k.startswith(kinds)}
    mismatch = _mismatch(replica, arrays, parameters_only)
    if mismatch is not None:
        raise UserError(f"checkpoint {checkpoint.path} does not fit this run: {mismatch}")
    updates: Any = replica.updates if parameters_only else checkpoint.facts.get("updates")
    if not _is_count(updates):
        raise UserError(
            f"checkpoint {checkpoint.path}: the number of updates is {shown(repr(updates))}; "
            "expected a whole number of at least 0"
        )
    named = named_arrays(replica)
    for name, array in arrays.items():
        kind, _, parameter = name.partition("/")
        named[kind][parameter] = array
    replica.updates = updates


def named_arrays(replica: Replica) -> dict[str, NamedArrays]:
    """Return the parameters, running statistics and optimizer state of a replica, by kind."""
    return {"parameters": replica.parameters, STATISTICS: replica.statistics, **replica.state}


def _shapes(replica: Replica, parameters_only: bool) -> dict[tuple[str, str], tuple[int, ...]]:
    """Return the shapes of the arrays of a checkpoint by kind and name."""
    network = replica.plan.network
    state = {} if parameters_only else replica.state
    named = {"parameters": replica.parameters, **state}
    shapes = {parameter.name: parameter.shape for parameter in network.parameters}
    found = {(kind, name): shapes[name] for kind, arrays in named.items() for name in arrays}
    return {**found, **{(STATISTICS, s.name): s.shape for s in network.statistics}}


def _mismatch(replica: Replica, arrays: Arrays, parameters_only: bool) -> str | None:
    """Describe the first difference between `arrays` and the replica; None if they fit."""
    expected = _shapes(replica, parameters_only)
    for (kind, name), shape in expected.items():
        array = arrays.get(f"{kind}/{name}")
        if array is None:
            return _describe_difference("it lacks", kind, name)
        if array.shape != shape:
            return f"{name} has shape {array.shape} in the checkpoint and {shape} in this run"
        if array.dtype != replica.plan.dtype and not parameters_only:
            return (
                f"{name} is {array.dtype} in the checkpoint and {replica.plan.dtype} in this run; "
                "use the --precision of the original run"
            )
    for path in arrays:
        kind, _, name = path.partition("/")
        if (kind, name) not in expected:
            return _describe_difference("it also has", kind, name)
    return None


def _describe_difference(verb: str, kind: str, name: str) -> str:
    if kind in ("parameters", STATISTICS):
        what = "parameter" if kind == "parameters" else "the statistic"
        return f"{verb} {what} {shown(name)}; use the --network of the original run"
    array = f"{shown(kind)} of {shown(name)}"
    return f"{verb} {array}; use the optimizer settings of the original run"
