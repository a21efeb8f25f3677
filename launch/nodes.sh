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
mpirun=$(command -v mpirun)
if [[ $("$mpirun" --version) == *'Open MPI'* ]]; then
    where=(--host "$hosts" --map-by "slot:PE=$threads" --bind-to core)
    # Open MPI passes no variables to other machines; DPTRAIN_* are settings.
    for variable in $(compgen -e DPTRAIN_ || true); do
        where+=(-x "$variable")
    done
else # MPICH and its relatives
    where=(-hosts "$hosts" -bind-to "core:$threads")
fi

exec "$mpirun" -n "$ranks" "${where[@]}" "$(command -v dptrain)" train --threads "$threads" "$@"
