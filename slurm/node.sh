#!/bin/bash
# Train on the cores of one node. Flags of `dptrain train` follow the script's name:
#   sbatch slurm/node.sh --network cifar --data cifar10:DIR
# Adapt the lines with #SBATCH to your site; some want --account and --partition.
#SBATCH --job-name=dptrain
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=16
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
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

exec "${launch[@]}" dptrain train "$@"
