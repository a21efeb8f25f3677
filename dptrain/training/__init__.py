"""Training, evaluation and prediction: the loops, and what they keep."""

from dptrain.training.evaluation import evaluate, predict
from dptrain.training.loop import train

__all__ = ["evaluate", "predict", "train"]
