"""Training, evaluation and prediction, and the files that they leave."""
