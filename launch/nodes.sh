#!/bin/bash
# Train on several machines without a scheduler. HOSTS is a file of lines NAME:RANKS:
#   HOSTS=hosts.txt THREADS=8 launch/nodes.sh --network cifar --data cifar10:DIR
# ssh must reach the machines without a password. This directory, the data and the Python
# environment must have the same path on all of them.
set -euo pipefail

hosts=$(paste -sd, "${HOSTS:?is not set; expected a file with one line NAME:RANKS per machine}")
ranks=$(awk -F: '{ n += $2 } END { print n }' "$HOSTS")
threads=${THREADS:-1}

# mpirun and dptrain are found on the other machines by their absolute paths.
MPIRUN=$(command -v "${MPIRUN:-mpirun}")
export MPIRUN THREADS=$threads # mpirun.sh binds each rank to as many cores.
if [[ $("$MPIRUN" --version) == *Open[\ R]* ]]; then # "Open MPI" or "OpenRTE"
    where=(--host "$hosts")
    # Open MPI passes no variables to other machines; DPTRAIN_* are settings.
    for variable in $(compgen -e DPTRAIN_ || true); do
        where+=(-x "$variable")
    done
else # MPICH and its relatives
    where=(-hosts "$hosts")
fi

here=$(dirname "$0")
exec "$here/mpirun.sh" -n "$ranks" "${where[@]}" \
    "$(command -v dptrain)" train --threads "$threads" "$@"
