"""Scaling of dptrain within a node, compared with other libraries and with what the machine allows.

    python -m benchmarks.node --quick                      about 2 minutes, model0 and LeNet-5
    python -m benchmarks.node --sections threads           training steps on 1 … all threads
    python -m benchmarks.node --sections ranks             weak and strong scaling of ranks
    python -m benchmarks.node --sections sums              gradient sum and update alone
    python -m benchmarks.node --sections two-cores         ranks on two cores
    python -m benchmarks.node --sections shards            cost of micro-shards
    python -m benchmarks.node --sections inference         batches of 1, 8 and 32
    python -m benchmarks.node --sections outside           training of other networks
    python -m benchmarks.node --sections residual          training of ResNets
    python -m benchmarks.node --sections filters           any number of filters
    python -m benchmarks.node --combine A.json,B.json      one report of several runs

All sections together take longer than 10 minutes; ``--section-minutes`` limits each of them.
``--networks model0,cifar`` selects networks, ``--mpirun PATH`` adds an MPI library, and ``--output
DIR`` is the folder of the results. docs/developers/performance.md describes what is measured.
"""
