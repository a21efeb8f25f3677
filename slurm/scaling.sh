#!/bin/bash
# Measure how training scales. Each job of the array makes a part of the launches on its own nodes,
# and a last job collects them in studies/scaling-NUMBER. STUDY=DIR continues a study that was
# interrupted.
#   sbatch slurm/scaling.sh --network cifar --batch-size 128
# Adapt the #SBATCH lines to your site; some require --account and --partition.
#SBATCH --job-name=scaling
#SBATCH --array=1-5
# Nodes and tasks for the largest number of RANKS.
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

# Adapt: module load …, source …/bin/activate. The job inherits PATH from the submission.

ranks=${RANKS:-1,2,4,8,16,32}
study=${STUDY:-studies/$SLURM_JOB_NAME-$SLURM_ARRAY_JOB_ID}

# For MPICH and MPIs derived from it. Open MPI: LAUNCH='srun --mpi=pmix -m pack'. Both:
# LAUNCH=mpirun.
# With `pack`, ranks fill one node before they use the next, as with mpirun.
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
