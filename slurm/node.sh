#!/bin/bash
# Train on the cores of one node. Arguments are flags of `dptrain train`:
#   sbatch slurm/node.sh --network cifar --data cifar10:DIR
# Adapt the #SBATCH lines to your site; some require --account and --partition.
#SBATCH --job-name=dptrain
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=16
#SBATCH --cpus-per-task=1
# Of the hardware threads of a core use one; others would share its vector units.
#SBATCH --hint=nomultithread
#SBATCH --time=01:00:00
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

exec "${launch[@]}" dptrain train "$@"
