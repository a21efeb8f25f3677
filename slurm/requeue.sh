#!/bin/bash
# Train for longer than a job may take: before its time is up, the job saves a checkpoint and goes
# back into the queue, and goes on from there, as often as it needs.
#   sbatch slurm/requeue.sh --network cifar --data cifar10:DIR --epochs 500
# A run whose job failed or was cancelled goes on by: sbatch slurm/requeue.sh --run-dir DIR
# Adapt the lines with #SBATCH to your site; some want --account and --partition.
#SBATCH --job-name=dptrain
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=16
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
# A warning to this script (B:), so many seconds early: a step and a checkpoint must fit in.
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
# Else each turn would overwrite what the one before has printed.
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
set -euo pipefail

# Adapt: module load …, source …/bin/activate. What is on PATH when you submit is there, too.

# A rank computes with as many threads as it has cores; newer versions of srun must be told again.
export DPTRAIN_THREADS=${DPTRAIN_THREADS:-$SLURM_CPUS_PER_TASK}
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
# Seconds after which srun ends all ranks when one has gone; else they wait for it.
export SLURM_WAIT=${SLURM_WAIT:-30}

# For MPICH and its relatives. Open MPI: LAUNCH='srun --mpi=pmix'. Either: LAUNCH=mpirun.
read -ra launch <<<"${LAUNCH:-srun --mpi=pmi2}"

# MPICH calls the memory that ranks share after job and step, and stumbles over what killed ranks
# have left on a node: each turn takes a step number of its own.
for ((turn = 0; turn < ${SLURM_RESTART_COUNT:-0}; turn++)); do
    srun --nodes=1 --ntasks=1 true
done

# A job keeps its number in the queue, so every turn finds the run of the one before.
"${launch[@]}" dptrain train --resume --run-dir "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" "$@" &

# The launcher passes the warning on to all ranks. It ends bash's `wait`, so wait again.
warned=
trap 'warned=yes; kill -USR1 $! || true' USR1
while kill -0 $! 2>/dev/null; do wait $! || true; done
wait $! && code=0 || code=$?

# 75: dptrain was asked to stop, and there is a checkpoint. A job that is cancelled is not warned,
# and one that failed would only fail again: neither goes back.
if [[ $warned && $code -eq 75 ]]; then
    scontrol requeue "$SLURM_JOB_ID" || true
fi
exit "$code"
