"""The settings of the ranks: how they share a minibatch and an update."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from dptrain.bounds import Limits, parse_number
from dptrain.comm import BATCH_NORM_MODES, STRATEGIES, TRANSPORTS
from dptrain.errors import UserError, shown
from dptrain.setting_groups import SettingGroup, UntilRecipe, UntilStart, setting

OFF, MEASURED = "off", "measured"
"""Values of the setting `balance` that are no shares."""

EXPECTED = "off, measured, or one share for each rank, such as 3,1"


def parse_balance(text: str) -> tuple[float, ...]:
    """Return the fixed shares in the value of ``--balance``; none for ``off`` and ``measured``.

    The largest share is 1, so that sums and quotients of shares are finite.

    Raises:
        UserError: the value is neither a name nor a list of shares.
    """
    if text in (OFF, MEASURED):
        return ()
    limits = Limits(at_least=0, at_most=sys.float_info.max)
    found = [parse_number(part, float, limits) for part in text.split(",")]
    shares = [share for share in found if share is not None]
    if len(shares) < len(found) or not any(shares):
        raise UserError(f"balance is '{shown(text)}'; expected {EXPECTED}")
    return tuple(share / max(shares) for share in shares)


@dataclass(frozen=True)
class ParallelismSettings(SettingGroup[UntilRecipe, UntilStart]):
    """How ranks share a minibatch and an update."""

    strategy: str = setting(
        "parallelism",
        "mirrored",
        "How ranks share an update: mirrored sums the gradients on "
        "every rank (all-reduce); central sends them to rank 0, which updates the parameters and "
        "broadcasts them.",
        choices=STRATEGIES,
    )
    batch_norm: str = setting(
        "parallelism",
        "global",
        "Whose mean and variance batch normalisation uses in training: "
        "global, those of the whole minibatch, with two small sums over the ranks for each such "
        "layer; rank, those of each rank's part, without sums; running means are then averaged "
        "over the ranks before evaluations and checkpoints.",
        choices=BATCH_NORM_MODES,
    )
    shards: int = setting(
        "parallelism",
        0,
        "Micro-shards of a minibatch, at least one for each rank. Their "
        "gradients are summed in a fixed order, so that results do not depend on the number of "
        "ranks and threads (not backend cudnn). 0 sums in the fastest order.",
        at_least=0,
    )
    balance: str = setting(
        "parallelism",
        "off",
        "Shares of the ranks in a minibatch: off, equal ones; measured, "
        "shares that follow the measured speeds of the ranks; or fixed ones, one number for each "
        "rank, such as 3,1. With --shards, ranks have whole micro-shards, each at least one.",
    )
    transport: str = setting(
        "parallelism",
        "auto",
        "How gradients are transferred. CPU ranks: memory that the ranks of "
        "a node share, or an all-reduce by MPI. GPU ranks: peer-to-peer memory within a node, "
        "NCCL, a CUDA-aware MPI, or host memory. auto takes the first that works.",
        choices=TRANSPORTS,
    )
    bucket_kib: int | UntilStart = setting(
        "parallelism",
        None,
        "Size of a gradient bucket in KiB. A smaller bucket starts its "
        "all-reduce earlier; a larger one needs fewer messages.",
        otherwise="the whole gradient within a node; 256 across nodes; 1024 between GPUs without "
        "peer-to-peer memory",
        at_least=1,
    )
    digest_every: int | UntilStart = setting(
        "parallelism",
        None,
        "Steps between two checks for silent corruption. Replicas of ranks must "
        "hold the same bits: digests of parameters, optimizer state and running statistics are "
        "compared. State that has one copy must not change between an update and its next use. A "
        "difference ends the job before the state is written. 0 checks nothing.",
        otherwise="100; 0 on GPUs, where its cost has not been measured",
        at_least=0,
    )
    replay_every: int | UntilStart = setting(
        "parallelism",
        None,
        "Steps between two replays, with --shards on CPUs: each rank computes the micro-shards of "
        "another one again, or its own if it is alone, and their gradients must have the same bits "
        "before the update. 0 makes none.",
        otherwise="100 with --shards on CPUs; 0 without",
        at_least=0,
    )
    baseline_steps: int = setting(
        "measurement",
        10,
        "Most steps in a block of steps that rank 0 makes alone, to measure the "
        "scaling efficiency; all blocks take at most 2% of the run. 0 makes none.",
        at_least=0,
    )

    def refuse_contradictions(self) -> None:
        super().refuse_contradictions()
        if self.shards and self.batch_norm == "rank":
            raise UserError(
                "--batch-norm rank takes statistics that depend on the number of ranks, but "
                f"--shards {self.shards} requires results that do not; remove one of the two"
            )
        parse_balance(self.balance)


@dataclass(frozen=True)
class RankSettings(SettingGroup[UntilRecipe, UntilStart]):
    """What a rank takes of its machine. These settings change no result."""

    threads: int | UntilStart = setting(
        "parallelism",
        None,
        "Compute threads of a rank.",
        otherwise="the cores of the node divided by its ranks",
        at_least=1,
        at_most=1024,
    )
    share_gpus: bool = setting("parallelism", False, "Allow several ranks to use one GPU.")
    timeout: float = setting(
        "parallelism",
        300.0,
        "Seconds that a rank waits for another one before it ends the job.",
        at_least=1,
        at_most=1e8,
    )
    workers: int = setting(
        "data",
        0,
        "Processes of each rank that decode samples: image files, and objects with "
        "data[i] that do not fit in memory. 0 decodes in the rank itself.",
        at_least=0,
        at_most=1024,
    )
    device_cache: float = setting(
        "data",
        0.5,
        "Largest share of a GPU's free memory that the training data may take; if it "
        "needs more, each minibatch is copied from host memory. 0 always copies.",
        at_least=0,
        at_most=1,
    )
