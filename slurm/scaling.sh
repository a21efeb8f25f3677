#!/bin/bash
# Measure how training scales, on cores or on GPUs with one rank per GPU. Each job of the array makes
# a part of the launches on its own nodes; the last one writes the study, studies/scaling-NUMBER.
#   sbatch slurm/scaling.sh --network cifar --batch-size 128
#   sbatch --gpus-per-node=4 --ntasks-per-node=4 --cpus-per-task=8 slurm/scaling.sh --network cifar
# RANKS=1,4,16 measures other numbers of ranks; STUDY=DIR continues a study that was interrupted.
# Account, partition, modules and environment are in site.sh.
#SBATCH --job-name=scaling
#SBATCH --array=1-5
# Nodes and tasks for the largest number of ranks.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=16
#SBATCH --cpus-per-task=1
# Of the hardware threads of a core use one; others would share its vector units.
#SBATCH --hint=nomultithread
# Other jobs on a node would be measured too.
#SBATCH --exclusive
#SBATCH --time=01:00:00
#SBATCH --output=%x-%A-%a.out
set -euo pipefail

# Slurm runs a copy of this script. Files next to the original are found by its recorded command.
job=${SLURM_JOB_ID:?is not set; submit this script with sbatch}
here=$(squeue --noheader --job "$job" --format %o | sed -nE '1s|[^/ ]*\.sh( .*)?$||p') || here=
# shellcheck source=start.sh
source "${here:-slurm/}start.sh"

# 1, 2, 4 and so on, up to the number of tasks.
ranks=
for ((power = 1; power < SLURM_NTASKS; power *= 2)); do ranks+=$power,; done
ranks=${RANKS:-$ranks$SLURM_NTASKS}

# With `pack`, ranks fill one node before they use the next, as with mpirun.
export SLURM_DISTRIBUTION=pack

# --threads is also the number of cores that srun assigns to each rank.
part=$((SLURM_ARRAY_TASK_ID - SLURM_ARRAY_TASK_MIN + 1))
exec dptrain scale --output "${STUDY:-studies/$SLURM_JOB_NAME-$SLURM_ARRAY_JOB_ID}" \
    --part "$part/$SLURM_ARRAY_TASK_COUNT" --launches "$SLURM_ARRAY_TASK_COUNT" \
    --ranks "$ranks" --threads "$SLURM_CPUS_PER_TASK" --launcher "${launch[*]}" "${gpus[@]}" "$@"
