"""The pages of a training run and of an evaluation."""
