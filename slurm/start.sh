#!/bin/bash
# The start that all batch scripts share: it reads site.sh and sets
#   launch  the launcher, and the container if there is one
#   gpus    flags of dptrain for a job with GPUs
# shellcheck disable=SC2034

container=()
set +u # Commands of modules use variables that are not set.
# shellcheck source=site.sh
source "${SITE:-${here:-slurm/}site.sh}"
set -u

# Ranks inherit the environment, also at sites whose jobs start with an empty one (--export=NONE).
export SLURM_EXPORT_ENV=ALL
# Slurm 22.05 and later do not pass --cpus-per-task to srun.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:=1}
# Seconds after which srun ends all ranks if one has ended; otherwise they wait for it.
export SLURM_WAIT=${SLURM_WAIT:-30}

# For MPICH and MPIs derived from it. Open MPI: LAUNCH='srun --mpi=pmix'. Both: LAUNCH=mpirun.
read -ra launch <<<"${LAUNCH:-srun --mpi=pmi2}"
if [[ ${launch[0]##*/} == mpirun* ]]; then
    # Open MPI would run all threads of a rank on one core. Only it reads these variables. It binds to
    # all cores of a node, so ranks are not bound if Slurm limits the job by an affinity mask alone. It
    # starts no rank if there are too few cores, because Slurm counts hardware threads as CPUs.
    last=$(($(getconf _NPROCESSORS_CONF) - 1)) policy=core
    count=(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
    own=$("${count[@]}")
    usable=$(taskset -c "0-$last" "${count[@]}" 2>/dev/null) || usable=$own
    cores=$(lscpu --parse=core,socket | grep -v '#' | sort -u | wc -l) tasks=${SLURM_TASKS_PER_NODE:-1}
    if ((own < usable || ${tasks%%[!0-9]*} * SLURM_CPUS_PER_TASK > cores)); then
        policy=none
    else
        export {PRTE_MCA_rmaps_default,OMPI_MCA_rmaps_base}_mapping_policy="slot:PE=$SLURM_CPUS_PER_TASK"
    fi
    export {PRTE_MCA_hwloc_default,OMPI_MCA_hwloc_base}_binding_policy=$policy
fi
launch+=("${container[@]}")

gpus=()
if [[ ${SLURM_GPUS_PER_NODE:-}${SLURM_GPUS:-} ]]; then
    # Products are computed in TF32 (10 bits of mantissa); for float32 set PRECISION=fp32.
    gpus=(--backend cuda --precision "${PRECISION:-tf32}")
else
    # One compute thread per core of a rank.
    export DPTRAIN_THREADS=${DPTRAIN_THREADS:-$SLURM_CPUS_PER_TASK}
fi
