"""Results of all measurements of the studies as they would be if every published number held."""

from __future__ import annotations

from functools import cache
from typing import Any

from benchmarks.studies.compiling import STACKS
from benchmarks.studies.exact import counts, memory
from benchmarks.studies.measuring import Context
from benchmarks.studies.networks import CIFAR_CHANGES, STUDY_A, perceptron_names
from benchmarks.studies.perceptrons import SCALED
from benchmarks.studies.published import published
from benchmarks.studies.store import Result
from dptrain.network import get_network

ABOUT = {
    "cores": 16, "cpu": "a CPU", "vectors": "512 bits", "date": "2026-11-25T12:00+00:00",
    "python": "3.12.3", "versions": {"numba": "0.68"}, "load": [0.5, 0.5, 0.5], "seconds": 10.0,
}  # fmt: skip
GPU_ABOUT = {**ABOUT, "gpu": "NVIDIA H100 80GB HBM3", "gpus": 2, "driver": "580"}
XEON = "2 × Xeon E5-2695 v3"
LAYERS_MS = published("study-a")["layers_ms"]
STUDY_B, VARIANTS = published("study-b"), published("study-d")["variants"]
PROFILE = published("study-d")["profile"]


def spread(value: float) -> dict[str, Any]:
    """Return a summary of equal values."""
    return {"median": value, "q1": value, "q3": value, "min": value, "n": 5}


def published_results() -> list[Result]:
    """Return a result of each measurement, on 16 cores or a GPU."""
    exact = _exact()
    return [
        *(Result("exact", name, ABOUT, values) for name, values in exact.items()),
        *(Result("cpu-16", name, ABOUT, values) for name, values in _cpu().items()),
        *(Result("gpu-h100", name, GPU_ABOUT, values) for name, values in _gpu().items()),
    ]


@cache
def _exact() -> dict[str, Any]:
    return {"counts": counts(Context((0,))), "memory": memory(Context((0,)))}


def _cpu() -> dict[str, Any]:
    seeds = {"accuracies": [0.9, 0.92, 0.91], "accuracy_mean": 0.91,
             "by_shift": {"0": [0.9, 0.92, 0.91], "2": [0.8, 0.8, 0.8]}}  # fmt: skip
    rungs = {"direct": 30.0, "im2col, own product": 10.0, "im2col, BLAS": 5.0}
    return {
        "agreement": {
            "networks": dict.fromkeys(("model0, reference", "model0, numba"), _differences())
        },
        "speed-up": _speed_up(),
        "equal-arithmetic": {
            "cases": {
                f"{name}, batch {batch}": {f"threads {n}": {"median_ms": 80.0 / n}
                                           for n in (1, 2, 4, 8, 16)}
                for name in ("model0", "log-network") for batch in (32, 1024)
            }
        },
        "ladder": {
            "layers": {
                "larger:conv2": {
                    "forward": [
                        {"rung": name, "median_ms": ms, "rounds_ms": [ms, 1.01 * ms, 0.99 * ms],
                         "gflops": 1.0, "extra_bytes": 0 if name == "direct" else 720_000}
                        for name, ms in rungs.items()
                    ]
                }
            }
        },
        "strategies": _strategies(),
        "unlike": {
            "batch": 128, "slowdowns": [2, 4],
            "samples_per_s": {
                "one": spread(100.0), "two, equal": spread(190.0),
                "unlike by 2, equal shares": spread(130.0),
                "unlike by 4, equal shares": spread(120.0),
                "unlike by 2, shares by speed": spread(160.0),
                "unlike by 4, shares by speed": spread(140.0),
            },
        },
        "keras": {
            "versions": {"keras": "3.0"},
            "rows": [{"network": "model0", "batch": 32, "dptrain_ms": 1.0, "keras_ms": 3.0,
                      "ratio": 3.0, "ratio_low": 2.9, "ratio_high": 3.1}],
        },
        "inference": _inference("xeon"),
        "largest": _largest(),
        "perceptrons": _perceptrons(3.0),
        "perceptrons-by-threads": {
            "counts": [1, 4, 16],
            "steps": {
                f"{name}, threads {n}": {
                    "network": name, "parameters": get_network(name).num_parameters,
                    "median_ms": (10.0 + i) / n ** (0.5 + 0.05 * i),
                }
                for i, name in enumerate(SCALED)
                for n in (1, 4, 16)
            },
        },
        "profile": _profiles(1.0),
        "profiling-cost": {"ratio": spread(1.01), "with": spread(1.01), "without": spread(1.0)},
        "solar": _solar(XEON),
        "additivity": _additivity(),
        "update-share": _update_share(),
        "minibatches": {
            "rows": [
                {"batch": n, "losses": [1.0, 0.1 * n**0.2], "seconds": 1.0, "steps": 1000 // n,
                 "equal_steps": 24, "equal_steps_loss": 2.0 / n, "goal_reached": n < 512,
                 "goal_seconds": 0.1 * n}
                for n in (8, 32, 128, 512)
            ]
        },
        "precision-by-batch": {
            "perceptron": {f"batch {n}, {length}": spread(0.01 * n)
                           for n in (100, 500, 1000) for length in ("2 epochs", "400 steps")},
            "maps": {f"batch {n}": spread(0.001 * n) for n in (8, 64, 512)},
        },
        "layers-by-accuracy": {
            "networks": dict.fromkeys((
                "max pooling, ReLU", "average pooling, ReLU", "sum pooling, ReLU",
                "max pooling, tanh", "max pooling, sigmoid", "stride 2 instead of pooling, ReLU",
            ), seeds)
        },
        "gradients": {"activations": {"ReLU": {"first_over_last": 0.2},
                                      "sigmoid": {"first_over_last": 1e-5}}},
        "variant-steps": _variants(0),
    }  # fmt: skip


def _gpu() -> dict[str, Any]:
    stages = [f"{layer}.{phase}" for layer in ("conv1", "conv2", "conv3", "pool1", "pool2", "pool3")
              for phase in ("forward", "backward")]  # fmt: skip
    layers = [
        {"layer": name.split()[0], "direction": name.split()[1],
         "cudnn": {"median": 1.2 * ms["cudnn"]}, "cudnn, best": {"median": ms["cudnn"]},
         "cudnn, all engines": {"median": 1.1 * ms["cudnn"]}, "PyTorch": {"median": ms["cudnn"]},
         "cuda": {"median": ms["cuda"]}}
        for name, ms in LAYERS_MS.items()
    ]  # fmt: skip
    rung = {"extra_bytes": 720_000}
    ladder = [
        {"rung": name, "median_ms": 10.0 / 2**i, "gflops": 2.0**i, **rung}
        for i, name in enumerate(("direct, by image", "direct", "one block", "one block, tiles",
                                  "many blocks", "shared tiles", "implicit", "dptrain fp32",
                                  "im2col, cuBLAS"))
    ]  # fmt: skip
    return {
        "agreement-gpu": {"networks": {"model0, cuda": _differences()}},
        "steps-gpu": {
            "rows": [
                {"network": name, "batch": batch, "cuda": {"median_us": 10.0 + i},
                 "cudnn": {"median_us": 14.0}, "cudnn, all engines": {"median_us": 13.0},
                 "cudnn, best": {"median_us": 12.0}, "PyTorch fp32 graph": {"median_us": 12.5},
                 "PyTorch tf32 graph": {"median_us": 12.4},
                 "engines": {setting: {"conv1.forward": "engine 3, 0.0 MB, FP32"}
                             for setting in ("cudnn", "cudnn, all engines", "cudnn, best")}}
                for i, name in enumerate(STUDY_A) for batch in (1, 32)
            ]
        },
        "layers-gpu": {"batch 1": layers, "batch 32": layers,
                       "host, batch 1": {"cuda": dict.fromkeys(stages, 0.01)}},
        "sizes-gpu": {
            "rows": [
                {"size": size, "filters": filters, "batch": batch, "direction": direction,
                 "cuda": 1.0, "cudnn": 20.0 / size}
                for size, filters in STACKS for batch in (1, 32)
                for direction in ("forward", "backward")
            ]
        },
        "ladder-gpu": {
            "layers": {"larger:conv2": {"forward": ladder}},
            "block_of_2500_threads": "refused: invalid argument",
        },
        "strategies-one-gpu": {
            "steps": {
                f"{name}, 2 ranks on 1 GPU, batch 128": {"medians_ms": [value] * 3,
                                                         "median_ms": value}
                for name, value in (("mirrored, host", 1.0), ("central, host", 1.1))
            }
        },
        "strategies-gpu": {
            "steps": {
                f"{name}, batch {batch}": {"median_ms": value, "medians_ms": [value] * 3}
                for batch in (128, 2048)
                for name, value in (("1 GPU", 4.0), ("mirrored, 2 GPUs", 2.5),
                                    ("mirrored, NCCL, 2 GPUs", 2.6), ("central, NCCL, 2 GPUs", 3.0),
                                    ("mirrored, NCCL, 3 GPUs", 2.7))
            }
        },
        "inference-gpu": _inference("gtx_1080"),
        "largest-gpu": _largest(),
        "perceptrons-gpu": _perceptrons(1.0),
        "profile-gpu": _profiles(0.01),
        "profiling-cost-gpu": {"ratio": spread(1.5)},
        "solar-gpu": _solar("GTX 1080"),
        "additivity-gpu": _additivity(),
        "update-share-gpu": _update_share(),
        "variants-gpu": _variants(3000),
    }  # fmt: skip


def _differences() -> dict[str, float]:
    return {"loss_difference": 1e-7, "first_step_difference": 1e-6, "parameter_difference": 1e-3}


def _speed_up() -> dict[str, Any]:
    def row(median_ms: float) -> dict[str, float]:
        return {"median_ms": median_ms, "loss_difference": 1e-7}

    counts = (1, 2, 4, 8, 16)
    programs = {f"threads {n}": row(8.0 / n) for n in counts}
    programs |= {f"ranks {n}": row(8.1 / n) for n in counts[1:]}
    return {
        "steps": {name: {**programs, "reference": row(500.0)} for name in STUDY_A},
    }


def _strategies() -> dict[str, Any]:
    steps = {"threads 1": {"median_ms": 100.0}}
    for ranks in (2, 4, 8, 16):
        steps[f"mirrored, shared memory, ranks {ranks}"] = {"median_ms": 100 / ranks}
        steps[f"mirrored, MPI, ranks {ranks}"] = {"median_ms": 110 / ranks}
        steps[f"central, MPI, ranks {ranks}"] = {"median_ms": 120 / ranks}
    return {"batch": 128, "steps": steps}


def _inference(device: str) -> dict[str, Any]:
    rows = []
    for samples, by_device in STUDY_B["inference_ms"].items():
        ms = by_device[device]
        rows.append({"samples": int(samples), "median_ms": ms, "min_ms": 0.9 * ms,
                     "max_ms": 1.1 * ms, "device_ms": 0.9 * ms})  # fmt: skip
    return {"rows": rows, "maps_within_1_s": 800}


def _largest() -> dict[str, Any]:
    return {
        "largest": {
            f"{size}, {task}": {"batch": batch, "limit_bytes": 2e9}
            for size, batch in (("2 GB", 512), ("4 GB", 1024), ("8 GB", 2048),
                                ("free memory", 20_000))
            for task in ("training", "inference")
        }
    }  # fmt: skip


def _perceptrons(slope: float) -> dict[str, Any]:
    rows = []
    for name in perceptron_names():
        work = get_network(name).num_parameters / 500_000
        median = work**0.3 if slope > 1 else 1.0
        rows += [{"network": name, "task": task, "samples": 1000, "median_ms": median,
                  "gflops": 100.0}
                 for task in ("training", "inference")]  # fmt: skip
    return {"rows": rows}


def _solar(device: str) -> dict[str, Any]:
    rows = [
        {"samples": int(batch), "median_ms": 1e3 * seconds * int(batch) / 145_028,
         "gflops": int(batch) / seconds}
        for batch, seconds in STUDY_B["solar_s"][device].items()
    ]  # fmt: skip
    return {"rows": rows}


def _additivity() -> dict[str, Any]:
    return {
        "networks": {
            "mlp-50": {
                "two_epochs_over_one": spread(2.003), "inside_steps_share": spread(0.99),
                "steps_times_median_over_total": spread(0.98), "steps": 136,
            }
        }
    }  # fmt: skip


def _update_share() -> dict[str, Any]:
    return {
        "shares": {
            f"{network}, batch {n}": {**spread(10 / n), "share": 10 / n}
            for network in ("mlp-50", "mlp-1600-800-416")
            for n in (100, 500, 1000)
        }
    }


def _profiles(scale: float) -> dict[str, Any]:
    variants = {}
    for name in CIFAR_CHANGES:
        theirs = VARIANTS.get(name, VARIANTS["stride 5"])
        conv, rest = theirs["conv_ms"], theirs["total_ms"] - theirs["conv_ms"]
        others = sum(row["ms"] for kind, row in PROFILE.items() if kind != "Conv2D")
        kinds = {
            kind: conv if kind == "Conv2D" else rest * row["ms"] / others
            for kind, row in PROFILE.items()
        }
        total = sum(kinds.values())
        variants[name] = {
            "total_ms": spread(scale * total),
            "kinds": {
                kind: {**spread(scale * ms), "share": ms / total} for kind, ms in kinds.items()
            },
        }
    return {"variants": variants}


def _variants(steps: int) -> dict[str, Any]:
    found = {}
    for name in CIFAR_CHANGES:
        precision = VARIANTS.get(name, VARIANTS["stride 5"])["precision"]
        found[name] = {
            "accuracy": [precision] * 2, "accuracy_mean": precision,
            "step": spread(288.0 if name == "base" else 18.0),
        }  # fmt: skip
    return {"data": "shapes", "steps": steps, "seeds": 2, "batch": 128, "learning_rate": 0.1,
            "variants": found}  # fmt: skip
