#!/bin/bash
# Train on GPUs, a rank on each; --nodes=2 takes those of two nodes:
#   sbatch slurm/gpus.sh --network cifar --data cifar10:DIR --batch-size 4096
# Adapt the lines with #SBATCH to your site; some want --account and --partition.
#SBATCH --job-name=dptrain
#SBATCH --nodes=1
# As many ranks as GPUs. Every rank sees all GPUs of its node and takes the one of its number:
# --gpus-per-task would hide the others from it, and so the fast ways between them.
#SBATCH --gpus-per-node=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out
set -euo pipefail

# Adapt: module load …, source …/bin/activate. What is on PATH when you submit is there, too.

# Newer versions of srun must be told again.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
# Seconds after which srun ends all ranks when one has gone; else they wait for it.
export SLURM_WAIT=${SLURM_WAIT:-30}

# For MPICH and its relatives. Open MPI: LAUNCH='srun --mpi=pmix'. Either: LAUNCH=mpirun.
read -ra launch <<<"${LAUNCH:-srun --mpi=pmi2}"

exec "${launch[@]}" dptrain train --backend cuda --precision tf32 "$@"
