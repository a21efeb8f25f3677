"""Bits that are flipped while a step is computed: of gradients and activations."""

from __future__ import annotations

import random
from typing import Any, NamedTuple, cast

import numpy as np

from dptrain.comm.world import CorruptedError, World
from dptrain.plan.flat import STOP
from dptrain.training.trainer import Trainer
from tests.flips.jobs import make_trainer


class Outcome(NamedTuple):
    """What a job has made of the step in which a bit may be flipped.

    Attributes:
        gradients: bytes of the gradient slots of this rank, with the loss.
        error: what the job has raised; "" if it ended in order.
        is_updated: whether parameters have changed since the step before.
        place: where the bit was flipped.
    """

    gradients: bytes
    error: str
    is_updated: bool
    place: str


def step_with_flip(world: World | None, seed: int, at: int, rank: int, *, flips: bool) -> Outcome:
    """Make `at` steps and one more, in which a random bit of a rank is flipped if `flips`."""
    rng = random.Random(seed)
    gradients, before, places = b"", b"", [""]

    def after_step(trainer: Trainer) -> None:
        nonlocal before
        if trainer.step == at:
            before = trainer.job.replica.arrays.parameters.tobytes()
            cast("Any", trainer.job.engine)._run = lambda: run(trainer)

    def run(trainer: Trainer) -> None:
        nonlocal gradients
        replica, engine = trainer.job.replica, cast("Any", trainer.job.engine)
        last = rng.randrange(len(replica.stages)) if rng.random() < 0.7 else -1
        for number, (stage, kernel) in enumerate(replica.stages):
            kernel(replica.context)
            if flips and number == last and trainer.job.world.rank == rank:
                name = rng.choice(sorted({*stage.writes, *stage.reads} & {*replica._views}))
                flip_any(rng, replica._views[name][: replica.context.n])
                places[0] = f"{name} after {stage.name}"
        size = replica.plan.trained.size + STOP
        if flips and last < 0 and trainer.job.world.rank == rank:
            flip_any(rng, rng.choice(replica.gradient_slots)[:size])
            places[0] = "gradient"
        gradients = replica.gradient_slots[:, :size].tobytes()
        del engine._run

    trainer = make_trainer(
        world, seed, after_step, replay_every=1, steps=at + 1, digest_every=0,
        transport="mpi" if seed % 2 else "auto",
    )  # fmt: skip
    error = ""
    try:
        trainer.fit()
    except CorruptedError as caught:
        error = str(caught)
    after = trainer.job.replica.arrays.parameters.tobytes()
    return Outcome(gradients, error, after != before, places[0])


def flip_any(rng: random.Random, array: Any) -> None:
    """Flip a random bit of an array."""
    element = np.unravel_index(rng.randrange(array.size), array.shape)
    one = np.array(array[element]).reshape(1)
    one.view(np.uint8)[rng.randrange(one.itemsize)] ^= np.uint8(1 << rng.randrange(8))
    array[element] = one[0]


def try_gradient(world: World, seed: int) -> tuple[str, str]:
    """Make a trial; all ranks call this, see `try_replicas`."""
    rng = random.Random(seed)
    at, rank = rng.randint(1, 5), rng.randrange(world.size)
    clean = step_with_flip(world, seed, at, rank, flips=False)
    found = step_with_flip(world, seed, at, rank, flips=True)
    place = world.all_gather_json(found.place)[rank]
    is_changed = any(world.all_gather_json(found.gradients != clean.gradients))
    details = f"rank {rank}, {place}, step {at + 1}: {found.error}"
    if clean.error or not clean.is_updated:
        return "wrong", f"without a flip: {clean.error}"
    if not is_changed and not found.error:
        return "vanished", details
    named = [each for each in range(world.size) if f"rank {each} on " in found.error]
    is_right = named == [rank] and not found.is_updated
    is_right = is_right and f"before the update of step {at + 1}, " in found.error
    return ("found" if is_right else "wrong"), details
