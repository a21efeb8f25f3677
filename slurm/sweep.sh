#!/bin/bash
# Train a sweep over settings as a job array; each task trains a part of the runs on one node:
#   sbatch --array=1-8 slurm/sweep.sh --set learning_rate=0.01,0.03,0.1 --seeds 5 --output runs/rates
# When all tasks have ended, the same command without the array writes the table and the plot:
#   dptrain study sweep --set learning_rate=0.01,0.03,0.1 --seeds 5 --output runs/rates
# A part that reaches the time limit stops with a checkpoint; submit the array again to continue.
# Adapt the #SBATCH lines to your site; some require --account and --partition.
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

# Adapt: module load …, source …/bin/activate. The job inherits PATH from the submission.

# One compute thread per core of a rank. Slurm 22.05 and later do not pass --cpus-per-task to srun.
export DPTRAIN_THREADS=${DPTRAIN_THREADS:-$SLURM_CPUS_PER_TASK}
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# For MPICH and MPIs derived from it. Open MPI: LAUNCH='srun --mpi=pmix'. Both: LAUNCH=mpirun.
read -ra launch <<<"${LAUNCH:-srun --mpi=pmi2}"
if [[ ${launch[0]##*/} == mpirun* ]]; then
    # Open MPI would run all threads of a rank on one core. Only it reads these variables.
    export {PRTE_MCA_rmaps_default,OMPI_MCA_rmaps_base}_mapping_policy="slot:PE=$SLURM_CPUS_PER_TASK"
    export {PRTE_MCA_hwloc_default,OMPI_MCA_hwloc_base}_binding_policy=core
fi

first=${SLURM_ARRAY_TASK_MIN:?submit it as an array: sbatch --array=1-8 slurm/sweep.sh}
part=$(((SLURM_ARRAY_TASK_ID - first) / ${SLURM_ARRAY_TASK_STEP:-1} + 1))
exec "${launch[@]}" dptrain study sweep --part "$part/$SLURM_ARRAY_TASK_COUNT" "$@"
