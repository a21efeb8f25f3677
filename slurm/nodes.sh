#!/bin/bash
# Train on several nodes. Arguments are flags of `dptrain train`:
#   sbatch --nodes=8 slurm/nodes.sh --network cifar --data cifar10:DIR
# Account, partition, modules and environment are in site.sh.
#SBATCH --job-name=dptrain
# One rank with many threads per socket: an all-reduce between fewer ranks is faster.
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=16
# Of the hardware threads of a core use one; others would share its vector units.
#SBATCH --hint=nomultithread
# All ranks wait for the slowest, so share no node with other jobs.
#SBATCH --exclusive
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out
set -euo pipefail

# Slurm runs a copy of this script. Files next to the original are found by its recorded command.
job=${SLURM_JOB_ID:?is not set; submit this script with sbatch}
here=$(squeue --noheader --job "$job" --format %o | sed -nE '1s|[^/ ]*\.sh( .*)?$||p') || here=
# shellcheck source=start.sh
source "${here:-slurm/}start.sh"

export SLURM_CPU_BIND=${SLURM_CPU_BIND:-cores} # Of srun.

exec "${launch[@]}" dptrain train "${gpus[@]}" "$@"
