"""Simulate training on 1 to 64 ranks with SimGrid, as truths for forecasts.

python -m benchmarks.forecast.simulate [--first 0] [--last 55]

This needs SimGrid 3.32 (Debian: `apt-get install libsimgrid-dev`). Each case draws a network, an
MPI library, a model and kinds of noise from a fixed seed. SimGrid routes every message of an
all-reduce over the links of the network, which share their bandwidth; forecasts know none of this.
The result, ``truths.json``, is committed. Forecasts were tuned with the first `TUNED` cases; the
others were generated before the last change of the forecasts and evaluated after it, once.
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

TRUTHS = Path(__file__).with_name("truths.json")
CASES, TUNED, STEPS = 55, 40, 40
LAUNCHES, TRUTH_LAUNCHES = 5, 3
"""Launches of each measured number of ranks, and of those to be forecast."""
MOST_MEASURED = 8
RANKS = (1, 2, 4, 8, 16, 32, 64)
HOSTS = 64
FAT_TREES = ("2;8,8;1,4;1,1", "2;8,8;1,8;1,1", "2;4,16;1,2;1,1")
"""Levels; hosts and switches below each switch; uplinks; parallel links. The first and the last
have half as many uplinks as hosts."""
TORI = ("4,4,4", "8,8")
PLATFORM = """<?xml version='1.0'?>
<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1">
  <cluster id="c" prefix="n" suffix="" radical="0-{last}" speed="1Gf" core="64"
    bw="{bandwidth}Bps" lat="{latency}s" loopback_bw="{loopback}Bps" loopback_lat="5e-7s"
    topology="{topology}" topo_parameters="{shape}"/>
</platform>
"""


@dataclass(frozen=True)
class Case:
    """A job on a machine.

    Attributes:
        topology, shape: of the network, in SimGrid's notation.
        library: MPI library whose selection of all-reduce algorithms is simulated.
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

    topology = one_of("FAT_TREE", "TORUS")
    bandwidth, latency_s = one_of((1.25e9, 5e-6), (1.25e8, 2e-5), (5e9, 1e-6))
    buckets = one_of(1, 4)
    total = math.exp(random.uniform(math.log(2**16), math.log(2**20)))
    ratio = math.exp(random.uniform(math.log(2), math.log(100)))
    return Case(
        topology=topology,
        shape=one_of(*(FAT_TREES if topology == "FAT_TREE" else TORI)),
        library=one_of("mpich", "ompi"),
        scattered=one_of(False, True),
        ranks_per_node=one_of(1, 1, 1, 2, 4),
        bandwidth=bandwidth,
        latency_s=latency_s,
        scaling=one_of("weak", "weak", "weak", "strong"),
        work_s=ratio * (2 * total / bandwidth + buckets * 6 * latency_s),
        fixed=one_of(0.0, 0.02),
        contention=one_of(0.0, 0.1, 0.2),
        buckets=buckets,
        bucket_bytes=round(total / buckets / 256) * 256,
        lateness=one_of("normal", "exponential", "pareto"),
        lateness_share=one_of(0.01, 0.03, 0.06),
        speed_spread=one_of(0.0, 0.01, 0.02),
        launch_spread=one_of(0.005, 0.01, 0.02),
    )


def simulate(case: Case, ranks: int, seed: int, program: Path) -> dict[str, Any]:
    """Return the times of one launch in ms, as ``step.c`` prints them."""
    random = np.random.Generator(np.random.Philox(key=[seed, ranks]))
    work, network = np.exp(case.launch_spread * random.normal(size=2))
    hosts = np.arange(HOSTS)
    if case.scattered:
        random.shuffle(hosts)
    names = [f"n{hosts[rank // case.ranks_per_node]}" for rank in range(ranks)]
    platform, host_file = program.with_name("platform.xml"), program.with_name("hosts")
    platform.write_text(
        PLATFORM.format(
            last=HOSTS - 1,
            bandwidth=case.bandwidth * network,
            latency=case.latency_s / network,
            loopback=4 * case.bandwidth,
            topology=case.topology,
            shape=case.shape,
        )
    )
    host_file.write_text("\n".join(names))
    command = [
        "smpirun", "-np", str(ranks), "-platform", str(platform), "-hostfile", str(host_file),
        "--cfg=smpi/simulate-computation:no", f"--cfg=smpi/coll-selector:{case.library}",
        "--log=root.thres:critical", str(program), str(STEPS),
        repr(float(case.work_at(ranks) * work)),
        case.lateness, str(case.lateness_share), str(case.speed_spread), str(case.buckets),
        str(case.bucket_bytes), str(seed),
    ]  # fmt: skip
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    values: dict[str, Any] = json.loads(printed)
    return values


def measure(number: int, program: Path) -> dict[str, Any]:
    """Return the record of a case: its parameters, and the launches of every number of ranks."""
    case = draw(number)
    points = []
    for ranks in RANKS:
        measured = ranks <= MOST_MEASURED
        seeds = range(1000 * number, 1000 * number + (LAUNCHES if measured else TRUTH_LAUNCHES))
        found = [simulate(case, ranks, seed, program) for seed in seeds]
        kept = found[0].keys() if measured else ("step_ms",)
        figures = {name: [_short(launch[name]) for launch in found] for name in kept}
        points.append({"ranks": ranks, **figures})
    return {"case": number, "parameters": asdict(case), "points": points}


def _short(value: Any) -> Any:
    return [_short(item) for item in value] if isinstance(value, list) else float(f"{value:.5g}")


def write(cases: list[dict[str, Any]]) -> None:
    """Write the cases, one a line."""
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    TRUTHS.write_text(f"[\n{lines}\n]\n")


@click.command()
@click.option("--first", default=0, show_default=True)
@click.option("--last", default=CASES, show_default=True)
def main(first: int, last: int) -> None:
    """Simulate cases FIRST to LAST - 1, and add them to truths.json."""
    known = json.loads(TRUTHS.read_text()) if TRUTHS.exists() else []
    cases = {case["case"]: case for case in known}
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "step"
        source = Path(__file__).with_name("step.c")
        compiler = shutil.which("smpicc")
        if compiler is None:
            raise click.ClickException("smpicc is missing; try apt-get install libsimgrid-dev")
        subprocess.run([compiler, "-O2", "-o", program, source, "-lm"], check=True)
        for number in range(first, last):
            cases[number] = measure(number, program)
            write([cases[key] for key in sorted(cases)])


if __name__ == "__main__":
    main()
