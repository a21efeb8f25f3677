#!/bin/bash
# Train on several nodes, and outlive the loss of a rank or of a node. Arguments are flags of
# `dptrain train`; with --shards, the final parameters do not depend on what was lost:
#   sbatch --nodes=4 slurm/survive.sh --network cifar --data cifar10:DIR --shards 64
# Submit the same command with --run-dir and the directory of the run to continue it.
# Account, partition, modules and environment are in site.sh.
#SBATCH --job-name=dptrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=16
#SBATCH --cpus-per-task=1
# Of the hardware threads of a core use one; others would share its vector units.
#SBATCH --hint=nomultithread
# If a node fails, the job goes on with the others.
#SBATCH --no-kill
#SBATCH --time=01:00:00
# Before the limit, dptrain writes a checkpoint and ends with exit code 75.
#SBATCH --signal=B:USR1@120
#SBATCH --output=%x-%j.out
set -euo pipefail

# Slurm runs a copy of this script. Files next to the original are found by its recorded command.
job=${SLURM_JOB_ID:?is not set; submit this script with sbatch}
here=$(squeue --noheader --job "$job" --format %o | sed -nE '1s|[^/ ]*\.sh( .*)?$||p') || here=
# shellcheck source=start.sh
source "${here:-slurm/}start.sh"

run=runs/$SLURM_JOB_NAME-$job
exec dptrain train --survive --launcher "${launch[*]}" --run-dir "$run" "${gpus[@]}" "$@"
