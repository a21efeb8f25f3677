"""A user's script of which one rank, 1 by default, hangs, exits or fails in a callback.

mpirun -n 2 python script.py KIND RUN TIMEOUT [RANK]
"""

import os
import sys
import time

import dptrain

KIND, RUN, TIMEOUT, *CHOSEN = sys.argv[1:]
NAMES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
RANK = next((os.environ[name] for name in NAMES if name in os.environ), "1")


class Fault(dptrain.Callback):
    """Does what a user's function may do."""

    def on_step(self, trainer: dptrain.Trainer, result: object) -> None:
        if trainer.step < 4 or (CHOSEN or ["1"])[0] != RANK:
            return
        if KIND == "hang":
            time.sleep(120)
        if KIND == "exit":
            sys.exit(0)
        raise ZeroDivisionError("seven by nothing")


if __name__ == "__main__":
    dptrain.Trainer(
        "mlp-5", "irradiance?samples=64", steps=20, batch_size=16, threads=1, progress=False,
        run_dir=RUN, timeout=int(TIMEOUT), callbacks=[Fault()],
    ).fit()  # fmt: skip
