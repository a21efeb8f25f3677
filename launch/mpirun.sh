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
if [[ ${THREADS:=1} == none ]]; then
    export PRTE_MCA_hwloc_default_binding_policy=none # Open MPI 5
    export OMPI_MCA_hwloc_base_binding_policy=none    # Open MPI 4
else
    export HYDRA_BINDING=core:$THREADS # MPICH and its relatives
    export PRTE_MCA_rmaps_default_mapping_policy=slot:PE=$THREADS
    export PRTE_MCA_hwloc_default_binding_policy=core
    export OMPI_MCA_rmaps_base_mapping_policy=slot:PE=$THREADS
    export OMPI_MCA_hwloc_base_binding_policy=core
fi

# MPICH's mpirun passes signals on to the ranks and waits for them.
if [[ $version != *Open[\ R]* ]]; then # "Open MPI", or "OpenRTE" of version 4 under another name
    exec "$mpirun" "$@"
fi

# Open MPI's mpirun kills the ranks after Ctrl-C, SIGTERM or SIGHUP, before a checkpoint is
# complete, but passes SIGUSR1 on. So it does not receive the others, and the ranks receive SIGUSR1.
block=(env --block-signal="INT,TERM,HUP")
"${block[@]}" true 2>/dev/null || block=() # GNU coreutils before 8.31
"${block[@]}" "$mpirun" "$@" <&0 &
job=$! interrupted=
trap 'kill -USR1 $job || true' TERM HUP USR1
trap '[[ $interrupted ]] && kill -KILL $job || kill -USR1 $job || true; interrupted=yes' INT
# A signal also ends bash's `wait`, so wait again.
while kill -0 $job 2>/dev/null; do wait $job || true; done
wait $job && code=0 || code=$?
exit "$code"
