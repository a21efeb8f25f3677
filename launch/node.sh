#!/bin/bash
# Train on the cores of this machine. Arguments are flags of `dptrain train`:
#   launch/node.sh --network cifar --data cifar10:DIR
#   RANKS=4 THREADS=2 launch/node.sh
set -euo pipefail

threads=${THREADS:-1}
# nproc counts hardware threads, at most OMP_NUM_THREADS. If a core has two, use half as many ranks.
ranks=${RANKS:-$(($(OMP_NUM_THREADS='' nproc) / threads))}

export THREADS=$threads # mpirun.sh binds each rank to as many cores.
here=$(dirname "$0")
exec "$here/mpirun.sh" -n "$ranks" dptrain train --threads "$threads" "$@"
