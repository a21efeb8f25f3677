#!/bin/bash
# Train on the cores of one node. Arguments are flags of `dptrain train`:
#   sbatch slurm/node.sh --network cifar --data cifar10:DIR
# Account, partition, modules and environment are in site.sh.
#SBATCH --job-name=dptrain
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=16
#SBATCH --cpus-per-task=1
# Of the hardware threads of a core use one; others would share its vector units.
#SBATCH --hint=nomultithread
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out
set -euo pipefail

# Slurm runs a copy of this script. Files next to the original are found by its recorded command.
job=${SLURM_JOB_ID:?is not set; submit this script with sbatch}
here=$(squeue --noheader --job "$job" --format %o | sed -nE '1s|[^/ ]*\.sh( .*)?$||p') || here=
# shellcheck source=start.sh
source "${here:-slurm/}start.sh"

exec "${launch[@]}" dptrain train "${gpus[@]}" "$@"
