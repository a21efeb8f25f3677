#!/bin/bash
# Train on the cores of this machine. Arguments are flags of `dptrain train`:
#   launch/node.sh --network cifar --data cifar10:DIR
#   RANKS=4 THREADS=2 launch/node.sh
set -euo pipefail

threads=${THREADS:-1}
# nproc counts hardware threads, at most OMP_NUM_THREADS. If a core has two, use half as many ranks.
ranks=${RANKS:-$(($(OMP_NUM_THREADS='' nproc) / threads))}

# Bind each rank to its cores. Unbound ranks migrate between cores and lose their caches.
if [[ $(mpirun --version) == *'Open MPI'* ]]; then
    bind=(--map-by "slot:PE=$threads" --bind-to core)
else # MPICH and its relatives
    bind=(-bind-to "core:$threads")
fi

exec mpirun -n "$ranks" "${bind[@]}" dptrain train --threads "$threads" "$@"
