#!/bin/bash
# Train on GPUs with one rank per GPU; --nodes=2 uses those of two nodes:
#   sbatch slurm/gpus.sh --network cifar --data cifar10:DIR --batch-size 4096
# Adapt the #SBATCH lines to your site; some require --account and --partition.
#SBATCH --job-name=dptrain
#SBATCH --nodes=1
# As many ranks as GPUs. Every rank sees all GPUs of its node and uses the one with its local rank:
# --gpus-per-task would hide the others, and peer-to-peer memory could not be used.
# Products are computed in TF32 (10 bits of mantissa); for float32 set PRECISION=fp32.
#SBATCH --gpus-per-node=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out
set -euo pipefail

# Adapt: module load …, source …/bin/activate. The job inherits PATH from the submission.

# Slurm 22.05 and later do not pass --cpus-per-task to srun.
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

exec "${launch[@]}" dptrain train --backend cuda --precision "${PRECISION:-tf32}" "$@"
