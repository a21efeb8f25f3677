"""Checkpoints: arrays and a manifest with checksums in a folder that is whole or not there.

    checkpoints/
      step-00000450/
        state.safetensors    every array, in canonical layout
        manifest.json        format, step, facts; dtype and shape of every array; size and sha256 of
                             the arrays' file and of the manifest itself

A folder is filled under a hidden name, synced, and renamed. Whatever moment a crash picks, `load`
finds either the old newest checkpoint or the new one. Hidden names left by a crash are removed by
the next `save`. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dptrain.backends.replica import Replica
from dptrain.errors import UserError
from dptrain.files import dump_json, parse_json, sync, writing

FORMAT = 1
"""Version of what a checkpoint's folder holds."""

ARRAYS, MANIFEST = "state.safetensors", "manifest.json"

Arrays = Mapping[str, NDArray[Any]]


class DamageError(Exception):
    """Why a checkpoint cannot be trusted; begins with the name of the file."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory, its checksums verified.

    Attributes:
        step: number of updates the run had made.
        arrays: by name, ``parameters/conv1.weight``; see `replica_arrays`.
        facts: what else the run needs to go on, as given to `CheckpointStore.save`.
        path: its folder.
        notes: one line for each newer checkpoint that was skipped because it is damaged.
    """

    step: int
    arrays: dict[str, NDArray[Any]]
    facts: dict[str, Any]
    path: Path
    notes: tuple[str, ...] = ()


class CheckpointStore:
    """The checkpoints of one run. One process may save at a time.

    Args:
        folder: where they lie; made by the first `save`.
        keep: how many `save` leaves, itself included.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        if keep < 1:
            raise UserError(f"{keep} checkpoints to keep; expected at least 1")
        self.folder, self.keep = folder, keep

    def save(self, step: int, arrays: Arrays, facts: Mapping[str, Any]) -> Path:
        """Write a checkpoint; when this returns, it survives a crash and a power failure.

        Afterwards, and only then, the oldest are deleted. So are those of later steps: saving at
        `step` means that the run went back to before them, past damage or because it was told to.

        Args:
            step: number of updates made.
            arrays: any names, dtypes float, int or bool, any shapes.
            facts: what `dptrain.files.dump_json` takes.

        Returns:
            The checkpoint's folder.

        Raises:
            UserError: it cannot be written; those that were there are as they were.
        """
        path = self._path(step)
        with writing(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            sync(self.folder.parent)
            self._clean()
            partial = path.with_name(f".{path.name}.partial")
            try:
                partial.mkdir()
                _fill(partial, step, arrays, facts)
            except OSError:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            self._put(partial, path)
            self._prune(step)
        return path

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, whole or damaged, in rising order.

        Raises:
            UserError: the folder cannot be read.
        """
        return sorted(self._look())

    def load(self, step: int | None = None) -> Checkpoint:
        """Read the checkpoint of `step`, or the newest whole one.

        Raises:
            UserError: there is none, or that of `step` is damaged; the message says which file
                and how.
        """
        found = self._look()
        if not found:
            raise UserError(f"no checkpoint in {self.folder}; train without --resume to make some")
        if step is not None and step not in found:
            steps = ", ".join(map(str, sorted(found)))
            raise UserError(f"no checkpoint of step {step} in {self.folder}; there are {steps}")
        notes: list[str] = []
        for number in sorted(found, reverse=True) if step is None else (step,):
            try:
                arrays, facts = _read(found[number], number)
                return Checkpoint(number, arrays, facts, found[number], tuple(notes))
            except DamageError as damage:
                notes.append(f"checkpoint {found[number]} is damaged: {damage}")
        others = "train again without --resume" if step is None else "choose another step"
        raise UserError(f"{notes[0]}; {others}")

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _look(self) -> dict[int, Path]:
        try:
            return self._found()
        except OSError as error:
            raise UserError(f"cannot read {self.folder}: {error.strerror}") from error

    def _found(self) -> dict[int, Path]:
        """Folder of every checkpoint; one set aside counts while nothing has taken its name."""
        if not self.folder.is_dir():
            return {}
        found: dict[int, Path] = {}
        for path in self.folder.iterdir():
            match = re.fullmatch(r"(\.?)step-(\d+)(\.aside)?", path.name)
            if match and bool(match[1]) == bool(match[3]):
                step = int(match[2])
                found[step] = found.get(step, path) if match[1] else path
        return found

    def _put(self, partial: Path, path: Path) -> None:
        """Give a filled folder its name; an earlier one of the same step is first set aside."""
        aside = path.with_name(f".{path.name}.aside")
        if path.exists():
            path.replace(aside)
        partial.replace(path)
        sync(self.folder)
        if aside.exists():
            _discard(aside)

    def _prune(self, step: int) -> None:
        """Delete all but the `keep` newest up to `step`, the oldest first.

        In that order, `load` never finds one in between while those of later steps go.
        """
        found = self._found()
        kept = sorted(number for number in found if number <= step)[-self.keep :]
        for number in sorted(found.keys() - set(kept)):
            _discard(found[number])

    def _clean(self) -> None:
        """Finish what a crash interrupted."""
        for path in self.folder.glob(".step-*.partial"):
            shutil.rmtree(path)
        for path in self.folder.glob(".step-*.aside"):
            final = path.with_name(path.name[1:].removesuffix(".aside"))
            if final.exists():
                _discard(path)
            else:
                path.replace(final)


def _discard(path: Path) -> None:
    """Delete a folder; it loses its name first, so that no half of it is ever taken for whole."""
    name = path.name.removeprefix(".").removesuffix(".aside")
    doomed = path.with_name(f".{name}.partial")
    path.replace(doomed)
    shutil.rmtree(doomed)


def _fill(folder: Path, step: int, arrays: Arrays, facts: Mapping[str, Any]) -> None:
    """Write both files of a checkpoint and wait until they are on the disk."""
    # safetensors writes memory as it lies; asarray keeps the shape () where ascontiguousarray
    # would make it (1,).
    ordered = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    state, manifest = folder / ARRAYS, folder / MANIFEST
    try:
        save_file(ordered, state)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    content = {
        "format": FORMAT,
        "step": step,
        "facts": dict(facts),
        "arrays": _description(ordered),
        "files": {ARRAYS: {"bytes": state.stat().st_size, "sha256": _file_sha256(state)}},
    }
    content["sha256"] = _content_sha256(content)
    manifest.write_text(dump_json(content, indent=2) + "\n", encoding="utf-8")
    # safetensors makes files that only their owner can read.
    shutil.copymode(manifest, state)
    for path in (state, manifest, folder):
        sync(path)


def _read(folder: Path, step: int) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Arrays and facts of the checkpoint in `folder`, or `DamageError`."""
    content = _read_manifest(folder / MANIFEST)
    if content["format"] != FORMAT:
        raise DamageError(f"{MANIFEST} has format {content['format']}; this version reads {FORMAT}")
    if content["step"] != step:
        raise DamageError(f"{MANIFEST} belongs to step {content['step']}")
    state, expected = folder / ARRAYS, content["files"][ARRAYS]
    try:
        size = state.stat().st_size
        if size != expected["bytes"]:
            raise DamageError(f"{ARRAYS} has {size} bytes; expected {expected['bytes']}")
        if _file_sha256(state) != expected["sha256"]:
            raise DamageError(f"{ARRAYS} differs from its checksum")
        arrays = load_file(state)
    except (OSError, SafetensorError) as error:
        raise DamageError(f"{ARRAYS} cannot be read ({_reason(error)})") from error
    assert _description(arrays) == content["arrays"], "the checksums match, the contents do not"
    return {name: arrays[name] for name in content["arrays"]}, content["facts"]


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_bytes())
    except OSError as error:
        raise DamageError(f"{path.name} cannot be read ({_reason(error)})") from error
    except ValueError as error:
        raise DamageError(f"{path.name} is no JSON") from error
    if not isinstance(content, dict) or content.pop("sha256", None) != _content_sha256(content):
        raise DamageError(f"{path.name} differs from its checksum")
    return content


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _description(arrays: Arrays) -> dict[str, Any]:
    return {
        name: {"dtype": array.dtype.name, "shape": list(array.shape)}
        for name, array in arrays.items()
    }


def _content_sha256(content: Mapping[str, Any]) -> str:
    """Checksum of what a manifest says, however it is spaced."""
    return hashlib.sha256(dump_json(content).encode()).hexdigest()


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def replica_arrays(replica: Replica) -> dict[str, NDArray[Any]]:
    """Copy what training changes in a replica, whatever the backend keeps inside.

    Returns:
        ``parameters/conv1.weight`` and, for each state of the optimizer, ``momentum/conv1.weight``,
        in canonical shape, (K, C, R, S), (out, in) or (out,), and the replica's dtype.
    """
    return {
        f"{kind}/{name}": arrays[name]
        for kind, arrays in _named(replica).items()
        for name in arrays
    }


def restore_replica(
    replica: Replica, checkpoint: Checkpoint, *, parameters_only: bool = False
) -> None:
    """Put the replica where it was when `replica_arrays` was called, bit for bit.

    ``replica.updates`` is set from the fact of that name.

    Args:
        replica: of the same network; backend and batch size may differ.
        checkpoint: what to restore.
        parameters_only: leave the optimizer alone and convert between precisions; for evaluation
            and prediction.

    Raises:
        UserError: the checkpoint is of another network, precision or optimizer; the message names
            the first array that differs, and the replica is as it was.
    """
    arrays = checkpoint.arrays
    if parameters_only:
        arrays = {k: v for k, v in arrays.items() if k.startswith("parameters/")}
    mismatch = _mismatch(replica, arrays, parameters_only)
    if mismatch is None and not parameters_only and "updates" not in checkpoint.facts:
        mismatch = "its facts lack the number of updates"
    if mismatch is not None:
        raise UserError(f"checkpoint {checkpoint.path} does not fit this run: {mismatch}")
    named = _named(replica)
    for name, array in arrays.items():
        kind, _, parameter = name.partition("/")
        named[kind][parameter] = array
    if not parameters_only:
        replica.updates = int(checkpoint.facts["updates"])


def _named(replica: Replica) -> dict[str, Any]:
    return {"parameters": replica.parameters, **replica.state}


def _mismatch(replica: Replica, arrays: Arrays, parameters_only: bool) -> str | None:
    """Say how `arrays` differ from what the replica holds; None where they fit."""
    kinds = ["parameters"] if parameters_only else ["parameters", *replica.state]
    shapes = {parameter.name: parameter.shape for parameter in replica.plan.network.parameters}
    for name in (f"{kind}/{parameter}" for kind in kinds for parameter in shapes):
        kind, _, parameter = name.partition("/")
        if name not in arrays:
            return _unknown("it lacks", kind, parameter)
        if arrays[name].shape != shapes[parameter]:
            return f"{parameter} has shape {arrays[name].shape} there, {shapes[parameter]} here"
        if arrays[name].dtype != replica.plan.dtype and not parameters_only:
            return (
                f"{parameter} is {arrays[name].dtype} there, {replica.plan.dtype} here; "
                "use the --precision it was trained with"
            )
    expected = {f"{kind}/{parameter}" for kind in kinds for parameter in shapes}
    for name in arrays:
        if name not in expected:
            kind, _, parameter = name.partition("/")
            return _unknown("it also has", kind, parameter)
    return None


def _unknown(what: str, kind: str, parameter: str) -> str:
    if kind == "parameters":
        return f"{what} parameter {parameter}; use the --network it was trained with"
    return f"{what} {kind} of {parameter}; use the optimizer settings it was trained with"
