#!/bin/bash
# Train on the GPUs of this machine, a rank on each:
#   launch/gpus.sh --network cifar --data cifar10:DIR --batch-size 4096
#   CUDA_VISIBLE_DEVICES=2,3 RANKS=2 launch/gpus.sh
set -euo pipefail

ranks=${RANKS:-$(nvidia-smi --list-gpus | wc -l)}

# A rank takes the GPU of its number. Its cores read data ahead, so it is bound to none of them.
if [[ $(mpirun --version) == *'Open MPI'* ]]; then
    bind=(--bind-to none)
else # MPICH and its relatives
    bind=(-bind-to none)
fi

exec mpirun -n "$ranks" "${bind[@]}" dptrain train --backend cuda --precision tf32 "$@"
