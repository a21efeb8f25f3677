#!/bin/bash
# Measure how training scales over GPUs, with one rank per GPU. Each job of the array makes a part of
# the launches on its own nodes, and a last job collects them in studies/gpu-scaling-NUMBER.
# STUDY=DIR continues a study that was interrupted.
#   RANKS=1,2,4,8 sbatch --nodes=2 slurm/gpu-scaling.sh --network cifar --batch-size 1024
# Adapt the #SBATCH lines to your site; some require --account and --partition.
#SBATCH --job-name=gpu-scaling
#SBATCH --array=1-5
# Nodes, GPUs and tasks for the largest number of RANKS. Every rank sees all GPUs of its node and
# uses the one with its local rank: --gpus-per-task would hide the others, and peer-to-peer memory
# could not be used. Products are computed in TF32 (10 bits of mantissa); for float32 set
# PRECISION=fp32.
#SBATCH --nodes=1
#SBATCH --gpus-per-node=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
# Other jobs on a node would be measured too.
#SBATCH --exclusive
#SBATCH --time=01:00:00
#SBATCH --output=%x-%A-%a.out
set -euo pipefail

# Adapt: module load …, source …/bin/activate. The job inherits PATH from the submission.

ranks=${RANKS:-1,2,4}
study=${STUDY:-studies/$SLURM_JOB_NAME-$SLURM_ARRAY_JOB_ID}

# For MPICH and MPIs derived from it. Open MPI: LAUNCH='srun --mpi=pmix -m pack'. Both:
# LAUNCH='mpirun -bind-to none' (Open MPI: '--bind-to none').
# With `pack`, ranks fill one node before they use the next, as with mpirun.
launch=${LAUNCH:-srun --mpi=pmi2 --distribution=pack}

if ((SLURM_ARRAY_TASK_ID == SLURM_ARRAY_TASK_MIN)); then
    sbatch --dependency="afterany:$SLURM_ARRAY_JOB_ID" --job-name="$SLURM_JOB_NAME-collect" \
        --output=%x-%j.out --partition="$SLURM_JOB_PARTITION" \
        ${SLURM_JOB_ACCOUNT:+--account="$SLURM_JOB_ACCOUNT"} \
        --ntasks=1 --time=10 --wrap="dptrain scale --collect '$study'"
fi

part=$((SLURM_ARRAY_TASK_ID - SLURM_ARRAY_TASK_MIN + 1))
# --threads is also the number of cores that srun assigns to each rank, for reading data.
exec dptrain scale --output "$study" --part "$part/$SLURM_ARRAY_TASK_COUNT" --ranks "$ranks" \
    --launches "$SLURM_ARRAY_TASK_COUNT" --launcher "$launch" --threads "$SLURM_CPUS_PER_TASK" \
    --backend cuda --precision "${PRECISION:-tf32}" "$@"
