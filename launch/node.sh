#!/bin/bash
# Train on the cores of this machine. Flags of `dptrain train` follow the script's name:
#   launch/node.sh --network cifar --data cifar10:DIR
#   RANKS=4 THREADS=2 launch/node.sh
set -euo pipefail

threads=${THREADS:-1}
# nproc counts hardware threads: where a core has two, half as many ranks are enough.
ranks=${RANKS:-$(($(nproc) / threads))}

# Each rank keeps its cores: unbound ones wander, and leave behind what their caches hold.
if [[ $(mpirun --version) == *'Open MPI'* ]]; then
    bind=(--map-by "slot:PE=$threads" --bind-to core)
else # MPICH and its relatives
    bind=(-bind-to "core:$threads")
fi

exec mpirun -n "$ranks" "${bind[@]}" dptrain train --threads "$threads" "$@"
