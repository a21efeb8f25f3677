"""Commands of `dptrain`, one after another in the same processes, which start only once.

mpirun -n 2 python tests/system/several.py "train --steps 3" "train --steps 5"
"""

import os
import shlex
import sys

from dptrain.cli.main import run
from dptrain.comm.launching.launcher import find_launch

if __name__ == "__main__":
    is_rank_zero = find_launch(os.environ).rank == 0
    for line in sys.argv[1:]:
        if code := run(shlex.split(line), is_rank_zero=is_rank_zero):
            sys.exit(code)
