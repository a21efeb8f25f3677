#!/bin/bash
# Train a sweep over settings as a job array; each task trains a part of the runs on one node:
#   sbatch --array=1-8 slurm/sweep.sh --set learning_rate=0.01,0.03,0.1 --seeds 5 --output runs/rates
# When all tasks have ended, the same command without the array writes the table and the plot:
#   dptrain study sweep --set learning_rate=0.01,0.03,0.1 --seeds 5 --output runs/rates
# A part that reaches the time limit stops with a checkpoint; submit the array again to continue.
# Account, partition, modules and environment are in site.sh.
#SBATCH --job-name=dptrain-sweep
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
# Of the hardware threads of a core use one; others would share its vector units.
#SBATCH --hint=nomultithread
#SBATCH --time=04:00:00
# All ranks stop 120 s before the limit; a step and a checkpoint must fit in.
#SBATCH --signal=USR1@120
#SBATCH --output=%x-%A-%a.out
set -euo pipefail

# Slurm runs a copy of this script. Files next to the original are found by its recorded command.
job=${SLURM_JOB_ID:?is not set; submit this script with sbatch}
here=$(squeue --noheader --job "$job" --format %o | sed -nE '1s|[^/ ]*\.sh( .*)?$||p') || here=
# shellcheck source=start.sh
source "${here:-slurm/}start.sh"

first=${SLURM_ARRAY_TASK_MIN:?submit it as an array: sbatch --array=1-8 slurm/sweep.sh}
part=$(((SLURM_ARRAY_TASK_ID - first) / ${SLURM_ARRAY_TASK_STEP:-1} + 1))
exec "${launch[@]}" dptrain study sweep --part "$part/$SLURM_ARRAY_TASK_COUNT" "${gpus[@]}" "$@"
