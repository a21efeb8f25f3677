"""Flip random bits in running jobs, and judge whether dptrain finds and names them.

    python -m tests.flips --trials 200 --jobs 20 --gradients 180 --repairs 10 --steps 2000 --seed 7

A trial in the state flips one to three bits in parameters, momentum or running statistics of one to
three ranks after a random step.

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

Each trial follows from its seed. Results are lines of `--output`; trials that are there are not
repeated. The exit code is 1 if anything else happens.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from dptrain.comm.abort import guard
from dptrain.comm.world import World
from tests.flips.gradients import try_gradient
from tests.flips.jobs import KINDS, start
from tests.flips.repairs import judge_repair, work_to_be_repaired
from tests.flips.state import judge_job, try_replicas, work_on_job, work_undisturbed

MOST_PER_JOB = 25
"""Trials that one start of the ranks makes."""

MOST_STEPS = 2000
"""Steps of an undisturbed job."""


class Results:
    """The results of all trials, one line of JSON for each.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._done: dict[tuple[str, int], dict[str, Any]] = {}
        for each in map(json.loads, lines):
            self._done[each["kind"], each["seed"]] = each

    def has(self, kind: str, seed: int) -> bool:
        """Return whether a trial was made."""
        return (kind, seed) in self._done

    def add(self, kind: str, seed: int, result: str, details: str, count: int = 1) -> None:
        """Record a trial, or `count` steps."""
        found = {
            "kind": kind, "seed": seed, "result": result, "details": details, "count": count,
        }  # fmt: skip
        with self._path.open("a") as file:
            file.write(json.dumps(found) + "\n")
        self._done[kind, seed] = found
        print(f"{kind} {seed} {result}: {details}", flush=True)

    def counts(self) -> Counter[str]:
        """Return the numbers of all results, by kind and result."""
        counts: Counter[str] = Counter()
        for (kind, _), each in self._done.items():
            counts[f"{kind}: {each['result']}"] += each["count"]
        return counts


def work_on_trials(kind: str, seeds: list[int]) -> None:
    world = World.connect(timeout=120.0)
    for seed in seeds:
        make_trial = try_replicas if kind == "replicas" else try_gradient
        result, details = make_trial(world, seed)
        results = world.all_gather_json(result)
        if world.is_rank_zero:
            result = result if len(set(results)) == 1 else "wrong"
            print(f"trial {seed} {result}: {details}", flush=True)


def judge_trials(
    results: Results, kind: str, sizes: tuple[int, ...], seed: int, trials: int
) -> None:
    """Make trials of which one start of the ranks makes several."""
    for number, first in enumerate(range(seed, seed + trials, MOST_PER_JOB)):
        ranks = sizes[number % len(sizes)]
        name = f"{kind} of {ranks} rank{'s' * (ranks > 1)}"
        block = range(first, min(first + MOST_PER_JOB, seed + trials))
        due = [each for each in block if not results.has(name, each)]
        if not due:
            continue
        done = start(ranks, "--worker", kind, "--seeds", ",".join(map(str, due)))
        lines = [line for line in done.stdout.splitlines() if line.startswith("trial ")]
        for line in lines:
            _, trial, rest = line.split(" ", 2)
            result, details = rest.split(": ", 1)
            results.add(name, int(trial), result, details)
        for each in due:
            if not results.has(name, each):
                results.add(name, each, "wrong", f"{done.returncode}: {done.stderr}")


def judge_all(options: argparse.Namespace) -> Counter[str]:
    """Make the trials that are missing; return the numbers of all results."""
    seed = options.seed * 10_000
    output = options.output or Path(tempfile.gettempdir()) / f"flips-{options.seed}.jsonl"
    results = Results(output)
    judge_trials(results, "replicas", (2, 3, 4), seed, options.trials)
    judge_trials(results, "gradients", (1, 2, 3, 4), seed, options.gradients)
    kinds = ("single", "shared", "central")
    with tempfile.TemporaryDirectory(prefix="dptrain-flips-") as folder:
        for number in range(options.jobs):
            kind = kinds[number % len(kinds)]
            if not results.has(kind, seed + number):
                results.add(kind, seed + number, *judge_job(seed + number, kind, Path(folder)))
        for number in range(options.repairs):
            if not results.has("repaired", seed + number):
                found = judge_repair(seed + number, Path(folder))
                results.add("repaired", seed + number, *found)
    for first in range(0, options.steps, MOST_STEPS):
        steps = min(MOST_STEPS, options.steps - first)
        for kind, (size, _) in KINDS.items():
            name = f"undisturbed steps of {kind}"
            if not results.has(name, seed + first):
                words = "--kind", kind, "--seed", seed + first, "--steps", steps
                done = start(size, "--worker", "undisturbed", *words)
                is_quiet = done.returncode == 0 and f"{steps} steps" in done.stdout
                result = "quiet" if is_quiet else "wrong"
                results.add(name, seed + first, result, done.stdout + done.stderr, steps)
    return results.counts()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("trials", 40), ("jobs", 6), ("gradients", 20), ("repairs", 1), ("steps", 500), ("seed", 1),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output", type=Path, help="results  [default: flips-SEED.jsonl in /tmp]")
    workers = "replicas", "gradients", "job", "repair", "undisturbed"
    parser.add_argument("--worker", choices=workers)
    parser.add_argument("--kind", choices=KINDS, default="single")
    parser.add_argument("--run", type=Path)
    parser.add_argument("--seeds", default="")
    options = parser.parse_args()
    if options.worker in ("replicas", "gradients"):
        work_on_trials(options.worker, [int(seed) for seed in options.seeds.split(",")])
    elif options.worker == "repair":
        return guard(lambda: work_to_be_repaired(options.seed, options.run))
    elif options.worker == "job":
        return guard(lambda: work_on_job(options.seed, options.kind, options.run))
    elif options.worker == "undisturbed":
        work_undisturbed(options.seed, options.kind, options.steps)
    else:
        counts = judge_all(options)
        for what, count in sorted(counts.items()):
            print(f"{count:6} {what}")
        return int(any(what.endswith("wrong") for what in counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
