#!/bin/bash
# Start ranks with the mpirun on PATH, of MPICH or Open MPI, bind each to its cores, and let all
# signals that stop training end it with a checkpoint. Arguments are those of mpirun:
#   THREADS=8 launch/mpirun.sh -n 4 dptrain train --threads 8 --network cifar --data cifar10:DIR
# MPIRUN names another program, such as mpirun.openmpi. The other scripts here use this one.
set -euo pipefail

mpirun=${MPIRUN:-mpirun}
version=$("$mpirun" --version)

# Unbound ranks migrate between cores and lose their caches, and Open MPI would bind a rank with
# several threads to one core. THREADS=none does not bind. Each variable is read by one MPI.
# MPIs bind to all cores of the machine. If the affinity mask of this script has fewer (taskset, a
# batch system without cgroups), ranks are not bound, so that they inherit the mask.
last=$(($(getconf _NPROCESSORS_CONF) - 1))
count=(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
own=$("${count[@]}")
usable=$(taskset -c "0-$last" "${count[@]}" 2>/dev/null) || usable=$own
if [[ ${THREADS:=1} == none ]] || ((own < usable)); then
    export PRTE_MCA_hwloc_default_binding_policy=none # Open MPI 5
    export OMPI_MCA_hwloc_base_binding_policy=none    # Open MPI 4
else
    export HYDRA_BINDING=core:$THREADS # MPICH and its relatives
    export PRTE_MCA_rmaps_default_mapping_policy=slot:PE=$THREADS
    export PRTE_MCA_hwloc_default_binding_policy=core
    export OMPI_MCA_rmaps_base_mapping_policy=slot:PE=$THREADS
    export OMPI_MCA_hwloc_base_binding_policy=core
fi

# Signals of a terminal reach this script only: mpirun is in a process group of its own (set -m).
# MPICH's mpirun passes SIGINT and SIGTERM on to the ranks and waits for them; a second SIGINT makes
# it kill them. It does not survive SIGHUP.
interrupt=INT again=INT end=TERM block=()
if [[ $version == *Open[\ R]* ]]; then # "Open MPI", or "OpenRTE" of version 4 under another name
    # Open MPI's mpirun kills the ranks after these three signals, before a checkpoint is complete,
    # but passes SIGUSR1 on. `dptrain train` prints this if the signals are not blocked.
    interrupt=USR1 again=KILL end=USR1 block=(env --block-signal="INT,TERM,HUP")
    "${block[@]}" true 2>/dev/null || block=() # GNU coreutils before 8.31
fi

# If this script is killed, mpirun receives a signal too (util-linux 2.33 or later).
follow=(setpriv --pdeathsig "$end")
"${follow[@]}" true 2>/dev/null || follow=()

set -m
"${follow[@]}" "${block[@]}" "$mpirun" "$@" </dev/null &
trap 'kill -$interrupt $! 2>/dev/null || true; interrupt=$again' INT
trap 'kill -$end $! 2>/dev/null || true' TERM HUP
trap 'kill -USR1 $! 2>/dev/null || true' USR1
# A signal also ends bash's `wait`, so wait again.
while kill -0 $! 2>/dev/null; do wait $! || true; done
wait $! && code=0 || code=$?
exit "$code"
