#!/bin/bash
# Train on the cores of one node. Arguments are flags of `dptrain train`:
#   sbatch slurm/node.sh --network cifar --data cifar10:DIR
# Adapt the #SBATCH lines to your site; some require --account and --partition.
#SBATCH --job-name=dptrain
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=16
#SBATCH --cpus-per-task=1
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

exec "${launch[@]}" dptrain train "$@"
