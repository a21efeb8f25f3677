"""Bits of parameters, momentum and running statistics."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from dptrain.backends.digests import STATISTICS
from dptrain.comm.world import CorruptedError, DivergedError, World
from dptrain.training.trainer import Trainer
from tests.flips.jobs import ARRAYS, KINDS, Flip, apply, choose, data, flat_of, make_trainer, start

# Separate replicas: several trials in one job.


def try_replicas(world: World, seed: int) -> tuple[str, str]:
    """Make a trial; all ranks call this.

    Returns:
        What happened: ``found``, ``diverged``, ``vanished``, or ``wrong``; and details.
    """
    rng = random.Random(seed)
    every, size = rng.randint(2, 8), world.size
    at = rng.randint(1, 2 * every)
    hit = sorted(rng.sample(range(size), rng.randint(1, min(3, size - 1))))
    flips: list[Flip] = []
    truth: dict[int, set[int]] = {}  # By step: the ranks to name, from the bytes of all ranks.

    def after_step(trainer: Trainer) -> None:
        if trainer.step == at:
            for rank in hit:
                flips.extend(choose(rng, trainer, rank, ARRAYS))
            apply(trainer, flips)
        if trainer.step >= at and trainer.step % every == 0:
            truth[trainer.step] = ranks_to_name(world, trainer)

    trainer = make_trainer(
        world, seed, after_step, transport="mpi", digest_every=every, steps=4 * every
    )
    due = -(-at // every) * every
    try:
        trainer.fit()
    except CorruptedError as error:
        text = str(error)
        named = {rank for rank in range(size) if f"rank {rank} on " in text}
        shown = text.split(" of rank")[0].split(", ", 1)[1]
        names = {each.split(" (")[0] for each in shown.split(" and ") if "(" in each}
        # A loss that is not finite is checked at once, without a comparison of bytes.
        expected = truth.get(trainer.step, {*hit} if size > 2 else {0, 1})
        is_right = trainer.step <= due and named == expected and bool(names)
        is_right = is_right and names <= {flip.tensor for flip in flips}
        return ("found" if is_right else "wrong"), f"{text}; due {due}, {expected}, {flips}"
    except DivergedError as error:
        return "diverged", f"{flips}: {error}"
    is_equal = due in truth and not truth[due]
    return ("vanished" if is_equal else "wrong"), f"no error at step {due} after {at}: {flips}"


def ranks_to_name(world: World, trainer: Trainer) -> set[int]:
    """Return the ranks whose bytes differ from those of most ranks, or all if there is no majority;
    tensor by tensor.
    """
    plan, own = trainer.job.plan, []
    for array in ARRAYS:
        layout = plan.statistics if array == STATISTICS else plan.trained
        flat = flat_of(trainer, array)
        own += [
            flat[slot.start : slot.start + slot.parameter.size].tobytes().hex()
            for slot in layout.slots
        ]
    found: set[int] = set()
    for values in zip(*world.all_gather_json(own), strict=True):
        common, count = Counter(values).most_common(1)[0]
        has_majority = 2 * count > world.size
        found |= {r for r, value in enumerate(values) if value != common or not has_majority}
    return found


# State with one copy: a job for each trial.


def settings_of(kind: str, every: int, steps: int) -> dict[str, Any]:
    return {**KINDS[kind][1], "digest_every": every, "steps": steps}


def work_on_job(seed: int, kind: str, run_dir: str) -> int:
    rng = random.Random(seed)
    at, size = rng.randint(3, 14), KINDS[kind][0]

    def after_step(trainer: Trainer) -> None:
        if trainer.step == at:
            rank = rng.randrange(size)
            # Running statistics belong to each rank, and with several they are compared.
            is_first = kind != "central" or rank == 0
            arrays = ARRAYS[: 2 if is_first else 1]
            flips = choose(rng, trainer, rank, arrays)
            if trainer.job.world.rank == rank:
                print(
                    f"flipped {flips[0].array} {flips[0].tensor} of {rank} after {at}", flush=True
                )
            apply(trainer, flips)
            trainer.job.world.barrier()  # The owner of a shared slice checks it after the flip.

    trainer = make_trainer(
        None, seed, after_step, run_dir=run_dir, checkpoint_every=2, checkpoint_seconds=0.0,
        **settings_of(kind, 1, 16),
    )  # fmt: skip
    trainer.fit()
    return 0


def judge_job(seed: int, kind: str, folder: Path) -> tuple[str, str]:
    run_dir = folder / f"run{seed}"
    done = start(
        KINDS[kind][0], "--worker", "job", "--seed", seed, "--kind", kind, "--run", run_dir
    )
    output = done.stdout + done.stderr
    flipped = next((line.split() for line in output.splitlines() if "flipped" in line), None)
    lines = [line for line in output.splitlines() if line.startswith("dptrain: ")]
    if flipped is None or len(lines) != 1 or done.returncode != 1:
        return "wrong", f"exit code {done.returncode}: {output}"
    array, tensor, rank, at = flipped[1], flipped[2], int(flipped[4]), int(flipped[6])
    size = KINDS[kind][0]
    text = lines[0]
    # Rank 0 of the strategy central differs from the others until its next update.
    compared = f"after step {at}, {tensor} ({array}) of rank {rank} on "
    guarded = f"{tensor} ({array}) changed on ", f" step {at} "
    is_named = compared in text or all(each in text for each in guarded)
    if kind == "central" and compared not in text:
        is_named = is_named and (f"rank {rank} of {size}: " in text or f"rank {rank}: " in text)
    if not is_named:
        return "wrong", f"{flipped}: {text}"
    resumed = Trainer.resume(run_dir, data(seed), progress=False, digest_every=0)
    step = resumed.step
    with resumed:
        resumed.fit()
    plain = make_trainer(None, seed, lambda trainer: None, steps=16)
    plain.fit()
    same = all(
        np.array_equal(resumed.parameters[name], values)
        for name, values in plain.parameters.items()
    )
    return ("found" if same and step <= at else "wrong"), f"{text} Resumed from step {step}."


def work_undisturbed(seed: int, kind: str, steps: int) -> None:
    settings = settings_of(kind, 1, steps)
    trainer = make_trainer(None, seed, lambda trainer: None, replay_every=1, **settings)
    trainer.fit()
    if trainer.job.world.is_rank_zero:
        print(f"undisturbed {kind}: {trainer.step} steps", flush=True)
