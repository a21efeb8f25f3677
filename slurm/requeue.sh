#!/bin/bash
# Train for longer than the time limit of a job. Before the limit, the job saves a checkpoint and
# requeues itself; it then continues from the checkpoint, as often as needed.
#   sbatch slurm/requeue.sh --network cifar --data cifar10:DIR --epochs 500
#   sbatch --gpus-per-node=4 --ntasks-per-node=4 --cpus-per-task=8 slurm/requeue.sh --network cifar
# Continue a run whose job failed or was cancelled: sbatch slurm/requeue.sh --run-dir DIR
# Account, partition, modules and environment are in site.sh.
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

# Slurm runs a copy of this script. Files next to the original are found by its recorded command.
job=${SLURM_JOB_ID:?is not set; submit this script with sbatch}
here=$(squeue --noheader --job "$job" --format %o | sed -nE '1s|[^/ ]*\.sh( .*)?$||p') || here=
# shellcheck source=start.sh
source "${here:-slurm/}start.sh"

trap 'echo "Slurm warned this job before it began to train; use a larger --time." >&2; exit 2' USR1

# MPICH names shared memory by job and step number, and fails if killed ranks have left memory of
# that name on a node. Each start therefore uses a new step number.
for ((turn = 0; turn < ${SLURM_RESTART_COUNT:-0}; turn++)); do
    srun --nodes=1 --ntasks=1 true
done

# A requeued job keeps its number, so each start finds the run of the previous one.
run=runs/$SLURM_JOB_NAME-$job
if ((${SLURM_RESTART_COUNT:-0})) && [[ $* != *--run-dir* && ! -e $run ]]; then
    echo "$run is not on this node, so training begins anew; see docs/how-to/sites.md." >&2
fi
"${launch[@]}" dptrain train --resume --run-dir "$run" "${gpus[@]}" "$@" &

# The launcher forwards the signal to all ranks. A signal also ends bash's `wait`, so wait again.
warned=
trap 'warned=yes; kill -USR1 $! || true' USR1
while kill -0 $! 2>/dev/null; do wait $! || true; done
wait $! && code=0 || code=$?

# 75: dptrain stopped on request and saved a checkpoint. A cancelled job receives no warning, and a
# failed job would fail again, so neither is requeued.
if [[ $warned && $code -eq 75 ]] && ! scontrol requeue "$job"; then
    echo "Slurm did not requeue this job. The next job of a chain continues the run. Without a" \
        "chain, submit the same command with --run-dir and the directory that dptrain named." >&2
fi
exit "$code"
