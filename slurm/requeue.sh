#!/bin/bash
# Train for longer than the time limit of a job. Before the limit, the job saves a checkpoint and
# requeues itself; it then continues from the checkpoint, as often as needed.
#   sbatch slurm/requeue.sh --network cifar --data cifar10:DIR --epochs 500
# Continue a run whose job failed or was cancelled: sbatch slurm/requeue.sh --run-dir DIR
# Adapt the #SBATCH lines to your site; some require --account and --partition.
#SBATCH --job-name=dptrain
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=16
#SBATCH --cpus-per-task=1
# Of the hardware threads of a core use one; others would share its vector units.
#SBATCH --hint=nomultithread
#SBATCH --time=01:00:00
# Slurm signals this script (B:) 120 s before the limit; a step and a checkpoint must fit in.
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
# Otherwise each start would overwrite the output of the previous one.
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
set -euo pipefail

# Adapt: module load …, source …/bin/activate. The job inherits PATH from the submission.

# One compute thread per core of a rank. Slurm 22.05 and later do not pass --cpus-per-task to srun.
export DPTRAIN_THREADS=${DPTRAIN_THREADS:-$SLURM_CPUS_PER_TASK}
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
# Seconds after which srun ends all ranks if one has ended; otherwise they wait for it.
export SLURM_WAIT=${SLURM_WAIT:-30}

# For MPICH and MPIs derived from it. Open MPI: LAUNCH='srun --mpi=pmix'. Both: LAUNCH=mpirun.
read -ra launch <<<"${LAUNCH:-srun --mpi=pmi2}"
if [[ ${launch[0]##*/} == mpirun* ]]; then
    # Open MPI would run all threads of a rank on one core. Only it reads these variables.
    export {PRTE_MCA_rmaps_default,OMPI_MCA_rmaps_base}_mapping_policy="slot:PE=$SLURM_CPUS_PER_TASK"
    export {PRTE_MCA_hwloc_default,OMPI_MCA_hwloc_base}_binding_policy=core
fi

# MPICH names shared memory by job and step number, and fails if killed ranks have left memory of
# that name on a node. Each start therefore uses a new step number.
for ((turn = 0; turn < ${SLURM_RESTART_COUNT:-0}; turn++)); do
    srun --nodes=1 --ntasks=1 true
done

# A requeued job keeps its number, so each start finds the run of the previous one.
"${launch[@]}" dptrain train --resume --run-dir "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" "$@" &

# The launcher forwards the signal to all ranks. A signal also ends bash's `wait`, so wait again.
warned=
trap 'warned=yes; kill -USR1 $! || true' USR1
while kill -0 $! 2>/dev/null; do wait $! || true; done
wait $! && code=0 || code=$?

# 75: dptrain stopped on request and saved a checkpoint. A cancelled job receives no warning, and a
# failed job would fail again, so neither is requeued.
if [[ $warned && $code -eq 75 ]]; then
    scontrol requeue "$SLURM_JOB_ID" || true
fi
exit "$code"
