#!/bin/bash
# Train on GPUs with one rank per GPU; --nodes=2 uses those of two nodes:
#   sbatch slurm/gpus.sh --network cifar --data cifar10:DIR --batch-size 4096
# Account, partition, modules and environment are in site.sh.
#SBATCH --job-name=dptrain
#SBATCH --nodes=1
# As many ranks as GPUs. Every rank sees all GPUs of its node and uses the one with its local rank:
# --gpus-per-task would hide the others, and peer-to-peer memory could not be used.
#SBATCH --gpus-per-node=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out
set -euo pipefail

# Slurm runs a copy of this script. Files next to the original are found by its recorded command.
job=${SLURM_JOB_ID:?is not set; submit this script with sbatch}
here=$(squeue --noheader --job "$job" --format %o | sed -nE '1s|[^/ ]*\.sh( .*)?$||p') || here=
# shellcheck source=start.sh
source "${here:-slurm/}start.sh"

exec "${launch[@]}" dptrain train "${gpus[@]}" "$@"
