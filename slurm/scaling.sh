#!/bin/bash
# Measure how training scales: each job of the array makes a part of the launches, on nodes of its
# own, and one more collects them into studies/scaling-NUMBER. STUDY=DIR goes on with one that was
# cut short.
#   sbatch slurm/scaling.sh --network cifar --batch-size 128
# Adapt the lines with #SBATCH to your site; some want --account and --partition.
#SBATCH --job-name=scaling
#SBATCH --array=1-5
# What the largest number of RANKS needs.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=16
#SBATCH --cpus-per-task=1
# Whoever shares a node is measured, too.
#SBATCH --exclusive
#SBATCH --time=01:00:00
#SBATCH --output=%x-%A-%a.out
set -euo pipefail

# Adapt: module load …, source …/bin/activate. What is on PATH when you submit is there, too.

ranks=${RANKS:-1,2,4,8,16,32}
study=${STUDY:-studies/$SLURM_JOB_NAME-$SLURM_ARRAY_JOB_ID}

# For MPICH and its relatives. Open MPI: LAUNCH='srun --mpi=pmix -m pack'. Either: LAUNCH=mpirun.
# Packed, few ranks fill a node before they take another, as mpirun has it.
launch=${LAUNCH:-srun --mpi=pmi2 --distribution=pack}

if ((SLURM_ARRAY_TASK_ID == SLURM_ARRAY_TASK_MIN)); then
    sbatch --dependency="afterany:$SLURM_ARRAY_JOB_ID" --job-name="$SLURM_JOB_NAME-collect" \
        --output=%x-%j.out --partition="$SLURM_JOB_PARTITION" \
        ${SLURM_JOB_ACCOUNT:+--account="$SLURM_JOB_ACCOUNT"} \
        --ntasks=1 --time=10 --wrap="dptrain scale --collect '$study'"
fi

part=$((SLURM_ARRAY_TASK_ID - SLURM_ARRAY_TASK_MIN + 1))
exec dptrain scale --output "$study" --part "$part/$SLURM_ARRAY_TASK_COUNT" \
    --ranks "$ranks" --launches "$SLURM_ARRAY_TASK_COUNT" --launcher "$launch" "$@"
