#!/bin/bash
# Train on the GPUs of this machine, with one rank per GPU:
#   launch/gpus.sh --network cifar --data cifar10:DIR --batch-size 4096
#   CUDA_VISIBLE_DEVICES=2,3 RANKS=2 launch/gpus.sh
# Products are computed in TF32 (10 bits of mantissa); for float32 set PRECISION=fp32.
set -euo pipefail

ranks=${RANKS:-$(nvidia-smi --list-gpus | wc -l)}

# Each rank uses the GPU with its local rank. Ranks are not bound, so that they can read data ahead
# on any core.
export THREADS=none

precision=${PRECISION:-tf32}
here=$(dirname "$0")
exec "$here/mpirun.sh" -n "$ranks" \
    dptrain train --backend cuda --precision "$precision" "$@"
