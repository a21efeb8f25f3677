"""Whether a launcher started this process, which rank it is, and with which MPI: before MPI starts.

A launcher describes the job in environment variables. Every program that a rank starts inherits
them, and so does a shell that outlives the job. An MPI library that follows variables
of another job aborts, waits without limit, or disturbs that job. `LAUNCHERS` lists the variables of
each kind of launcher, and `find_launch` compares them with what the operating system knows
(`dptrain.comm.launching.ancestry`): the ancestors of this process and the connections that the
variables name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass

from dptrain.comm.launching.ancestry import Facts, observe
from dptrain.errors import UserError

ALLOW_SINGLE = "DPTRAIN_ALLOW_SINGLE"
"""Environment variable: if it is 1, a rank that MPI does not connect to others runs alone."""

_NETMOD = "MPIR_CVAR_CH4_NETMOD"
_OTHER_PMI = (
    "ALPS_APP_PE",
    "FLUX_JOB_ID",
    "JSM_NAMESPACE",
    "PALS_RANKID",
    "PMI_CONTROL_PORT",
    "PMI_PORT",
)
"""Variables by which a launcher describes another connection for PMI than an open file."""

_PREFIXES = (
    "ALPS_", "FLUX_", "JSM_", "LSB_", "MPI", "MV2_", "OMPI_", "PALS_", "PMI", "PRTE_",
    "SLURM_PROCID", "SLURM_STEP",
)  # fmt: skip
"""How the names of variables begin that launchers set, also those whose sizes are not known."""


def _has_pmi(environ: Mapping[str, str], facts: Facts) -> bool | None:
    """Return whether the connection of PMI 1 and 2 is open; None if unknown."""
    descriptor = environ.get("PMI_FD", "")
    if descriptor:
        return descriptor.isdecimal() and facts.has_socket(int(descriptor))
    return None if any(name in environ for name in _OTHER_PMI) else False


def _has_pmix(environ: Mapping[str, str], facts: Facts) -> bool | None:
    """Return whether the server of PMIx, which is on this machine, exists; None if unknown."""
    servers = [value for name, value in environ.items() if name.startswith("PMIX_SERVER_URI")]
    if not servers:
        return None if "JSM_NAMESPACE" in environ else False
    ports = [found for value in servers for found in re.findall(r"tcp[46]?://\S*:(\d+)", value)]
    known = [facts.has_listener(int(port)) for port in ports]
    if any(known):
        return True
    return False if known and None not in known else None


def _has_unknown(environ: Mapping[str, str], facts: Facts) -> bool | None:
    return None


@dataclass(frozen=True)
class Launcher:
    """A kind of launcher.

    Attributes:
        name: for messages.
        size, rank: its variables with the number of ranks and the rank; "" if it sets none.
        prefixes: how the names of its variables begin. They are hidden from MPI if another
            launcher, or none, started this process.
        programs: names of the processes that start ranks; empty if unknown.
        has_connection: whether the variables name a connection that is open.
    """

    name: str
    size: str
    rank: str
    prefixes: tuple[str, ...]
    programs: frozenset[str]
    has_connection: Callable[[Mapping[str, str], Facts], bool | None]

    def variables(self, environ: Mapping[str, str]) -> tuple[str, ...]:
        """Return the variables in `environ` that this launcher sets."""
        settings = ("PMIX_MCA_", "PMI_VERSION", "PMI_SUBVERSION", "PMI_DEBUG")
        return tuple(
            name
            for name in sorted(environ)
            if name in (self.size, self.rank)
            or (name.startswith(self.prefixes) and not name.startswith(settings))
        )

    def counts(self, environ: Mapping[str, str]) -> dict[str, int]:
        """Return the variables with a rank or a number of ranks, and their values."""
        values = {name: environ.get(name, "") for name in (self.rank, self.size)}
        return {name: int(value) for name, value in values.items() if value.isdecimal()}

    def describes_several(self, environ: Mapping[str, str]) -> bool:
        """Return whether the variables are those of a rank among several."""
        return any(n > (name == self.size) for name, n in self.counts(environ).items())


_HYDRA = ("hydra_pmi_proxy", "pmi_proxy", "hydra_bstrap_proxy", "mpiexec.gforker")
_OPEN_MPI = ("prterun", "prted", "orterun", "orted")
LAUNCHERS = (
    Launcher(
        "an mpirun of MPICH or srun --mpi=pmi2", "PMI_SIZE", "PMI_RANK",
        ("PMI_", "HYDI_", "MPI_LOCAL"), frozenset([*_HYDRA, "slurmstepd"]), _has_pmi,
    ),
    Launcher(
        "an mpirun of Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK",
        (
            "PRTE_LAUNCHED", "OMPI_COMM_WORLD_", "OMPI_MCA_ess", "OMPI_MCA_pmix",
            "OMPI_MCA_orte_ess", "OMPI_MCA_orte_hnp_uri", "OMPI_MCA_orte_launch",
            "OMPI_MCA_orte_local_daemon_uri", "OMPI_MCA_orte_jobfam_session_dir",
            "OMPI_MCA_orte_top_session_dir",
        ),
        frozenset(_OPEN_MPI), _has_pmix,
    ),
    Launcher(
        "a launcher with PMIx", "", "PMIX_RANK", ("PMIX_",), frozenset([*_OPEN_MPI, "slurmstepd"]),
        _has_pmix,
    ),
    Launcher(
        "an mpirun of MVAPICH", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", (),
        frozenset([*_HYDRA, "mpispawn", "mpirun_rsh", "slurmstepd"]), _has_unknown,
    ),
    Launcher(
        "srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", (), frozenset(["slurmstepd"]), _has_unknown,
    ),
    Launcher("PALS", "PALS_LOCAL_SIZE", "PALS_RANKID", (), frozenset(), _has_unknown),
)  # fmt: skip
"""Kinds of launchers, the most specific first: mpirun inside a Slurm job starts its proxies with
srun, so the task count of the step is then that of the proxies. SLURM_NTASKS is not used: it is
also set for a program that a batch script runs directly, as one process."""

_STARTED, _CONNECTED, _UNKNOWN, _LEFT = range(4)
"""What the facts say about a launcher whose variables are set: it started this process; its
connection is open; nothing; it did not start this process."""


@dataclass(frozen=True)
class Launch:
    """How this process was started.

    Attributes:
        rank, size: as the launcher set them; 0 and 1 without a launcher.
        source: the variable of the size and its value, or "".
        hidden: variables of launchers that did not start this process.
        error: why this process cannot be a rank of the job that the variables describe, and what
            to do; "" if it can, or if they describe one rank.
    """

    rank: int
    size: int
    source: str
    hidden: tuple[str, ...] = ()
    error: str = ""


_decisions: dict[tuple[tuple[str, str], ...], Launch] = {}


def find_launch(environ: Mapping[str, str] = os.environ, facts: Facts | None = None) -> Launch:
    """Return rank and size of this process; without a launcher, rank 0 of 1.

    The first result for the same variables stays: MPI closes its connection when it ends, and a
    forked process keeps the rank of its parent.

    Args:
        environ: the environment variables.
        facts: for tests; by default those of this process.
    """
    names = {name for each in LAUNCHERS for name in each.variables(environ)}
    if not names:
        return Launch(0, 1, "")
    if facts is not None:
        return _decide(environ, facts)
    relevant = tuple((name, environ[name]) for name in sorted(names))
    if relevant not in _decisions:
        programs = frozenset[str]().union(*(launcher.programs for launcher in LAUNCHERS))
        _decisions[relevant] = _decide(environ, observe(programs))
    return _decisions[relevant]


def _decide(environ: Mapping[str, str], facts: Facts) -> Launch:
    variables = {each: each.variables(environ) for each in LAUNCHERS}
    states = {each: _judge(each, environ, facts) for each in LAUNCHERS if variables[each]}
    left = [each for each, state in states.items() if state == _LEFT]
    sizes = {each: size for each in states if (size := _read(each, environ)) is not None}
    closed = [each for each in left if each in sizes and _has_lost_connection(each, facts)]
    chosen = min(sizes, key=lambda each: states[each], default=None)
    error = ""
    if chosen is None or states[chosen] == _LEFT:
        chosen = closed[0] if closed else None
        if chosen is None:
            hidden = _names_to_hide(left, variables)
            return Launch(0, 1, "", hidden, _explain_left(left, environ, facts))
        error = _explain_closed(chosen, environ)
    elif states[chosen] == _STARTED:
        # Slurm sets its own variables in addition to those of PMI.
        is_connected = any(
            state == _STARTED and each.has_connection(environ, facts)
            for each, state in states.items()
        )
        same = [each for each in closed if sizes[each] == sizes[chosen]]
        if same and not is_connected:
            error = _explain_closed(same[0], environ)
        # The others started an ancestor of the launcher.
        left += [each for each in states if each not in left and not _is_nearest(each, facts)]
    hidden = _names_to_hide(left, variables)
    return Launch(*sizes[chosen], f"{chosen.size}={environ[chosen.size]}", hidden, error)


def _names_to_hide(
    launchers: list[Launcher], variables: Mapping[Launcher, tuple[str, ...]]
) -> tuple[str, ...]:
    return tuple(name for each in launchers if each.prefixes for name in variables[each])


def _is_nearest(launcher: Launcher, facts: Facts) -> bool:
    """Return whether the nearest ancestor that starts ranks may be this launcher."""
    return bool(facts.launchers and launcher.programs & facts.launchers[0])


def _has_lost_connection(launcher: Launcher, facts: Facts) -> bool:
    return _is_nearest(launcher, facts) and not facts.mpi_parent


def _judge(launcher: Launcher, environ: Mapping[str, str], facts: Facts) -> int:
    """Return what the facts say about a launcher whose variables are set."""
    connection = launcher.has_connection(environ, facts)
    if connection is False or facts.mpi_parent:
        return _LEFT
    if _is_nearest(launcher, facts):
        return _STARTED
    if connection:
        return _CONNECTED
    is_absent = facts.sees_all and not any(launcher.programs & each for each in facts.launchers)
    return _LEFT if launcher.programs and is_absent else _UNKNOWN


def _read(launcher: Launcher, environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return rank and number of ranks in the variables of a launcher; None if there are none."""
    size, rank = environ.get(launcher.size, ""), environ.get(launcher.rank, "0")
    if not (size.isdecimal() and rank.isdecimal() and int(size) > 0):
        return None
    return int(rank), int(size)


def _explain_left(launchers: list[Launcher], environ: Mapping[str, str], facts: Facts) -> str:
    """Return the error if variables of launchers describe several ranks; "" if they do not."""
    several = [each for each in launchers if each.describes_several(environ)]
    names = [name for each in several for name in each.counts(environ)]
    if not names:
        return ""
    values = " and ".join(f"{name}={environ[name]}" for name in names)
    unset = " ".join(f"-u {name}" for name in names)
    advice = f"start it with env {unset}, or set {ALLOW_SINGLE}=1, to run one rank"
    if facts.mpi_parent:
        return (
            f"this process is a child of an MPI program, {facts.mpi_parent}, and cannot use the "
            f"connection of that program to its launcher ({values}); {advice}"
        )
    of = " or ".join(each.name for each in several)
    return (
        f"{values} {'is' if len(names) == 1 else 'are'} left over from another MPI program: "
        f"{of} set this, but did not start this process; {advice}"
    )


def _explain_closed(launcher: Launcher, environ: Mapping[str, str]) -> str:
    """Return the error of a rank whose connection to its launcher is closed."""
    name = "PMI_FD" if "PMI_FD" in environ else launcher.size
    return (
        f"{launcher.name} started this process as a rank, but its connection "
        f"({name}={environ[name]}) is closed: a program between the launcher and dptrain closed "
        "the file; let that program start dptrain with exec, or with close_fds=False if it is "
        f"Python's subprocess; {ALLOW_SINGLE}=1 continues with one rank"
    )


def prepare_mpi(environ: MutableMapping[str, str] = os.environ) -> Launch:
    """Hide the variables of other jobs from MPI, which would follow them.

    Args:
        environ: the environment variables; changed before MPI starts.

    Returns:
        How this process was started.

    Raises:
        UserError: this process cannot be the rank that its variables describe.
    """
    launch = find_launch(environ)
    if launch.error and environ.get(ALLOW_SINGLE) != "1":
        raise UserError(launch.error)
    for name in launch.hidden:
        del environ[name]
    return find_launch(environ) if launch.hidden else launch  # Decides before MPI changes facts.


def has_launcher(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if a launcher may have started this process; without one, there is one rank."""
    return any(name.startswith(_PREFIXES) for name in environ)


def mpirun_vendor(version: str) -> str | None:
    """Return the MPI of an ``mpirun`` as mpi4py spells it; None if it is unknown.

    The version text of Open MPI contains the name by which it was called: Debian's
    ``mpirun.openmpi`` prints "OpenRTE", and ``prterun`` "PRRTE".

    Args:
        version: the output of ``mpirun --version``.

    Example:
        >>> mpirun_vendor("mpirun.openmpi (OpenRTE) 4.1.4")
        'Open MPI'
    """
    marks = {
        "Intel": "Intel MPI",
        "Open MPI": "Open MPI",
        "OpenRTE": "Open MPI",
        "PRRTE": "Open MPI",
        "HYDRA": "MPICH",
        "MVAPICH": "MVAPICH",
    }
    return next((vendor for mark, vendor in marks.items() if mark in version), None)


def shorten_addresses(version: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Select libfabric for MPICH under srun, because UCX sends addresses that Slurm truncates.

    Ranks started by ``srun --mpi=pmi2`` pass their addresses to Slurm in lines of text, of which
    Slurm reads 1024 characters. With UCX, MPICH sends 4096 bytes per address, including unused
    memory; depending on its contents, MPI fails to start or waits forever. With libfabric it sends
    only the address. If the user chose a netmod, or under MPICH's own mpirun, nothing changes.

    Args:
        version: the version text of the MPI library that mpi4py loaded.
        environ: the environment variables; changed before MPI starts.
    """
    by_slurm = "PMI_JOBID" in environ and "PMI_HOSTNAME" not in environ  # The latter is mpirun's.
    has_both = re.search(r"^MPICH Device:\s*ch4:ucx ofi", version, re.MULTILINE)
    if by_slurm and has_both and not environ.keys() & {"MPICH_CH4_NETMOD", _NETMOD}:
        environ[_NETMOD] = "ofi"


def refuse_other_mpi(
    library: str, environ: MutableMapping[str, str] = os.environ, *, has_pmix: bool = False
) -> None:
    """Refuse to start an MPI library that does not know PMIx under a launcher that offers it.

    MPICH would abort. If there is one rank, the variables of PMIx are hidden from it instead.

    Args:
        library: name and version of the MPI that mpi4py loaded.
        environ: the environment variables; changed before MPI starts.
        has_pmix: whether the library was built with PMIx, which Open MPI always is.

    Raises:
        UserError: the launcher offers PMIx, and the library does not know it.
    """
    launcher = next(each for each in LAUNCHERS if "PMIX_" in each.prefixes)
    launch, names = find_launch(environ), launcher.variables(environ)
    if library.startswith("Open MPI") or has_pmix or not names:
        return
    offers_both = "PMI_FD" in environ
    if launch.size > 1 and not offers_both and environ.get(ALLOW_SINGLE) != "1":
        raise UserError(_explain(launch, library))
    for name in names:
        del environ[name]


def refuse_single(size: int, library: str, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse to run as a single rank if the launcher started several processes.

    Otherwise every process would be rank 0, train alone and write the same files.

    Args:
        size: of COMM_WORLD.
        library: name and version of the MPI that mpi4py loaded.
        environ: the environment variables.

    Raises:
        UserError: MPI has one rank, and the launcher started more.
    """
    launch = find_launch(environ)
    if size == 1 and launch.size > 1 and environ.get(ALLOW_SINGLE) != "1":
        raise UserError(_explain(launch, library))


def _explain(launch: Launch, library: str) -> str:
    plugin = "pmix" if library.startswith("Open MPI") else "pmi2"
    return (
        f"MPI reports 1 rank, but the launcher started {launch.size} ({launch.source}): the "
        f"launcher does not support the MPI that mpi4py loaded ({library}); use the mpirun of "
        f"that MPI, or srun --mpi={plugin} (srun --mpi=list shows the alternatives); `dptrain "
        f"doctor` reports more, and {ALLOW_SINGLE}=1 continues with one rank"
    )
