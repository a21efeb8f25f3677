"""Simulate training on 1 to 64 ranks with SimGrid, as truths for forecasts.

python -m benchmarks.forecast.simulate [--first 53] [--last 108]

This needs SimGrid 3.32 (Debian: `apt-get install libsimgrid-dev`). Each case draws a network, an
MPI library, a model and kinds of noise from a fixed seed. SimGrid routes every message of an
all-reduce over the links of the network, which share their bandwidth; forecasts know none of this.
Forecasts are tuned with the cases before `TUNED`; the others are held back. From case `WIDE` on
there are more kinds of networks, algorithms and noise.

``truths.jsonl`` is committed and has one line per case. The command appends missing cases, so it
can be stopped, continued, and run several times at once with different cases. To simulate a case
again, delete its line.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

TRUTHS = Path(__file__).with_name("truths.jsonl")
FIRST, WIDE, TUNED, CASES = 53, 55, 75, 108
TUNED_LAUNCHES, LAUNCHES, STEPS = 10, 25, 50
"""Launches of each measured number of ranks of tuned and of held-back cases, and their steps.
Replications of a study draw from them."""
TRUTH_LAUNCHES, TRUTH_STEPS = {16: 10, 32: 10, 64: 3}, 20
"""Launches of each number of ranks to be forecast, and their steps. 64 ranks take minutes."""
MOST_MEASURED = 8
RANKS = (1, 2, 4, 8, 16, 32, 64)
HOSTS = 64
FAT_TREES = ("2;8,8;1,4;1,1", "2;8,8;1,8;1,1", "2;4,16;1,2;1,1")
"""Levels; hosts and switches below each switch; uplinks; parallel links. The first and the last
have half as many uplinks as hosts."""
TORI = ("4,4,4", "8,8")
DRAGONFLIES = ("4,1;2,1;4,1;2", "2,2;4,1;4,1;2")
"""Groups, chassis, routers and hosts, each with the links between them."""
SHAPES = {"FAT_TREE": FAT_TREES, "TORUS": TORI, "DRAGONFLY": DRAGONFLIES, "FLAT": ("",)}
SELECTIONS = {
    "mpich": "coll-selector:mpich", "ompi": "coll-selector:ompi", "ring": "allreduce:lr",
    "Rabenseifner": "allreduce:rab_rdb", "doubling": "allreduce:rdb",
}  # fmt: skip
"""Options of SimGrid by MPI library, or by the algorithm of an unknown library."""
PLATFORM = """<?xml version='1.0'?>
<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1">
  <cluster id="c" prefix="n" suffix="" radical="0-{last}" speed="1Gf" core="64"
    bw="{bandwidth}Bps" lat="{latency}s" loopback_bw="{loopback}Bps" loopback_lat="5e-7s"
    topology="{topology}" topo_parameters="{shape}"{backbone}/>
</platform>
"""


@dataclass(frozen=True)
class Case:
    """A job on a machine.

    Attributes:
        topology, shape: of the network, in SimGrid's notation.
        library: MPI library whose selection of all-reduce algorithms is simulated, or the one
            algorithm, see `SELECTIONS`.
        scattered: True if each launch receives random hosts.
        ranks_per_node: ranks that share a host and its network link.
        bandwidth, latency_s: of a link, in bytes/s and seconds.
        scaling: ``weak`` or ``strong``.
        work_s: computation of a step on one rank.
        fixed: share of the work that strong scaling does not divide.
        contention: slowdown of computation if all ranks of a node compute.
        buckets, bucket_bytes: gradients.
        lateness, lateness_share: distribution of the work of a step, and its scale as a share.
        speed_spread: standard deviation of the ranks' speeds, drawn in each launch.
        launch_spread: standard deviation of work and bandwidth between launches.
        slow_launches: share of each ten launches in which work takes 1.3 times as long.
        backbone: bandwidth of a link that all nodes of a FLAT network share, over that of a node's
            link; 0 if there is none.
    """

    topology: str
    shape: str
    library: str
    scattered: bool
    ranks_per_node: int
    bandwidth: float
    latency_s: float
    scaling: str
    work_s: float
    fixed: float
    contention: float
    buckets: int
    bucket_bytes: int
    lateness: str
    lateness_share: float
    speed_spread: float
    launch_spread: float
    slow_launches: float = 0.0
    backbone: float = 0.0

    def work_at(self, ranks: int) -> float:
        """Return the seconds of computation of one rank in a step."""
        share = 1.0 if self.scaling == "weak" else self.fixed + (1 - self.fixed) / ranks
        busy = min(ranks, self.ranks_per_node) - 1
        return self.work_s * share * (1 + self.contention * busy / max(self.ranks_per_node - 1, 1))


def draw(number: int) -> Case:
    """Return case `number`."""
    random = np.random.Generator(np.random.Philox(key=[19, number]))

    def one_of(*values: Any) -> Any:
        return values[int(random.integers(len(values)))]

    wide = number >= WIDE
    topology = one_of("FAT_TREE", "TORUS", *("DRAGONFLY", "FLAT") * wide)
    bandwidth, latency_s = one_of((1.25e9, 5e-6), (1.25e8, 2e-5), (5e9, 1e-6))
    if wide:
        factors = np.exp(random.uniform(-0.5, 0.5, 2)).tolist()
        bandwidth, latency_s = bandwidth * factors[0], latency_s * factors[1]
    buckets = one_of(1, 4)
    total = math.exp(random.uniform(math.log(2**16), math.log(2 ** (22 if wide else 20))))
    ratio = math.exp(random.uniform(math.log(2), math.log(100)))
    return Case(
        topology=topology,
        shape=one_of(*SHAPES[topology]),
        library=one_of("mpich", "ompi", *("ring", "Rabenseifner", "doubling") * wide),
        scattered=one_of(False, True),
        ranks_per_node=one_of(1, 1, 1, 2, *() if wide else (4,)),
        bandwidth=bandwidth,
        latency_s=latency_s,
        scaling=one_of("weak", "weak", "weak", "strong"),
        work_s=ratio * (2 * total / bandwidth + buckets * 6 * latency_s),
        fixed=one_of(0.0, 0.02),
        contention=one_of(0.0, 0.1, 0.2),
        buckets=buckets,
        bucket_bytes=round(total / buckets / 256) * 256,
        lateness=one_of("normal", "exponential", "pareto", *("pareto2", "interrupted") * wide),
        lateness_share=one_of(0.01, 0.03, 0.06),
        speed_spread=one_of(0.0, 0.01, 0.02),
        launch_spread=one_of(0.005, 0.01, 0.02),
        slow_launches=one_of(0.0, 0.0, 0.0, 0.0, 0.1) if wide else 0.0,
        backbone=one_of(0.0, 0.0, 8.0) if topology == "FLAT" else 0.0,
    )


def simulate(case: Case, ranks: int, seed: int, program: Path) -> dict[str, Any]:
    """Return the times of one launch in ms, as ``step.c`` prints them."""
    random = np.random.Generator(np.random.Philox(key=[seed, ranks]))
    work, network = np.exp(case.launch_spread * random.normal(size=2))
    if seed % 10 < 10 * case.slow_launches:
        work *= 1.3
    hosts = np.arange(HOSTS)
    if case.scattered:
        random.shuffle(hosts)
    names = [f"n{hosts[rank // case.ranks_per_node]}" for rank in range(ranks)]
    bandwidth, latency = case.bandwidth * network, case.latency_s / network
    backbone = f' bb_bw="{case.backbone * bandwidth}Bps" bb_lat="{latency}s"'
    platform, host_file = program.with_name("platform.xml"), program.with_name("hosts")
    platform.write_text(
        PLATFORM.format(
            last=HOSTS - 1,
            bandwidth=bandwidth,
            latency=latency,
            loopback=4 * case.bandwidth,
            topology=case.topology,
            shape=case.shape,
            backbone=backbone if case.backbone else "",
        )
    )
    host_file.write_text("\n".join(names))
    command = [
        "smpirun", "-np", str(ranks), "-platform", str(platform), "-hostfile", str(host_file),
        "--cfg=smpi/simulate-computation:no", f"--cfg=smpi/{SELECTIONS[case.library]}",
        "--log=root.thres:critical", str(program),
        str(STEPS if ranks <= MOST_MEASURED else TRUTH_STEPS),
        repr(float(case.work_at(ranks) * work)),
        case.lateness, str(case.lateness_share), str(case.speed_spread), str(case.buckets),
        # Launches of different numbers of ranks are independent.
        str(case.bucket_bytes), str(100 * seed + ranks),
    ]  # fmt: skip
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    values: dict[str, Any] = json.loads(printed)
    return values


def measure(number: int, program: Path) -> dict[str, Any]:
    """Return the record of a case: its parameters, and the launches of every number of ranks."""
    case = draw(number)
    launches = TUNED_LAUNCHES if number < TUNED else LAUNCHES
    points = []
    for ranks in RANKS:
        seeds = range(1000 * number, 1000 * number + TRUTH_LAUNCHES.get(ranks, launches))
        found = [simulate(case, ranks, seed, program) for seed in seeds]
        kept = found[0].keys() if ranks <= MOST_MEASURED else ("step_ms",)
        figures = {name: [_short(launch[name]) for launch in found] for name in kept}
        points.append({"ranks": ranks, **figures})
    return {"case": number, "parameters": asdict(case), "points": points}


def _short(value: Any) -> Any:
    return [_short(item) for item in value] if isinstance(value, list) else float(f"{value:.4g}")


def read_truths(path: Path = TRUTHS) -> dict[int, dict[str, Any]]:
    """Return the stored cases by their numbers."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {case["case"]: case for case in sorted(map(json.loads, lines), key=_number)}


def _number(case: dict[str, Any]) -> int:
    return int(case["case"])


def append(case: dict[str, Any], path: Path = TRUTHS) -> None:
    """Append a case, so that commands that run at the same time lose none of the others' cases."""
    with path.open("a") as file:
        file.write(json.dumps(case, separators=(",", ":")) + "\n")


@click.command()
@click.option("--first", default=FIRST, show_default=True)
@click.option("--last", default=CASES, show_default=True)
def main(first: int, last: int) -> None:
    """Simulate those of the cases FIRST to LAST - 1 that truths.jsonl lacks."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "step"
        source = Path(__file__).with_name("step.c")
        compiler = shutil.which("smpicc")
        if compiler is None:
            raise click.ClickException("smpicc is missing; try apt-get install libsimgrid-dev")
        subprocess.run([compiler, "-O2", "-o", program, source, "-lm"], check=True)
        for number in range(first, last):
            if number not in read_truths():
                append(measure(number, program))


if __name__ == "__main__":
    main()
