"""The specification of a run: the job, on which all ranks agree, and the hardware of each rank.

`resolve_job` turns `Settings`, in which a user leaves most values open, into a `JobSpec`, in which
every value is known. `RunSpec` adds the data, the preprocessing and the ranks. It is written to the
run directory and to every checkpoint, and `dptrain train --dry-run` prints it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dptrain.data.base import count_text
from dptrain.runs.settings import CHECKPOINT_SECONDS, DIRECTORY_SETTINGS
from dptrain.runs.spans import threads_of
from dptrain.setting_groups import Known, first
from dptrain.training.parallelism import OFF
from dptrain.training.settings import (
    RANK_SETTINGS,
    START_SETTINGS,
    WORKER_SETTINGS,
    JobSettings,
    Settings,
    settings,
)


@dataclass(frozen=True, kw_only=True)
class JobSpec(JobSettings[Known, Known]):
    """The settings of a job, all resolved, equal on every rank.

    The fields have the names and the meaning of the settings, with these additions and exceptions.

    Attributes:
        ranks: number of ranks.
        backend, precision: of rank 0; `RankSpec` has those of each rank.
        epoch_steps: updates per epoch.
        schedule_start: steps of the run before its length was changed; 0 if it was not. Schedules
            that depend on the length begin anew there, and `patience` counts from there.
        epochs: passes over the data; 0 if the length of the job was set in steps.
        steps: updates of the whole job, including those before a resume.
        clip_norm: 0 without a limit.
        step_every: 0 unless the schedule is ``step``.
        step_at: empty unless the schedule is ``step``.
        average_weights: 0 without an average.
        weight_decay: None if each layer has its own.
        validation: share of the training samples that is set aside; 0 if there are none, or if the
            data has a split of its own.
        until_accuracy: validation accuracy at which training ends; 0 makes all steps.
        patience: evaluations without an improvement after which training ends; 0 makes all steps.
        best_by: ``none`` without validation data.
        bucket_kib: 0 if the gradient is one bucket.
        transport: the transport in use; ``mpi`` for one rank on a CPU, ``host`` for one on a GPU.
    """

    ranks: int
    epoch_steps: int
    schedule_start: int


@dataclass(frozen=True)
class RankSpec:
    """The hardware of one rank.

    Attributes:
        rank: number of the rank.
        host: name of its node.
        processor: model of its CPU.
        device: model of its GPU, or ``cpu``.
        backend, precision: those of the rank.
        threads: its compute threads.
        cores: cores that it may use.
    """

    rank: int
    host: str
    processor: str
    device: str
    backend: str
    precision: str
    threads: int
    cores: int


@dataclass(frozen=True, repr=False)
class RunSpec:
    """Everything that decides what a run computes, and where it runs.

    Attributes:
        version: version of dptrain.
        job: the resolved settings.
        network: the network as its TOML file describes it.
        data: fingerprint of the data set, see `dptrain.data.fingerprint`.
        preprocessing: see `dptrain.data.preprocessing.preprocessing.Preprocessing.to_dict`.
        ranks: one entry for each rank.
        origins: origin of each setting that is not a default, such as a flag or a file.
        kernels: the kernels that were selected by measurements; empty if estimates decided.
    """

    version: str
    job: JobSpec
    network: Mapping[str, Any]
    data: Mapping[str, Any]
    preprocessing: Mapping[str, Any]
    ranks: tuple[RankSpec, ...]
    origins: Mapping[str, str]
    kernels: Mapping[str, Any] = field(default_factory=dict)

    def job_part(self) -> dict[str, Any]:
        """Return what all ranks agree on, as plain JSON values."""
        return {
            "version": self.version,
            "job": asdict(self.job),
            "network": dict(self.network),
            "data": dict(self.data),
            "preprocessing": dict(self.preprocessing),
            "kernels": dict(self.kernels),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the specification as plain JSON values."""
        return {
            **self.job_part(),
            "digest": self.digest,
            "ranks": [asdict(rank) for rank in self.ranks],
            "origins": dict(self.origins),
        }

    def with_schedule_start(self, step: int) -> RunSpec:
        """Return the specification with another `JobSpec.schedule_start`."""
        return replace(self, job=replace(self.job, schedule_start=step))

    @property
    def digest(self) -> str:
        """SHA-256 of the part that all ranks agree on."""
        return digest(self.job_part())

    def __repr__(self) -> str:
        data = self.data
        sizes = (data.get(f"{split}_samples", 0) for split in ("train", "test", "validation"))
        samples = f"{count_text(*sizes)} samples"
        order = {setting.name: number for number, setting in enumerate(settings())}
        job = sorted(asdict(self.job).items(), key=lambda item: order.get(item[0], len(order)))
        lines = [
            f"RunSpec of dptrain {self.version}, digest {self.digest[:16]}",
            *(f"  {name:<17} {value!s:<12} {self.origin(name)}".rstrip() for name, value in job),
            f"  data content      {samples}, {data['dtype']}, digest {data['content'][:16]}",
            *(
                f"  rank {rank.rank:<12} {rank.threads} threads on {rank.host}, {rank.processor}, "
                f"device {rank.device}"
                for rank in self.ranks
            ),
        ]
        return "\n".join(lines)

    def origin(self, name: str) -> str:
        """Return where the value of a setting comes from, in a few words."""
        if name in self.origins:
            return self.origins[name]
        default = next((s.default for s in settings() if s.name == name), None)
        return "resolved" if default is None or default == "auto" else "default"


def digest(value: Any) -> str:
    """Return the SHA-256 of plain JSON values, independent of the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def all_settings(spec: RunSpec, chosen: Settings) -> dict[str, Any]:
    """Return every setting of a run, resolved, as plain JSON values.

    Args:
        spec: the specification of the run.
        chosen: the settings that belong to no job, such as the threads of a rank.
    """
    others = {
        setting.name: getattr(chosen, setting.name)
        for setting in settings()
        if setting.name not in (*DIRECTORY_SETTINGS, *START_SETTINGS)
    }
    threads = threads_of([asdict(rank) for rank in spec.ranks])
    return {**others, **asdict(spec.job), "threads": threads}


def job_settings(chosen: Settings) -> dict[str, Any]:
    """Return the settings on which all ranks must agree, as plain JSON values."""
    # With --resume, the setting run_dir is the directory that continues.
    may_differ = (*(name for name in DIRECTORY_SETTINGS if name != "run_dir"), *RANK_SETTINGS)
    if chosen.balance != OFF:
        may_differ += WORKER_SETTINGS
    values = {setting.name: getattr(chosen, setting.name) for setting in settings()}
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in values.items()
        if name not in may_differ
    }


def resolve_job(
    chosen: Settings,
    *,
    ranks: int,
    epoch_steps: int,
    backend: str,
    precision: str,
    prefetch: int,
    transport: str,
    bucket_kib: int,
    digest_every: int,
    replay_every: int,
    best_by: str,
) -> JobSpec:
    """Return the job specification; nothing is left open.

    Args:
        chosen: settings with the recipe of the network filled in.
        ranks: number of ranks.
        epoch_steps: updates per epoch.
        backend: of rank 0.
        precision, prefetch, transport, bucket_kib, digest_every, replay_every, best_by: what the
            backend, the data and the machine decide if `chosen` leaves it open.
    """
    decided: dict[str, Any] = {
        "steps": chosen.total_steps(epoch_steps),
        "best_by": best_by,
        "checkpoint_every": first(chosen.checkpoint_every, epoch_steps),
        "checkpoint_seconds": first(
            chosen.checkpoint_seconds,
            CHECKPOINT_SECONDS if chosen.checkpoint_every is None else 0.0,
        ),
        "validation": first(chosen.validation, 0.0),
        "backend": backend,
        "precision": precision,
        "prefetch": prefetch,
        "transport": transport,
        "bucket_kib": bucket_kib,
        "digest_every": digest_every,
        "replay_every": replay_every,
        "ranks": ranks,
        "epoch_steps": epoch_steps,
        "schedule_start": 0,
    }
    names = [item.name for item in fields(JobSpec) if item.name not in decided]
    return JobSpec(**{name: getattr(chosen, name) for name in names}, **decided)
