#!/bin/bash
# Train on several machines without a scheduler. HOSTS is a file with a line NAME:RANKS for each:
#   HOSTS=hosts.txt THREADS=8 launch/nodes.sh --network cifar --data cifar10:DIR
# ssh must reach them without a password, and they must see this directory, the data and the Python
# environment at the same place.
set -euo pipefail

hosts=$(paste -sd, "${HOSTS:?is the file of hosts, with a line NAME:RANKS for each}")
ranks=$(awk -F: '{ n += $2 } END { print n }' "$HOSTS")
threads=${THREADS:-1}

# Both find themselves on the other machines by the path that they are called by here.
mpirun=$(command -v mpirun)
if [[ $("$mpirun" --version) == *'Open MPI'* ]]; then
    where=(--host "$hosts" --map-by "slot:PE=$threads" --bind-to core)
else # MPICH and its relatives
    where=(-hosts "$hosts" -bind-to "core:$threads")
fi

exec "$mpirun" -n "$ranks" "${where[@]}" "$(command -v dptrain)" train --threads "$threads" "$@"
