"""Flip random bits in running jobs, and judge whether dptrain finds and names them.

    python -m tests.flips --trials 200 --jobs 20 --gradients 100 --repairs 10 --steps 2000 --seed 7

A trial in the state flips one to three bits in parameters, momentum or running statistics of one to three
ranks after a random step.

- A trial compares separate replicas: jobs of two to four ranks whose gradients MPI sums, with a
  random `--digest-every` from 2 to 8. Every rank must raise the same error within that many steps.
  It names both ranks of two, and otherwise the minority, and tensors in which bits were flipped.
  A rounding of an update may remove the effect of a flipped bit: then the replicas must be equal.
  A loss that is no longer finite ends a job as well.
- A job has state with one copy: one rank, ranks that share memory, or the strategy central, with
  `--digest-every 1`. It must end with exit code 1 and one line that names the rank and the tensor.
  Its newest checkpoint is resumed by one process and ends with the bits of an undisturbed run.
- A trial in gradients or activations flips a bit while a step is computed, in a gradient slot or
  in a buffer that a stage reads or writes, of one to four ranks with `--replay-every 1`. If any bit
  of a gradient then differs from that of an undisturbed job, every rank must raise the same error
  before the update, and it names the rank. A bit that nothing reads changes none.
- `dptrain.survival` repairs a job of two ranks in which a bit is flipped: training continues from
  the newest state, and ends with the bits of an undisturbed run.
- Undisturbed jobs of each kind make `--steps` steps with both checks after each, without an alarm.

The exit code is 1 if anything else happens.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from dptrain.backends.digests import PARAMETERS, STATISTICS
from dptrain.comm.abort import guard
from dptrain.comm.world import CorruptedError, DivergedError, World
from dptrain.network import BatchNorm2d, Conv2d, Dense, Flatten, Network, ReLU
from dptrain.plan.flat import STOP
from dptrain.runs.names import CONFIG
from dptrain.scaling.launching import Launcher
from dptrain.survival.supervisor import Job, Supervisor
from dptrain.training.callbacks import AfterStep
from dptrain.training.digests.differences import CORRUPTION
from dptrain.training.persistence.checkpoints import CheckpointStore
from dptrain.training.trainer import Trainer
from tests.run import BIN

LIMIT_S = 600.0
"""Time limit of a job on a busy machine."""

MOST_PER_JOB = 25
"""Trials that one start of the ranks makes."""

KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "shared": (3, {"transport": "shared"}),
    "central": (3, {"strategy": "central"}),
    "mirrored": (3, {"transport": "mpi"}),
}
"""Number of ranks and settings of jobs."""

ARRAYS = (PARAMETERS, "momentum", STATISTICS)


class Flip(NamedTuple):
    """A flipped bit of a tensor of a rank."""

    rank: int
    array: str
    tensor: str
    element: int
    bit: int


def network() -> Network:
    layers = [
        Conv2d(6),
        BatchNorm2d(),
        ReLU(),
        Conv2d(4),
        BatchNorm2d(),
        ReLU(),
        Flatten(),
        Dense(5),
    ]
    return Network((2, 8, 8), layers, name="flips")


def data(seed: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((160, 2, 8, 8)).astype(np.float32)
    y = rng.integers(0, 5, 160)
    return x[:128], y[:128], x[128:], y[128:]


def make_trainer(
    world: World | None, seed: int, callback: Callable[[Trainer], None], **settings: Any
) -> Trainer:
    """Return a trainer that calls a function after each step."""
    return Trainer(
        network(), data(seed), world=world, batch_size=16, shards=4, optimizer="sgd", momentum=0.9,
        seed=seed, threads=1, progress=False, timeout=120.0,
        callbacks=[AfterStep(lambda trainer, result: callback(trainer))], **settings,
    )  # fmt: skip


def flat_of(trainer: Trainer, array: str) -> Any:
    replica = trainer.job.replica
    if array == STATISTICS:
        return replica.statistics.flat
    return replica.arrays.parameters if array == PARAMETERS else replica.arrays.state[array]


def choose(rng: random.Random, trainer: Trainer, rank: int, arrays: tuple[str, ...]) -> list[Flip]:
    """Return one to three random bits of a tensor."""
    array, plan = rng.choice(arrays), trainer.job.plan
    layout = plan.statistics if array == STATISTICS else plan.trained
    slot = rng.choice(layout.slots)
    elements = [slot.start + rng.randrange(slot.parameter.size) for _ in range(rng.randint(1, 3))]
    bits = {(element, rng.randrange(32)) for element in elements}
    return [Flip(rank, array, slot.name, element, bit) for element, bit in sorted(bits)]


def apply(trainer: Trainer, flips: list[Flip]) -> None:
    for flip in flips:
        if flip.rank == trainer.job.world.rank:
            words = flat_of(trainer, flip.array).view(np.uint32)
            words[flip.element] ^= np.uint32(1 << flip.bit)


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


# Gradients and activations: several trials in one job.


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


def work_on_trials(kind: str, seed: int, trials: int) -> None:
    world = World.connect(timeout=120.0)
    for number in range(trials):
        make_trial = try_replicas if kind == "replicas" else try_gradient
        result, details = make_trial(world, seed + number)
        results = world.all_gather_json(result)
        if world.is_rank_zero:
            result = result if len(set(results)) == 1 else "wrong"
            print(f"trial {seed + number} {result}: {details}", flush=True)


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


# Repaired jobs.


def work_to_be_repaired(seed: int, run_dir: Path) -> int:
    """Make or continue a run; a bit is flipped once, also if the step is made again."""
    at, marker = random.Random(seed).randint(6, 12), run_dir.with_suffix(".flipped")

    def after_step(trainer: Trainer) -> None:
        world = trainer.job.world
        if trainer.step == at and not any(world.all_gather_json(marker.exists())):
            if world.rank == world.size - 1:
                apply(trainer, choose(random.Random(seed), trainer, world.rank, ARRAYS[:1]))
                marker.touch()
            world.barrier()

    settings = {"digest_every": 1, "snapshots": True, "snapshot_every": 4}
    callbacks = [AfterStep(lambda trainer, result: after_step(trainer))]
    if (run_dir / CONFIG).exists():
        Trainer.resume(
            run_dir, data(seed), callbacks=callbacks, progress=False, **settings
        ).fit()
    else:
        make_trainer(None, seed, after_step, run_dir=run_dir, steps=16, **settings).fit()
    return 0


def judge_repair(seed: int, folder: Path) -> tuple[str, str]:
    run_dir = folder / f"repaired{seed}"
    words = "--worker", "repair", "--seed", str(seed), "--run", str(run_dir)
    program = (sys.executable, "-m", "tests.flips", *words)
    job = Job(
        launcher=Launcher((str(BIN / "mpirun"),), False), program=program, run_dir=run_dir,
        ranks=2, least_ranks=1, most_restarts=3, threads=1, timeout=120.0, repairs=True,
    )  # fmt: skip
    supervisor = Supervisor(job)
    code = supervisor.run()
    plain = make_trainer(None, seed, lambda trainer: None, steps=16)
    plain.fit()
    arrays = CheckpointStore(run_dir / "checkpoints").load().arrays if code == 0 else {}
    same = all(
        np.array_equal(arrays.get(f"parameters/{name}", []), values)
        for name, values in plain.parameters.items()
    )
    found = supervisor.incidents
    is_right = code == 0 and same and len(found) == 1 and CORRUPTION in found[0].cause
    # Snapshots are written every four steps, and at the ends of epochs of eight.
    is_right = is_right and found[0].steps_lost == (found[0].step or 0) % 4
    return ("found" if is_right else "wrong"), f"exit code {code}, equal {same}: {found}"


# Undisturbed jobs.


def work_undisturbed(seed: int, kind: str, steps: int) -> None:
    settings = settings_of(kind, 1, steps)
    trainer = make_trainer(None, seed, lambda trainer: None, replay_every=1, **settings)
    trainer.fit()
    if trainer.job.world.is_rank_zero:
        print(f"undisturbed {kind}: {trainer.step} steps", flush=True)


def start(ranks: int, *words: object) -> subprocess.CompletedProcess[str]:
    launcher = [str(BIN / "mpirun"), "-n", str(ranks)] if ranks > 1 else []
    command = [*launcher, sys.executable, "-m", "tests.flips", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def report(counts: Counter[str], kind: str, result: str, details: str) -> None:
    counts[f"{kind}: {result}"] += 1
    print(f"{kind} {result}: {details}", flush=True)


def judge_trials(
    counts: Counter[str], kind: str, sizes: tuple[int, ...], seed: int, trials: int
) -> None:
    """Make trials of which one start of the ranks makes several."""
    for number, first in enumerate(range(seed, seed + trials, MOST_PER_JOB)):
        due, ranks = min(MOST_PER_JOB, seed + trials - first), sizes[number % len(sizes)]
        done = start(ranks, "--worker", kind, "--seed", first, "--trials", due)
        lines = [line for line in done.stdout.splitlines() if line.startswith("trial ")]
        name = f"{kind} of {ranks} rank{'s' * (ranks > 1)}"
        for line in lines:
            _, trial, rest = line.split(" ", 2)
            result, details = rest.split(": ", 1)
            report(counts, name, result, f"{trial}: {details}")
        for _ in range(due - len(lines)):
            report(counts, name, "wrong", f"{done.returncode}: {done.stderr}")


def judge_all(arguments: argparse.Namespace) -> Counter[str]:
    counts: Counter[str] = Counter()
    seed = arguments.seed * 10_000
    judge_trials(counts, "replicas", (2, 3, 4), seed, arguments.trials)
    judge_trials(counts, "gradients", (1, 2, 3, 4), seed, arguments.gradients)
    kinds = ("single", "shared", "central")
    with tempfile.TemporaryDirectory(prefix="dptrain-flips-") as folder:
        for number in range(arguments.jobs):
            kind = kinds[number % len(kinds)]
            report(counts, kind, *judge_job(seed + number, kind, Path(folder)))
        for number in range(arguments.repairs):
            report(counts, "repaired", *judge_repair(seed + number, Path(folder)))
    for kind, (size, _) in KINDS.items() if arguments.steps else ():
        words = "--kind", kind, "--seed", seed, "--steps", arguments.steps
        done = start(size, "--worker", "undisturbed", *words)
        is_quiet = done.returncode == 0 and f"{arguments.steps} steps" in done.stdout
        report(counts, kind, "quiet" if is_quiet else "wrong", done.stdout + done.stderr)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("trials", 40), ("jobs", 6), ("gradients", 20), ("repairs", 1), ("steps", 500), ("seed", 1),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    workers = "replicas", "gradients", "job", "repair", "undisturbed"
    parser.add_argument("--worker", choices=workers)
    parser.add_argument("--kind", choices=KINDS, default="single")
    parser.add_argument("--run")
    arguments = parser.parse_args()
    if arguments.worker in ("replicas", "gradients"):
        work_on_trials(arguments.worker, arguments.seed, arguments.trials)
    elif arguments.worker == "repair":
        return guard(lambda: work_to_be_repaired(arguments.seed, Path(arguments.run)))
    elif arguments.worker == "job":
        return guard(lambda: work_on_job(arguments.seed, arguments.kind, arguments.run))
    elif arguments.worker == "undisturbed":
        work_undisturbed(arguments.seed, arguments.kind, arguments.steps)
    else:
        counts = judge_all(arguments)
        for what, count in sorted(counts.items()):
            print(f"{count:6} {what}")
        return int(any(what.endswith("wrong") for what in counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
